"""What keeping states between batches saves (MillWheel 8.3, Figure 16): time and rows read, by size.

One worker runs batch after batch over the same keys, through the whole step: it reads states, runs the
computation, commits states, offsets and lows in one fenced transaction. The cache holds nothing, a part, or
all. Two computations: one that changes the state of every key it sees, and one that mostly looks (a model per
key, changed by one record in ten), which is where a cache can save most. Sizes take turns batch by batch, so
that whatever else the machine does meets all of them. The bus is in memory: its time is not what is asked.

    python -m bench.state_cache
    python -m bench.state_cache --check --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table

from penstock.streams.bus.log import LOW_MIN, CategorySpec
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.dsl.computation import Computation, Context, Opaque, Record
from penstock.streams.rows.postgres import PostgresRows
from penstock.streams.rows.row_store import IntervalRef, RowStore, Snapshot
from penstock.streams.rows.sqlite import SqliteRows
from penstock.streams.step.stateful import ENTRY_BYTES, InputRange, StateCache, StatefulStep, open_interval

REF = IntervalRef(job="bench.model", job_birth="bench", partition=0, birth="bench")
GAIN_MIN = 1.2  # of the full cache over none, on PostgreSQL, where most states are only looked at
WARM_BATCHES = 2
KEY = "user {:07d}"


class Changes(Computation):
    """Every record changes its key's state."""

    share = 1
    model = Opaque()

    def process_record(self, record: Record, ctx: Context) -> None:
        if record.n % self.share == 0:
            ctx.state.model = record.n.to_bytes(8, "big") + ctx.state.model[8:].ljust(record.size, b"m")


class Looks(Changes):
    """One record in ten changes it."""

    share = 10


class CountedRows:
    """A row store that counts the states it gave."""

    def __init__(self, rows: RowStore) -> None:
        self._rows, self.states = rows, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def snapshot(self, ref: IntervalRef, *, keys: Iterable[str], **others: Any) -> Snapshot:
        found = self._rows.snapshot(ref, keys=keys, **others)
        self.states += len(found.states)
        return found


class Worker:
    """One interval with a cache of one size, on rows of its own."""

    def __init__(self, rows: RowStore, kind: type[Changes], args: argparse.Namespace, bytes_max: int) -> None:
        self.rows, self.args = CountedRows(rows), args
        self.times: list[float] = []
        log = MemoryLog()
        log.create(CategorySpec(name="in", partitions=1, columns=(("n", "bigint"), ("size", "bigint"))))
        self._birth = log.describe("in").birth
        self.rows.create(REF, offsets={self._birth: 0}, low=LOW_MIN)
        row = open_interval(
            ref=REF, generation=1, shard_epoch=1, producer_for=str, rows=rows, log=log, outputs=()
        )
        self._step = StatefulStep(
            ref=REF,
            token=row.token,
            rows=self.rows,  # type: ignore[arg-type]
            log=log,
            outputs=(),
            computation=kind(),
            cache=StateCache(bytes_max) if bytes_max else None,
        )

    def batch(self, number: int, *, counts: bool) -> None:
        """One micro-batch: a record of every key."""
        keys, start = self.args.keys, number * self.args.keys
        # The first batch gives every key its state.
        numbers = pa.array([0] * keys if number == 0 else range(number, number + keys))
        columns = {
            "_input": pa.array([0] * keys, pa.int8()),
            "_offset": pa.array(range(start, start + keys), pa.int64()),
            "_ts": pa.array([1] * keys, pa.int64()),
            "_key": pa.array([KEY.format(key) for key in range(keys)]),
            "_late": pa.array([False] * keys),
            "n": numbers,
            "size": pa.array([self.args.bytes] * keys, pa.int64()),
        }
        ranges = (InputRange(category="in", birth=self._birth, start=start, end=start + keys),)
        batches = [pa.RecordBatch.from_pydict(columns)]
        before, began = self.rows.states, time.perf_counter()
        report = self._step.run(ranges, batches, now_ms=1)
        took = time.perf_counter() - began
        assert report.committed and report.records == keys
        self.read = self.rows.states - before
        if counts:
            self.times.append(took)


@contextmanager
def stores(kind: str, folder: Path, count: int) -> Iterator[list[RowStore]]:
    """So many row stores, each empty."""
    if kind == "sqlite":
        yield [SqliteRows(folder / f"rows{number}") for number in range(count)]
        return
    from tests.postgres import postgres_server

    with postgres_server(on_disk=True) as server:
        yield [PostgresRows(server.new_database()) for _ in range(count)]


def measure(kind: str, work: type[Changes], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every size of the cache on one kind of rows."""
    whole = args.keys * (ENTRY_BYTES + len(KEY.format(0)) + args.bytes + 64)
    sizes = {"none": 0, "half": whole // 2, "all": whole}
    with tempfile.TemporaryDirectory() as folder, stores(kind, Path(folder), len(sizes)) as made:
        workers = {
            name: Worker(rows, work, args, size)
            for rows, (name, size) in zip(made, sizes.items(), strict=True)
        }
        order = list(workers.values())
        for number in range(WARM_BATCHES + args.batches):
            for worker in order[number % len(order) :] + order[: number % len(order)]:
                worker.batch(number, counts=number >= WARM_BATCHES)
        states = [found_states(worker.rows, args.keys) for worker in order]
        assert states[0] == states[1] == states[2], "the cache changed a result"
    none = statistics.median(workers["none"].times)
    return [
        {
            "rows": kind,
            "work": work.__name__.lower(),
            "cache": name,
            "cache_mb": round(sizes[name] / 2**20, 1),
            "batch_ms": round(statistics.median(worker.times) * 1000, 1),
            "batch_ms_low": round(min(worker.times) * 1000, 1),
            "batch_ms_high": round(max(worker.times) * 1000, 1),
            "states_read": worker.read,
            "gain": round(none / statistics.median(worker.times), 2),
        }
        for name, worker in workers.items()
    ]


def found_states(rows: Any, keys: int) -> dict[str, bytes]:
    """All that is stored in the end."""
    token = rows.peek(REF).token
    found = rows.snapshot(
        REF, token=token, keys=[KEY.format(key) for key in range(keys)], timers_up_to=LOW_MIN
    )
    return dict(found.states)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=5000)
    parser.add_argument("--bytes", type=int, default=1000, help="of each state")
    parser.add_argument("--batches", type=int, default=15)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = [
        line
        for kind in ("sqlite", "postgres")
        for work in (Changes, Looks)
        for line in measure(kind, work, args)
    ]
    table = Table(title=f"{args.keys} keys of {args.bytes} bytes in every batch, {args.batches} batches")
    for name in ("rows", "work", "cache", "MiB", "ms per batch", "from", "to", "states read", "gain"):
        table.add_column(name, justify="left" if name in ("rows", "work", "cache") else "right")
    for line in found:
        table.add_row(*(str(value) for value in line.values()))
    Console().print(table)
    full = next(
        line for line in found if (line["rows"], line["work"], line["cache"]) == ("postgres", "looks", "all")
    )
    is_met = full["gain"] >= GAIN_MIN
    if args.json:
        print(json.dumps({"measured": found, "gain": full["gain"], "gain_min": GAIN_MIN, "is_met": is_met}))
    if args.check and not is_met:
        print(f"the full cache is {full['gain']} times as fast as none, not {GAIN_MIN}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
