"""Time as an argument: integer milliseconds, and the one protocol that tells them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Millis = int


class Clock(Protocol):
    """Tells the time. Only `core/loop.py` has a real one."""

    def now_ms(self) -> Millis:
        """Milliseconds since the Unix epoch, for people and records."""

    def boot_ms(self) -> Millis:
        """Milliseconds since boot, counting suspends: the only clock leases are measured with."""


Action = TypeVar("Action")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Generic[Action]):
    """Do `actions`, and call again by `wake_at_ms`. Calling earlier is harmless."""

    actions: tuple[Action, ...] = ()
    wake_at_ms: Millis | None = None
