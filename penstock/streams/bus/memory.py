"""The bus in memory: a real implementation for tests, models and the simulator."""

from __future__ import annotations

import secrets
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from penstock.core.clock import Millis
from penstock.streams.bus import idle
from penstock.streams.bus import log as contract
from penstock.streams.bus.idle import Reading, count_on, is_note_due
from penstock.streams.bus.log import (
    LOW_MIN,
    Category,
    CategorySpec,
    Lag,
    Mark,
    Published,
    Run,
    Seen,
    TimedRun,
)


@dataclass(slots=True)
class _Partition:
    starts: list[int] = field(default_factory=list)  # first offset of each batch
    batches: list[pa.RecordBatch] = field(default_factory=list)
    times: list[Millis] = field(default_factory=list)  # when each batch was appended
    first: int = 0
    end: int = 0

    def append(self, batch: pa.RecordBatch, now_ms: Millis) -> None:
        self.starts.append(self.end)
        self.batches.append(batch)
        self.times.append(now_ms)
        self.end += batch.num_rows

    def truncate(self, before: int) -> None:
        self.first = max(self.first, before)
        gone = bisect_right(self.starts, self.first) - (self.first < self.end)
        del self.starts[:gone], self.batches[:gone], self.times[:gone]

    def lag(self, position: int, now_ms: Millis) -> Lag:
        waiting = self.cut(max(position, self.first), self.end) if position < self.end else []
        oldest = bisect_right(self.starts, max(position, self.first)) - 1
        return Lag(
            records=sum(batch.num_rows for batch in waiting),
            bytes=sum(batch.nbytes for batch in waiting),
            ms=max(0, now_ms - self.times[oldest]) if waiting else 0,
        )

    def sizes(self, start: int) -> Iterator[tuple[int, int, int]]:
        for index in range(max(0, bisect_right(self.starts, start) - 1), len(self.starts)):
            yield self.starts[index], self.batches[index].num_rows, self.batches[index].nbytes

    def cut(self, start: int, end: int) -> list[pa.RecordBatch]:
        cuts = []
        for index in range(bisect_right(self.starts, start) - 1, len(self.starts)):
            first, batch = self.starts[index], self.batches[index]
            if first >= end:
                break
            skip = max(0, start - first)
            cuts.append(batch.slice(skip, min(end - first, batch.num_rows) - skip))
        return cuts


