"""Who holds a watermark back, and why: the definition of low(A) walked upstream (MillWheel 4.5).

Pure: the topology with all its lows in, one answer out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from penstock.core.clock import Millis
from penstock.streams.bus.log import LOW_MAX, LOW_MIN

Place = tuple[str, int]  # job, partition


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLow:
    """How far one input of an interval is: its low at the committed position, and what lies beyond that."""

    category: str
    low: Millis
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalLow:
    """One interval of a running job. `outbox`: the oldest production that is not sent, if there is one."""

    job: str
    partition: int
    input_low: Millis
    output_low: Millis
    inputs: tuple[InputLow, ...]
    outbox: Millis | None = None
    trouble: str = ""  # why it does not go on: it is stopped, nobody runs it, its task fails

    @property
    def name(self) -> str:
        """How people call it."""
        return f"{self.job}[{self.partition}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerLow:
    """A registered producer: an interval of a running job, or somebody outside.

    `records`: how many came to the partitions that it reads, read or not; 0 of somebody outside.
    """

    name: str
    low: Millis
    place: Place | None = None
    records: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryLow:
    """A category's W; of an event-time category the least that readers reached, by partition, and how many
    records each partition has had.
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
    """What runs, and how far it is."""

    categories: Mapping[str, CategoryLow]
    intervals: Mapping[Place, IntervalLow] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBack:
    """The answer: who, why, and the way from the category that was asked for to them."""

    who: str
    because: str
    path: tuple[str, ...]

    @property
    def text(self) -> str:
        """One line."""
        return f"held back by {self.who}, because {self.because}" if self.who else self.because


def find_holder(topology: Topology, category: str) -> HeldBack:
    """Who holds this category's watermark back."""
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
        why = "it is not on the bus" if found is None else "it waits for itself: the jobs make a circle"
        return HeldBack(who=f"category {name}", because=why, path=path)
    path = (*path, name)
    if found.low >= LOW_MAX:
        return HeldBack(who="", because="nobody: all has come", path=path)
    if found.kind == "event_time":
        return _event_time(found, path)
    if not found.producers:
        why = "nobody is registered to write it" if found.kind == "producers" else "no injector has begun"
        return HeldBack(who=f"category {name}", because=why, path=path)
    slowest = min(found.producers, key=lambda producer: (producer.low, producer.name))
    if slowest.low > found.low:
        return HeldBack(who=f"category {name}", because="its next mark is just being made", path=path)
    interval = topology.intervals.get(slowest.place) if slowest.place else None
    if interval is None:
        return _outsider(found, slowest, path)
    return _interval(topology, slowest, interval, (*path, interval.name))


def _event_time(found: CategoryLow, path: tuple[str, ...]) -> HeldBack:
    slowest = min(range(len(found.partitions)), key=found.partitions.__getitem__, default=0)
    low = found.partitions[slowest] if found.partitions else LOW_MIN
    if low <= LOW_MIN:
        return HeldBack(
            who=f"partition {slowest} of {found.name}", because="nothing was read of it yet", path=path
        )
    idle = "" if found.idle_after_ms else "; without idle_after_ms it waits for ever"
    why = f"its newest record is from {moment(low + found.lateness_ms)}{idle}"
    return HeldBack(who=f"partition {slowest} of {found.name}", because=why, path=path)


def _outsider(found: CategoryLow, slowest: ProducerLow, path: tuple[str, ...]) -> HeldBack:
    said = "has not reported yet" if slowest.low <= LOW_MIN else f"said {moment(slowest.low)} last"
    if found.kind == "injector":
        return HeldBack(who=f"injector {slowest.name}", because=f"it {said}", path=path)
    why = f"no job that runs has it; it {said}"
    return HeldBack(who=f"producer {slowest.name}", because=why, path=path)


def _interval(
    topology: Topology, producer: ProducerLow, interval: IntervalLow, path: tuple[str, ...]
) -> HeldBack:
    def held(because: str) -> HeldBack:
        return HeldBack(who=interval.name, because=because, path=path)

    trouble = f"; {interval.trouble}" if interval.trouble else ""
    if interval.output_low > producer.low:
        return held(f"it is at {moment(interval.output_low)} but has not said so{trouble}")
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
        return held(f"it has not taken the last mark of {slowest.category} yet{trouble}")
    if there is not None and there.kind == "event_time":
        # Its own partition is what counts, not the slowest of the category.
        idle = "" if there.idle_after_ms else "; without idle_after_ms it waits for ever"
        newest = (
            f"its newest record is from {moment(slowest.low + there.lateness_ms)}{idle}"
            if slowest.low > LOW_MIN
            else f"nothing has come there yet{idle}"
        )
        who = f"partition {interval.partition} of {slowest.category}"
        return HeldBack(who=who, because=newest, path=(*path, slowest.category))
    return _category(topology, slowest.category, path)


def percentile_low(found: CategoryLow, percent: int) -> Millis:
    """The low that so many per cent have reached of producers, or of partitions read, each by its records.

    Who has had none, or is somebody outside, counts as one record. It leaves the slowest out, so records
    behind it may still come on time.
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
    """A low as people read it."""
    if low <= LOW_MIN:
        return "the beginning"
    if low >= LOW_MAX:
        return "the end"
    try:
        return datetime.fromtimestamp(low / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    except (ValueError, OverflowError, OSError):
        return f"{low} ms"
