"""What an application developer writes: hooks on one key, with state, timers and productions (MillWheel 5).

A window count, tried on three records without any service:

>>> class CountPerSecond(Computation):
...     outputs = {"out": {"query": "string", "second": "bigint", "n": "bigint"}}
...     counts = Value(dict[int, int])
...
...     def process_record(self, record, ctx):
...         second = record.ts // 1000
...         ctx.state.counts[second] = ctx.state.counts.get(second, 0) + 1
...         ctx.set_timer(str(second), (second + 1) * 1000)
...
...     def process_timer(self, timer, ctx):
...         second = int(timer.tag)
...         ctx.produce({"query": ctx.key, "second": second, "n": ctx.state.counts.pop(second)})
>>> from penstock.streams.keyed_work import try_computation
>>> searches = [("cats", 1200), ("cats", 1900), ("cats", 2100)]
>>> for production in try_computation(CountPerSecond(), searches, low=2000):
...     print(production)
('out', 1999, 'cats', {'query': 'cats', 'second': 1, 'n': 2})
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Union, get_args, get_origin

import msgspec

from penstock.core.clock import Millis
from penstock.core.errors import PipelineError
from penstock.streams.bus.log import ARROW_TYPES

if TYPE_CHECKING:
    from penstock.streams.keyed_work import KeyedWork

LATE = ("drop", "process")
_MISSING = object()
_EMPTY: dict[Any, Any] = {
    int: 0,
    float: 0.0,
    str: "",
    bytes: b"",
    bool: False,
    list: [],
    dict: {},
    set: set(),
}


class Value:
    """One persistent value per key, typed: `counts = Value(dict[int, int])`, `best = Value(int, default=-1)`.

    Without a default it starts as the type's empty value. A key whose values all equal their defaults is not
    stored.
    """

    def __init__(self, kind: Any, *, default: Any = _MISSING) -> None:
        self.kind = kind
        self.default = _empty_of(kind) if default is _MISSING else default

    def field(self) -> Any:
        """The field of the state's struct; no two keys share a default that can change."""
        if type(self.default) in (list, dict, set) and not self.default:
            return msgspec.field(default_factory=type(self.default))
        if self.default is None or isinstance(self.default, int | float | str | bytes):
            return msgspec.field(default=self.default)
        return msgspec.field(default_factory=lambda: copy.deepcopy(self.default))


class Computation:
    """User code for one key at a time. Subclass it, declare `outputs` and values, write the two hooks.

    Keep nothing on `self`: only `ctx.state` survives, and a hook may run again after a failure.
    """

    outputs: ClassVar[Mapping[str, Mapping[str, str]]] = {}  # stream -> column -> Spark SQL type
    late: ClassVar[str] = "drop"  # or "process"
    state_type: ClassVar[type[msgspec.Struct]]
    state_decoder: ClassVar[msgspec.msgpack.Decoder[Any]]

    def process_record(self, record: Record, ctx: Context) -> None:
        """Called for each record of a key, in order."""
        raise PipelineError(
            f"computation {type(self).__name__!r} does not say what to do with a record",
            why="it has no process_record",
            fix="define process_record(self, record, ctx)",
        )

    def process_timer(self, timer: Timer, ctx: Context) -> None:
        """Called when the low watermark has passed a timer that this key set."""
        raise PipelineError(
            f"computation {type(self).__name__!r} does not say what to do with a timer",
            why=f"it has no process_timer, but timer {timer.tag!r} was set",
            fix="define process_timer(self, timer, ctx)",
        )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_declaration(cls)
        declared = {
            name: value
            for base in reversed(cls.__mro__)
            for name, value in vars(base).items()
            if isinstance(value, Value)
        }
        fields = [(name, value.kind, value.field()) for name, value in declared.items()]
        try:
            cls.state_type = msgspec.defstruct(f"{cls.__name__}State", fields, forbid_unknown_fields=True)
            cls.state_decoder = msgspec.msgpack.Decoder(cls.state_type)
        except (TypeError, ValueError) as error:
            raise PipelineError(
                f"computation {cls.__name__!r} declares a value that cannot be stored",
                why=str(error),
                fix="use numbers, strings, bytes, lists, dicts, sets, or dataclasses of these",
            ) from error


Computation.state_type = msgspec.defstruct("NoState", [], forbid_unknown_fields=True)
Computation.state_decoder = msgspec.msgpack.Decoder(Computation.state_type)


