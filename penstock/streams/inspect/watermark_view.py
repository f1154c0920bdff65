"""Reads the low watermarks of categories, producers and intervals, and finds what holds them back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from penstock.core.clock import Millis
from penstock.core.errors import Fenced, IntervalMissing, NotFound
from penstock.jobs.config import JobConfig, StreamJob
from penstock.jobs.tasks import interval_birth, producer_of
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, Category, Log
from penstock.streams.rows.row_store import IntervalRef, IntervalRow, RowStore
from penstock.streams.step.step import is_dead
from penstock.streams.step.watermark import event_time_low, marks_of_event_time

IntervalId = tuple[str, int]  # job, partition


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLow:
    """One input of an interval: its low at the committed offset, and the number of unread records."""

    category: str
    low: Millis
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalLow:
    """One interval of a running job. `outbox`: the time of its oldest unsent production."""

    job: str
    partition: int
    input_low: Millis
    output_low: Millis
    inputs: tuple[InputLow, ...]
    outbox: Millis | None = None
    trouble: str = ""  # why it makes no progress: it is stopped, not running, or its task fails

    @property
    def name(self) -> str:
        """Its name for display."""
        return f"{self.job}[{self.partition}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerLow:
    """A registered producer: an interval of a running job, or an external producer.

    `records`: how many records its input partitions have; 0 for an external producer.
    """

    name: str
    low: Millis
    place: IntervalId | None = None
    records: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryLow:
    """The low watermark of a category. For an event-time category: the minimum that its readers reached, with
    lows and numbers of records by partition.
    """

    name: str
    kind: str  # producers | injector | event_time
    low: Millis
    producers: tuple[ProducerLow, ...] = ()
    partitions: tuple[Millis, ...] = ()
    records: tuple[int, ...] = ()
    lateness_ms: Millis = 0
    idle_after_ms: Millis = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The categories and intervals of running jobs, with their lows."""

    categories: Mapping[str, CategoryLow]
    intervals: Mapping[IntervalId, IntervalLow] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBack:
    """What holds a watermark back, why, and the path to it from the requested category."""

    holder: str
    reason: str
    path: tuple[str, ...]

    @property
    def text(self) -> str:
        """One line."""
        return f"held back by {self.holder}, because {self.reason}" if self.holder else self.reason


def find_holder(topology: Topology, category: str) -> HeldBack:
    """Find what holds this category's watermark back."""
    return _category(topology, category, ())


def upstream(topology: Topology, category: str) -> tuple[str, ...]:
    """The category and all that its watermark depends on, nearest first."""
    found: list[str] = []
    waiting = [category]
    while waiting:
        name = waiting.pop(0)
        if name in found or name not in topology.categories:
            continue
        found.append(name)
        for producer in topology.categories[name].producers:
            interval = topology.intervals.get(producer.place) if producer.place else None
            waiting += [source.category for source in interval.inputs] if interval else []
    return tuple(found)


def _category(topology: Topology, name: str, path: tuple[str, ...]) -> HeldBack:
    found = topology.categories.get(name)
    if found is None or name in path:
        why = "it is not on the bus" if found is None else "it depends on itself: the jobs have a cycle"
        return HeldBack(holder=f"category {name}", reason=why, path=path)
    path = (*path, name)
    if found.low >= LOW_MAX:
        return HeldBack(holder="", reason="nothing holds it back: the input has ended", path=path)
    if found.kind == "event_time":
        return _event_time(found, path)
    if not found.producers:
        why = "it has no registered producer" if found.kind == "producers" else "no injector has started"
        return HeldBack(holder=f"category {name}", reason=why, path=path)
    slowest = min(found.producers, key=lambda producer: (producer.low, producer.name))
    if slowest.low > found.low:
        return HeldBack(holder=f"category {name}", reason="its next mark is being written", path=path)
    interval = topology.intervals.get(slowest.place) if slowest.place else None
    if interval is None:
        return _outsider(found, slowest, path)
    return _interval(topology, slowest, interval, (*path, interval.name))


def _event_time(found: CategoryLow, path: tuple[str, ...]) -> HeldBack:
    slowest = min(range(len(found.partitions)), key=found.partitions.__getitem__, default=0)
    low = found.partitions[slowest] if found.partitions else LOW_MIN
    if low <= LOW_MIN:
        return HeldBack(
            holder=f"partition {slowest} of {found.name}",
            reason="none of its records was read yet",
            path=path,
        )
    idle = "" if found.idle_after_ms else "; without idle_after_ms it waits forever"
    why = f"its newest record is from {moment(low + found.lateness_ms)}{idle}"
    return HeldBack(holder=f"partition {slowest} of {found.name}", reason=why, path=path)