@dataclass(slots=True)
class _Stored:
    category: Category
    partitions: list[_Partition]
    epochs: dict[str, int] = field(default_factory=dict)  # producer -> highest epoch seen
    sequences: dict[str, dict[int, int]] = field(
        default_factory=dict
    )  # producer -> partition -> highest sequence
    lows: dict[str, Millis] = field(default_factory=dict)  # registered producers
    marks: list[tuple[Millis, tuple[int, ...]]] = field(default_factory=list)  # (W, end offsets)
    marked_ms: Millis | None = None
    reading: Reading | None = None  # of the last note for retention
    noted_ends: list[tuple[Millis, tuple[int, ...]]] = field(default_factory=list)  # by the time counted then
    percentiles: dict[int, Millis] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)  # of event-time categories whose idle partitions follow
    idle_marks: list[tuple[int, Mark]] = field(default_factory=list)  # with their partitions

    @property
    def low(self) -> Millis:
        return self.marks[-1][0] if self.marks else LOW_MIN

    def ends(self) -> tuple[int, ...]:
        return tuple(partition.end for partition in self.partitions)

    def truncate(self, before: Mapping[int, int]) -> None:
        for partition, offset in before.items():
            self.partitions[partition].truncate(offset)
        firsts = tuple(partition.first for partition in self.partitions)
        passed = [
            number
            for number, (_, ends) in enumerate(self.marks)
            if all(end <= first for end, first in zip(ends, firsts, strict=True))
        ]
        del self.marks[: max(0, len(passed) - 1)]  # the last one has W at the start
        for partition, first in enumerate(firsts):
            gone = [item for item in self.idle_marks if item[0] == partition and item[1].end <= first][:-1]
            self.idle_marks = [item for item in self.idle_marks if item not in gone]

    def expire(self, now_ms: Millis) -> int:
        if not self.category.spec.retention_ms:
            return 0
        retention_ms, last = self.category.spec.retention_ms, self.reading
        now = count_on(last, boot_id="", boot_ms=now_ms)
        before: dict[int, int] = {}
        for counted_ms, ends in self.noted_ends:
            if counted_ms <= now.counted_ms - retention_ms:
                before |= {n: end for n, end in enumerate(ends) if self.partitions[n].first < end}
        self.truncate(before)
        if is_note_due(last, now, retention_ms=retention_ms):
            self.reading = now
            kept = [note for note in self.noted_ends if note[0] > now.counted_ms - retention_ms]
            self.noted_ends = [*kept, (now.counted_ms, self.ends())]
        return len(before)

    def mark_if_due(self, now_ms: Millis) -> None:
        due = contract.decide_mark(self.lows, last=self.low, last_ms=self.marked_ms, now_ms=now_ms)
        if due is not None:
            self.marks.append((due, self.ends()))
            self.marked_ms = now_ms

    def note(self, observed: Mapping[int, Millis], now_ms: Millis) -> None:
        after_ms = self.category.spec.idle_after_ms
        noted = idle.decide_idle(
            self.seen, self.ends(), observed=observed, idle_after_ms=after_ms, now_ms=now_ms, last=self.low
        )
        for partition, low in idle.due_marks(self.seen, noted).items():
            self.idle_marks.append((partition, Mark(low=low, end=self.ends()[partition], idle=True)))
        for partition, seen in noted.items():
            self.seen[partition] = seen

    def cut_marks(self, partition: int, above: Millis, up_to: int) -> tuple[Mark, ...]:
        found = [Mark(low=low, end=ends[partition]) for low, ends in self.marks]
        found += [mark for number, mark in self.idle_marks if number == partition]
        return tuple(
            sorted((m for m in found if m.low > above and m.end <= up_to), key=lambda mark: mark.low)
        )