class Record:
    """One input record: `key`, `ts` (event time, ms), `late`, and its columns as attributes or items."""

    __slots__ = ("_row", "key", "late", "ts")
    _places: ClassVar[Mapping[str, int]] = {}

    def __init__(self, key: str, ts: Millis, late: bool, row: tuple[Any, ...]) -> None:
        self.key, self.ts, self.late, self._row = key, ts, late, row

    def __getitem__(self, column: str) -> Any:
        return self._row[self._places[column]]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the record has no column {name!r}, only {list(self._places)}")

    def __repr__(self) -> str:
        return f"Record({self.as_dict()!r}, key={self.key!r}, ts={self.ts}, late={self.late})"

    def as_dict(self) -> dict[str, Any]:
        """All columns by name."""
        return dict(zip(self._places, self._row, strict=True))


@functools.lru_cache(maxsize=64)
def record_type(columns: tuple[str, ...]) -> type[Record]:
    """The class of records with these columns: made once, so that reading a column costs an index.

    Columns named like an own attribute (`key`, `ts`, `late`) are reached as items only.
    """
    members: dict[str, Any] = {
        "__slots__": (),
        "_places": {name: place for place, name in enumerate(columns)},
    }
    for place, name in enumerate(columns):
        if not hasattr(Record, name):
            members[name] = property(_reader(place))
    return type("Record", (Record,), members)


def _reader(place: int) -> Callable[[Record], Any]:
    return lambda record: record._row[place]


@dataclass(frozen=True, slots=True)
class Timer:
    """A timer that fired. `hold_ms` is the earliest stamp its productions may carry."""

    key: str
    tag: str
    at_ms: Millis
    hold_ms: Millis
    late: bool = False


class Context:
    """What a hook may do, for its key. `low_watermark`: no record on time comes before it any more."""

    __slots__ = ("_floor", "_late", "_work", "key", "low_watermark", "state")

    def __init__(self, work: KeyedWork) -> None:
        self._work = work
        self.key = ""
        self.state: Any = None
        self.low_watermark: Millis = 0
        self._floor: Millis = 0
        self._late = False

    def enter(self, key: str, state: Any, floor: Millis, late: bool) -> None:
        """Called by the step before each hook: for whom it runs and how early it may produce."""
        self.key, self.state, self._floor, self._late = key, state, floor, late

    def set_timer(self, tag: str, at_ms: Millis, hold_ms: Millis | None = None) -> None:
        """Call `process_timer` once the low watermark reaches `at_ms`; replaces this key's timer of that tag.

        What the timer produces is stamped `at_ms - 1` or later. To stamp it earlier, say how early with
        `hold_ms` (not before this record): downstream then waits until the timer is gone.
        """
        self._work.set_timer(self.key, tag, at_ms, hold_ms, floor=self._floor, is_late=self._late)

    def delete_timer(self, tag: str) -> None:
        """Forget this key's timer of that tag, if there is one."""
        self._work.delete_timer(self.key, tag)

    def produce(
        self, values: Mapping[str, Any], stream: str = "out", ts: Millis | None = None, key: str | None = None
    ) -> None:
        """Send a record to an output stream: all its columns by name, None for null.

        Stamped like this record or this timer's hold unless `ts` says later; keyed like it unless `key` says
        otherwise.
        """
        stamp = self._floor if ts is None else ts
        target = self.key if key is None else key
        self._work.produce(values, stream, stamp, target, floor=self._floor, is_late=self._late)


def _empty_of(kind: Any) -> Any:
    origin = get_origin(kind) or kind
    if origin in (Union, types.UnionType) and type(None) in get_args(kind):
        return None
    if origin in _EMPTY:
        return copy.deepcopy(_EMPTY[origin])
    raise PipelineError(
        f"a value of type {kind!r} needs a default",
        why="only numbers, strings, bytes, booleans, lists, dicts, sets and optional types have one",
        fix=f"write Value({getattr(kind, '__name__', kind)}, default=…)",
    )


def _check_declaration(cls: type[Computation]) -> None:
    columns = [(stream, *item) for stream, named in cls.outputs.items() for item in named.items()]
    unknown = [f"{stream}.{name}: {kind}" for stream, name, kind in columns if kind not in ARROW_TYPES]
    reserved = [f"{stream}.{name}" for stream, name, _ in columns if name.startswith("_")]
    complaints: Sequence[tuple[object, str, str]] = (
        (cls.late not in LATE, f"late is {cls.late!r}", f"use one of {list(LATE)}"),
        (unknown, f"the types of {unknown} are not known", f"use one of {sorted(ARROW_TYPES)}"),
        (reserved, f"columns {reserved} start with an underscore, which belongs to the bus", "rename them"),
    )
    for is_wrong, why, fix in complaints:
        if is_wrong:
            raise PipelineError(f"computation {cls.__name__!r} is not declared rightly", why=why, fix=fix)
