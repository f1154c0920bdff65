"""What a computation keeps per key: maps, lists, the user's own bytes; and what happens to wrong ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.core.errors import PipelineError, StateMismatch, StateRefused
from penstock.streams.dsl.computation import (
    Computation,
    Context,
    ListState,
    MapState,
    Opaque,
    Record,
    Value,
    record_type,
)
from penstock.streams.step.keyed_work import KeyedWork


@dataclass
class Mean:
    """A user's own type, that msgpack knows nothing of."""

    total: complex
    seen: int


class MeanFormat:
    def encode(self, value: Mean) -> bytes:
        return json.dumps([value.total.real, value.total.imag, value.seen]).encode()

    def decode(self, data: bytes) -> Mean:
        real, imag, seen = json.loads(data)
        return Mean(complex(real, imag), seen)


class Keeps(Computation):
    seen = MapState(str, int)
    waiting = ListState(tuple[int, str])
    mean = Opaque(serializer=MeanFormat())
    raw = Opaque()

    def process_record(self, record: Record, ctx: Context) -> None:
        state = ctx.state
        state.seen[ctx.key] = state.seen.get(ctx.key, 0) + 1
        state.waiting.append((record.ts, ctx.key))
        state.mean = state.mean or Mean(0j, 0)
        state.mean.total += 1 + 2j
        state.mean.seen += 1
        state.raw += b"\x00"


def after(kind: type[Computation], stored: dict[str, bytes], *keys: str) -> dict[str, bytes | None]:
    """The changes that records of these keys make."""
    work = KeyedWork(kind(), job="j", low=0, states=stored)
    work.run([record_type(())(key, 7, False, ()) for key in keys], range(len(keys)), [])
    return work.state_changes()


def doing(act: Any, **declared: Value) -> type[Computation]:
    def process_record(self: Computation, record: Record, ctx: Context) -> None:
        act(ctx.state)

    return type("Doing", (Computation,), {**declared, "process_record": process_record})


def test_maps_lists_and_opaque_values_survive_from_step_to_step() -> None:
    first = after(Keeps, {}, "a", "a", "b")
    stored = {key: data for key, data in first.items() if data is not None}
    second = after(Keeps, stored, "a")
    assert set(second) == {"a"}
    state = Keeps.state_codec.decode(second["a"] or b"")
    assert (state.seen, state.waiting) == ({"a": 3}, [(7, "a")] * 3)
    assert (state.mean, state.raw) == (Mean(3 + 6j, 3), b"\x00\x00\x00")


def test_state_back_at_its_defaults_is_deleted() -> None:
    def clear(state: Any) -> None:
        state.seen.clear()
        state.waiting = []
        state.mean = None
        state.raw = b""

    Clears = doing(clear, **{name: vars(Keeps)[name] for name in ("seen", "waiting", "mean", "raw")})
    stored = {key: data for key, data in after(Keeps, {}, "a").items() if data is not None}
    assert after(Clears, stored, "a") == {"a": None}
    assert after(Clears, {}, "b") == {}


def test_an_opaque_value_like_its_default_is_not_stored() -> None:
    kind = doing(lambda state: None, mean=Opaque(serializer=MeanFormat(), default=Mean(0j, 0)))
    assert after(kind, {}, "a") == {}
    changed = doing(lambda state: setattr(state.mean, "seen", 5), mean=vars(kind)["mean"])
    (data,) = after(changed, {}, "a").values()
    assert changed.state_codec.decode(data or b"").mean == Mean(0j, 5)
    assert changed.state_codec.blank().mean == Mean(0j, 0), "no key changes the default of another"


def test_an_opaque_value_is_encoded_compactly() -> None:
    (data,) = after(doing(lambda state: setattr(state, "raw", b"x" * 100), raw=Opaque()), {}, "a").values()
    assert data is not None and len(data) < 110


