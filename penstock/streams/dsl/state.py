"""What a computation keeps for each key: values, maps, lists and the user's own bytes, typed and encoded.

Pure: no clock, no store. All that a key keeps is one msgpack value of the row store, read once and written
once per step and changed key, however many records came. So the cost of a change grows with the key's whole
state: keep thousands of entries under one key, not millions, and give what grows further a key of its own.
"""

from __future__ import annotations

import copy
import hashlib
import types
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Protocol, Union, get_args, get_origin

import msgspec

from penstock.core.errors import PenstockError, PipelineError, StateMismatch, StateRefused

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
