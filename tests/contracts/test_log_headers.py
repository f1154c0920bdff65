"""Headers of records, on each implementation of the bus."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from penstock.core.errors import ConfigError
from penstock.streams.bus.log import CategorySpec, Log
from penstock.streams.dsl.injector import Injector
from tests.contracts.buses import SPEC, NewLog, assert_three_parts, records

HEADED = CategorySpec(name="raw", partitions=1, columns=(("n", "bigint"),), format="json", headers=True)
GIVEN: list[Any] = [
    [("trace", b"abc"), ("trace", b"\xff\x00"), ("empty", b""), ("none", None)],
    None,
    [("penstock", b"not ours"), ("ключ", "значение".encode())],
]


def headers_of(log: Log, category: str) -> list[Any]:
    (end,) = log.end_offsets(category)
    return [row["_headers"] for batch in log.read(category, 0, 0, end) for row in batch.to_pylist()]


def test_headers_come_back_as_they_were_given(new_log: NewLog):
    """In order, repeated names and bytes of any kind included; from another handle; over several publishes."""
    log = new_log()
    log.create(HEADED)
    injector = Injector(log, "raw", "a", epoch=1)
    injector.publish(["k"] * 3, [1, 2, 3], [b'{"n": 1}'] * 3, GIVEN)
    injector.publish(["k"], [4], [b'{"n": 2}'])
    log.clean(now_ms=10**15, older_than_ms=0)
    found = headers_of(new_log(), "raw")
    assert [None if row is None else list(row) for row in found] == [*GIVEN, None]


def test_typed_rows_have_headers_too(new_log: NewLog):
    log, spec = new_log(), replace(SPEC, partitions=1, headers=True)
    log.create(spec)
    plain = records(1, 2)
    beside = pa.array([[("h", b"1")], None], spec.schema().field("_headers").type)
    batch = pa.RecordBatch.from_arrays([*plain.columns, beside], schema=spec.schema())
    log.publish("clicks", producer="a", epoch=1, batches={0: batch}, gapless=True)
    assert headers_of(log, "clicks") == [[("h", b"1")], None]
    (read,) = log.read("clicks", 0, 0, log.end_offsets("clicks")[0])
    assert read.column("n").to_pylist() == [1, 2]


def test_a_category_without_headers_has_none(log: Log):
    assert "_headers" not in log.describe("clicks").spec.schema().names
    beside = pa.array([None], HEADED.schema().field("_headers").type)
    batch = records(1)
    headed = pa.RecordBatch.from_arrays([*batch.columns, beside], names=[*batch.schema.names, "_headers"])
    with pytest.raises(ConfigError, match="does not fit") as caught:
        log.publish("clicks", producer="a", epoch=1, batches={0: headed}, gapless=False)
    assert_three_parts(caught.value)
    log.create(replace(HEADED, name="bare", headers=False))
    with pytest.raises(ConfigError, match="has no headers") as caught:
        Injector(log, "bare", "a", epoch=1).publish(["k"], [1], [b"1"], [[("h", b"1")]])
    assert_three_parts(caught.value)
