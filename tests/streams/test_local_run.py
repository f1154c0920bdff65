"""What `penstock run --local` does before and behind Spark: inputs that end, defaults of files, what it tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.runs import read_specs
from penstock.core.errors import ConfigError
from penstock.core.system_clock import SystemClock
from penstock.server.bodies import NewCategoryBody
from penstock.streams.bus.log import LATENESS_MS, LOW_MAX, CategorySpec
from penstock.streams.inspect.record_lines import Lines
from penstock.streams.local_run import JobSummary, LocalFolder, LocalRun, notes_for
from penstock.testing import PipelineRun
from tests.contracts.buses import assert_three_parts

JOIN = """
from penstock import Pipeline

p = Pipeline("pairs", partitions=2)
clicks = p.source("clicks").key_by("shop", name="left")
clicks.join(p.source("orders").select("shop", "ts AS ordered").key_by("shop", name="right"), within=("10s", "10s")).sink("both")
"""


def a_category(name: str, **more: Any) -> dict[str, Any]:
    columns = [["shop", "string"], ["ts", "bigint"]]
    return {"name": name, "partitions": 1, "columns": columns, "ts_column": "ts", **more}


def written(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def lines(*stamps: int, shop: str = "a") -> str:
    return "".join(json.dumps({"shop": shop, "ts": ts}) + "\n" for ts in stamps)


# One default of the lateness


def test_a_category_without_a_lateness_has_the_same_one_wherever_it_is_described(tmp_path: Path):
    (of_file,) = read_specs([written(tmp_path, "clicks.json", a_category("clicks"))])
    of_api = NewCategoryBody(name="clicks", partitions=1, columns=[("shop", "string")])
    of_python = CategorySpec(name="clicks", partitions=1, columns=(), watermark="event_time")
    assert [of_file.lateness_ms, of_api.lateness_ms, of_python.lateness_ms] == [LATENESS_MS] * 3
    assert CategorySpec(name="out", partitions=1, columns=()).lateness_ms == 0  # what jobs write is not late
    (said,) = read_specs([written(tmp_path, "said.json", a_category("clicks", lateness_ms=0))])
    assert said.lateness_ms == 0


@pytest.mark.parametrize(("said", "rows", "dropped"), [({}, 100, 0), ({"lateness_ms": 0}, 64, 36)])
def test_a_join_of_files_without_a_lateness_loses_nothing(
    tmp_path: Path, said: dict[str, int], rows: int, dropped: int
):
    """Before, a category file without a lateness meant 0: 36 of these 100 pairs were dropped without a word."""
    specs = [
        written(tmp_path, f"{name}.json", {"watermark": "event_time", **a_category(name, **said)})
        for name in ("clicks", "orders")
    ]
    run = PipelineRun(written(tmp_path, "pairs.py", JOIN), *specs)
    with run.batch():
        for n in range(100):
            run.record("clicks", n * 1000, shop=f"s{n}")
            if n % 25 < 9:  # half a second before it another one came
                run.record("orders", n * 1000 + 500, shop="other")
            run.record("orders", n * 1000, shop=f"s{n}")
    run.close()
    assert len(run.outputs("both")) == rows
    counters = [run.trial.rows.peek(job.ref(p)).counters for job in run.trial.jobs.values() for p in range(2)
                if job.config["kind"] == "stateful"]  # fmt: skip
    assert sum(found.get("dropped", 0) for found in counters) == dropped


# The end of files


def a_run(folder: Path, *categories: dict[str, Any], is_kept: bool) -> LocalRun:
    run = LocalRun(LocalFolder(folder=folder), SystemClock(), is_kept=is_kept)
    run.create(read_specs([written(folder, f"{item['name']}.json", item) for item in categories]))
    return run


@pytest.mark.parametrize(
    ("watermark", "is_kept", "close", "ends"),
    [
        ("event_time", False, True, True),
        ("event_time", True, True, False),  # the next run in this folder may bring more
        ("event_time", False, False, False),  # --follow
        ("injector", False, True, True),
        ("injector", True, True, True),
    ],
)
def test_the_input_ends_with_its_files_where_nothing_can_follow(
    tmp_path: Path, watermark: str, is_kept: bool, close: bool, ends: bool
):
    run = a_run(tmp_path, a_category("clicks", watermark=watermark), is_kept=is_kept)
    files = [str(written(tmp_path, name, lines(ts))) for name, ts in (("one.ndjson", 5), ("two.ndjson", 3))]
    assert run.publish("clicks", files, Lines.VALUE, close=close) == 2
    assert (run.log.watermark("clicks") >= LOW_MAX) == ends


def test_a_file_behind_the_end_of_its_input_is_refused_and_the_same_file_is_not(tmp_path: Path):
    one = str(written(tmp_path, "one.ndjson", lines(5)))
    two = str(written(tmp_path, "two.ndjson", lines(9)))
    category = a_category("clicks", watermark="injector")
    assert a_run(tmp_path, category, is_kept=True).publish("clicks", [one], Lines.VALUE, close=True) == 1
    again = a_run(tmp_path, category, is_kept=True)
    assert again.publish("clicks", [one], Lines.VALUE, close=True) == 0
    with pytest.raises(ConfigError, match="has ended") as caught:
        again.publish("clicks", [one, two], Lines.VALUE, close=True)
    assert_three_parts(caught.value)
    assert again.log.end_offsets("clicks") == (1,)


# What it tells


def test_a_run_without_losses_has_nothing_to_remark():
    assert list(notes_for([JobSummary(job="a", records=7, late=2)], ["clicks"], is_kept=True)) == []


def test_all_that_is_lost_or_has_yet_to_come_is_told_with_its_number_and_what_to_do():
    job = JobSummary(
        job="a", records=100, late=40, dropped=36, dead_letters=5, waiting=4, wall_timers=3, open_keys=2
    )
    assert job.line == "a: 100 records read, 40 late, 36 dropped, 5 dead letters, 4 waiting"
    late, dead, waiting, windows, timers = notes_for([job], ["clicks"], is_kept=True)
    assert "36 of 100 records" in late and "lateness_ms" in late
    assert "5 records are dead letters" in dead and "4 records are unread" in waiting
    assert "2 keys" in windows and "clicks has not ended (with --folder it stays open" in windows
    assert "3 wall timers" in timers and "--follow" in timers
