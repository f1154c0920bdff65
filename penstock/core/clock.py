"""Time as an argument: integer milliseconds, and the one protocol that tells them."""

from __future__ import annotations

from typing import Protocol

Millis = int


class Clock(Protocol):
    """Tells the time. Only `core/loop.py` has a real one."""

    def now_ms(self) -> Millis:
        """Milliseconds since the Unix epoch, for people and records."""

    def boot_ms(self) -> Millis:
        """Milliseconds since boot, counting suspends: the only clock leases are measured with."""
