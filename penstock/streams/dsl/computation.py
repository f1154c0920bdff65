"""User code per key: hooks with state, timers and productions (MillWheel 5).

A window count, run on three records in memory:

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
>>> from penstock.streams.step.keyed_work import try_computation
>>> searches = [("cats", 1200), ("cats", 1900), ("cats", 2100)]
>>> for production in try_computation(CountPerSecond(), searches, low=2000):
...     print(production)
('out', 1999, 'cats', {'query': 'cats', 'second': 1, 'n': 2})
"""

from __future__ import annotations

import copy
import functools
import hashlib
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Union, get_args, get_origin

import msgspec

import penstock
from penstock.core.clock import Millis
from penstock.core.errors import ComputationFailed, PenstockError, PipelineError, StateMismatch, StateRefused
from penstock.streams.bus.log import ARROW_TYPES

if TYPE_CHECKING:
    from penstock.streams.step.keyed_work import KeyedWork


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

    def shape(self) -> str:
        """The type as text; equal for types with the same stored form."""
        is_plain = isinstance(self.kind, type) and not get_args(self.kind)
        name = self.kind.__name__ if is_plain else str(self.kind)
        if all(part in _EMPTY or part in (Any, type(None)) for part in _parts(self.kind)):
            return name
        # A user's class: its fields are part of the shape, not only its name.
        try:
            schema = msgspec.json.encode(msgspec.json.schema(self.kind), order="sorted")
        except (TypeError, ValueError):
            return name
        return f"{name} ({hashlib.sha256(schema).hexdigest()[:8]})"

    def field(self) -> Any:
        """The field of the state's struct. Keys never share a mutable default."""
        if type(self.default) in (list, dict, set) and not self.default:
            return msgspec.field(default_factory=type(self.default))
        if self.default is None or isinstance(self.default, int | float | str | bytes):
            return msgspec.field(default=self.default)
        return msgspec.field(default_factory=lambda: copy.deepcopy(self.default))


class MapState(Value):
    """A persistent map per key: `seen = MapState(str, int)`; in a hook it is a dict.

    Its entries are stored together with the rest of the key's state, and rewritten with it.
    """

    def __init__(self, key_type: Any, value_type: Any) -> None:
        super().__init__(dict[key_type, value_type])


class ListState(Value):
    """A persistent list per key: `waiting = ListState(str)`; in a hook it is a list.

    Its items are stored together with the rest of the key's state, and rewritten with it.
    """

    def __init__(self, item_type: Any) -> None:
        super().__init__(list[item_type])


class Serializer(Protocol):
    """Converts a user's own type to bytes and back. Later versions must be able to decode older bytes."""

    def encode(self, value: Any, /) -> bytes: ...

    def decode(self, data: bytes, /) -> Any: ...


class Opaque(Value):
    """A value with a serializer of its own: `model = Opaque(serializer=ModelFormat())`.

    In a hook it is the decoded value, or `default` if nothing is stored. It is encoded once per step for each
    key whose hooks ran, and written if the bytes changed. Without a serializer: plain bytes.
    """

    def __init__(self, *, serializer: Serializer | None = None, default: Any = _MISSING) -> None:
        for name in ("encode", "decode") if serializer is not None else ():
            if not callable(getattr(serializer, name, None)):
                raise PipelineError(
                    f"{serializer!r} cannot be a serializer",
                    why=f"it has no function {name!r}",
                    fix="give it encode(value) -> bytes and decode(data) -> value",
                )
        self.serializer = serializer
        empty: Any = b"" if serializer is None else None
        super().__init__(
            bytes if serializer is None else Any, default=empty if default is _MISSING else default
        )

    def shape(self) -> str:
        """The content of the bytes is not part of the shape: only the serializer knows it."""
        return "bytes" if self.serializer is None else "opaque"


