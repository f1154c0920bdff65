"""Many producers and readers on one category, in several processes: nothing lost, doubled or out of order.

`python -m tests.streams.bus.stress --seconds 60` runs it on the embedded log and on Kafka.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa

from penstock.streams.bus.log import CategorySpec, Log
from penstock.streams.places import open_log

SPEC = CategorySpec(name="stress", partitions=4, columns=(("producer", "string"),))
PROCESSES, PRODUCERS, READERS = 5, 20, 10


def run(place: str, seconds: float, seed: int = 1) -> dict[str, int]:
    """Everything at once for some time, then a last look. AssertionError with what went wrong."""
    open_log(place).create(SPEC)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "pandas", "penstock.streams.bus.embedded.log"])
    started = []
    for number in range(PROCESSES):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(there, place, number, seconds, seed), daemon=True)
        process.start()
        there.close()
        started.append((process, here))
    sent: Counter[tuple[str, int]] = Counter()
    totals: Counter[str] = Counter()
    for process, here in started:
        said = here.recv()
        process.join()
        assert not said["errors"], said["errors"][0]
        sent.update(said["sent"])
        totals.update(said["totals"])
    seen = Follower(open_log(place))
    seen.read_on()
    assert seen.last == dict(sent), "what is there is not what was acknowledged"
    return {**totals, "records": sum(sent.values()), "producers": len({name for name, _ in sent})}


class Follower:
    """Reads every partition on and on; sequences of each producer must come one after another."""

    def __init__(self, log: Log) -> None:
        self._log, self._positions = log, dict.fromkeys(range(SPEC.partitions), 0)
        self.last: dict[tuple[str, int], int] = {}

    def read_on(self) -> int:
        """Up to the ends as they are now; returns how many records came."""
        count = 0
        for partition, end in enumerate(self._log.end_offsets(SPEC.name)):
            last_offset = self._positions[partition] - 1
            for offsets, batch in self._log.scan(SPEC.name, partition, self._positions[partition], end):
                assert offsets[0] > last_offset and offsets[-1] < end, "offsets ascend within the range"
                last_offset = int(offsets[-1])
                names, seqs = batch.column("producer").to_pylist(), batch.column("_seq").to_pylist()
                for name, seq in zip(names, seqs, strict=True):
                    expected = self.last.get((name, partition), 0) + 1
                    assert seq == expected, f"{name}[{partition}]: {seq} came, {expected} was next"
                    self.last[name, partition] = seq
                count += batch.num_rows
            self._positions[partition] = end
        return count


def _work(told: Connection, place: str, number: int, seconds: float, seed: int) -> None:
    said: dict[str, Any] = {"errors": [], "sent": {}, "totals": Counter()}
    log, until = open_log(place), time.monotonic() + seconds

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:  # whatever it is, the parent must hear it
            said["errors"].append(traceback.format_exc())

    def produce(name: str, rng: random.Random) -> None:
        last, epoch = dict.fromkeys(range(SPEC.partitions), 0), 1
        while time.monotonic() < until:
            batches = {
                p: _batch(name, last[p] + 1, rng.choice((1, 10, 300))) for p in rng.sample(range(4), 2)
            }
            if rng.random() < 0.1:
                epoch += 1
            for _ in range(rng.choice((1, 1, 2))):  # a repeat, as after a lost answer
                log.publish(SPEC.name, producer=name, epoch=epoch, batches=batches, gapless=True)
            said["totals"]["publishes"] += 1
            for partition, batch in batches.items():
                last[partition] += batch.num_rows
                said["sent"][name, partition] = last[partition]

    def read() -> None:
        follower = Follower(log)
        while time.monotonic() < until:
            said["totals"]["read"] += follower.read_on()

    threads = []
    for index in range(PRODUCERS // PROCESSES):
        name = f"p{number}-{index}"
        work = lambda name=name: produce(name, random.Random(f"{seed}{name}"))  # noqa: E731
        threads.append(threading.Thread(target=guarded, args=(work,)))
    threads += [threading.Thread(target=guarded, args=(read,)) for _ in range(READERS // PROCESSES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told.send(said)


def _batch(name: str, first: int, count: int) -> pa.RecordBatch:
    seqs = range(first, first + count)
    columns = [pa.array(seqs, pa.int64()), pa.array(seqs, pa.int64()), pa.nulls(count, pa.string())]
    columns += [pa.array([False] * count), pa.array([name] * count, pa.string())]
    return pa.RecordBatch.from_arrays(columns, schema=SPEC.schema())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print("embedded:", run(f"embedded:{folder}", arguments.seconds, arguments.seed), flush=True)
    from tests.kafka import NoBroker, kafka_server

    try:
        with kafka_server() as server:
            print("kafka:", run(server.new_place(), arguments.seconds, arguments.seed), flush=True)
    except NoBroker as reason:
        print(f"kafka: skipped: {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
