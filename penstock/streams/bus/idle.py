"""Which partitions of an event-time category are idle, and which watermark they follow (MillWheel 4.5).

Pure: every implementation of the bus asks here, inside the transaction that writes the answer down. Readers
find the answer as marks of the log, so all of them see the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.core.clock import Millis
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, Seen

# What is seen of partitions is noted at most so often, and at most ten times in `idle_after_ms`.
NOTE_EVERY_MS: Millis = 200


def decide_idle(
    seen: Sequence[Seen],
    ends: Sequence[int],
    *,
    observed: Mapping[int, Millis],
    idle_after_ms: Millis,
    now_ms: Millis,
    last: Millis = LOW_MIN,
) -> dict[int, Seen]:
    """What to note of which partitions now. Where `follows` rises, an idle mark (follows, end) is due.

    A partition that did not grow for `idle_after_ms` follows the slowest of those that did. If none did,
    nothing tells the time, and all stay. `observed`: what readers say, by partition. `last`: the category's
    own W; at its end nothing is left to follow.
    """
    if not idle_after_ms or last >= LOW_MAX:
        return {}
    looked = [
        _look(known, end, observed.get(partition, LOW_MIN), now_ms)
        for partition, (known, end) in enumerate(zip(seen, ends, strict=True))
    ]
    active = [one.reached for one in looked if now_ms - one.since_ms < idle_after_ms]
    followed = min(active, default=LOW_MIN)
    every_ms = max(NOTE_EVERY_MS, idle_after_ms // 10)
    noted = {}
    for partition, (known, one) in enumerate(zip(seen, looked, strict=True)):
        is_idle = now_ms - one.since_ms >= idle_after_ms
        new = replace(one, follows=followed) if is_idle and followed > one.reached else one
        # The distance, not the difference: after the wall clock was set back it goes on.
        is_time = known.noted_ms is None or abs(now_ms - known.noted_ms) >= every_ms
        if is_time and new != known:
            noted[partition] = replace(new, noted_ms=now_ms)
    return noted


def _look(known: Seen, end: int, observed: Millis, now_ms: Millis) -> Seen:
    grew = end != known.end or now_ms < known.since_ms
    return replace(
        known,
        low=max(known.low, observed),
        end=end,
        since_ms=now_ms if grew else known.since_ms,
    )


def due_marks(seen: Sequence[Seen], noted: Mapping[int, Seen]) -> dict[int, Millis]:
    """Which partitions get an idle mark, and with which low."""
    return {
        partition: new.follows for partition, new in noted.items() if new.follows > seen[partition].follows
    }


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
