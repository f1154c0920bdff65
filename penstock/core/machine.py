"""The answer of a passive state machine: what to do, and when to ask again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.core.clock import Millis

Action = TypeVar("Action")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Generic[Action]):
    """Do `actions`, and call again by `wake_at_ms`. Calling earlier is harmless."""

    actions: tuple[Action, ...] = ()
    wake_at_ms: Millis | None = None
