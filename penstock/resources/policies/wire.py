"""What a user's policy and the control plane say to each other: JSON, a line each way. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from penstock.resources.frames import Frame
from penstock.resources.policies.facts import JobFacts, TaskFacts
from penstock.resources.policies.policy import Broken, Verdict
from penstock.resources.policies.runnable import Declared


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A look at one job; without facts: what the policy declares."""

    facts: dict[str, Any] | None = None
    settings: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one that fits the question."""

    declared: Declared | None = None
    verdict: Verdict | Broken | None = None


def facts_to_json(facts: JobFacts) -> dict[str, Any]:
    """Plain values; a number that is not known is null."""
    found = {name: getattr(facts, name) for name in facts.__slots__ if name not in ("frame", "tasks")}
    frame = facts.frame
    values = {
        name: [None if value != value else value for value in points.tolist()]
        for name, points in frame.values.items()
    }
    return {
        **found,
        "oncall": sorted(facts.oncall),
        "containers": sorted(facts.containers),
        "tasks": msgspec.to_builtins(facts.tasks),
        "frame": {"job": frame.job, "first_minute": frame.first_minute, "values": values},
    }


def facts_from_json(raw: dict[str, Any]) -> JobFacts:
    """The facts again."""
    frame = raw["frame"]
    values = {
        name: np.array([np.nan if value is None else value for value in points], dtype=np.float64)
        for name, points in frame["values"].items()
    }
    rest = {name: value for name, value in raw.items() if name not in ("frame", "tasks")}
    return JobFacts(
        **{**rest, "oncall": frozenset(raw["oncall"]), "containers": frozenset(raw["containers"])},
        tasks=msgspec.convert(raw["tasks"], tuple[TaskFacts, ...]),
        frame=Frame(job=frame["job"], first_minute=frame["first_minute"], values=values),
    )