def _outsider(found: CategoryLow, slowest: ProducerLow, path: tuple[str, ...]) -> HeldBack:
    report = "has not reported yet" if slowest.low <= LOW_MIN else f"last reported {moment(slowest.low)}"
    if found.kind == "injector":
        return HeldBack(holder=f"injector {slowest.name}", reason=f"it {report}", path=path)
    why = f"it belongs to no running job; it {report}"
    return HeldBack(holder=f"producer {slowest.name}", reason=why, path=path)


def _interval(
    topology: Topology, producer: ProducerLow, interval: IntervalLow, path: tuple[str, ...]
) -> HeldBack:
    def held(reason: str) -> HeldBack:
        return HeldBack(holder=interval.name, reason=reason, path=path)

    trouble = f"; {interval.trouble}" if interval.trouble else ""
    if interval.output_low > producer.low:
        return held(f"it is at {moment(interval.output_low)} but has not reported it{trouble}")
    if interval.output_low < interval.input_low:
        if interval.outbox is not None and interval.outbox <= interval.output_low:
            return held(f"its production of {moment(interval.outbox)} is not sent yet{trouble}")
        return held(f"a timer holds it at {moment(interval.output_low)}{trouble}")
    if not interval.inputs:
        return held(f"it has no input{trouble}")
    slowest = min(interval.inputs, key=lambda source: (source.low, -source.waiting, source.category))
    there = topology.categories.get(slowest.category)
    if slowest.waiting and (there is None or there.kind == "event_time" or there.low > slowest.low):
        return held(f"it has {slowest.waiting:,} records of {slowest.category} to read{trouble}")
    if there is not None and there.kind != "event_time" and there.low > slowest.low:
        return held(f"it has not processed the last mark of {slowest.category} yet{trouble}")
    if there is not None and there.kind == "event_time":
        # Only its own partition counts, not the slowest one of the category.
        idle = "" if there.idle_after_ms else "; without idle_after_ms it waits forever"
        newest = (
            f"its newest record is from {moment(slowest.low + there.lateness_ms)}{idle}"
            if slowest.low > LOW_MIN
            else f"it has no records yet{idle}"
        )
        holder = f"partition {interval.partition} of {slowest.category}"
        return HeldBack(holder=holder, reason=newest, path=(*path, slowest.category))
    return _category(topology, slowest.category, path)


def percentile_low(found: CategoryLow, percent: int) -> Millis:
    """The low that `percent` of the producers or partitions have reached, weighted by their records.

    Producers without records, and external ones, have weight 1. It ignores the slowest ones, so records
    before this low may still be on time.
    """
    of_partitions = zip(found.partitions, found.records or [0] * len(found.partitions), strict=True)
    of_producers = ((producer.low, producer.records) for producer in found.producers)
    lows = sorted(
        (low, max(1, count)) for low, count in (of_partitions if found.partitions else of_producers)
    )
    if found.low >= LOW_MAX:
        return found.low
    total, behind = sum(count for _, count in lows), 0
    for low, count in lows:
        behind += count
        if behind * 100 > total * (100 - percent):
            return max(found.low, low)
    return found.low


