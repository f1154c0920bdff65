"""The state of a category's control topic: spec, birth, producers, registrations, marks.

Pure: records are applied in the order of the topic, the last one of a key counts. Keys: `category`,
`open`, `p:<producer>` (written under that producer's transactional id alone), `r:<producer>`, `m:<number>`,
`s:<partition>`, `q:<percent>` and `i:<partition>:<number>` (written under the category's).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from penstock.core.clock import Millis
from penstock.core.errors import CorruptData
from penstock.core.text import make_known
from penstock.streams.bus.log import LOW_MIN, Category, CategorySpec, Mark, Seen

CATEGORY, OPEN = b"category", b"open"


class ProducerState(msgspec.Struct, frozen=True, kw_only=True):
    """One producer: the highest epoch, the last sequence per partition, its low."""

    epoch: int | None = None
    last: dict[int, int] = {}
    low: Millis = LOW_MIN
    registration: int = 0  # the registration under which `low` was reported
    records: int = 0  # published in total, with `bytes`, for the mean size
    bytes: int = 0


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """A producer's registration in the watermark, with its first low; `low` None: unregistered."""

    number: int
    low: Millis | None


class MarkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """W, the ends of all partitions at that moment, and when it was made."""

    low: Millis
    ends: tuple[int, ...]
    at_ms: Millis


class OpenMark(msgspec.Struct, frozen=True, kw_only=True):
    """A mark that is being made: its W, and ends below which it cannot lie; readers stay below them.

    `idle`: marks of idle partitions that are made with it. W may be as it was.
    """

    low: Millis
    floor: tuple[int, ...]
    idle: dict[int, Millis] = {}


class _CategoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    birth: str
    spec: CategorySpec


@dataclass(slots=True)
class ControlState:
    """A category as of position `position` of its control topic."""

    position: int = 0
    category: Category | None = None
    producers: dict[str, ProducerState] = field(default_factory=dict)
    registered: dict[str, Registration] = field(default_factory=dict)
    marks: dict[int, MarkRecord] = field(default_factory=dict)  # by number, ascending
    open: OpenMark | None = None
    seen: dict[int, Seen] = field(default_factory=dict)  # by partition, of event-time categories
    idle_marks: dict[tuple[int, int], Mark] = field(default_factory=dict)  # by partition and number
    percentiles: dict[int, Millis] = field(default_factory=dict)

    def copy(self) -> ControlState:
        """A copy, independent of later changes."""
        return ControlState(
            self.position,
            self.category,
            dict(self.producers),
            dict(self.registered),
            dict(self.marks),
            self.open,
            dict(self.seen),
            dict(self.idle_marks),
            dict(self.percentiles),
        )

    def apply(self, key: bytes, value: bytes | None) -> None:
        """Apply the next record of the topic. CorruptData if it is foreign."""
        kind, _, name = key.partition(b":")
        try:
            if key == CATEGORY and value is not None:
                self._rename(msgspec.json.decode(value, type=_CategoryRecord))
            elif key == OPEN:
                self.open = None if value is None else msgspec.json.decode(value, type=OpenMark)
            elif kind == b"p" and value is not None:
                self.producers[name.decode()] = msgspec.json.decode(value, type=ProducerState)
            elif kind == b"r" and value is not None:
                self.registered[name.decode()] = msgspec.json.decode(value, type=Registration)
            elif kind == b"m" and value is not None:
                self.marks[int(name)] = msgspec.json.decode(value, type=MarkRecord)
            elif kind == b"m":
                self.marks.pop(int(name), None)
            elif kind == b"s" and value is not None:
                self.seen[int(name)] = msgspec.json.decode(value, type=Seen)
            elif kind == b"q" and value is not None:
                self.percentiles[int(name)] = msgspec.json.decode(value, type=int)
            elif kind == b"i":
                partition, _, number = name.partition(b":")
                self._set_idle((int(partition), int(number)), value)
            else:
                raise ValueError(f"key {key!r} is not known")
        except ValueError as error:  # msgspec's and Unicode's are such
            raise CorruptData(
                "a control topic holds a record that is not ours",
                why=str(error),
                fix="find the foreign producer of the control topics, and restore the topic",
            ) from error

    def _rename(self, record: _CategoryRecord) -> None:
        if self.category is not None and self.category.birth != record.birth:
            # Created again under its name: the predecessor's state is dropped.
            self.producers, self.registered, self.marks, self.open = {}, {}, {}, None
            self.seen, self.idle_marks, self.percentiles = {}, {}, {}
        self.category = Category(spec=record.spec, birth=record.birth)

    def _set_idle(self, place: tuple[int, int], value: bytes | None) -> None:
        if value is None:
            self.idle_marks.pop(place, None)
        else:
            self.idle_marks[place] = msgspec.json.decode(value, type=Mark)

    def lows(self) -> dict[str, Millis]:
        """Registered producers and their output lows."""
        return {name: self._low(name, found) for name, found in self.registered.items()
                if found.low is not None}  # fmt: skip

    def _low(self, producer: str, found: Registration) -> Millis:
        assert found.low is not None
        state = self.producers.get(producer)
        reported = state is not None and state.registration == found.number
        return max(found.low, state.low) if state is not None and reported else found.low

    def watermark(self) -> tuple[Millis, Millis | None]:
        """W of the last mark, and when it was made."""
        if not self.marks:
            return LOW_MIN, None
        last = self.marks[next(reversed(self.marks))]
        return last.low, last.at_ms

    def next_low(self) -> Millis:
        """W, or the W of the mark that is being made: where a new producer starts."""
        return self.watermark()[0] if self.open is None else self.open.low

    def cut_marks(self, partition: int, *, above: Millis, up_to: int) -> tuple[Mark, ...]:
        """Marks of one partition with low > `above` and end <= `up_to`; both ascend, so it is a slice."""
        marks = list(self.marks.values())
        first = bisect_right(marks, above, key=lambda mark: mark.low)
        end = bisect_right(marks, up_to, key=lambda mark: mark.ends[partition])
        found = [Mark(low=mark.low, end=mark.ends[partition]) for mark in marks[first:end]]
        idle = [m for _, m in self.idle_of(partition) if m.low > above and m.end <= up_to]
        return tuple(sorted([*found, *idle], key=lambda mark: mark.low) if idle else found)

    def idle_of(self, partition: int) -> list[tuple[int, Mark]]:
        """Idle marks of one partition, with their numbers, which ascend."""
        return [(number, mark) for (place, number), mark in self.idle_marks.items() if place == partition]

    def mark_number(self) -> int:
        """The number of the next mark."""
        return next(reversed(self.marks)) + 1 if self.marks else 1

    def passed_marks(self, starts: tuple[int, ...]) -> list[int]:
        """Marks that no reader needs: their ends and those of a later mark are below the starts."""
        passed = [
            number
            for number, mark in self.marks.items()
            if all(end <= start for end, start in zip(mark.ends, starts, strict=True))
        ]
        return passed[:-1]

    def passed_idle(self, starts: tuple[int, ...]) -> list[tuple[int, int]]:
        """The same of idle marks, as (partition, number)."""
        return [
            (partition, number)
            for partition, start in enumerate(starts)
            for number, _ in [item for item in self.idle_of(partition) if item[1].end <= start][:-1]
        ]

    def registration_number(self) -> int:
        """The number of the next registration."""
        return max((found.number for found in self.registered.values()), default=0) + 1

    def record_bytes(self) -> float:
        """The mean bytes of a record that Penstock published."""
        records = sum(state.records for state in self.producers.values())
        return sum(state.bytes for state in self.producers.values()) / records if records else 0.0


