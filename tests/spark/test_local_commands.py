"""`penstock run --local` and `penstock backfill` as people start them: processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from tests.spark.test_tasks import ZEITGEIST, queries, reference

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "penstock.cli.main", *map(str, arguments)]


@pytest.fixture
def given(tmp_path: Path) -> tuple[str, ...]:
    """The Zeitgeist's category and a file of records for it."""
    path = tmp_path / "queries.ndjson"
    path.write_bytes(b"".join(value + b"\n" for _, _, value in queries(0, 2000)))
    return ("--category", str(ZEITGEIST / "queries.json"), "--input", f"queries={path}")


def counted(rows: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    return Counter((row["query"], row["second"], row["count"]) for row in rows)


def test_a_pipeline_runs_here_and_as_a_batch_with_the_same_result(given: tuple[str, ...], tmp_path: Path):
    expected = reference(queries(0, 2000))
    ran = subprocess.run(
        command("run", ZEITGEIST / "pipeline.py", "--local", *given, "--folder", tmp_path / "kept"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert {line["category"] for line in lines} == {"query_counts"}
    assert counted([line["value"] for line in lines]) == expected
    assert "Traceback" not in ran.stderr and " WARN " not in ran.stderr

    # What the first run left is a bus like any other.
    kept = f"embedded:{tmp_path / 'kept' / 'bus'}"
    made = subprocess.run(
        command(
            "backfill", ZEITGEIST / "pipeline.py", "--bus", kept, "--into", tmp_path / "result", "-o", "json"
        ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["rows"] == {"queries.dead": 0, "query_counts": expected.total()}
    assert counted(ds.dataset(tmp_path / "result" / "query_counts").to_table().to_pylist()) == expected


def test_ctrl_c_ends_a_run_in_order_and_leaves_nothing_running(given: tuple[str, ...], tmp_path: Path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        command("run", ZEITGEIST / "pipeline.py", "--local", "-f", *given),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        deadline = time.monotonic() + 120
        # A checkpoint is there once a query was started.
        while not list(temporary.glob("penstock-*/checkpoints/*")) and process.poll() is None:
            assert time.monotonic() < deadline, "no task was started"
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 0, error
    assert "Traceback" not in error
    assert list(temporary.glob("penstock-*")) == []
    deadline = time.monotonic() + 20
    while alive := _session(process.pid):
        assert time.monotonic() < deadline, alive
        time.sleep(0.2)


def _session(leader: int) -> list[str]:
    found = subprocess.run(["ps", "-o", "cmd=", "-s", str(leader)], capture_output=True, text=True).stdout
    return found.splitlines()


RAISES = """\
from penstock import Computation, Pipeline


class Halves(Computation):
    outputs = {"out": {"k": "string", "n": "bigint"}}

    def process_record(self, record, ctx):
        print("half of", record["n"])
        ctx.produce({"k": ctx.key, "n": share(record["n"])})


def share(n):
    return 100 // n


p = Pipeline("shops", partitions=1)
p.source("numbers").key_by("k").process(Halves).sink("quotients")
"""
NUMBERS = {
    "name": "numbers",
    "partitions": 1,
    "columns": [["k", "string"], ["n", "bigint"], ["ts", "bigint"]],
    "format": "json",
    "watermark": "injector",
    "ts_column": "ts",
}


@pytest.mark.parametrize("way", [("run", "--local", "--folder"), ("backfill", "--into")])
def test_an_error_of_user_code_says_its_line_and_nothing_of_java(way: tuple[str, ...], tmp_path: Path):
    (tmp_path / "shops.py").write_text(RAISES)
    (tmp_path / "numbers.json").write_text(json.dumps(NUMBERS))
    records = [json.dumps({"k": "a", "n": n, "ts": 1000 + n}) for n in (1, 0, 2)]
    (tmp_path / "numbers.ndjson").write_text("\n".join(records) + "\n")
    given = ("--category", "numbers.json", "--input", "numbers=numbers.ndjson")
    ended = subprocess.run(
        command(way[0], "shops.py", *given, *way[1:], tmp_path / "kept"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 1
    said = " ".join(ended.stderr.split())
    line = next(n for n, text in enumerate(RAISES.splitlines(), 1) if "100 // n" in text)
    assert f"user code failed at shops.py:{line} in share: job 'shops.halves', key 'a', record at" in said
    assert "ZeroDivisionError: integer division or modulo by zero" in said
    for noise in ("Traceback", "\tat ", "BrokenPipe", "org.apache", " ERROR "):
        assert noise not in ended.stderr, ended.stderr
    assert "half of 0" in ended.stderr, "what user code prints is still seen"
    if way[0] == "run":  # a batch keeps nothing
        assert "PythonException" in (tmp_path / "kept" / "scratch" / "spark.log").read_text()
