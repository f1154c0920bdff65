"""Which partitions of an event-time category are idle, and which watermark they follow (MillWheel 4.5).

Pure: every implementation of the bus calls this inside the transaction that stores the result. Readers get
the result as marks of the log, so all of them see the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.core.clock import Millis
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, Seen

# Shortest interval between two records of partitions' progress; at most ten per `idle_after_ms`.
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
    """The progress to record, by partition. Where `follows` rises, an idle mark (follows, end) is due.

    A partition that did not grow for `idle_after_ms` follows the slowest of those that did. If none did, no
    watermark advances. `observed`: lows reported by readers, by partition. `last`: the category's W; at
    LOW_MAX there is nothing to follow.
    """
    if not idle_after_ms or last >= LOW_MAX:
        return {}
    current = [
        _update(known, end, observed.get(partition, LOW_MIN), now_ms)
        for partition, (known, end) in enumerate(zip(seen, ends, strict=True))
    ]
    active = [one.reached for one in current if now_ms - one.since_ms < idle_after_ms]
    followed = min(active, default=LOW_MIN)
    every_ms = max(NOTE_EVERY_MS, idle_after_ms // 10)
    noted = {}
    for partition, (known, one) in enumerate(zip(seen, current, strict=True)):
        is_idle = now_ms - one.since_ms >= idle_after_ms
        new = replace(one, follows=followed) if is_idle and followed > one.reached else one
        # The absolute difference, so that it continues after the wall clock was set back.
        is_time = known.noted_ms is None or abs(now_ms - known.noted_ms) >= every_ms
        if is_time and new != known:
            noted[partition] = replace(new, noted_ms=now_ms)
    return noted


def _update(known: Seen, end: int, observed: Millis, now_ms: Millis) -> Seen:
    grew = end != known.end or now_ms < known.since_ms
    return replace(
        known,
        low=max(known.low, observed),
        end=end,
        since_ms=now_ms if grew else known.since_ms,
    )


def due_marks(seen: Sequence[Seen], noted: Mapping[int, Seen]) -> dict[int, Millis]:
    """Partitions that get an idle mark, and its low."""
    return {
        partition: new.follows for partition, new in noted.items() if new.follows > seen[partition].follows
    }


# A retention is divided into so many readings: a record is kept at most one part longer.
NOTES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A reading of the monotonic clock since boot, and the total time counted so far."""

    boot_id: str  # identifies a boot of the machine; "" if unknown
    boot_ms: Millis
    counted_ms: Millis = 0


def count_on(last: Reading | None, *, boot_id: str, boot_ms: Millis) -> Reading:
    """The reading after `last`. It never counts more time than has passed."""
    if last is None:
        return Reading(boot_id=boot_id, boot_ms=boot_ms)
    if last.boot_id != boot_id:
        passed = boot_ms  # rebooted meanwhile: at least this time has passed
    elif boot_ms >= last.boot_ms:
        passed = boot_ms - last.boot_ms
    elif boot_id:
        return last  # an older reading by another process
    else:
        passed = 0
    return Reading(boot_id=boot_id, boot_ms=boot_ms, counted_ms=last.counted_ms + passed)


def is_note_due(last: Reading | None, now: Reading, *, retention_ms: Millis) -> bool:
    """Whether the partitions' ends and the reading should be recorded."""
    if last is None or (now.boot_id, now.boot_ms >= last.boot_ms) != (last.boot_id, True):
        return True  # readings of different boots cannot be compared
    return now.counted_ms - last.counted_ms >= retention_ms // NOTES
