"""The row store in memory: a real implementation for tests, models and the simulator."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from penstock.core.clock import Millis
from penstock.streams.bus.log import LOW_MAX, LOW_MIN
from penstock.streams.rows.row_store import (
    Changes,
    IntervalRef,
    IntervalRow,
    OutboxRow,
    ScannedState,
    ScannedTimer,
    Snapshot,
    StoredSize,
    TimerRow,
    after_acquire,
    after_commit,
    after_delivery,
    after_fence,
    after_repeated_create,
    check_birth,
    check_token,
    check_version,
    new_row,
    unseen_names,
)


@dataclass(slots=True)
class _Interval:
    row: IntervalRow
    states: dict[str, bytes] = field(default_factory=dict)
    timers: dict[tuple[str, str], TimerRow] = field(default_factory=dict)
    outbox: dict[int, OutboxRow] = field(default_factory=dict)
    outbox_id: int = 0  # the last one given

    def oldest_work(self) -> Millis:
        holds = (timer.hold_ms for timer in self.timers.values() if not timer.late and not timer.wall)
        return min((*(out.ts_min for out in self.outbox.values()), *holds), default=LOW_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """A copy of an interval as an `IntervalView`."""

    row: IntervalRow
    kept: Mapping[str, bytes]
    set_timers: Mapping[tuple[str, str], TimerRow]

    def states(self, *, start: str, limit: int) -> tuple[ScannedState, ...]:
        keys = sorted(key for key in self.kept if key >= start)[:limit]
        return tuple(ScannedState(key=key, value=self.kept[key]) for key in keys)

    def timers(self, *, start: tuple[str, str], limit: int) -> tuple[ScannedTimer, ...]:
        names = sorted(name for name in self.set_timers if name >= start)[:limit]
        return tuple(ScannedTimer(key=name[0], tag=name[1], timer=self.set_timers[name]) for name in names)


class MemoryRows:
    """The `RowStore` protocol in memory. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._intervals: dict[tuple[str, int, str], _Interval] = {}

    def create(self, ref: IntervalRef, *, offsets: Mapping[str, int], low: Millis) -> None:
        """Create the interval, or add new inputs."""
        with self._lock:
            found = self._intervals.get((ref.job_birth, ref.partition, ref.birth))
            if found is None:
                row = new_row(ref, offsets, low)
                self._intervals[ref.job_birth, ref.partition, ref.birth] = _Interval(row)
            else:
                found.row = after_repeated_create(ref, found.row, offsets)

    def exists(self, ref: IntervalRef) -> bool:
        """True if there is one of this birth."""
        with self._lock:
            found = self._intervals.get((ref.job_birth, ref.partition, ref.birth))
            return found is not None and found.row.birth == ref.birth

    def acquire(self, ref: IntervalRef, *, generation: int, shard_epoch: int) -> IntervalRow:
        """Take ownership under a new token."""
        with self._lock:
            found = self._of(ref)
            found.row = after_acquire(ref, found.row, generation=generation, shard_epoch=shard_epoch)
            return found.row

    def fence(self, ref: IntervalRef, *, generation: int) -> int:
        """Refuse every owner of a smaller generation."""
        with self._lock:
            found = self._of(ref)
            found.row = after_fence(found.row, generation=generation)
            return found.row.token

    def snapshot(
        self,
        ref: IntervalRef,
        *,
        token: int,
        keys: Iterable[str],
        timers_up_to: Millis,
        wall_up_to: Millis = LOW_MIN,
    ) -> Snapshot:
        """One consistent read under the token."""
        with self._lock:
            found = self._of(ref)
            check_token(ref, found.row, token)
            due = (
                timer
                for timer in found.timers.values()
                if timer.at_ms <= (wall_up_to if timer.wall else timers_up_to)
            )
            timers = tuple(sorted(due, key=lambda timer: (timer.wall, timer.at_ms, timer.key, timer.tag)))
            wanted = {*keys, *(timer.key for timer in timers)}
            states = {key: found.states[key] for key in wanted if key in found.states}
            return Snapshot(row=found.row, states=states, timers=timers, outbox=tuple(found.outbox.values()))

    def commit(self, ref: IntervalRef, *, token: int, version: int, changes: Changes) -> IntervalRow:
        """Write one step, all of it or nothing."""
        with self._lock:
            found = self._of(ref)
            check_token(ref, found.row, token)
            check_version(ref, found.row, version)
            # Written to a copy first: a refused change must not change anything.
            new = _Interval(
                found.row, dict(found.states), dict(found.timers), dict(found.outbox), found.outbox_id
            )
            for key, state in changes.states.items():
                if state is None:
                    new.states.pop(key, None)
                else:
                    new.states[key] = state
            for name in changes.timers_deleted:
                new.timers.pop(name, None)
            new.timers.update({(timer.key, timer.tag): timer for timer in changes.timers_set})
            for out in changes.outbox:
                new.outbox_id += 1
                new.outbox[new.outbox_id] = replace(out, id=new.outbox_id)
            sizes = {
                name: len(name.encode()) + len(found.states[name])
                for name in unseen_names(found.row, changes)
                if name in found.states
            }
            unseen = StoredSize(rows=len(sizes), bytes=sum(sizes.values()))
            new.row = after_commit(found.row, changes, oldest_work=new.oldest_work(), unseen=unseen)
            self._intervals[ref.job_birth, ref.partition, ref.birth] = new
            return new.row

    def delivered(self, ref: IntervalRef, *, token: int, ids: Iterable[int]) -> IntervalRow:
        """Delete published outbox rows."""
        with self._lock:
            found = self._of(ref)
            check_token(ref, found.row, token)
            for sent in ids:
                found.outbox.pop(sent, None)
            found.row = after_delivery(found.row, oldest_work=found.oldest_work())
            return found.row

    def peek(self, ref: IntervalRef) -> IntervalRow:
        """The current row."""
        with self._lock:
            return self._of(ref).row

    @contextmanager
    def view(self, ref: IntervalRef) -> Iterator[_View]:
        """A view: a copy of the interval."""
        with self._lock:
            found = self._of(ref)
            moment = _View(row=found.row, kept=dict(found.states), set_timers=dict(found.timers))
        yield moment

    def scan(self, ref: IntervalRef, *, start: str, limit: int) -> tuple[ScannedState, ...]:
        """States from this key on."""
        with self.view(ref) as moment:
            return moment.states(start=start, limit=limit)

    def scan_timers(
        self, ref: IntervalRef, *, start: tuple[str, str], limit: int
    ) -> tuple[ScannedTimer, ...]:
        """Timers from this name on."""
        with self.view(ref) as moment:
            return moment.timers(start=start, limit=limit)

    def _of(self, ref: IntervalRef) -> _Interval:
        found = self._intervals.get((ref.job_birth, ref.partition, ref.birth))
        check_birth(ref, None if found is None else found.row.birth)
        assert found is not None
        return found
