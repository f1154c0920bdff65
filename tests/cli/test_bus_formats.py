"""`penstock bus` on categories of Avro and of plain bytes: lines in, lines out, nothing changed on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.streams.bus.avro import decode_avro
from penstock.streams.bus.embedded.log import EmbeddedLog
from penstock.streams.dsl.injector import Injector
from tests.cli.test_bus import a_file, a_spec, everything
from tests.cli.world import Run

AVRO = (("shop", "string"), ("amounts", "array<double>"), ("ts", "bigint"))
BYTES = (("raw", "binary"),)
GIVEN = [
    {"shop": "north", "amounts": [1.5, None, 2.0], "ts": 1000},
    {"shop": None, "amounts": [], "ts": 2000},
    {"shop": "süd", "amounts": None, "ts": 3000},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a bus in it; no control plane runs."""
    log = EmbeddedLog(tmp_path / "plane" / "bus")
    for name in ("sales", "copies"):
        log.create(a_spec(name, columns=AVRO, format="avro"))
    for name in ("raws", "raw_copies"):
        log.create(a_spec(name, columns=BYTES, format="bytes", ts_column=""))
    return tmp_path / "plane"


@pytest.fixture
def bus(folder: Path) -> EmbeddedLog:
    return EmbeddedLog(folder / "bus")


def published(folder: Path, run: Run) -> None:
    path = a_file(folder, *map(json.dumps, GIVEN))
    assert run("bus", "publish", "sales", path, "--key", "shop", "--folder", folder).code == 0


def test_lines_become_avro_records_and_are_shown_as_what_they_hold(
    folder: Path, bus: EmbeddedLog, run: Run
) -> None:
    published(folder, run)
    rows = sorted(everything(bus, "sales"), key=lambda row: row["_ts"])
    assert [row["_ts"] for row in rows] == [1000, 2000, 3000]
    decoded = decode_avro(pa.array([row["_value"] for row in rows], pa.binary()), AVRO)
    assert decoded.table.to_pylist() == GIVEN and not decoded.bad
    assert "süd" in run("bus", "tail", "sales", "--folder", folder).out


def test_a_line_that_fits_no_avro_record_is_named_and_nothing_is_written(
    folder: Path, bus: EmbeddedLog, run: Run
) -> None:
    path = a_file(folder, json.dumps(GIVEN[0]), '{"shop": 7, "ts": 5}', "nonsense")
    said = run("bus", "publish", "sales", path, "--key", "shop", "--folder", folder).is_refused()
    assert "line 2" in said and "line 3" in said
    assert everything(bus, "sales") == []


@pytest.mark.parametrize("name", ["out.ndjson", "out.parquet"])
def test_avro_goes_to_a_file_and_back_byte_by_byte(
    name: str, folder: Path, bus: EmbeddedLog, run: Run
) -> None:
    published(folder, run)
    damaged = b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"
    Injector(bus, "sales", "other", epoch=1).publish(["k"], [4000], [damaged])
    path = folder / name
    assert run("bus", "copy", "sales", path, "--folder", folder).code == 0
    assert run("bus", "copy", path, "copies", "--folder", folder).code == 0

    def plain(category: str) -> list[tuple[int, bytes]]:
        return sorted((row["_ts"], row["_value"]) for row in everything(bus, category))

    assert plain("copies") == plain("sales") and len(plain("copies")) == 4


def test_bytes_go_to_a_file_and_back_byte_by_byte(folder: Path, bus: EmbeddedLog, run: Run) -> None:
    values = [b"\xff\x00", b"{broken", b'{"fine":1}', b" 1 ", b"two\nlines", b""]
    Injector(bus, "raws", "test", epoch=1).publish(["k"] * 6, range(6), values)
    assert run("bus", "copy", "raws", folder / "out.ndjson", "--folder", folder).code == 0
    assert run("bus", "copy", folder / "out.ndjson", "raw_copies", "--folder", folder).code == 0
    assert sorted(row["_value"] for row in everything(bus, "raw_copies")) == sorted(values)
