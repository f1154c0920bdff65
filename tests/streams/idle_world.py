"""Jobs that copy an event-time source, interval by interval, through the real reader and step: no Spark."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from penstock.jobs.tasks import stateless_producer
from penstock.streams.bus.log import LOW_MIN, CategorySpec, Log, partitions_of
from penstock.streams.dsl.injector import Injector
from penstock.streams.places import open_log, open_rows
from penstock.streams.rows.row_store import IntervalRef
from penstock.streams.spark.worker import run_interval
from penstock.streams.step.reading import read_ranges
from penstock.streams.step.step import OutputSpec, OwnedInterval, input_of
from tests.streams.descriptors import a_descriptor

COLUMNS = (("q", "string"), ("ts", "bigint"))
DEAD_COLUMNS = (
    ("reason", "string"), ("value", "binary"), ("source_partition", "int"), ("source_offset", "bigint"),
)  # fmt: skip


def key_of(partition: int, partitions: int) -> str:
    """A key whose records go to this partition."""
    keys = [f"k{number}" for number in range(64)]
    targets = partitions_of(pa.array(keys), partitions)
    return next(key for key, target in zip(keys, targets, strict=True) if target == partition)


@dataclass(slots=True)
class Source:
    """A category of JSON records on a bus on disk, and who writes it."""

    folder: Path
    idle_after_ms: int = 1000
    ahead_max_ms: int = 0
    partitions: int = 2
    lives: int = 0  # of its injector

    @property
    def log(self) -> Log:
        return open_log(f"embedded:{self.folder / 'bus'}")

    def build(self) -> Source:
        self.log.create(
            CategorySpec(
                name="in",
                partitions=self.partitions,
                columns=COLUMNS,
                format="json",
                watermark="event_time",
                lateness_ms=0,
                ts_column="ts",
                idle_after_ms=self.idle_after_ms,
                ahead_max_ms=self.ahead_max_ms,
            )
        )
        return self

    def publish(self, partition: int, *stamps: int) -> None:
        self.lives += 1
        injector = Injector(self.log, "in", "me", epoch=self.lives)
        values = [json.dumps({"q": "x", "ts": ts}).encode() for ts in stamps]
        keys = [key_of(partition, self.partitions)] * len(stamps)
        injector.publish(keys, [0] * len(stamps), values)


class Copier:
    """One job: each step reads what is there of one partition, at most so many records, and copies it."""

    def __init__(self, source: Source, name: str) -> None:
        self.source, self.name, self.rows_place = source, name, f"sqlite:{source.folder / 'rows'}"
        log, self.rows = source.log, open_rows(f"sqlite:{source.folder / 'rows'}")
        self.birth = log.describe("in").birth
        self.outputs = (
            self._output("out", name, COLUMNS),
            self._output("dead", f"{name}.dead", DEAD_COLUMNS),
        )
        for partition in range(source.partitions):
            self.rows.create(self.ref(partition), offsets={self.birth: 0}, low=LOW_MIN)
            log.register_producer(name, self.producer(partition))

    def _output(self, stream: str, category: str, columns: tuple[tuple[str, str], ...]) -> OutputSpec:
        made = self.source.log.create(CategorySpec(name=category, partitions=1, columns=columns))
        return OutputSpec(
            stream=stream,
            category=category,
            birth=made.birth,
            partitions=1,
            columns=columns,
            watermarked=stream == "out",
        )

    def ref(self, partition: int) -> IntervalRef:
        return IntervalRef(
            job=self.name, job_birth=self.name, partition=partition, birth=f"{self.name}{partition}"
        )

    def producer(self, partition: int) -> str:
        return stateless_producer(self.name, self.birth, partition)

    def step(self, partition: int, *, now_ms: int, most: int = 10**6) -> None:
        """A new owner each time: nothing is remembered between steps but what is durable."""
        log, ref = self.source.log, self.ref(partition)
        row = self.rows.acquire(ref, generation=1, shard_epoch=1)
        interval = OwnedInterval(ref=ref, token=row.token, producers={self.birth: self.producer(partition)})
        task = a_descriptor(
            bus=f"embedded:{self.source.folder / 'bus'}",
            rows=self.rows_place,
            intervals=(interval,),
            inputs=(input_of(log.describe("in")),),
            outputs=self.outputs,
        )
        start = row.offsets[self.birth]
        end = min(log.end_offsets("in")[partition], start + most)
        batches = read_ranges(
            task=task, interval=interval, spans={self.birth: (start, end)}, log=log, rows=self.rows
        )
        run_interval(task, batches, now_ms=now_ms)

    def low(self, partition: int) -> int:
        return self.rows.peek(self.ref(partition)).input_low

    def copied(self) -> list[tuple[int, bool]]:
        """(event time, is late) of what came out, by time."""
        log = self.source.log
        batches = log.read(self.name, 0, 0, log.end_offsets(self.name)[0])
        return sorted((row["_ts"], row["_late"]) for batch in batches for row in batch.to_pylist())

    def dead(self) -> list[str]:
        log = self.source.log
        batches = log.read(f"{self.name}.dead", 0, 0, log.end_offsets(f"{self.name}.dead")[0])
        return [row["reason"] for batch in batches for row in batch.to_pylist()]
