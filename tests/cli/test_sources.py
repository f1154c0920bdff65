"""What `backfill` and `run` refuse before Spark is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.runs import read_time
from tests.cli.world import ZEITGEIST, Run

QUERIES = ZEITGEIST.parent / "queries.json"


@pytest.fixture
def records(tmp_path: Path) -> Path:
    path = tmp_path / "queries.ndjson"
    path.write_text(json.dumps({"query": "cats", "lang": "en", "ts": 1}) + "\n")
    return path


def backfill(run: Run, tmp_path: Path, *arguments: str | Path, described: bool = True) -> str:
    given = ("--category", QUERIES) if described else ()
    place = ("--into", tmp_path / "result", "--folder", tmp_path / "none")
    return run("backfill", ZEITGEIST, *given, *place, *arguments).is_refused()


def test_an_input_is_a_category_and_a_file_that_exists(run: Run, tmp_path: Path, records: Path):
    assert "it must be category=file" in backfill(run, tmp_path, "--input", "queries")
    there = run(
        "backfill", ZEITGEIST, "--category", QUERIES, "--into", tmp_path / "r", "--input", "queries=nowhere"
    )
    assert "there is no file 'nowhere'" in there.is_refused(3)
    error = backfill(run, tmp_path, "--input", f"querys={records}")
    assert "does not read 'querys'" in error and "did you mean 'queries'?" in error


def test_a_category_that_is_only_described_needs_a_file(run: Run, tmp_path: Path):
    assert "give --input queries=FILE" in backfill(run, tmp_path)


def test_without_bus_and_description_it_says_where_it_looked(run: Run, tmp_path: Path):
    said = run("backfill", ZEITGEIST, "--into", tmp_path / "r", "--folder", tmp_path / "none")
    assert "there is no bus at" in said.is_refused(5)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "Expecting"),
        ("[1]", "not a JSON object"),
        ('{"name": "q", "partitons": 3}', "did you mean 'partitions'?"),
    ],
)
def test_a_description_that_is_none_is_refused(run: Run, tmp_path: Path, content: str, why: str):
    path = tmp_path / "category.json"
    path.write_text(content)
    assert why in backfill(run, tmp_path, "--category", path, described=False)


def test_times_are_iso_or_milliseconds(run: Run, tmp_path: Path, records: Path):
    assert read_time("1970-01-01T00:00:01Z") == 1000 and read_time("2100-01-01") == 4_102_444_800_000
    assert read_time("-5") == -5 and read_time("") is None and read_time("1970-01-01T01:00:00+01:00") == 0
    given = ("--input", f"queries={records}")
    assert "not a time: 'noon'" in backfill(run, tmp_path, *given, "--from", "noon")
    assert "--from must be before --to" in backfill(run, tmp_path, *given, "--from", "5", "--to", "5")


def test_a_format_that_is_none_is_refused(run: Run, tmp_path: Path, records: Path):
    assert "the formats are parquet, ndjson" in backfill(
        run, tmp_path, "--input", f"queries={records}", "--format", "csv"
    )


def test_run_wants_to_be_told_that_it_is_local(run: Run):
    assert "add --local" in run("run", ZEITGEIST).is_refused()


def test_a_bad_file_is_refused_before_spark_is_started(run: Run, tmp_path: Path):
    bad = tmp_path / "bad.ndjson"
    bad.write_text("oops\n")
    folder = tmp_path / "kept"
    error = run(
        "run", ZEITGEIST, "--local", "--category", QUERIES, "--input", f"queries={bad}", "--folder", folder
    ).is_refused()
    assert "line 1:" in error and "nothing was written" in error
    assert not (folder / "scratch").exists()
