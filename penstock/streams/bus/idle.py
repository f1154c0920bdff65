"""Which partitions of an event-time category are idle, and which watermark they follow (MillWheel 4.5).

Pure: every implementation of the bus asks here, inside the transaction that writes the answer down. Readers
find the answer as marks of the log, so all of them see the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

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
