"""The process that runs a user's policy: reads requests from stdin and answers them until stdin ends."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import msgspec

from penstock.core.errors import PenstockError
from penstock.scaling.policies.policy import Broken, Policy
from penstock.scaling.policies.process import (
    PolicyReply,
    PolicyRequest,
    declared_by,
    facts_from_json,
    find_misdeclared,
    run_policy,
)
from penstock.streams.dsl.user_code import UserCode

ANSWER_S_MAX = 120
MEMORY_BYTES_MAX = 4 * 2**30  # of address space: beyond it Python raises MemoryError


def main() -> None:
    """Arguments: folder, file, class, name. `scaling/policies/process.py` starts it."""
    folder, entry, class_name, name = sys.argv[1:5]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    # The policy may print: replies use another descriptor.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    policy: Policy | Broken | None = None
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=PolicyRequest)
        if policy is None:
            policy = load_policy(Path(folder), entry, class_name, name)
        signal.alarm(ANSWER_S_MAX)  # ends this process if the control plane was killed
        reply = PolicyReply(verdict=policy) if isinstance(policy, Broken) else answer(policy, request)
        signal.alarm(0)
        answers.write(msgspec.json.encode(reply) + b"\n")
        answers.flush()


def load_policy(folder: Path, entry: str, class_name: str, name: str) -> Policy | Broken:
    """Load the policy of a package; Broken if it cannot be used."""
    try:
        module = UserCode(f"penstock_package_{folder.name}", folder, entry).load()
    except PenstockError as error:
        return Broken(policy=name, how="raised", text=str(error)[:2000])
    kind = getattr(module, class_name, None)
    if not isinstance(kind, type) or not issubclass(kind, Policy):
        text = f"{entry} has no class {class_name} that is a penstock Policy"
        return Broken(policy=name, how="nonsense", text=text)
    try:
        policy = kind()
    except Exception as error:
        return _raised(name, error)
    problem = find_misdeclared(policy)
    if not problem and policy.name != name:
        problem = f"its name is {policy.name!r}: use that name in the job's `policies` too"
    return Broken(policy=name, how="nonsense", text=problem) if problem else policy


def answer(policy: Policy, ask: PolicyRequest) -> PolicyReply:
    """The policy's declaration, or its verdict on the facts."""
    if ask.facts is None:
        return PolicyReply(declared=declared_by(policy))
    try:
        return PolicyReply(verdict=run_policy(policy, facts_from_json(ask.facts), ask.settings))
    except Exception as error:
        return PolicyReply(verdict=_raised(policy.name, error))


def _raised(name: str, error: Exception) -> Broken:
    return Broken(policy=name, how="raised", text=f"{type(error).__name__}: {error}"[:2000])


if __name__ == "__main__":
    main()
