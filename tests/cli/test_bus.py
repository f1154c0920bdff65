"""`penstock bus`: what it shows, and that what it writes is all there, once, or not at all."""

from __future__ import annotations

import io
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.streams.bus.embedded.log import EmbeddedLog
from penstock.streams.bus.log import CategorySpec
from tests.cli.world import Run, Started

COLUMNS = (("shop", "string"), ("amount", "double"), ("ts", "bigint"))
YEAR_2100_MS = 4_102_444_800_000


def a_spec(name: str, **changes: Any) -> CategorySpec:
    given = {
        "partitions": 3,
        "columns": COLUMNS,
        "format": "json",
        "watermark": "injector",
        "ts_column": "ts",
    }
    return CategorySpec(name=name, **{**given, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a bus in it; no control plane runs."""
    log = EmbeddedLog(tmp_path / "plane" / "bus")
    log.create(a_spec("sales"))
    log.create(a_spec("copies", partitions=2))
    log.create(a_spec("totals", format="typed", ts_column="", watermark="producers"))
    return tmp_path / "plane"


@pytest.fixture
def bus(folder: Path) -> EmbeddedLog:
    return EmbeddedLog(folder / "bus")


def everything(log: EmbeddedLog, category: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for partition, end in enumerate(log.end_offsets(category)):
        for batch in log.read(category, partition, 0, end):
            found += batch.to_pylist()
    return found


def sale(shop: str | None, amount: float, ts: int) -> str:
    return json.dumps({"shop": shop, "amount": amount, "ts": ts})


def a_file(folder: Path, *lines: str, name: str = "sales.ndjson") -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_file_is_published_by_key_and_time(folder: Path, bus: EmbeddedLog, run: Run):
    file = a_file(folder, sale("north", 1.5, 0), "", sale("south", 2, YEAR_2100_MS), sale(None, 3, 7))
    said = run("bus", "publish", "sales", file, "--key", "shop", "--folder", folder, "-o", "json").json
    assert (said["appended"], said["repeated"]) == (3, 0)
    found = {(row["_key"], row["_ts"]) for row in everything(bus, "sales")}
    assert found == {("north", 0), ("south", YEAR_2100_MS), (None, 7)}


def test_one_bad_line_and_nothing_is_written(folder: Path, bus: EmbeddedLog, run: Run):
    file = a_file(
        folder,
        sale("north", 1, 1),
        "{nonsense",
        '{"shop": 5, "ts": 1}',
        '{"shop": "x"}',
        "[]",
        sale("a", 1, 2),
    )
    error = run("bus", "publish", "sales", file, "--folder", folder).is_refused()
    assert "4 lines of" in error and "nothing was written" in error
    for number, reason in ((2, "malformed"), (3, "$.shop"), (4, "no event time"), (5, "Expected `object`")):
        assert f"line {number}: " in error and reason in error
    assert "line 1:" not in error and "line 6:" not in error
    assert bus.end_offsets("sales") == (0, 0, 0)


def test_only_the_first_bad_lines_are_shown_and_all_are_counted(folder: Path, run: Run):
    file = a_file(folder, *["oops"] * 50)
    error = run("bus", "publish", "sales", file, "--folder", folder).is_refused()
    assert "50 lines" in error and "line 20:" in error and "line 21:" not in error and "and 30 more" in error


def test_a_time_that_no_clock_shows_is_refused(folder: Path, run: Run):
    file = a_file(folder, sale("a", 1, 2**62), '{"shop": "a", "ts": 1e300}')
    error = run("bus", "publish", "sales", file, "--folder", folder).is_refused()
    assert "is not an event time" in error and "line 2:" in error


def test_a_value_of_ten_megabytes_goes_through_and_comes_back(folder: Path, bus: EmbeddedLog, run: Run):
    large = sale("x" * 10_000_000, 1, 5)
    file = a_file(folder, sale("a", 1, 1), large)
    assert run("bus", "publish", "sales", file, "--folder", folder).code == 0
    assert large.encode() in {row["_value"] for row in everything(bus, "sales")}
    shown = run("bus", "tail", "sales", "--folder", folder).out
    assert "characters)" in shown and len(shown) < 5000


def test_a_line_without_end_is_refused_and_the_others_are_still_looked_at(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("penstock.streams.bus.copy.LINE_BYTES_MAX", 1000)
    monkeypatch.setattr("penstock.streams.inspect.record_lines.LINE_BYTES_MAX", 1000)
    file = a_file(folder, sale("y" * 5000, 1, 1), "oops", sale("a", 1, 1))
    error = run("bus", "publish", "sales", file, "--folder", folder).is_refused()
    assert "line 1: it is longer than 1000 bytes" in error and "line 2:" in error and "line 3" not in error


def test_the_same_lines_under_the_same_name_add_nothing_and_new_ones_follow(
    folder: Path, bus: EmbeddedLog, run: Run
):
    lines = [sale(f"shop {n}", n, n) for n in range(100)]
    arguments = ("--key", "shop", "--producer", "till-7", "--folder", folder, "-o", "json")
    first = run("bus", "publish", "sales", a_file(folder, *lines[:60]), *arguments).json
    again = run("bus", "publish", "sales", a_file(folder, *lines), *arguments).json
    assert (first["appended"], again["appended"], again["repeated"]) == (60, 40, 60)
    assert sorted(row["_ts"] for row in everything(bus, "sales")) == list(range(100))


def test_without_a_name_every_call_appends(folder: Path, bus: EmbeddedLog, run: Run):
    file = a_file(folder, sale("a", 1, 1))
    for _ in range(2):
        assert run("bus", "publish", "sales", file, "--folder", folder).code == 0
    assert sum(bus.end_offsets("sales")) == 2


def test_standard_input_is_a_file_too(
    folder: Path, bus: EmbeddedLog, run: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(sale("a", 1, 9).encode())))
    assert run("bus", "publish", "sales", "-", "--folder", folder).code == 0
    assert [row["_ts"] for row in everything(bus, "sales")] == [9]


def test_typed_records_are_read_by_their_columns(folder: Path, bus: EmbeddedLog, run: Run):
    file = a_file(folder, sale("a", 1.5, 4))
    assert run("bus", "publish", "totals", file, "--ts", "ts", "--key", "shop", "--folder", folder).code == 0
    (row,) = everything(bus, "totals")
    assert (row["shop"], row["amount"], row["ts"], row["_ts"], row["_key"]) == ("a", 1.5, 4, 4, "a")
    error = run(
        "bus", "publish", "totals", a_file(folder, '{"amount": "much"}'), "--folder", folder
    ).is_refused()
    assert "$.amount" in error


def test_done_lets_the_watermark_pass(folder: Path, bus: EmbeddedLog, run: Run):
    file = a_file(folder, sale("a", 1, 1))
    assert run("bus", "publish", "sales", file, "--done", "--folder", folder).code == 0
    assert bus.watermark("sales") == 2**62
    assert (
        "does not apply" in run("bus", "publish", "totals", file, "--done", "--folder", folder).is_refused()
    )


@pytest.mark.parametrize(
    "arguments",
    [("describe", "slaes"), ("tail", "slaes"), ("publish", "slaes", "-"), ("copy", "slaes", "copies")],
)
def test_a_category_that_is_not_there_is_named_with_the_one_that_was_meant(
    arguments: tuple[str, ...], folder: Path, run: Run
):
    assert "did you mean 'sales'?" in run("bus", *arguments, "--folder", folder).is_refused(3)


def test_a_column_that_is_not_there_is_named_with_the_one_that_was_meant(folder: Path, run: Run):
    file = a_file(folder, sale("a", 1, 1))
    error = run("bus", "publish", "sales", file, "--key", "shp", "--folder", folder).is_refused()
    assert "did you mean 'shop'?" in error


def test_without_a_bus_it_says_where_it_looked(tmp_path: Path, run: Run):
    assert "there is no bus at" in run("bus", "ls", "--folder", tmp_path / "nowhere").is_refused(5)
    assert "no such bus" in run("bus", "ls", "--bus", "pigeons:here").is_refused()


def test_a_file_that_is_not_there_is_named(folder: Path, run: Run):
    assert "cannot read" in run("bus", "publish", "sales", "none.ndjson", "--folder", folder).is_refused()


def test_categories_are_listed_and_described(folder: Path, run: Run):
    run("bus", "publish", "sales", a_file(folder, sale("a", 1, 1)), "--done", "--folder", folder)
    assert [found["spec"]["name"] for found in run("bus", "ls", "--folder", folder, "-o", "json").json] == [
        "copies",
        "sales",
        "totals",
    ]
    found = run("bus", "describe", "sales", "--folder", folder, "-o", "json").json
    assert sum(found["end_offsets"]) == 1 and list(found["producers"].values()) == [2**62]
    assert "producers" in run("bus", "describe", "sales", "--folder", folder).text


def test_a_damaged_category_is_named_and_the_others_are_listed(folder: Path, run: Run):
    (folder / "bus" / "sales" / "index.db").write_bytes(bytes(8192))
    said = run("bus", "ls", "--folder", folder, "-o", "json")
    assert [found["spec"]["name"] for found in said.json] == ["copies", "totals"]
    assert "category 'sales' cannot be read" in said.err and "damaged" in said.err
    assert "sales" in run("bus", "tail", "sales", "--folder", folder).is_refused()


def test_tail_shows_the_last_records_of_each_partition(folder: Path, run: Run):
    lines = [sale("north", n, n) for n in range(30)]
    run("bus", "publish", "sales", a_file(folder, *lines), "--key", "shop", "--folder", folder)
    said = run("bus", "tail", "sales", "-n", "2", "--folder", folder, "-o", "json").out.splitlines()
    assert [json.loads(line)["ts"] for line in said] == [28, 29]
    said = run("bus", "tail", "sales", "--from", "27", "--folder", folder, "-o", "json").out.splitlines()
    assert [json.loads(line)["offset"] for line in said] == [27, 28, 29]
    assert "has no partition 3" in run(
        "bus", "tail", "sales", "--partition", "3", "--folder", folder
    ).is_refused(3)


@pytest.mark.parametrize("in_background", [False, True])
def test_tail_follows_until_ctrl_c(folder: Path, run: Run, in_background: bool):
    """In the background of a script SIGINT is ignored, until the command says that it ends with it."""
    tail = Started(
        "bus", "tail", "sales", "-f", "--folder", folder, "-o", "json", in_background=in_background
    )
    for n in range(3):
        run("bus", "publish", "sales", a_file(folder, sale("a", 1, n)), "--folder", folder)
        tail.until(lambda n=n: len(tail.out.splitlines()) == n + 1, "the record")
    ended = tail.end(signal.SIGINT)
    assert (ended.code, ended.err) == (0, "")
    assert [json.loads(line)["ts"] for line in ended.out.splitlines()] == [0, 1, 2]


def records(count: int) -> list[str]:
    return [sale(None if n % 5 == 0 else f"shop {n % 17}", n, n) for n in range(count)]


def test_a_copy_has_every_record_once_also_when_it_is_repeated(folder: Path, bus: EmbeddedLog, run: Run):
    run("bus", "publish", "sales", a_file(folder, *records(500)), "--key", "shop", "--folder", folder)
    said = [run("bus", "copy", "sales", "copies", "--folder", folder, "-o", "json").json for _ in range(2)]
    assert [(found["appended"], found["repeated"]) for found in said] == [(500, 0), (0, 500)]
    run("bus", "publish", "sales", a_file(folder, sale("late", 1, 900)), "--key", "shop", "--folder", folder)
    assert run("bus", "copy", "sales", "copies", "--folder", folder, "-o", "json").json["appended"] == 1
    copied = [(row["_key"], row["_ts"], row["_value"]) for row in everything(bus, "copies")]
    original = [(row["_key"], row["_ts"], row["_value"]) for row in everything(bus, "sales")]
    assert len(copied) == 501 and set(copied) == set(original)


def test_a_copy_that_was_cut_off_goes_on(
    folder: Path, bus: EmbeddedLog, run: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("penstock.streams.bus.copy.BATCH_ROWS", 40)
    run("bus", "publish", "sales", a_file(folder, *records(500)), "--key", "shop", "--folder", folder)
    publish, calls = EmbeddedLog.publish, []

    def dying(self: EmbeddedLog, category: str, **given: Any) -> Any:
        calls.append(category)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return publish(self, category, **given)

    with monkeypatch.context() as broken:
        broken.setattr(EmbeddedLog, "publish", dying)
        assert run("bus", "copy", "sales", "copies", "--folder", folder).code == 130
    before = sum(bus.end_offsets("copies"))
    assert 0 < before < 500
    assert run("bus", "copy", "sales", "copies", "--folder", folder).code == 0
    assert sorted(row["_ts"] for row in everything(bus, "copies")) == list(range(500))


@pytest.mark.parametrize("name", ["out.ndjson", "out.parquet"])
def test_a_category_goes_to_a_file_and_back_byte_by_byte(name: str, folder: Path, bus: EmbeddedLog, run: Run):
    lines = [*records(50), '{ "shop": "spaced",   "ts": 3 }']
    run("bus", "publish", "sales", a_file(folder, *lines), "--key", "shop", "--folder", folder)
    path = folder / name
    assert run("bus", "copy", "sales", path, "--folder", folder, "-o", "json").json["appended"] == 51
    assert "is there already" in run("bus", "copy", "sales", path, "--folder", folder).is_refused()
    said = [run("bus", "copy", path, "copies", "--folder", folder, "-o", "json").json for _ in range(2)]
    assert [(found["appended"], found["repeated"]) for found in said] == [(51, 0), (0, 51)]

    def plain(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return sorted((row["_ts"], row["_value"], row["_key"] or "") for row in rows)

    assert plain(everything(bus, "copies")) == plain(everything(bus, "sales"))


def test_what_is_not_json_survives_a_file_too(folder: Path, bus: EmbeddedLog, run: Run):
    from penstock.streams.dsl.injector import Injector

    values = [b"\xff\x00", b"{broken", b" 1 ", b"two\nlines", b""]
    Injector(bus, "sales", "test", epoch=1).publish(["k"] * 5, range(5), values)
    assert run("bus", "copy", "sales", folder / "out.ndjson", "--folder", folder).code == 0
    assert run("bus", "copy", folder / "out.ndjson", "copies", "--folder", folder).code == 0
    assert sorted(row["_value"] for row in everything(bus, "copies")) == sorted(values)
    assert "base64" in run("bus", "tail", "sales", "--folder", folder).out


def test_a_file_that_was_cut_off_is_gone_on_with(folder: Path, run: Run):
    run("bus", "publish", "sales", a_file(folder, *records(100)), "--key", "shop", "--folder", folder)
    path = folder / "out.ndjson"
    run("bus", "copy", "sales", path, "--folder", folder)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    assert run("bus", "copy", "sales", path, "--resume", "--folder", folder).code == 0
    assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())
    path.write_text("something else\n")
    assert (
        "cannot be resumed" in run("bus", "copy", "sales", path, "--resume", "--folder", folder).is_refused()
    )
    assert path.read_text() == "something else\n"


def test_copies_that_make_no_sense_are_refused(folder: Path, run: Run):
    assert "onto itself" in run("bus", "copy", "sales", "sales", "--folder", folder).is_refused()
    assert "cannot be copied" in run("bus", "copy", "sales", "totals", "--folder", folder).is_refused()
    assert "both are files" in run("bus", "copy", "a.ndjson", "b.ndjson", "--folder", folder).is_refused()
    broken = folder / "broken.parquet"
    broken.write_bytes(b"no")
    assert "cannot be read" in run("bus", "copy", broken, "copies", "--folder", folder).is_refused()
