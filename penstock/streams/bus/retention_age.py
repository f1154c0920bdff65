"""For how long records have been on a bus, counted so that a wall clock set anew changes nothing. Pure.

Now and then the cleaner notes how long each partition is, and how much time has been counted so far. What was
there when a retention less had been counted goes. Time is counted by the clock that runs since the machine's
start. While the machine is off nothing is counted: a record may stay too long, it never goes too early.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.clock import Millis

# How many notes a retention is divided into: a record stays at most that part longer.
NOTES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A reading of the clock since the machine's start, and the time that was counted by then."""

    boot_id: str  # tells one start of the machine from another; "" where nobody knows
    boot_ms: Millis
    counted_ms: Millis = 0


def count_on(last: Reading | None, *, boot_id: str, boot_ms: Millis) -> Reading:
    """The reading that follows on `last`. It never counts more than has passed."""
    if last is None:
        return Reading(boot_id=boot_id, boot_ms=boot_ms)
    if last.boot_id != boot_id:
        passed = boot_ms  # the machine was started in between, and has run for so long at least
    elif boot_ms >= last.boot_ms:
        passed = boot_ms - last.boot_ms
    elif boot_id:
        return last  # somebody who read the clock before
    else:
        passed = 0
    return Reading(boot_id=boot_id, boot_ms=boot_ms, counted_ms=last.counted_ms + passed)


def is_note_due(last: Reading | None, now: Reading, *, retention_ms: Millis) -> bool:
    """Whether the partitions' ends are to be noted, and the reading with them."""
    if last is None or (now.boot_id, now.boot_ms >= last.boot_ms) != (last.boot_id, True):
        return True  # a reading of another start says nothing about this one's
    return now.counted_ms - last.counted_ms >= retention_ms // NOTES
