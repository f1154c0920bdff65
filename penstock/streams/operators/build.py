"""Which logic a job's plan asks for. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.errors import ConfigError
from penstock.streams.operators.windowed import WindowedAggregate, WindowSpec
from penstock.streams.step_logic import StepLogic


def operator_of(plan: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> StepLogic:
    """The logic of `computation` in a job's plan; `columns`: of what it produces."""
    if plan["operator"] == "aggregate" and plan["window"]["kind"] in ("tumbling", "sliding"):
        return WindowedAggregate(WindowSpec.of(plan, columns))
    raise ConfigError(
        f"{plan['operator']!r} cannot be run",
        why="this version has no such operator",
        fix="do it in a Computation, with state and timers",
    )
