"""`penstock state` against a control plane: real rows, every form, pages, files that are whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from penstock.jobs.tasks import interval_birth
from penstock.streams.bus.log import partition_of
from penstock.streams.dsl.computation import StateCodec, Value
from penstock.streams.places import open_rows
from penstock.streams.rows.row_store import Changes, IntervalRef, TimerRow
from tests.cli.world import COUNT, PARSE, Run, World
from tests.waiting import until

CODEC = StateCodec("CountPerSecond", {"counts": Value(dict[int, int])})
PARTITIONS = 6


@pytest.fixture
def kept(world: World) -> World:
    """The Zeitgeist pipeline with the state of twenty queries, owned by a task."""
    until(lambda: all(view.is_in_sync for view in world.plane.jobs.every_view()))
    for partition in range(PARTITIONS):
        rows, ref = open_rows(world.plane.settings.rows_place), interval(world, partition)
        row = rows.acquire(ref, generation=1, shard_epoch=1)
        keys = [f"query {n}" for n in range(20) if partition_of(f"query {n}", PARTITIONS) == partition]
        states = {key: CODEC.encode(CODEC.live_type(counts={1: 4})) for key in keys}
        timers = tuple(TimerRow(key=key, tag="1", at_ms=2000, hold_ms=1999) for key in keys)
        changes = Changes(states=states, timers_set=timers)
        rows.commit(ref, token=row.token, version=row.version, changes=changes)
    return world


def interval(world: World, partition: int) -> IntervalRef:
    running = world.plane.jobs.view(COUNT).running
    assert running is not None and running.config.partitions == PARTITIONS
    birth = interval_birth(running.birth, "stateful", running.config.lineage, partition)
    return IntervalRef(job=COUNT, job_birth=running.birth, partition=partition, birth=birth)


def test_state_is_shown_in_every_form_and_nobody_notices(kept: World, run: Run, tmp_path: Path):
    rows = open_rows(kept.plane.settings.rows_place)
    before = [rows.peek(interval(kept, partition)) for partition in range(PARTITIONS)]
    at = ("--folder", kept.folder)
    found = run("state", "get", COUNT, "query 7", *at, "-o", "json").json
    assert found["states"][0]["state"] == {"counts": {"1": 4}} and found["timers"][0]["tag"] == "1"
    said = run("state", "get", COUNT, "query 7", *at).text
    assert '"counts"' in said and "low watermark" in said and "version" in said

    pages, after = [], ""
    while after is not None:
        asked = ("state", "scan", COUNT, "--limit", "3", *at, "-o", "yaml")
        page = yaml.safe_load(run(*asked, *(("--after", after) if after else ())).out)
        pages += [item["key"] for item in page["states"]]
        after = page["next"]
    assert sorted(pages) == sorted(f"query {n}" for n in range(20))
    said = run("state", "scan", COUNT, "--prefix", "query 1", "--limit", "2", *at).text
    assert "next page: --after '[" in said and "query 2" not in said

    due = run("state", "timers", COUNT, *at, "-o", "json").json
    assert len(due["timers"]) == 20 and due["next"] is None
    assert len(run("state", "timers", COUNT, "--key", "query 3", *at, "-o", "json").json["timers"]) == 1

    lines, table = tmp_path / "kept.jsonl", tmp_path / "kept.parquet"
    assert run("state", "export", COUNT, lines, *at, "-o", "json").json["states"] == 20
    assert "20 states" in run("state", "export", COUNT, table, *at).text
    exported = [json.loads(line) for line in lines.read_text().splitlines()]
    rows_of_table = pq.read_table(table).to_pylist()
    assert [(r["partition"], r["version"], r["key"], json.loads(r["state"])) for r in rows_of_table] == [
        (line["partition"], line["version"], line["key"], line["state"]) for line in exported
    ]
    assert before == [rows.peek(interval(kept, partition)) for partition in range(PARTITIONS)]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith((".", "kept"))) == [
        "kept.jsonl",
        "kept.parquet",
    ]


def test_wrong_input_is_refused_in_three_parts(kept: World, run: Run, tmp_path: Path):
    at = ("--folder", kept.folder)
    assert "stores nothing for the key" in run("state", "get", COUNT, "nobody", *at).is_refused(3)
    assert "no job" in run("state", "get", "no.job", "k", *at).is_refused(3)
    assert "has no state" in run("state", "scan", PARSE, *at).is_refused()
    assert "not the position" in run("state", "scan", COUNT, "--after", "query 1", *at).is_refused()
    assert "not the position" in run("state", "timers", COUNT, "--after", '[1,"x"]', *at).is_refused()
    taken = tmp_path / "taken.jsonl"
    taken.write_text("mine")
    assert "exists already" in run("state", "export", COUNT, taken, *at).is_refused()
    assert taken.read_text() == "mine"
    assert "not a known format" in run("state", "export", COUNT, tmp_path / "kept.csv", *at).is_refused()
    assert "no folder" in run("state", "export", COUNT, tmp_path / "no" / "kept.jsonl", *at).is_refused()
    assert "has no state" in run("state", "export", PARSE, tmp_path / "none.jsonl", *at).is_refused()
    assert not (tmp_path / "none.jsonl").exists()
