"""How marks are made on Kafka: begun, so that readers stay below where they may lie, then made.

Pure: what each of the two transactions writes, as a function of what the control topic says and of the ends.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.clock import Millis
from penstock.streams.bus import admission, idle
from penstock.streams.bus.kafka.control import (
    ControlState,
    MarkRecord,
    OpenMark,
    Update,
    idle_update,
    mark_update,
    open_update,
    seen_update,
)
from penstock.streams.bus.log import Mark, Seen


def begin_updates(
    state: ControlState, ends: tuple[int, ...], *, observed: Mapping[int, Millis] | None, now_ms: Millis
) -> tuple[Update, ...]:
    """What is noted of partitions, and the mark that is due, begun. `ends`: read after `state`.

    `observed` None: partitions are not looked at.
    """
    if state.open is not None:
        return ()
    assert state.category is not None
    last, last_ms = state.watermark()
    due = admission.decide_mark(state.lows(), last=last, last_ms=last_ms, now_ms=now_ms)
    seen = seen_of(state)
    noted = idle.decide_idle(
        seen,
        ends,
        observed=observed or {},
        idle_after_ms=0 if observed is None else state.category.spec.idle_after_ms,
        now_ms=now_ms,
        last=last,
    )
    marks = idle.due_marks(seen, noted)
    updates = [seen_update(partition, one) for partition, one in noted.items()]
    if due is not None or marks:
        updates.append(open_update(OpenMark(low=last if due is None else due, floor=ends, idle=marks)))
    return tuple(updates)


def finish_updates(state: ControlState, ends: tuple[int, ...], *, now_ms: Millis) -> tuple[Update, ...]:
    """The mark that was begun, made at these ends. Nothing if somebody else did."""
    if state.open is None:
        return ()
    updates = [open_update(None)]
    if state.open.low > state.watermark()[0]:
        mark = MarkRecord(low=state.open.low, ends=ends, at_ms=now_ms)
        updates.insert(0, mark_update(state.mark_number(), mark))
    for partition, low in state.open.idle.items():
        number = max((number for number, _ in state.idle_of(partition)), default=0) + 1
        updates.insert(0, idle_update(partition, number, Mark(low=low, end=ends[partition], idle=True)))
    return tuple(updates)


def seen_of(state: ControlState) -> tuple[Seen, ...]:
    """What was noted of each partition."""
    assert state.category is not None
    return tuple(state.seen.get(partition, Seen()) for partition in range(state.category.spec.partitions))