def moment(low: Millis) -> str:
    """A low as text."""
    if low <= LOW_MIN:
        return "the beginning"
    if low >= LOW_MAX:
        return "the end"
    try:
        return datetime.fromtimestamp(low / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    except (ValueError, OverflowError, OSError):
        return f"{low} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobToInspect:
    """A job with its running config. `trouble`: partition -> why its task makes no progress."""

    name: str
    birth: str
    config: JobConfig
    pipeline: str = ""
    trouble: Mapping[int, str] = field(default_factory=dict)


class WatermarkView:
    """Reads lows without locks: lows that change meanwhile only rise."""

    def __init__(self, log: Log, rows: RowStore) -> None:
        self._log, self._rows = log, rows

    def explain(
        self, jobs: Sequence[JobToInspect], subject: str, now_ms: Millis, percent: int | None = None
    ) -> dict[str, Any]:
        """The watermarks of a category, or of the outputs of a job or pipeline, with everything upstream and
        what holds each back. Empty subject: all categories that no job reads. `percent`: also the
        `percentile_low`, which is stored and only rises.
        """
        streaming = [job for job in jobs if isinstance(job.config, StreamJob)]
        requested = self._requested(streaming, subject)
        topology = self._topology(*_needed(streaming, requested))
        walked = dict.fromkeys(name for start in requested for name in upstream(topology, start))
        shown = [topology.categories[name] for name in walked]
        places = {producer.place for found in shown for producer in found.producers}
        return {
            "subject": subject,
            "held_back": [_answer(topology, name, now_ms) for name in requested],
            "categories": [
                {**_category_json(found, topology, now_ms), **self._percentile(found, percent)}
                for found in shown
            ],
            "intervals": [
                {**asdict(found), "name": found.name}
                for place, found in sorted(topology.intervals.items())
                if place in places
            ],
        }

    def _percentile(self, found: CategoryLow, percent: int | None) -> dict[str, Any]:
        if percent is None:
            return {}
        low = percentile_low(found, percent)
        stored = self._log.raise_percentile(found.name, percent=percent, low=low)
        return {"percent": percent, "percentile_low": stored}

    def _requested(self, jobs: Sequence[JobToInspect], subject: str) -> list[str]:
        there = self._log.names()
        written = {job.name: _written(job.config) for job in jobs}
        read = {item.category for job in jobs for item in job.config.inputs}
        if not subject:
            return sorted({name for names in written.values() for name in names} - read)
        if subject in there:
            return [subject]
        if subject in written:
            return written[subject]
        found = [name for job in jobs if job.pipeline == subject for name in written[job.name]]
        if found:
            return [name for name in dict.fromkeys(found) if name not in read] or list(dict.fromkeys(found))
        running = ", ".join([*written][:20]) or "none"
        raise NotFound(
            f"there is no category, job or pipeline {subject!r}",
            why=f"categories: {', '.join(there[:20]) or 'none'}; jobs: {running}",
            fix="use one of these names, or the name of a pipeline; without a name all are shown",
        )

    def _topology(self, jobs: Sequence[JobToInspect], names: Collection[str]) -> Topology:
        categories = {}
        for name in self._log.names():
            with suppress(NotFound):  # it may be removed meanwhile
                if name in names:
                    categories[name] = self._log.describe(name)
        ends = {name: self._log.end_offsets(name) for name in categories}
        intervals: dict[IntervalId, IntervalLow] = {}
        producers: dict[str, tuple[IntervalId, int]] = {}
        reached: dict[str, dict[int, Millis]] = {}
        for job in jobs:
            sources = [categories[i.category] for i in job.config.inputs if i.category in categories]
            for partition in range(job.config.partitions):
                producers |= _producers(job, sources, ends, partition)
                with suppress(IntervalMissing, Fenced):  # it is being created, or another task acquires it
                    found = self._interval(job, sources, ends, partition)
                    intervals[job.name, partition] = found
                    for source in found.inputs:
                        known = reached.setdefault(source.category, {})
                        known[partition] = max(source.low, known.get(partition, LOW_MIN))
        lows = {
            name: self._category(found, producers, reached.get(name, {}), ends[name])
            for name, found in categories.items()
        }
        return Topology(categories=lows, intervals=intervals)

    def _interval(
        self,
        job: JobToInspect,
        sources: Sequence[Category],
        ends: Mapping[str, Sequence[int]],
        partition: int,
    ) -> IntervalLow:
        config = job.config
        birth = interval_birth(job.birth, config.kind, config.lineage, partition)
        ref = IntervalRef(job=job.name, job_birth=job.birth, partition=partition, birth=birth)
        row, outbox = self._rows.peek(ref), None
        if row.output_low < row.input_low:
            snapshot = self._rows.snapshot(ref, token=row.token, keys=(), timers_up_to=LOW_MIN)
            outbox = min((out.ts_min for out in snapshot.outbox), default=None)
        return IntervalLow(
            job=job.name,
            partition=partition,
            input_low=row.input_low,
            output_low=row.output_low,
            inputs=tuple(
                self._input(row, source, partition, ends[source.spec.name][partition])
                for source in sources
                if partition < source.spec.partitions and source.birth in row.offsets
            ),
            outbox=outbox,
            trouble=job.trouble.get(partition, ""),
        )

    def _input(self, row: IntervalRow, source: Category, partition: int, end: int) -> InputLow:
        spec, position = source.spec, row.offsets[source.birth]
        marks = self._log.marks(spec.name, partition, above=row.input_low, up_to=position)
        low = row.input_low
        if spec.watermark == "event_time":
            marks = marks_of_event_time(marks)
            low = max(low, event_time_low(row.event_time_max.get(source.birth, LOW_MIN), spec.lateness_ms))
        low = max([low, *(mark.low for mark in marks)])
        return InputLow(category=spec.name, low=low, waiting=max(0, end - position))

    def _category(
        self,
        found: Category,
        producers: Mapping[str, tuple[IntervalId, int]],
        reached: Mapping[int, Millis],
        ends: Sequence[int],
    ) -> CategoryLow:
        spec, low = found.spec, self._log.watermark(found.spec.name)
        partitions: tuple[Millis, ...] = ()
        if spec.watermark == "event_time" and low < LOW_MAX:
            partitions = tuple(reached.get(number, LOW_MIN) for number in range(spec.partitions))
            low = min(partitions)
        registered, outside = self._log.producers(spec.name), (None, 0)
        return CategoryLow(
            name=spec.name,
            kind=spec.watermark,
            low=low,
            producers=tuple(
                ProducerLow(name=name, low=at, place=place, records=records)
                for name, at in sorted(registered.items())
                for place, records in [producers.get(name, outside)]
            ),
            partitions=partitions,
            records=tuple(ends) if partitions else (),
            lateness_ms=spec.lateness_ms,
            idle_after_ms=spec.idle_after_ms,
        )


def _needed(
    jobs: Sequence[JobToInspect], requested: Sequence[str]
) -> tuple[list[JobToInspect], frozenset[str]]:
    """The jobs and categories that these watermarks depend on, and the readers of these categories."""
    names, found = set(requested), dict[str, JobToInspect]()
    waiting = list(requested)
    while waiting:
        name = waiting.pop()
        for job in jobs:
            inputs = {item.category for item in job.config.inputs}
            if name in _written(job.config):
                found[job.name] = job
                waiting += inputs - names
                names |= inputs
    for job in jobs:
        if names & {item.category for item in job.config.inputs}:
            found.setdefault(job.name, job)
    return list(found.values()), frozenset(names)


def _written(config: JobConfig) -> list[str]:
    return [output.category for output in config.outputs if not is_dead(output.stream)]


def _producers(
    job: JobToInspect, sources: Sequence[Category], ends: Mapping[str, Sequence[int]], partition: int
) -> dict[str, tuple[IntervalId, int]]:
    """The producers of an interval, and the number of records in the input partitions of each."""
    kind, lineage = job.config.kind, job.config.lineage
    records: dict[str, int] = {}
    for source in sources:
        name = producer_of(
            job_birth=job.birth, kind=kind, lineage=lineage, input_birth=source.birth, partition=partition
        )
        there = ends[source.spec.name][partition : partition + 1]
        records[name] = records.get(name, 0) + sum(there)
    return {name: ((job.name, partition), count) for name, count in records.items()}


def _answer(topology: Topology, name: str, now_ms: Millis) -> dict[str, Any]:
    holder = find_holder(topology, name)
    found = topology.categories.get(name)
    low = LOW_MIN if found is None else found.low
    return {
        "category": name,
        "low": low,
        "age_ms": _age(low, now_ms),
        "who": holder.holder,
        "because": holder.reason,
        "path": list(holder.path),
        "text": holder.text,
    }


def _category_json(found: CategoryLow, topology: Topology, now_ms: Millis) -> dict[str, Any]:
    return {
        "category": found.name,
        "watermark": found.kind,
        "low": found.low,
        "age_ms": _age(found.low, now_ms),
        "partitions": list(found.partitions),
        "producers": [
            {
                "producer": producer.name,
                "who": topology.intervals[producer.place].name
                if producer.place is not None and producer.place in topology.intervals
                else producer.name,
                "low": producer.low,
                "age_ms": _age(producer.low, now_ms),
            }
            for producer in found.producers
        ],
    }


def _age(low: Millis, now_ms: Millis) -> Millis | None:
    """How far it is behind the clock; None: it has not started, or has ended."""
    return now_ms - low if LOW_MIN < low < LOW_MAX else None
