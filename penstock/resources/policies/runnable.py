"""A policy as the service runs it, wherever its code is: declared first, then asked, never trusted. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.core.errors import ConfigError
from penstock.resources.frames import METRICS
from penstock.resources.policies.controls import read_settings
from penstock.resources.policies.facts import JobFacts
from penstock.resources.policies.policy import Broken, Policy, Verdict, evaluate

MINUTES_MAX = 14 * 24 * 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What a policy says of itself before it is asked."""

    priority: int
    metrics: tuple[str, ...]
    minutes: int
    if_known: tuple[str, ...] = ()


class Runnable(Protocol):
    """One policy."""

    @property
    def name(self) -> str:
        """As jobs call it in `policies`."""

    def declare(self) -> Declared | Broken:
        """What it reads."""

    def run(self, facts: JobFacts, settings: Mapping[str, Any]) -> Verdict | Broken:
        """Its verdict. `settings` is what the job says of it."""


class OwnPolicy:
    """A policy of Penstock itself, in this process."""

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
    """Read the settings, then the three steps."""
    try:
        read = read_settings(policy.settings, policy.name, settings)
    except ConfigError as error:
        return Broken(policy=policy.name, how="settings", text=str(error)[:2000])
    return evaluate(policy, facts, read)


def declared_by(policy: Policy) -> Declared:
    """What a policy's class says."""
    return Declared(
        priority=policy.priority,
        metrics=tuple(policy.metrics),
        minutes=policy.minutes,
        if_known=tuple(policy.if_known),
    )


def find_misdeclared(policy: Policy) -> str:
    """What is wrong with a policy's class; "" if nothing is."""
    if not isinstance(policy.name, str) or not policy.name.isidentifier():
        return f"its name {policy.name!r} is not a plain word"
    if not isinstance(policy.priority, int) or not -1000 <= policy.priority <= 1000:
        return f"its priority {policy.priority!r} is not -1000 to 1000"
    if not isinstance(policy.minutes, int) or not 1 <= policy.minutes <= MINUTES_MAX:
        return f"its minutes {policy.minutes!r} are not 1 to {MINUTES_MAX}"
    named = (*policy.metrics, *policy.if_known)
    if len({*named}) < len(named):
        return "it names a metric twice"
    unknown = sorted(name for name in named if name not in METRICS)
    return f"there is no metric {', '.join(unknown)}; there are {', '.join(METRICS)}" if unknown else ""
