"""User-defined policies: each runs in its own process, which is killed on timeout.

The control plane never imports user code. The worst that a policy can do to it is to give no answer.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from penstock.core.clock import Clock, Millis
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.text import make_known
from penstock.jobs.config import JobConfig
from penstock.scaling.metrics.frames import METRICS, Frame
from penstock.scaling.policies.facts import JobFacts, TaskFacts
from penstock.scaling.policies.policy import Broken, Policy, Verdict, evaluate, find_nonsense, read_settings

MINUTES_MAX = 14 * 24 * 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What a policy's class declares."""

    priority: int
    metrics: tuple[str, ...]
    minutes: int
    if_known: tuple[str, ...] = ()


class Runnable(Protocol):
    """A policy that can be run, built in or in a process."""

    @property
    def name(self) -> str:
        """Its name in `policies` of a job's config."""

    def declare(self) -> Declared | Broken:
        """The metrics that it reads, and its priority."""

    def run(self, facts: JobFacts, settings: Mapping[str, Any]) -> Verdict | Broken:
        """Its verdict. `settings` are those in the job's config."""


class BuiltInPolicy:
    """A policy of Penstock itself; it runs in this process."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        problem = find_misdeclared(policy)
        assert not problem, problem

    @property
    def name(self) -> str:
        return self._policy.name

    def declare(self) -> Declared | Broken:
        return declared_by(self._policy)

    def run(self, facts: JobFacts, settings: Mapping[str, Any]) -> Verdict | Broken:
        return run_policy(self._policy, facts, settings)


def run_policy(policy: Policy, facts: JobFacts, settings: Mapping[str, Any]) -> Verdict | Broken:
    """Parse the settings, then run the three steps."""
    try:
        read = read_settings(policy.settings, policy.name, settings)
    except ConfigError as error:
        return Broken(policy=policy.name, how="settings", text=str(error)[:2000])
    return evaluate(policy, facts, read)


def declared_by(policy: Policy) -> Declared:
    """What a policy's class declares."""
    return Declared(
        priority=policy.priority,
        metrics=tuple(policy.metrics),
        minutes=policy.minutes,
        if_known=tuple(policy.if_known),
    )


def find_misdeclared(policy: Policy) -> str:
    """What is wrong with a policy's class; "" if it is valid."""
    if not isinstance(policy.name, str) or not policy.name.isidentifier():
        return f"its name {policy.name!r} must be letters, digits and underscores, and not start with a digit"
    if not isinstance(policy.priority, int) or not -1000 <= policy.priority <= 1000:
        return f"its priority {policy.priority!r} must be an integer from -1000 to 1000"
    if not isinstance(policy.minutes, int) or not 1 <= policy.minutes <= MINUTES_MAX:
        return f"its minutes {policy.minutes!r} must be an integer from 1 to {MINUTES_MAX}"
    named = (*policy.metrics, *policy.if_known)
    if len({*named}) < len(named):
        return "it names a metric twice"
    unknown = sorted(name for name in named if name not in METRICS)
    return (
        f"it names unknown metrics: {', '.join(unknown)}; known are {', '.join(METRICS)}" if unknown else ""
    )


class PolicyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a policy's process: run on these facts; without facts: send the declaration."""

    facts: dict[str, Any] | None = None
    settings: dict[str, Any] = {}


class PolicyReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The response: a declaration or a verdict."""

    declared: Declared | None = None
    verdict: Verdict | Broken | None = None


def facts_to_json(facts: JobFacts) -> dict[str, Any]:
    """Facts as JSON values; an unknown number is null."""
    found = {name: getattr(facts, name) for name in facts.__slots__ if name not in ("frame", "tasks")}
    frame = facts.frame
    values = {
        name: [None if value != value else value for value in points.tolist()]
        for name, points in frame.values.items()
    }
    return {
        **found,
        "config": facts.config.to_json(),
        "oncall": sorted(facts.oncall),
        "containers": sorted(facts.containers),
        "tasks": msgspec.to_builtins(facts.tasks),
        "frame": {"job": frame.job, "first_minute": frame.first_minute, "values": values},
    }


def facts_from_json(raw: dict[str, Any]) -> JobFacts:
    """The reverse of `facts_to_json`."""
    frame = raw["frame"]
    values = {
        name: np.array([np.nan if value is None else value for value in points], dtype=np.float64)
        for name, points in frame["values"].items()
    }
    rest = {name: value for name, value in raw.items() if name not in ("frame", "tasks")}
    return JobFacts(
        **{
            **rest,
            "config": JobConfig.from_stored(raw["config"]),
            "oncall": frozenset(raw["oncall"]),
            "containers": frozenset(raw["containers"]),
        },
        tasks=msgspec.convert(raw["tasks"], tuple[TaskFacts, ...]),
        frame=Frame(job=frame["job"], first_minute=frame["first_minute"], values=values),
    )


HOST = "penstock.policy_host"
REPLY_BYTES_MAX = 2**20
# The environment variables that a policy's process gets: enough to find Python's modules, no secrets.
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "HOME")
# Each NumPy thread would use up part of the process's memory limit.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class ProcessPolicy:
    """One policy of one package. One request at a time; a process that fails to answer is killed."""

    def __init__(
        self,
        name: str,
        folder: Callable[[], Path],
        *,
        entry: str,
        class_name: str,
        clock: Clock,
        budget_ms: Millis = 10_000,
        start_ms: Millis = 30_000,
    ) -> None:
        self._name, self._folder, self._entry, self._class = name, folder, entry, class_name
        self._clock, self._budget_ms, self._start_ms = clock, budget_ms, start_ms
        self._process: subprocess.Popen[bytes] | None = None
        self._declared: Declared | None = None
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self._name

    def declare(self) -> Declared | Broken:
        with self._locked() as is_locked:
            if not is_locked:
                return self._busy()
            if self._declared is None:
                answer = self._ask(PolicyRequest(), self._start_ms)
                if isinstance(answer, Broken):
                    return answer
                if answer.declared is None:
                    return (
                        answer.verdict if isinstance(answer.verdict, Broken) else self._nonsense("no answer")
                    )
                self._declared = answer.declared
            return self._declared

    def run(self, facts: JobFacts, settings: Mapping[str, Any]) -> Verdict | Broken:
        with self._locked() as is_locked:
            if not is_locked:
                return self._busy()
            # A process that was killed is started first: a start has a longer timeout than an answer.
            start = None if self._is_up() else self._ask(PolicyRequest(), self._start_ms)
            if isinstance(start, Broken):
                return start
            answer = self._ask(
                PolicyRequest(facts=facts_to_json(facts), settings=dict(settings)), self._budget_ms
            )
        if isinstance(answer, Broken):
            return answer
        verdict = answer.verdict
        if verdict is None or verdict.policy != self._name:
            return self._nonsense(
                f"its verdict names the policy {verdict.policy!r}" if verdict else "no verdict"
            )
        problem = "" if isinstance(verdict, Broken) else find_nonsense(verdict, facts)
        return self._nonsense(problem) if problem else verdict

    def stop(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._end()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Serialize requests. False: the lock was not free within the timeout."""
        is_locked = self._lock.acquire(timeout=(self._start_ms + self._budget_ms) / 1000)
        try:
            yield is_locked
        finally:
            if is_locked:
                self._lock.release()

    def _busy(self) -> Broken:
        return Broken(policy=self._name, how="hung", text="its process is still busy with other jobs")

    def _nonsense(self, text: str) -> Broken:
        return Broken(policy=self._name, how="nonsense", text=text)

    def _is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _ask(self, request: PolicyRequest, limit_ms: Millis) -> PolicyReply | Broken:
        try:
            if not self._is_up():
                self._start()
            line = self._exchange(msgspec.json.encode(request) + b"\n", limit_ms)
        except PenstockError as error:
            return Broken(policy=self._name, how="raised", text=str(error)[:2000])
        except OSError as error:
            self._end()
            return Broken(
                policy=self._name, how="raised", text=f"its process does not take requests: {error}"
            )
        if isinstance(line, Broken):
            self._end()
            return line
        try:
            return msgspec.json.decode(line, type=PolicyReply)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            self._end()
            return self._nonsense(f"its answer cannot be read: {error}"[:2000])

    def _start(self) -> None:
        self._end()
        command = [sys.executable, "-m", HOST, str(self._folder()), self._entry, self._class, self._name]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | _ONE_THREAD,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    def _exchange(self, line: bytes, limit_ms: Millis) -> bytes | Broken:
        """Send a line and read one, within the timeout: the process may stop reading as well as writing."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        into, out = process.stdin.fileno(), process.stdout.fileno()
        end_ms, left, found = self._clock.boot_ms() + limit_ms, memoryview(line), bytearray()
        while not found.endswith(b"\n"):
            wait_ms = end_ms - self._clock.boot_ms()
            if wait_ms <= 0:
                return Broken(policy=self._name, how="hung", text=f"no answer within {limit_ms / 1000:g} s")
            readable, writable, _ = select.select([out], [into] if left else [], [], wait_ms / 1000)
            if writable:
                with contextlib.suppress(BlockingIOError):
                    left = left[os.write(into, left[:65536]) :]
            if readable:
                piece = os.read(out, 65536)
                if not piece:
                    return Broken(policy=self._name, how="raised", text="its process ended without an answer")
                found += piece
                if len(found) > REPLY_BYTES_MAX:
                    return self._nonsense(f"its answer is longer than {REPLY_BYTES_MAX} bytes")
        return bytes(found)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and all processes that it started
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class UserPolicies:
    """User-defined policies: one process for each (name, code), started at its first request."""

    def __init__(self, folder_of: Callable[[str], Path], clock: Clock, *, budget_ms: Millis) -> None:
        self._folder_of, self._clock, self._budget_ms = folder_of, clock, budget_ms
        self._known: dict[tuple[str, str], ProcessPolicy] = {}

    def load(self, name: str, code: str) -> ProcessPolicy:
        """The policy for `hash/file:class`, as in the setting `code`."""
        if (name, code) not in self._known:
            hash_, _, rest = code.partition("/")
            entry, _, class_name = rest.rpartition(":")
            self._known[name, code] = ProcessPolicy(
                name,
                lambda: self._folder_of(hash_),
                entry=entry,
                class_name=class_name,
                clock=self._clock,
                budget_ms=self._budget_ms,
            )
        return self._known[name, code]

    def stop(self) -> None:
        """Kill all processes."""
        for policy in self._known.values():
            policy.stop()
        self._known.clear()


make_known(PolicyRequest, PolicyReply, tuple[TaskFacts, ...])
