"""Processes that publish to an embedded log and tell what was acknowledged; tests kill them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.streams.bus.embedded.log import EmbeddedLog
from penstock.streams.bus.log import CategorySpec

SPEC = CategorySpec(name="clicks", partitions=2, columns=(("note", "string"),))
SMALL, LARGE = "x", "x" * 4000  # ten records of it lie in the index, or in a file of their own


def records(first: int, last: int, note: str = SMALL) -> pa.RecordBatch:
    seqs = range(first, last + 1)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(seqs, pa.int64()),
            pa.array(seqs, pa.int64()),
            pa.array([None] * len(seqs), pa.string()),
            pa.array([False] * len(seqs), pa.bool_()),
            pa.array([note] * len(seqs), pa.string()),
        ],
        schema=SPEC.schema(),
    )


def publish(log: EmbeddedLog, producer: str, first: int, last: int, note: str = SMALL, epoch: int = 1):
    """The same records to both partitions."""
    batch = records(first, last, note)
    return log.publish(
        "clicks", producer=producer, epoch=epoch, batches={0: batch, 1: batch.slice(0)}, gapless=True
    )


def stored(log: EmbeddedLog, partition: int) -> list[int]:
    end = log.end_offsets("clicks")[partition]
    return [
        seq for batch in log.read("clicks", partition, 0, end) for seq in batch.column("_seq").to_pylist()
    ]


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "clicks").glob("*.arrow")}


def start(target: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """A process from a small server that has everything imported: no test waits for imports twice."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "pandas", "penstock.streams.bus.embedded.log"])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    return process, here


def heard(connection: Connection) -> list[int]:
    """Everything the process said before it ended."""
    said = []
    try:
        while True:
            said.append(connection.recv())
    except EOFError:
        connection.close()
        return said


def publish_forever(told: Connection, folder: Path, producer: str) -> None:
    """Ten records at a time, small and large in turn, from the first unsure one; tells the last acknowledged."""
    log = EmbeddedLog(folder)
    # One batch back: a successor repeats what its predecessor was not sure of.
    begin = max(1, log.published_to("clicks", producer).get(0, 0) - 9)
    for first in count(begin, 10):
        publish(log, producer, first, first + 9, LARGE if first // 10 % 2 else SMALL)
        told.send(first + 9)


def publish_some(told: Connection, folder: Path, producer: str, batches: int) -> None:
    log = EmbeddedLog(folder)
    log.create(SPEC)
    for number in range(batches):
        publish(log, producer, number * 10 + 1, number * 10 + 10, LARGE if number % 3 == 0 else SMALL)
        told.send(number * 10 + 10)


def create(told: Connection, folder: Path, go: Path) -> None:
    while not go.exists():
        pass
    told.send(EmbeddedLog(folder).create(SPEC).birth)


def work_until(told: Connection, folder: Path, exit_at: int) -> None:
    """Every kind of effect once; the process vanishes at the `exit_at`-th point. Tells the acknowledged sequences."""
    points = count()

    def fault(point: str) -> None:
        if next(points) == exit_at:
            os._exit(9)

    log = EmbeddedLog(folder, fault=fault)
    do_work(log, told.send)
    told.send(-1)


def do_work(log: EmbeddedLog, acknowledged: Callable[[int], None], epoch: int = 1) -> None:
    """May be repeated under a higher epoch, on whatever a crash left."""
    log.create(SPEC)
    log.register_producer("clicks", "a")
    publish(log, "a", 1, 10, epoch=epoch)
    acknowledged(10)
    publish(log, "a", 11, 20, LARGE, epoch=epoch)
    acknowledged(20)
    log.report_low("clicks", producer="a", epoch=epoch, low=5, now_ms=0)
    publish(log, "a", 15, 30, LARGE, epoch=epoch)
    acknowledged(30)
    log.fence("clicks", "b", 3)
    publish(log, "a", 25, 30, epoch=epoch + 1)
    log.report_low("clicks", producer="a", epoch=epoch + 1, low=9, now_ms=1000)
    log.clean(now_ms=0, older_than_ms=0)
