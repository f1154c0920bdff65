"""Time as integer milliseconds, and the protocol of a clock. Decisions get the time as an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Millis = int


class Clock(Protocol):
    """The real one is `SystemClock` in `core/system_clock.py`."""

    def now_ms(self) -> Millis:
        """Milliseconds since the Unix epoch, for display and for stored records."""

    def boot_ms(self) -> Millis:
        """Milliseconds since boot, time in suspend included. Leases are measured with this clock only."""


Action = TypeVar("Action")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Generic[Action]):
    """Execute `actions`, and call again at `wake_at_ms` or earlier."""

    actions: tuple[Action, ...] = ()
    wake_at_ms: Millis | None = None
