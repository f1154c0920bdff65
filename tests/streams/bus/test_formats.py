"""Values of the edges become columns: what does not fit is set aside with its reason, never a crash."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.streams.bus import log as contract
from penstock.streams.bus.avro import decode_avro, encode_avro
from penstock.streams.bus.decode import decode_bytes
from penstock.streams.bus.log import LOW_MIN, CategorySpec
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.dsl.injector import Injector
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.rows.row_store import IntervalRef
from penstock.streams.step.reading import read_ranges
from penstock.streams.step.step import BAD, DATA, OwnedInterval, input_of
from tests.contracts.buses import assert_three_parts
from tests.streams.descriptors import a_descriptor

COLUMNS = (
    *(("s", "string"), ("l", "bigint"), ("i", "int"), ("d", "double"), ("f", "float")),
    *(("o", "boolean"), ("b", "binary")),
)
ROW = {"s": "ä", "l": 2**40, "i": -3, "d": 0.5, "f": 1.5, "o": True, "b": b"\x00\xff"}
NOTHING = dict.fromkeys(ROW)


def test_avro_values_of_every_type_come_back():
    values = encode_avro([ROW, NOTHING], COLUMNS)
    decoded = decode_avro(pa.array(values, pa.binary()), COLUMNS)
    assert decoded.table.to_pylist() == [ROW, NOTHING] and decoded.rows is None and decoded.bad == ()


def test_avro_values_that_do_not_fit_are_set_aside():
    good = encode_avro([ROW], COLUMNS)[0]
    values = [good, b"", good[:-1], good + b"x", None, b"\x04", good]
    decoded = decode_avro(pa.array(values, pa.binary()), COLUMNS)
    assert decoded.rows == (0, 6) and decoded.table.num_rows == 2
    assert [place for place, _ in decoded.bad] == [1, 2, 3, 4, 5] and all(why for _, why in decoded.bad)


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_no_bytes_crash_the_avro_decoder(values: list[bytes]):
    decoded = decode_avro(pa.array(values, pa.binary()), COLUMNS)
    assert decoded.table.num_rows + len(decoded.bad) == len(values)


def test_bytes_are_their_own_column():
    decoded = decode_bytes(pa.array([b"a", None], pa.binary()), (("body", "binary"),))
    assert decoded.table.to_pylist() == [{"body": b"a"}, {"body": None}]


@pytest.mark.parametrize(
    "spec",
    [
        {"format": "bytes", "columns": ()},
        {"format": "bytes", "columns": (("a", "string"),)},
        {"format": "bytes", "columns": (("a", "binary"), ("b", "binary"))},
        {"format": "avro", "columns": (("a-b", "string"),)},
        {"format": "avro", "columns": (("a", "string"),), "ts_column": "a"},
        {"format": "json", "columns": (("a", "bigint"),), "ts_column": "b"},
        {"retention_ms": -1, "columns": ()},
    ],
)
def test_a_spec_that_no_reader_could_read_is_refused(spec: dict):
    with pytest.raises(ConfigError) as caught:
        contract.check_spec(CategorySpec(**{"name": "in", "partitions": 1, **spec}))
    assert_three_parts(caught.value)


@pytest.mark.parametrize(
    ("format_", "columns", "values", "expected"),
    [
        ("avro", (("s", "string"), ("at", "bigint")), None, [("x", 7), None]),
        ("bytes", (("body", "binary"),), [b"one", b"two"], [(b"one",), (b"two",)]),
    ],
)
def test_a_range_of_such_a_category_is_read_as_its_columns(format_, columns, values, expected):
    """Plan: two records, the second of them no Avro; the rows that Spark would get."""
    if values is None:
        values = [encode_avro([{"s": "x", "at": 7}], columns)[0], b"\xff"]
    log, rows = MemoryLog(), MemoryRows()
    spec = CategorySpec(
        name="in",
        partitions=1,
        columns=columns,
        format=format_,
        watermark="injector",
        ts_column="at" if format_ == "avro" else "",
    )
    birth = log.create(spec).birth
    ref = IntervalRef(job="j", job_birth="b", partition=0, birth="i")
    rows.create(ref, offsets={birth: 0}, low=LOW_MIN)
    Injector(log, "in", "me", epoch=1).publish(["k", "k"], [5, 5], values)
    interval = OwnedInterval(ref=ref, token=1, producers=("p",))
    task = a_descriptor(intervals=(interval,), inputs=(input_of(log.describe("in")),))
    found = read_ranges(task=task, interval=interval, spans={birth: (0, 2)}, log=log, rows=rows)
    read = pa.Table.from_batches(found).to_pylist()[1:-1]
    assert [row["_kind"] for row in read] == [BAD if want is None else DATA for want in expected]
    for row, want in zip(read, expected, strict=True):
        assert want is None or tuple(row[name] for name, _ in columns) == want
    if format_ == "avro":
        assert read[0]["_ts"] == 7 and read[1]["_raw"] == b"\xff" and read[1]["_bad"]
