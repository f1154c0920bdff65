"""Which logic a job's plan asks for. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.errors import ConfigError
from penstock.streams.operators.dedup import Dedup, DedupSpec
from penstock.streams.operators.joins import JoinSpec, StreamJoin
from penstock.streams.operators.phases import CombinedAggregate, PartialAggregate
from penstock.streams.operators.sessions import SessionAggregate, SessionFirings
from penstock.streams.operators.top import TopOfWindow, TopSpec
from penstock.streams.operators.windowed import FiringAggregate, WindowedAggregate, WindowSpec
from penstock.streams.step.logic import StepLogic


def operator_of(plan: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> StepLogic:
    """The logic of `computation` in a job's plan; `columns`: of what it produces."""
    if plan["operator"] == "aggregate":
        spec = WindowSpec.of(plan, columns)
        if spec.spans.kind == "session":
            return SessionAggregate(spec) if spec.firing.is_plain else SessionFirings(spec)
        if not spec.firing.is_plain:
            return FiringAggregate(spec)
        return WindowedAggregate(spec)
    if plan["operator"] in ("partial", "combine"):
        spec = WindowSpec.of(plan, columns)
        return PartialAggregate(spec) if plan["operator"] == "partial" else CombinedAggregate(spec)
    if plan["operator"] == "join":
        return StreamJoin(JoinSpec.of(plan))
    if plan["operator"] == "dedup":
        return Dedup(DedupSpec.of(plan, columns))
    if plan["operator"] == "top":
        return TopOfWindow(TopSpec.of(plan, columns))
    raise ConfigError(
        f"{plan['operator']!r} cannot be run",
        why="this version has no such operator",
        fix="do it in a Computation, with state and timers",
    )
