"""The first batch of a session, run before anything else may use it.

A tiny stateless task over a category of its own. It loads what every task needs, from the source to the step:
in a cold JVM that takes seconds. And it runs alone: all queries of a session share the environment of the
registered source, an unguarded map into which Spark puts four names when the first reader starts. Of two
queries that start together, one may change the map while the other's tasks are being written, and they can
not be read again (`OptionalDataException`). Later starts put the same names, which changes no structure.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from pyspark.sql import SparkSession

from penstock.core.system_clock import sleep_ms
from penstock.streams.bus.log import LOW_MIN, CategorySpec
from penstock.streams.engine.query import start_query
from penstock.streams.injector import Injector
from penstock.streams.places import open_log, open_rows
from penstock.streams.rows.row_store import IntervalRef
from penstock.streams.step import OutputSpec, open_interval
from penstock.streams.task import Input, OwnedInterval, TaskDescriptor

COLUMNS = (("word", "string"), ("ts", "bigint"))
SOURCE = CategorySpec(
    name="in", partitions=1, columns=COLUMNS, format="json", watermark="injector", ts_column="ts"
)
TARGET = CategorySpec(name="out", partitions=2, columns=(("word", "string"),))
PLAN = {
    "stages": [
        {"op": "filter", "expr": "length(trim(word)) > 0"},
        {"op": "select", "columns": [["word", "lower(trim(word))", "string"]]},
    ],
    "key": "word",
}


def warm_up(session: SparkSession, folder: Path) -> None:
    """Run one batch with records in it. `folder` is used for it and removed."""
    shutil.rmtree(folder, ignore_errors=True)
    task = _prepare(folder)
    query = start_query(session, task, checkpoint=folder / "checkpoint" / "spark", trigger_ms=100)
    while query.isActive and query.lastProgress is None:
        sleep_ms(50)
    query.stop()
    shutil.rmtree(folder, ignore_errors=True)


def _prepare(folder: Path) -> TaskDescriptor:
    bus, place = f"embedded:{folder / 'bus'}", f"sqlite:{folder / 'rows'}"
    log, rows = open_log(bus), open_rows(place)
    source, target = log.create(SOURCE), log.create(TARGET)
    ref = IntervalRef(job="warm-up", job_birth="warm-up", partition=0, birth="warm-up")
    output = OutputSpec(
        stream="out", category="out", birth=target.birth, partitions=2, columns=TARGET.columns
    )
    rows.create(ref, offsets={source.birth: 0}, low=LOW_MIN)
    log.register_producer("out", "warm-up")
    row = open_interval(
        ref=ref,
        generation=1,
        shard_epoch=1,
        producer_for=lambda birth: "warm-up",
        rows=rows,
        log=log,
        outputs=(output,),
    )
    Injector(log, "in", "warm-up", epoch=1).publish(
        ["a", "b"], [1, 2], [b'{"word": " One ", "ts": 1}', b'{"word": "two", "ts": 2}']
    )
    return TaskDescriptor(
        task_id="warm-up/0",
        job="warm-up",
        kind="stateless",
        bus=bus,
        rows=place,
        intervals=(OwnedInterval(ref=ref, token=row.token, producers={source.birth: "warm-up"}),),
        inputs=(
            Input(
                category="in",
                birth=source.birth,
                columns=COLUMNS,
                format="json",
                watermark="injector",
                lateness_ms=0,
                ts_column="ts",
                partitions=SOURCE.partitions,
            ),
        ),
        outputs=(output,),
        plan=PLAN,
        package_hash="",
        package_folder="",
        package_entry="",
    )
