"""Claims about states that workers keep on Spark, which gives the batches of an interval to them in turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.jobs.config import JobConfig
from penstock.streams.data_plane import intervals_of
from penstock.streams.step.stateful import FilePosition, SharedChanges
from tests.spark.test_tasks import CATEGORY, publish
from tests.support.stage import Stage, wait_for

PIPELINE = """
from penstock import Computation, Pipeline, Value


class Running(Computation):
    outputs = {"out": {"query": "string", "n": "bigint"}}
    n = Value(int)

    def process_record(self, record, ctx):
        ctx.state.n += 1
        ctx.produce({"query": ctx.key, "n": ctx.state.n})


p = Pipeline("news", partitions=2)
p.source("queries").key_by("query", name="keyed").process(Running, name="running").sink("news_out")
"""
KEYS, ROUNDS, WORKERS_MAX = 40, 30, 6


def test_a_state_is_read_once_by_each_worker_whoever_gets_the_batches(spark: Any, tmp_path: Path):
    from pyspark import SparkFiles

    path = tmp_path / "news.py"
    path.write_text(PIPELINE)
    stage = Stage(spark, tmp_path, path, CATEGORY)
    injector = stage.injector("queries")
    ids = [task for job in stage.configs for task in stage.start(job)]
    for number in range(ROUNDS):
        stamps = range(number * KEYS, (number + 1) * KEYS)
        values = ({"query": f"q{ts % KEYS}", "lang": "en", "ts": ts} for ts in stamps)
        records = [(str(row["ts"]), row["ts"], json.dumps(row).encode()) for row in values]
        publish(stage, records, injector, now_ms=1000 * number)
        done = KEYS * (number + 1)
        wait_for(lambda done=done: sum(stage.log.end_offsets("news_out")) == done, f"{done} results")
    stage.stop(ids)
    counts = sorted(row["n"] for row in stage.records("news_out"))
    assert counts == sorted(list(range(1, ROUNDS + 1)) * KEYS)

    news = SharedChanges(Path(SparkFiles.getRootDirectory()) / "penstock-news", 2**24)
    job = "news.running"
    refs = list(intervals_of(job, stage.birth(job), JobConfig.from_stored(stage.configs[job])))
    changes = [change for ref in refs for change in news.read_after(ref, FilePosition())[0]]
    assert len(refs) == 2 and len(changes) >= 2 * ROUNDS
    read = sum(change.read for change in changes)
    written = sum(len(change.states) for change in changes)
    print(f"{read} states were read from the rows, {written} were written")
    assert written == KEYS * ROUNDS
    assert KEYS <= read <= KEYS * WORKERS_MAX, "each worker reads a state once, and then hears of it"