@pytest.mark.parametrize(
    ("declared", "act", "said"),
    [
        (MapState(str, int), lambda s: s.it.update({1: 1}), "Expected `str`, got `int`"),
        (MapState(str, int), lambda s: s.it.update({"a": "b"}), "Expected `int`, got `str`"),
        (MapState(str, int), lambda s: setattr(s, "it", []), "Expected `object`, got `array`"),
        (ListState(int), lambda s: s.it.append(1.5), "Expected `int`, got `float`"),
        (ListState(int), lambda s: s.it.append(None), "Expected `int`, got `None`"),
        (Value(int), lambda s: setattr(s, "it", 2**70), "serialize ints"),
        (Value(int), lambda s: setattr(s, "it", "many"), "Expected `int`, got `str`"),
        (Value(list[int]), lambda s: s.it.append(object()), "object"),
        (Opaque(), lambda s: setattr(s, "it", "text"), "Expected `bytes`, got `str`"),
        (Opaque(serializer=MeanFormat()), lambda s: setattr(s, "it", 3), "AttributeError: .* at `\\$.it`"),
    ],
)  # fmt: skip
def test_a_wrong_type_is_told_with_job_and_key_before_anything_is_written(
    declared: Any, act: Any, said: str
) -> None:
    with pytest.raises(StateRefused, match=said) as caught:
        after(doing(act, it=declared), {}, "k")
    assert "(job 'j', key 'k')" in caught.value.what
    assert (caught.value.job, caught.value.key) == ("j", "k")


def test_a_serializer_that_returns_no_bytes_is_told() -> None:
    class Text:
        def encode(self, value: Any) -> Any:
            return str(value)

        def decode(self, data: bytes) -> Any:
            return data

    kind = doing(lambda state: setattr(state, "it", 3), it=Opaque(serializer=Text()))
    with pytest.raises(StateRefused, match="returned str, not bytes"):
        after(kind, {}, "k")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ({"it": MapState(str, int)}, {"it": MapState(int, int)}, "Expected `int`, got `str`"),
        ({"it": MapState(str, int)}, {"it": ListState(int)}, "Expected `array`, got `object`"),
        ({"it": MapState(str, int)}, {"other": MapState(str, int)}, "unknown field `it`"),
        ({"it": MapState(str, int)}, {"it": Opaque(serializer=MeanFormat())}, "Expected `bytes"),
    ],
)
def test_state_of_another_version_is_a_mismatch_that_names_job_and_key(old: Any, new: Any, said: str) -> None:
    stored = after(doing(lambda state: state.it.update(a=1), **old), {}, "k")
    with pytest.raises(StateMismatch, match=said) as caught:
        after(doing(lambda state: None, **new), {key: data or b"" for key, data in stored.items()}, "k")
    assert "(job 'j', key 'k')" in caught.value.what


def test_bytes_that_a_serializer_cannot_decode_are_a_mismatch() -> None:
    stored = after(doing(lambda state: setattr(state, "it", b"no json"), it=Opaque()), {}, "k")
    kind = doing(lambda state: None, it=Opaque(serializer=MeanFormat()))
    with pytest.raises(StateMismatch, match="JSONDecodeError"):
        after(kind, {key: data or b"" for key, data in stored.items()}, "k")


def test_a_new_value_starts_at_its_default_beside_stored_ones() -> None:
    stored = after(Keeps, {}, "a")
    seen: list[Any] = []
    kind = doing(
        lambda state: seen.append((state.more, state.mean.seen)),
        more=MapState(str, int),
        **{name: vars(Keeps)[name] for name in ("seen", "waiting", "mean", "raw")},
    )
    after(kind, {key: data or b"" for key, data in stored.items()}, "a")
    assert seen == [({}, 1)]


def test_a_serializer_needs_both_functions() -> None:
    class Half:
        def encode(self, value: Any) -> bytes:
            return b""

    with pytest.raises(PipelineError, match="no function 'decode'"):
        Opaque(serializer=Half())  # type: ignore[arg-type]
