"""`penstock run --local` and `penstock backfill` as people start them: processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from tests.cli.world import IN_BACKGROUND
from tests.spark.test_tasks import ZEITGEIST, queries, reference
from tests.waiting import LIMIT_S, until

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
        timeout=600,
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
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["rows"] == {"queries.dead": 0, "query_counts": expected.total()}
    assert counted(ds.dataset(tmp_path / "result" / "query_counts").to_table().to_pylist()) == expected


def test_ctrl_c_ends_a_run_in_order_and_leaves_nothing_running(given: tuple[str, ...], tmp_path: Path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        [*IN_BACKGROUND, *command("run", ZEITGEIST / "pipeline.py", "--local", "-f", *given)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        # A checkpoint is there once a query was started.
        until(
            lambda: list(temporary.glob("penstock-*/checkpoints/*")) or process.poll() is not None,
            "the start of a task",
        )
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, error
        assert "Traceback" not in error
        assert list(temporary.glob("penstock-*")) == []
        until(lambda: not _session(process.pid), lambda: _session(process.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _session(leader: int) -> list[str]:
    found = subprocess.run(["ps", "-o", "cmd=", "-s", str(leader)], capture_output=True, text=True).stdout
    return found.splitlines()