Update = tuple[bytes, bytes | None]  # key and value of one control record


def category_update(category: Category) -> Update:
    """An update with the category's birth and spec."""
    return CATEGORY, msgspec.json.encode(_CategoryRecord(birth=category.birth, spec=category.spec))


def producer_update(producer: str, state: ProducerState) -> Update:
    """An update with a producer's state."""
    return b"p:" + producer.encode(), msgspec.json.encode(state)


def registration_update(producer: str, registration: Registration) -> Update:
    """An update with a producer's registration."""
    return b"r:" + producer.encode(), msgspec.json.encode(registration)


def open_update(mark: OpenMark | None) -> Update:
    """Begin a mark, or end it."""
    return OPEN, None if mark is None else msgspec.json.encode(mark)


def mark_update(number: int, mark: MarkRecord | None) -> Update:
    """Append a mark, or remove one that nobody needs."""
    return b"m:%d" % number, None if mark is None else msgspec.json.encode(mark)


def seen_update(partition: int, seen: Seen) -> Update:
    """What is known of a partition from now on."""
    return b"s:%d" % partition, msgspec.json.encode(seen)


def percentile_update(percent: int, low: Millis) -> Update:
    """The low that so many per cent have reached."""
    return b"q:%d" % percent, msgspec.json.encode(low)


def idle_update(partition: int, number: int, mark: Mark | None) -> Update:
    """Append a mark of an idle partition, or remove one that nobody needs."""
    return b"i:%d:%d" % (partition, number), None if mark is None else msgspec.json.encode(mark)


def after_publish(
    state: ProducerState, *, epoch: int, last: Mapping[int, int], records: int, size: int
) -> ProducerState:
    """The producer's state once a publish is through."""
    return msgspec.structs.replace(
        state,
        epoch=epoch,
        last={**state.last, **last},
        records=state.records + records,
        bytes=state.bytes + size,
    )


make_known(_CategoryRecord, OpenMark, ProducerState, Registration, MarkRecord, Seen, Mark)
