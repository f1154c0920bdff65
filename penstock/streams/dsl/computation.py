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
        """The type as text, the same for types that are stored alike."""
        is_plain = isinstance(self.kind, type) and not get_args(self.kind)
        name = self.kind.__name__ if is_plain else str(self.kind)
        if all(part in _EMPTY or part in (Any, type(None)) for part in _parts(self.kind)):
            return name
        # A class of the user's: what is in it counts, not only what it is called.
        try:
            schema = msgspec.json.encode(msgspec.json.schema(self.kind), order="sorted")
        except (TypeError, ValueError):
            return name
        return f"{name} ({hashlib.sha256(schema).hexdigest()[:8]})"

    def field(self) -> Any:
        """The field of the state's struct; no two keys share a default that can change."""
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
    """How a user's own type becomes bytes and comes back. What `encode` makes, any later version decodes."""

    def encode(self, value: Any, /) -> bytes: ...

    def decode(self, data: bytes, /) -> Any: ...


class Opaque(Value):
    """Bytes that only user code understands: `model = Opaque(serializer=ModelFormat())`.

    In a hook it is what the serializer decoded, or `default` where nothing is stored. It is encoded once per
    step for each key that a hook ran for, and written if the bytes changed. Without a serializer: plain
    bytes.
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
        """Bytes: what they mean is the serializer's business."""
        return "bytes" if self.serializer is None else "opaque"


class StateCodec:
    """The state of one computation: its live form, its stored form, and the way between them."""

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
        """The live state of stored bytes; StateMismatch if another version of the computation wrote them."""
        try:
            stored = self._decoder.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise self._mismatch(str(error)) from error
        if not self._serializers:
            return stored
        values = {field: getattr(stored, field) for field in self._stored_type.__struct_fields__}
        for field, serializer in self._serializers.items():
            kept = values.pop(field)
            if kept is not None:
                with _Telling(self._mismatch, field):
                    values[field] = serializer.decode(kept)
        return self.live_type(**values)

    def plain(self, data: bytes) -> Any:
        """What is stored, with opaque values as bytes: for comparing and for looking at it."""
        return msgspec.structs.asdict(self._decoder.decode(data))

    def encode(self, state: Any) -> bytes | None:
        """The bytes to store, None for a state like `blank()`; StateRefused if it could not be read again."""
        stored = self._stored(state)
        if stored == self._stored_type():
            return None
        try:
            data = self._encode(stored)
            self._decoder.decode(data)  # a wrong type must be found now, while the old state still stands
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
            with _Telling(self._refused, field):
                made = serializer.encode(value)
                if not isinstance(made, bytes):
                    raise TypeError(f"the serializer's encode returned {type(made).__name__}, not bytes")
                values[field] = None if empty is not None and made == serializer.encode(empty) else made
        return self._stored_type(**values)

    def _mismatch(self, why: str) -> StateMismatch:
        return StateMismatch(
            f"stored state does not fit computation {self._name!r}",
            why=f"{why}; it was written by another version of the computation",
            fix="declare every value with the name and type it was stored with, or reset the job's state",
        )

    def _refused(self, why: str) -> StateRefused:
        return StateRefused(
            f"a state of computation {self._name!r} cannot be stored",
            why=why,
            fix="give each value what its declaration says, or declare it with another type",
        )


class _Telling:
    """Turns whatever a user's serializer raises into an error that says what it means. Interrupts pass."""

    def __init__(self, tell: Callable[[str], PenstockError], field: str) -> None:
        self._tell, self._field = tell, field

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if isinstance(error, Exception):
            raise self._tell(f"{type(error).__name__}: {error} - at `$.{self._field}`") from error
        return False


