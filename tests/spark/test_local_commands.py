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


VISITS = """
from penstock import Computation, Pipeline, Value, tumbling

GAP_MS = 30 * 60_000

class ByTimer(Computation):
    # Takes "the timer has not fired" for "the visit goes on": true in a backfill, not in the stream.
    outputs = {"out": {"clicks": "bigint"}}
    clicks = Value(int)

    def process_record(self, record, ctx):
        ctx.state.clicks += 1
        ctx.set_timer("end", record.ts + GAP_MS)

    def process_timer(self, timer, ctx):
        ctx.produce({"clicks": ctx.state.clicks})
        ctx.state.clicks = 0

class ByTime(Computation):
    # The times of a record and of the visits that are open say what belongs together.
    outputs = {"out": {"clicks": "bigint"}}
    visits = Value(list[list[int]])  # first, last, clicks; by time

    def process_record(self, record, ctx):
        mine = [v for v in ctx.state.visits if v[0] - GAP_MS < record.ts < v[1] + GAP_MS]
        others = [v for v in ctx.state.visits if v not in mine]
        mine.append([record.ts, record.ts, 1])
        one = [min(v[0] for v in mine), max(v[1] for v in mine), sum(v[2] for v in mine)]
        ctx.state.visits = sorted([*others, one])
        ctx.set_timer("end", ctx.state.visits[0][1] + GAP_MS)

    def process_timer(self, timer, ctx):
        (_, _, clicks), *ctx.state.visits = ctx.state.visits
        ctx.produce({"clicks": clicks})
        if ctx.state.visits:
            ctx.set_timer("end", ctx.state.visits[0][1] + GAP_MS)

class Reminder(Computation):
    outputs = {"out": {"user": "string"}}

    def process_record(self, record, ctx):
        ctx.set_wall_timer("later", ctx.now + 24 * 3_600_000)

    def process_timer(self, timer, ctx):
        ctx.produce({"user": ctx.key})

p = Pipeline("shop", partitions=2)
clicks = p.source("clicks").key_by("user")
clicks.process(ByTimer, name="timers").sink("by_timer")
clicks.process(ByTime, name="times").sink("by_time")
clicks.process(Reminder, name="reminders").sink("reminded")
clicks.window(tumbling("1h")).aggregate("count(*) AS n").sink("per_hour")
"""
CLICKS = {
    "name": "clicks",
    "partitions": 1,
    "columns": [["user", "string"], ["ts", "bigint"]],
    "ts_column": "ts",
}


def test_what_a_run_leaves_open_is_told_and_visits_that_hang_on_a_timer_differ_in_a_backfill(tmp_path: Path):
    """40 users, 191 visits of a click, two hours apart, in one file. The input ends with the file, so all
    windows are given; timers of the clock are pending. A computation that sets its timer anew with each click
    makes one visit of all that comes before the low watermark moves: 40. In a backfill it makes 191, and one
    that goes by the times of its records makes 191 in both.
    """
    (tmp_path / "shop.py").write_text(VISITS)
    (tmp_path / "clicks.json").write_text(json.dumps(CLICKS))
    rows = [
        {"user": f"u{user}", "ts": 1_700_000_000_000 + visit * 7_200_000}
        for visit in range(5)
        for user in range(40 if visit < 4 else 31)
    ]
    (tmp_path / "clicks.ndjson").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("--category", "clicks.json", "--input", "clicks=clicks.ndjson")
    ran = ended(tmp_path, "run", "shop.py", "--local", *given)
    found = Counter(json.loads(line)["category"] for line in ran.stdout.splitlines())
    assert found == {"by_timer": 40, "by_time": 191, "per_hour": 191}
    assert "shop.reminders: 40 wall timers are pending" in ran.stderr
    assert "shop.timers: ByTimer uses timers" in ran.stderr and "open windows" not in ran.stderr
    for job in ("by_user", "timers", "times", "aggregate"):
        line = f"shop.{job}: 191 records read, 0 late, 0 dropped, 0 dead letters, 0 waiting"
        assert line in ran.stderr
    made = ended(tmp_path, "backfill", "shop.py", *given, "--into", "result", "-o", "json")
    said = json.loads(made.stdout)
    assert said["rows"] == {
        "by_timer": 191,
        "by_time": 191,
        "per_hour": 191,
        "reminded": 0,
        "clicks.dead": 0,
    }
    assert (said["dead_letters"], said["late"], said["waiting"]) == (0, 0, 0)
    assert "They do not fire in a backfill" in made.stderr


UNION = """
from penstock import Pipeline, tumbling

p = Pipeline("both", partitions=2)
shops = p.source("shops").select("shop", "ts")
everything = shops.union(p.source("online").select("shop", "ts"))
keyed = everything.key_by("shop")
keyed.window(tumbling("1s")).aggregate("count(*) AS n").sink("per_second")
updated = keyed.window(tumbling("1s"), late="update", lateness="2s")
updated.aggregate("count(*) AS n", name="with_updates").sink("updated")
"""


@pytest.mark.parametrize("first", ["shops", "online"])
def test_a_union_of_an_injector_and_an_event_time_source_ends(tmp_path: Path, first: str):
    """It went on for ever; and what is late or no record is told. What is beyond a window's lateness does not
    count either if it comes in one batch with the record that made it late.
    """
    text = UNION if first == "shops" else UNION.replace('"shops"', '"x"').replace('"online"', '"shops"')
    (tmp_path / "both.py").write_text(text.replace('"x"', '"online"'))
    kinds = {"shops": "injector", "online": "event_time"}
    given: list[str] = []
    for name, watermark in kinds.items():
        spec = {
            "name": name,
            "partitions": 1,
            "columns": [["shop", "string"], ["ts", "bigint"]],
            "ts_column": "ts",
            "watermark": watermark,
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(spec))
        stamps = [*range(0, 10_000, 500), 100]  # the last one is 9.4 s late, where event times tell
        text = "".join(json.dumps({"shop": "a", "ts": ts}) + "\n" for ts in stamps)
        text += json.dumps({"shop": "a", "ts": 2**42}) + "\n" if name == "online" else ""  # from the future
        (tmp_path / f"{name}.ndjson").write_text(text)
        given += ["--category", f"{name}.json", "--input", f"{name}={name}.ndjson"]
    ran = ended(tmp_path, "run", "both.py", "--local", *given)
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    for sink in ("per_second", "updated"):
        values = [row["value"] for row in rows if row["category"] == sink]
        found = {value["window_start"]: value["n"] for value in values}
        assert found == {start: 4 + (start == 0) for start in range(0, 10_000, 1000)}, sink
    assert "both.by_shop: 43 records read, 1 late, 0 dropped, 1 dead letters, 0 waiting" in ran.stderr
    for job in ("aggregate", "with_updates"):
        assert f"both.{job}: 42 records read, 1 late, 1 dropped, 0 dead letters, 0 waiting" in ran.stderr
    assert "both.aggregate: 1 of 42 records were late and are in no result" in ran.stderr


def ended(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that ended well."""
    done = subprocess.run(
        command(*arguments),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done