class StateCodec:
    """Converts the state of one computation between its stored bytes and the object that hooks see."""

    def __init__(self, name: str, declared: Mapping[str, Value]) -> None:
        self._name = name
        self.shape = {field: value.shape() for field, value in declared.items()}
        fields = [(field, value.kind, value.field()) for field, value in declared.items()]
        self._serializers = {
            field: value.serializer
            for field, value in declared.items()
            if isinstance(value, Opaque) and value.serializer is not None
        }
        stored = [
            (field, bytes | None, msgspec.field(default=None)) if field in self._serializers else given
            for given in fields
            for field in [given[0]]
        ]
        try:
            self.live_type = msgspec.defstruct(f"{name}State", fields, forbid_unknown_fields=True)
            self._stored_type = self.live_type
            if self._serializers:
                self._stored_type = msgspec.defstruct(f"{name}State", stored, forbid_unknown_fields=True)
            self._decoder = msgspec.msgpack.Decoder(self._stored_type)
        except (TypeError, ValueError) as error:
            raise PipelineError(
                f"computation {name!r} declares a value that cannot be stored",
                why=str(error),
                fix="use numbers, strings, bytes, lists, dicts, sets, dataclasses of these, or Opaque with a "
                "serializer",
            ) from error
        self._encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode

    def blank(self) -> Any:
        """The state of a key that has none."""
        return self.live_type()

    def decode(self, data: bytes) -> Any:
        """The state from stored bytes; StateMismatch if another version of the computation wrote them."""
        try:
            stored = self._decoder.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise self._mismatch(str(error)) from error
        if not self._serializers:
            return stored
        values = {field: getattr(stored, field) for field in self._stored_type.__struct_fields__}
        for field, serializer in self._serializers.items():
            data_of_field = values.pop(field)
            if data_of_field is not None:
                with _SerializerErrors(self._mismatch, field):
                    values[field] = serializer.decode(data_of_field)
        return self.live_type(**values)

    def plain(self, data: bytes) -> Any:
        """The stored values, with opaque values as bytes: for comparison and inspection."""
        return msgspec.structs.asdict(self._decoder.decode(data))

    def encode(self, state: Any) -> bytes | None:
        """The bytes to store; None for a blank state. StateRefused if they could not be decoded again."""
        stored = self._stored(state)
        if stored == self._stored_type():
            return None
        try:
            data = self._encode(stored)
            self._decoder.decode(data)  # find a wrong type now, before the old state is replaced
        except (TypeError, ValueError, OverflowError, msgspec.ValidationError, RecursionError) as error:
            raise self._refused(str(error)) from error
        return data

    def _stored(self, state: Any) -> Any:
        if not self._serializers:
            return state
        values = {field: getattr(state, field) for field in self.live_type.__struct_fields__}
        blank = self.blank()
        for field, serializer in self._serializers.items():
            value, empty = values[field], getattr(blank, field)
            if value is None and empty is None:
                continue
            with _SerializerErrors(self._refused, field):
                made = serializer.encode(value)
                if not isinstance(made, bytes):
                    raise TypeError(f"the serializer's encode returned {type(made).__name__}, not bytes")
                values[field] = None if empty is not None and made == serializer.encode(empty) else made
        return self._stored_type(**values)

    def _mismatch(self, why: str) -> StateMismatch:
        return StateMismatch(
            f"stored state does not fit computation {self._name!r}",
            why=f"{why}; another version of the computation wrote it",
            fix="declare every value with the name and type with which it was "
            "stored, or reset the job's state",
        )

    def _refused(self, why: str) -> StateRefused:
        return StateRefused(
            f"a state of computation {self._name!r} cannot be stored",
            why=why,
            fix="assign values of the declared types, or declare another type",
        )


class _SerializerErrors:
    """Converts exceptions of a user's serializer into a PenstockError. Interrupts are not converted."""

    def __init__(self, make_error: Callable[[str], PenstockError], field: str) -> None:
        self._make_error, self._field = make_error, field

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if isinstance(error, Exception):
            raise self._make_error(f"{type(error).__name__}: {error} - at `$.{self._field}`") from error
        return False


def _parts(kind: Any) -> Iterator[Any]:
    """The plain types that are part of a type."""
    arguments = get_args(kind)
    if not arguments:
        yield kind
    for argument in arguments:
        yield from _parts(argument)


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


__all__ = [
    "Computation",
    "Context",
    "ListState",
    "MapState",
    "Opaque",
    "Record",
    "Timer",
    "Value",
    "record_type",
]

LATE = ("drop", "process")
POISON = ("fail", "skip")
PRODUCTIONS, DEDUP = ("strong", "weak"), ("on", "off")