class MemoryLog:
    """The `Log` protocol in memory. Thread-safe.

    `fault(point)` is called at "<method>:before" and "<method>:after" of every effect (create, publish,
    fence, register_producer, unregister_producer, report_low); what it raises reaches the caller.
    """

    def __init__(
        self,
        *,
        fault: Callable[[str], None] | None = None,
        new_birth: Callable[[], str] = lambda: secrets.token_hex(8),
        now_ms: Callable[[], Millis] = lambda: 0,
    ) -> None:
        self._fault, self._new_birth, self._now_ms = fault or (lambda point: None), new_birth, now_ms
        self._lock = threading.RLock()
        self._stored: dict[str, _Stored] = {}

    def create(self, spec: CategorySpec) -> Category:
        """Create, or return the existing category if its spec is the same."""
        contract.check_spec(spec)
        with self._effect("create"):
            stored = self._stored.get(spec.name)
            if stored is None:
                category = Category(spec=spec, birth=self._new_birth())
                stored = _Stored(
                    category,
                    [_Partition() for _ in range(spec.partitions)],
                    seen=[Seen()] * spec.partitions,
                )
                self._stored[spec.name] = stored
            contract.check_same(stored.category, spec)
            return stored.category

    def describe(self, name: str) -> Category:
        """NotFound if there is none."""
        with self._lock:
            return self._of(name).category

    def categories(self) -> tuple[Category, ...]:
        """All categories, by name."""
        with self._lock:
            return tuple(self._stored[name].category for name in sorted(self._stored))

    def names(self) -> tuple[str, ...]:
        """The names of all categories."""
        with self._lock:
            return tuple(sorted(self._stored))

    def publish(
        self,
        category: str,
        *,
        producer: str,
        epoch: int,
        batches: Mapping[int, pa.RecordBatch],
        gapless: bool,
    ) -> Published:
        """Append the new records of each batch, all partitions or none."""
        with self._effect("publish"):
            stored = self._of(category)
            arranged = contract.arrange(stored.category.spec, batches)
            contract.check_epoch(category, producer, epoch=epoch, highest=stored.epochs.get(producer))
            marks = stored.sequences.get(producer, {})
            if gapless:
                for partition, batch in arranged.items():
                    contract.check_gapless(category, partition, batch, marks.get(partition))
            trimmed = {p: contract.decide_trim(batch, marks.get(p)) for p, batch in arranged.items()}
            stored.epochs[producer] = epoch
            for partition, batch in arranged.items():
                new = batch.slice(trimmed[partition])
                if new.num_rows:
                    stored.partitions[partition].append(new, self._now_ms())
                    stored.sequences.setdefault(producer, {})[partition] = int(contract.sequences(new)[-1])
            appended = {p: batch.num_rows - trimmed[p] for p, batch in arranged.items()}
            return Published(appended=appended, trimmed=trimmed)

    def start_offsets(self, category: str) -> tuple[int, ...]:
        """The first existing offset of each partition."""
        with self._lock:
            return tuple(partition.first for partition in self._of(category).partitions)

    def truncate(self, category: str, before: Mapping[int, int]) -> None:
        """Delete the records below these offsets."""
        with self._effect("truncate"):
            stored = self._of(category)
            contract.check_truncate(stored.category.spec, before, stored.ends())
            stored.truncate(before)

    def end_offsets(self, category: str) -> tuple[int, ...]:
        """One past the last record of each partition."""
        with self._lock:
            return self._of(category).ends()

    def read(self, category: str, partition: int, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Records [start, end) in offset order."""
        assert start >= 0, "offsets count from 0"
        with self._lock:
            stored = self._of(category)
            contract.check_partition(stored.category.spec, partition)
            if end <= start:
                return iter(())
            found = stored.partitions[partition]
            contract.check_range(stored.category.spec, partition, end, found.end)
            contract.check_start(category, partition, start, found.first)
            return iter(found.cut(start, end))

    def scan(self, category: str, partition: int, start: int, end: int) -> Iterator[Run]:
        """As `read`, each batch with the offsets of its rows."""
        return contract.count_offsets(start, self.read(category, partition, start, end))

    def scan_timed(self, category: str, partition: int, start: int, end: int) -> Iterator[TimedRun]:
        """As `scan`, with the time at which each row was appended."""
        with self._lock:
            self.read(category, partition, start, end)  # checks the arguments
            found = self._of(category).partitions[partition]
            starts, times = np.array(found.starts), np.array([0, *found.times], dtype=np.int64)
        for offsets, batch in self.scan(category, partition, start, end):
            yield offsets, times[np.searchsorted(starts, offsets, side="right")], batch

    def times(self, category: str, partition: int, start: int, end: int) -> tuple[Millis, Millis] | None:
        """The smallest and the largest `_ts` of the records in [start, end)."""
        return contract.times_of(self.read(category, partition, start, end))

    def lag(self, category: str, positions: Mapping[int, int], *, now_ms: Millis) -> Lag:
        """The lag of a reader at these positions."""
        with self._lock:
            stored = self._of(category)
            for partition in positions:
                contract.check_partition(stored.category.spec, partition)
            return contract.sum_lags(
                stored.partitions[partition].lag(position, now_ms)
                for partition, position in positions.items()
            )

    def within(self, category: str, partition: int, start: int, end: int, bytes_max: int) -> int:
        """The end of the range from `start` with about `bytes_max` bytes."""
        with self._lock:
            stored = self._of(category)
            contract.check_partition(stored.category.spec, partition)
            return contract.fit_bytes(stored.partitions[partition].sizes(start), start, end, bytes_max)

    def published_to(self, category: str, producer: str) -> Mapping[int, int]:
        """The highest sequence this producer ever appended, per partition."""
        with self._lock:
            return dict(self._of(category).sequences.get(producer, {}))

    def fence(self, category: str, producer: str, epoch: int, *, is_new_life: bool = False) -> None:
        """Refuse every smaller epoch of this producer from now on."""
        with self._effect("fence"):
            epochs = self._of(category).epochs
            if is_new_life:
                contract.check_new_epoch(category, producer, epoch=epoch, highest=epochs.get(producer))
            epochs[producer] = max(epoch, epochs.get(producer, epoch))

    def register_producer(self, category: str, producer: str) -> None:
        """Add this producer to the category's watermark, from the current W. May be repeated."""
        with self._effect("register_producer"):
            stored = self._of(category)
            stored.lows.setdefault(producer, stored.low)

    def unregister_producer(self, category: str, producer: str) -> None:
        """Remove it from the watermark; W rises with the next report of another producer."""
        with self._effect("unregister_producer"):
            self._of(category).lows.pop(producer, None)

    def producers(self, category: str) -> Mapping[str, Millis]:
        """Registered producers and their output lows."""
        with self._lock:
            return dict(self._of(category).lows)

    def report_low(self, category: str, *, producer: str, epoch: int, low: Millis, now_ms: Millis) -> None:
        """Raise the producer's output low, and append a mark if one is due."""
        with self._effect("report_low"):
            stored = self._of(category)
            contract.check_epoch(category, producer, epoch=epoch, highest=stored.epochs.get(producer))
            if producer not in stored.lows:
                raise contract.not_registered(category, producer)
            stored.epochs[producer] = epoch
            stored.lows[producer] = max(low, stored.lows[producer])
            stored.mark_if_due(now_ms)

    def advance(self, category: str, *, now_ms: Millis) -> None:
        """Append the mark that is due, if any."""
        with self._effect("advance"):
            stored = self._of(category)
            stored.mark_if_due(now_ms)
            stored.note({}, now_ms)

    def observe(self, category: str, *, partition: int, low: Millis, now_ms: Millis) -> None:
        """Report that a reader has reached this low; idle partitions follow."""
        with self._effect("observe"):
            stored = self._of(category)
            contract.check_partition(stored.category.spec, partition)
            stored.note({partition: low}, now_ms)

    def observed(self, category: str) -> tuple[Seen, ...]:
        """The recorded progress of each partition."""
        with self._lock:
            stored = self._of(category)
            return tuple(stored.seen) if stored.category.spec.idle_after_ms else ()

    def marks(self, category: str, partition: int, *, above: Millis, up_to: int) -> tuple[Mark, ...]:
        """Marks of one partition with low > `above` and end <= `up_to`, in order."""
        with self._lock:
            stored = self._of(category)
            contract.check_partition(stored.category.spec, partition)
            return stored.cut_marks(partition, above, up_to)

    def raise_percentile(self, category: str, *, percent: int, low: Millis) -> Millis:
        """Store the low that so many percent have reached, if it is higher."""
        with self._effect("raise_percentile"):
            kept = self._of(category).percentiles
            kept[percent] = max(low, kept.get(percent, LOW_MIN))
            return kept[percent]

    def clean(self, *, now_ms: Millis, older_than_ms: Millis) -> int:
        """Delete records past their retention; nothing else is left in memory."""
        with self._lock:
            return sum(stored.expire(now_ms) for stored in self._stored.values())

    def watermark(self, category: str) -> Millis:
        """W of the last mark, LOW_MIN if none."""
        with self._lock:
            return self._of(category).low

    def _of(self, name: str) -> _Stored:
        contract.check_name(name)
        stored = self._stored.get(name)
        if stored is None:
            raise contract.missing(name)
        return stored

    @contextmanager
    def _effect(self, name: str) -> Iterator[None]:
        with self._lock:
            self._fault(f"{name}:before")
            yield
            self._fault(f"{name}:after")
