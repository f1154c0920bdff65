"""How far the running topology is: lows of categories, producers and intervals, read from bus and rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.core.clock import Millis
from penstock.core.errors import Fenced, IntervalMissing, NotFound
from penstock.jobs.births import interval_birth, producer_of
from penstock.jobs.config import JobConfig, StreamJob
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, Category, Log
from penstock.streams.inspect.held_back import (
    CategoryLow,
    InputLow,
    IntervalLow,
    Place,
    ProducerLow,
    Topology,
    find_holder,
    percentile_low,
    upstream,
)
from penstock.streams.rows.row_store import IntervalRef, IntervalRow, RowStore
from penstock.streams.step.step import is_dead
from penstock.streams.step.watermark import event_time_low, marks_of_event_time


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A job that has a running config. `trouble`: by partition, why its task does not go on."""

    name: str
    birth: str
    config: JobConfig
    pipeline: str = ""
    trouble: Mapping[int, str] = field(default_factory=dict)


class WatermarkView:
    """Reads lows. Nothing is locked: lows that change meanwhile only rise."""

    def __init__(self, log: Log, rows: RowStore) -> None:
        self._log, self._rows = log, rows

    def explain(
        self, jobs: Sequence[RunningJob], subject: str, now_ms: Millis, percent: int | None = None
    ) -> dict[str, Any]:
        """The watermarks of a category, or of what a job or a pipeline writes; without a subject of all that
        nobody reads. With everything upstream, and who holds each back. `percent`: also the low that so many
        per cent have reached, by records (`percentile_low`), which is kept and only rises.
        """
        streaming = [job for job in jobs if isinstance(job.config, StreamJob)]
        asked = self._asked(streaming, subject)
        topology = self._topology(*_needed(streaming, asked))
        walked = dict.fromkeys(name for start in asked for name in upstream(topology, start))
        shown = [topology.categories[name] for name in walked]
        places = {producer.place for found in shown for producer in found.producers}
        return {
            "subject": subject,
            "held_back": [_answer(topology, name, now_ms) for name in asked],
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
        kept = self._log.raise_percentile(found.name, percent=percent, low=low)
        return {"percent": percent, "percentile_low": kept}

    def _asked(self, jobs: Sequence[RunningJob], subject: str) -> list[str]:
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
            f"nothing that has a watermark is called {subject!r}",
            why=f"categories: {', '.join(there[:20]) or 'none'}; jobs: {running}",
            fix="name a category, a job or a pipeline; without a name all are shown",
        )

    def _topology(self, jobs: Sequence[RunningJob], names: Collection[str]) -> Topology:
        categories = {}
        for name in self._log.names():
            with suppress(NotFound):  # it is just being made
                if name in names:
                    categories[name] = self._log.describe(name)
        ends = {name: self._log.end_offsets(name) for name in categories}
        intervals: dict[Place, IntervalLow] = {}
        producers: dict[str, tuple[Place, int]] = {}
        reached: dict[str, dict[int, Millis]] = {}
        for job in jobs:
            sources = [categories[i.category] for i in job.config.inputs if i.category in categories]
            for partition in range(job.config.partitions):
                producers |= _producers(job, sources, ends, partition)
                with suppress(
                    IntervalMissing, Fenced
                ):  # its plan is just making it, or somebody takes it over
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
        job: RunningJob,
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
        producers: Mapping[str, tuple[Place, int]],
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


def _needed(jobs: Sequence[RunningJob], asked: Sequence[str]) -> tuple[list[RunningJob], frozenset[str]]:
    """The jobs and categories that the watermarks of these depend on, and who reads these themselves."""
    names, found = set(asked), dict[str, RunningJob]()
    waiting = list(asked)
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
    job: RunningJob, sources: Sequence[Category], ends: Mapping[str, Sequence[int]], partition: int
) -> dict[str, tuple[Place, int]]:
    """Who writes for an interval, and how many records came to what each of them reads."""
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
        "who": holder.who,
        "because": holder.because,
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
    """How far behind the clock it is; None: it has not begun, or has ended."""
    return now_ms - low if LOW_MIN < low < LOW_MAX else None