class Computation:
    """User code for one key at a time. Subclass it, declare `outputs` and values, and write the two hooks.

    Do not store anything on `self`: only `ctx.state` is persistent, and a hook may run again after a failure.
    """

    outputs: ClassVar[Mapping[str, Mapping[str, str]]] = {}  # stream -> column -> Spark SQL type
    # Optional: the columns that it needs of each input, checked at compile time. A single input is "in".
    inputs: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    late: ClassVar[str] = "drop"  # or "process"
    # When process_record raises: stop the task ("fail"), or write the record to the dead letters ("skip").
    poison: ClassVar[str] = "fail"  # or "skip"
    # "strong": checkpointed, then sent. "weak": sent before the checkpoint, at least once.
    productions: ClassVar[str] = "strong"
    # "off": records that a task sends again after a crash are not deduplicated.
    dedup: ClassVar[str] = "on"
    # The column with the record's own id: a record with an id that was seen for the same key, within the
    # slack of event time, is dropped. "": no ids.
    record_id: ClassVar[str] = ""
    record_id_slack: ClassVar[str] = "2h"
    state_type: ClassVar[type[msgspec.Struct]]
    state_codec: ClassVar[StateCodec]

    def process_record(self, record: Record, ctx: Context) -> None:
        """Called for each record of a key, in order."""
        raise PipelineError(
            f"computation {type(self).__name__!r} cannot process records",
            why="it does not define process_record",
            fix="define process_record(self, record, ctx)",
        )

    def process_timer(self, timer: Timer, ctx: Context) -> None:
        """Called when the low watermark, or the clock, has reached a timer of this key."""
        raise PipelineError(
            f"computation {type(self).__name__!r} cannot process timers",
            why=f"timer {timer.tag!r} was set, but it does not define process_timer",
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
        cls.state_codec = StateCodec(cls.__name__, declared)
        cls.state_type = cls.state_codec.live_type


Computation.state_codec = StateCodec("No", {})
Computation.state_type = Computation.state_codec.live_type


class Record:
    """One input record: `key`, `ts` (event time, ms), `late`, `stream` (the input it came from), and its
    columns as attributes or items.
    """

    __slots__ = ("_row", "key", "late", "ts")
    stream: ClassVar[str] = "in"
    _indices: ClassVar[Mapping[str, int]] = {}

    def __init__(self, key: str, ts: Millis, late: bool, row: tuple[Any, ...]) -> None:
        self.key, self.ts, self.late, self._row = key, ts, late, row

    def __getitem__(self, column: str) -> Any:
        return self._row[self._indices[column]]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the record has no column {name!r}, only {list(self._indices)}")

    def __repr__(self) -> str:
        return f"Record({self.as_dict()!r}, key={self.key!r}, ts={self.ts}, late={self.late})"

    def as_dict(self) -> dict[str, Any]:
        """All columns by name."""
        return dict(zip(self._indices, self._row, strict=True))


@functools.lru_cache(maxsize=64)
def record_type(columns: tuple[str, ...], stream: str = "in") -> type[Record]:
    """The class of records with these columns, cached; reading a column is one index operation.

    Columns named like an attribute of Record (`key`, `ts`, `late`, `stream`) are available as items only.
    """
    members: dict[str, Any] = {
        "__slots__": (),
        "stream": stream,
        "_indices": {name: index for index, name in enumerate(columns)},
    }
    for index, name in enumerate(columns):
        if not hasattr(Record, name):
            members[name] = property(_reader(index))
    return type("Record", (Record,), members)


def _reader(index: int) -> Callable[[Record], Any]:
    return lambda record: record._row[index]


@dataclass(frozen=True, slots=True)
class Timer:
    """A timer that fired; `wall`: by the clock. `hold_ms`: the earliest timestamp of its productions."""

    key: str
    tag: str
    at_ms: Millis
    hold_ms: Millis
    late: bool = False
    wall: bool = False


class Context:
    """What a hook can do for its key. `low_watermark`: all later records with an earlier event time are late.

    `now`: the clock, read once per step. Results that use it depend on when the step ran, and a failed step
    runs again later.
    """

    __slots__ = ("_floor", "_late", "_work", "key", "low_watermark", "now", "state")

    def __init__(self, work: KeyedWork) -> None:
        self._work = work
        self.key = ""
        self.state: Any = None
        self.low_watermark: Millis = 0
        self.now: Millis = 0
        self._floor: Millis = 0
        self._late = False

    def enter(self, key: str, state: Any, floor: Millis, late: bool) -> None:
        """Called by the step before each hook; `floor`: the earliest timestamp of productions."""
        self.key, self.state, self._floor, self._late = key, state, floor, late

    def set_timer(self, tag: str, at_ms: Millis, hold_ms: Millis | None = None) -> None:
        """Call `process_timer` once the low watermark reaches `at_ms`; replaces this key's timer of that tag.

        Productions of the timer have timestamps of `at_ms - 1` or later. For earlier ones give `hold_ms` (not
        before this record): it holds the low watermark for downstream as long as the timer is set.
        """
        self._work.set_timer(self.key, tag, at_ms, hold_ms, floor=self._floor, is_late=self._late)

    def set_wall_timer(self, tag: str, at_ms: Millis) -> None:
        """Call `process_timer` once the clock reaches `at_ms`; replaces this key's timer of that tag.

        It fires with or without records and does not hold the low watermark: its productions have the low
        watermark at that moment as timestamp, or a later one.
        """
        self._work.set_wall_timer(self.key, tag, at_ms, floor=self._floor)

    def delete_timer(self, tag: str) -> None:
        """Delete this key's timer with this tag, if there is one."""
        self._work.delete_timer(self.key, tag)

    def produce(
        self, values: Mapping[str, Any], stream: str = "out", ts: Millis | None = None, key: str | None = None
    ) -> None:
        """Send a record to an output stream: all its columns by name, None for null.

        Timestamp: `ts`, or that of this record or this timer's hold. Key: `key`, or the key of this hook.
        """
        stamp = self._floor if ts is None else ts
        target = self.key if key is None else key
        self._work.produce(values, stream, stamp, target, floor=self._floor, is_late=self._late)


def _check_declaration(cls: type[Computation]) -> None:
    columns = [(stream, *item) for stream, named in cls.outputs.items() for item in named.items()]
    unknown = [f"{stream}.{name}: {kind}" for stream, name, kind in columns if kind not in ARROW_TYPES]
    reserved = [f"{stream}.{name}" for stream, name, _ in columns if name.startswith("_")]
    complaints: Sequence[tuple[object, str, str]] = (
        (cls.late not in LATE, f"late is {cls.late!r}", f"use one of {list(LATE)}"),
        (cls.poison not in POISON, f"poison is {cls.poison!r}", f"use one of {list(POISON)}"),
        (
            cls.productions not in PRODUCTIONS or cls.dedup not in DEDUP,
            f"productions is {cls.productions!r}, dedup is {cls.dedup!r}",
            f"use one of {list(PRODUCTIONS)}, and one of {list(DEDUP)}",
        ),
        (unknown, f"the types of {unknown} are not known", f"use one of {sorted(ARROW_TYPES)}"),
        (
            reserved,
            f"columns {reserved} start with an underscore, which is reserved for system columns",
            "rename them",
        ),
    )
    for is_wrong, why, fix in complaints:
        if is_wrong:
            raise PipelineError(
                f"the declaration of computation {cls.__name__!r} is not valid", why=why, fix=fix
            )


MESSAGE_CHARS_MAX, KEY_CHARS_MAX = 500, 80


_NOT_USERS = (
    Path(penstock.__file__).parent,
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")),
)


# Folders of loaded packages: errors name files in them relative to the folder.
USER_FOLDERS: set[Path] = set()


_INSTALLED = ("site-packages", "dist-packages")


class UserCall(NamedTuple):
    """The job, key and record for which user code was called."""

    job: str
    name: str
    key: str = ""
    offset: int | None = None


@contextmanager
def report_user_errors(where: Callable[[], UserCall]) -> Iterator[None]:
    """Converts exceptions of user code into ComputationFailed, except StateMismatch and interrupts."""
    try:
        yield
    except StateMismatch:
        raise
    except ComputationFailed as error:
        call = where()
        error.what = f"{error.what}{_location_suffix(error)}: job {call.job!r}, {call.name}"
        error.job, error.key, error.offset = call.job, call.key, call.offset
        raise
    except Exception as error:  # user code may raise anything
        call = where()
        raise ComputationFailed(
            f"user code failed{_location_suffix(error)}: job {call.job!r}, {call.name}",
            why=error.what if isinstance(error, PenstockError) else error_text(error),
            fix=(error.fix if isinstance(error, PenstockError) else "")
            or "correct the computation and release a new version; the records are processed again",
            job=call.job,
            key=call.key,
            offset=call.offset,
        ) from error


def error_text(error: BaseException) -> str:
    """The class and message of an error, as one line of limited length."""
    try:
        message = " ".join(str(error).split())
    except Exception as broken:  # its `__str__` is user code too
        message = f"its message cannot be shown ({type(broken).__name__})"
    return f"{type(error).__name__}: {cut_short(message, MESSAGE_CHARS_MAX)}"


def user_line(error: BaseException) -> str:
    """The innermost frame of the error in the user's own files, as in `shops.py:12 in total`; "" if none."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        found = user_file_line(frame.f_code.co_filename, line, frame.f_code.co_name) or found
    return found


def user_file_line(file: str, line: int, function: str) -> str:
    """One frame of a traceback if it is in a user's file, else ""."""
    path = Path(file)
    folders = [folder for folder in USER_FOLDERS if path.is_relative_to(folder)]
    if not folders and (file.startswith("<") or any(map(path.is_relative_to, _NOT_USERS))):
        return ""
    name = path.relative_to(max(folders, key=lambda folder: len(folder.parts))) if folders else path
    if any(part in _INSTALLED for part in name.parts):
        return ""
    shown = name.as_posix() if folders else name.name
    return f"{shown}:{line}" + (f" in {function}" if function != "<module>" else "")


def short_key(key: object) -> str:
    """A key for error texts, of limited length."""
    return cut_short(repr(key), KEY_CHARS_MAX)


def cut_short(text: str, length_max: int) -> str:
    """The text, cut to a limited length with an ellipsis."""
    return text if len(text) <= length_max else f"{text[: length_max - 1]}…"


def _location_suffix(error: BaseException) -> str:
    line = user_line(error)
    return f" at {line}" if line else ""
