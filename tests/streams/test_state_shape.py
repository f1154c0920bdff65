"""What a plan says of a computation's state: enough to see whether new code can read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from penstock import Computation, ListState, MapState, Opaque, Pipeline, Value, VectorComputation
from penstock.streams.bus.log import CategorySpec
from penstock.streams.catalogue import StaticCatalogue
from tests.streams.plans import compiled


@dataclass
class Model:
    mean: float = 0.0


class Pickled:
    def encode(self, value: Any) -> bytes:
        return bytes(value)

    def decode(self, data: bytes) -> Any:
        return data


class Everything(Computation):
    outputs = {"out": {"n": "bigint"}}
    total = Value(float)
    last = Value(int | None)
    seen = MapState(str, int)
    waiting = ListState(str)
    raw = Opaque()
    own = Opaque(serializer=Pickled())


class Counts(VectorComputation):
    outputs = {"out": {"n": "bigint"}}
    state = {"n": "bigint"}


def test_each_declared_value_is_named_with_its_type() -> None:
    assert Everything.state_codec.shape == {
        "total": "float",
        "last": "int | None",
        "seen": "dict[str, int]",
        "waiting": "list[str]",
        "raw": "bytes",
        "own": "opaque",
    }


def test_a_class_of_the_user_is_told_by_what_is_in_it() -> None:
    @dataclass
    class Other:
        mean: float = 0.0

    @dataclass
    class Changed:
        mean: int = 0

    Changed.__name__ = Changed.__qualname__ = "Model"
    shapes = [Value(kind, default=kind()).shape() for kind in (Model, Changed)]
    assert shapes[0] != shapes[1] and all(shape.startswith("Model (") for shape in shapes)
    assert (
        Value(dict[str, Model]).shape() == Value(dict[str, Model]).shape() != Value(dict[str, Other]).shape()
    )


@pytest.mark.parametrize(("computation", "state"), [(Everything, None), (Counts, {"n": "bigint"})])
def test_the_plan_of_a_job_says_its_keys_and_its_state(
    computation: type, state: dict[str, str] | None
) -> None:
    p = Pipeline("demo", partitions=2)
    p.source("sales").key_by("shop", "day").process(computation).sink("totals")
    columns = (("shop", "string"), ("day", "bigint"), ("ts", "bigint"))
    spec = CategorySpec(name="sales", partitions=2, columns=columns, format="json", watermark="injector")
    plan = compiled(p, StaticCatalogue([spec])).to_json()["jobs"][-1]["plan"]["computation"]
    assert plan["keys"] == ["shop", "day"]
    assert plan["state"] == (Everything.state_codec.shape if state is None else state)