def _parts(kind: Any) -> Iterator[Any]:
    """The plain types that a type is made of."""
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
    """User code for one key at a time. Subclass it, declare `outputs` and values, write the two hooks.

    Keep nothing on `self`: only `ctx.state` survives, and a hook may run again after a failure.
    """

    outputs: ClassVar[Mapping[str, Mapping[str, str]]] = {}  # stream -> column -> Spark SQL type
    # What it needs of each input stream, if it says so: checked before anything runs. One stream is "in".
    inputs: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    late: ClassVar[str] = "drop"  # or "process"
    # When process_record raises: stop the task ("fail"), or put the record aside into the job's dead letters.
    poison: ClassVar[str] = "fail"  # or "skip"
    # "strong": checkpointed, then sent. "weak": sent before the checkpoint, at least once.
    productions: ClassVar[str] = "strong"
    # "off": what a task sends again after a crash is not recognised as sent before.
    dedup: ClassVar[str] = "on"
    # The column that is a record's own id: one that came before, under the same key and within the slack of
    # event time, is dropped. "": records have none.
    record_id: ClassVar[str] = ""
    record_id_slack: ClassVar[str] = "2h"
    state_type: ClassVar[type[msgspec.Struct]]
    state_codec: ClassVar[StateCodec]

    def process_record(self, record: Record, ctx: Context) -> None:
        """Called for each record of a key, in order."""
        raise PipelineError(
            f"computation {type(self).__name__!r} does not say what to do with a record",
            why="it has no process_record",
            fix="define process_record(self, record, ctx)",
        )

    def process_timer(self, timer: Timer, ctx: Context) -> None:
        """Called when the low watermark, or the clock, has reached a timer that this key set."""
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
def record_type(columns: tuple[str, ...], stream: str = "in") -> type[Record]:
    """The class of records with these columns: made once, so that reading a column costs an index.

    Columns named like an own attribute (`key`, `ts`, `late`, `stream`) are reached as items only.
    """
    members: dict[str, Any] = {
        "__slots__": (),
        "stream": stream,
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
    """A timer that fired, `wall`: by the clock. `hold_ms` is the earliest stamp its productions may carry."""

    key: str
    tag: str
    at_ms: Millis
    hold_ms: Millis
    late: bool = False
    wall: bool = False


class Context:
    """What a hook may do, for its key. `low_watermark`: no record on time comes before it any more.

    `now`: the clock, read once per step. What is made of it depends on when the step ran, and a step that
    failed runs again later; what was committed stays.
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
        """Called by the step before each hook: for whom it runs and how early it may produce."""
        self.key, self.state, self._floor, self._late = key, state, floor, late

    def set_timer(self, tag: str, at_ms: Millis, hold_ms: Millis | None = None) -> None:
        """Call `process_timer` once the low watermark reaches `at_ms`; replaces this key's timer of that tag.

        What the timer produces is stamped `at_ms - 1` or later. To stamp it earlier, say how early with
        `hold_ms` (not before this record): downstream then waits until the timer is gone.
        """
        self._work.set_timer(self.key, tag, at_ms, hold_ms, floor=self._floor, is_late=self._late)

    def set_wall_timer(self, tag: str, at_ms: Millis) -> None:
        """Call `process_timer` once the clock reaches `at_ms`; replaces this key's timer of that tag.

        It fires with or without records, and holds nothing back: what it produces is stamped with the low
        watermark at that moment, or later.
        """
        self._work.set_wall_timer(self.key, tag, at_ms, floor=self._floor)

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
        (reserved, f"columns {reserved} start with an underscore, which belongs to the bus", "rename them"),
    )
    for is_wrong, why, fix in complaints:
        if is_wrong:
            raise PipelineError(f"computation {cls.__name__!r} is not declared rightly", why=why, fix=fix)


MESSAGE_CHARS_MAX, KEY_CHARS_MAX = 500, 80


_NOT_USERS = (
    Path(penstock.__file__).parent,
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")),
)


# Of the packages that were loaded here: files in them are called as the package calls them.
USER_FOLDERS: set[Path] = set()


_INSTALLED = ("site-packages", "dist-packages")


class UserCall(NamedTuple):
    """What user code was called for."""

    job: str
    name: str
    key: str = ""
    offset: int | None = None


@contextmanager
def report_user_errors(where: Callable[[], UserCall]) -> Iterator[None]:
    """Run user code in it. Interrupts, and errors of the rows, which say all already, go through."""
    try:
        yield
    except StateMismatch:
        raise
    except ComputationFailed as error:
        place = where()
        error.what = f"{error.what}{_at(error)}: job {place.job!r}, {place.name}"
        error.job, error.key, error.offset = place.job, place.key, place.offset
        raise
    except Exception as error:  # user code may raise anything
        place = where()
        raise ComputationFailed(
            f"user code failed{_at(error)}: job {place.job!r}, {place.name}",
            why=error.what if isinstance(error, PenstockError) else error_text(error),
            fix=(error.fix if isinstance(error, PenstockError) else "")
            or "correct the computation and release a new version; the records come again",
            job=place.job,
            key=place.key,
            offset=place.offset,
        ) from error


def error_text(error: BaseException) -> str:
    """The class of an error and its message, as one line of limited length."""
    try:
        message = " ".join(str(error).split())
    except Exception as broken:  # its `__str__` is user code too
        message = f"its message cannot be shown ({type(broken).__name__})"
    return f"{type(error).__name__}: {cut_short(message, MESSAGE_CHARS_MAX)}"


def user_line(error: BaseException) -> str:
    """The innermost line of the user's own files that an error came through, as in `shops.py:12 in total`; ""
    if there is none.
    """
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        found = user_file_line(frame.f_code.co_filename, line, frame.f_code.co_name) or found
    return found


def user_file_line(file: str, line: int, function: str) -> str:
    """One line of a traceback if it lies in a user's file, else ""."""
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
    """A key as it is shown: of limited length."""
    return cut_short(repr(key), KEY_CHARS_MAX)


def cut_short(text: str, length_max: int) -> str:
    """A text of limited length, which shows where it was cut."""
    return text if len(text) <= length_max else f"{text[: length_max - 1]}…"


def _at(error: BaseException) -> str:
    line = user_line(error)
    return f" at {line}" if line else ""
