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

import functools
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec

import penstock
from penstock.core.clock import Millis
from penstock.core.errors import ComputationFailed, PenstockError, PipelineError, StateMismatch
from penstock.streams.bus.log import ARROW_TYPES
from penstock.streams.dsl.state import ListState, MapState, Opaque, StateCodec, Value

if TYPE_CHECKING:
    from penstock.streams.step.keyed_work import KeyedWork

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


class Place(NamedTuple):
    """What user code was called for."""

    job: str
    name: str
    key: str = ""
    offset: int | None = None


@contextmanager
def blaming(where: Callable[[], Place]) -> Iterator[None]:
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
            why=error.what if isinstance(error, PenstockError) else said_by(error),
            fix=(error.fix if isinstance(error, PenstockError) else "")
            or "correct the computation and release a new version; the records come again",
            job=place.job,
            key=place.key,
            offset=place.offset,
        ) from error


def said_by(error: BaseException) -> str:
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
        found = line_of_user(frame.f_code.co_filename, line, frame.f_code.co_name) or found
    return found


def line_of_user(file: str, line: int, function: str) -> str:
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


def shown_key(key: object) -> str:
    """A key as it is shown: of limited length."""
    return cut_short(repr(key), KEY_CHARS_MAX)


def cut_short(text: str, length_max: int) -> str:
    """A text of limited length, which shows where it was cut."""
    return text if len(text) <= length_max else f"{text[: length_max - 1]}…"


def _at(error: BaseException) -> str:
    line = user_line(error)
    return f" at {line}" if line else ""
