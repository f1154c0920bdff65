"""The peer's side of `bench.stateful`, part 3, on bytewax: run by its own interpreter, through `bytewax.run`.

Reads `<FOLDER>/<part>.csv` (user,ts), a part per process. There is no low watermark over all keys: a key's
own records are its clock, so what is measured is a little less than what Penstock does. State is snapshotted
into bytewax's own recovery store every second.
"""

from __future__ import annotations

import csv
import itertools
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import bytewax.operators as op
from bytewax.dataflow import Dataflow
from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from bytewax.outputs import DynamicSink, StatelessSinkPartition

WINDOW_MS, LATENESS_MS, LINES = 10_000, 1000, 1000


class Part(StatefulSourcePartition[tuple[str, int], int]):
    """One file."""

    def __init__(self, path: Path, done: int) -> None:
        self._done = done
        self._lines = itertools.islice(csv.reader(path.open()), done, None)

    def next_batch(self) -> list[tuple[str, int]]:
        rows = [(user, int(ts)) for user, ts in itertools.islice(self._lines, LINES)]
        if not rows:
            raise StopIteration
        self._done += len(rows)
        return rows

    def next_awake(self) -> datetime | None:
        return None

    def snapshot(self) -> int:
        return self._done


class Parts(FixedPartitionedSource[tuple[str, int], int]):
    """All files."""

    def list_parts(self) -> list[str]:
        return sorted(path.name for path in Path(os.environ["FOLDER"]).glob("*.csv"))

    def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> Part:
        return Part(Path(os.environ["FOLDER"]) / for_part, resume_state or 0)


class PerWindow(op.StatefulLogic[int, tuple[int, int], dict[int, int]]):
    """Counts one user's records per window; reports a window once it is over."""

    def __init__(self, counts: dict[int, int] | None) -> None:
        self._counts = counts or {}

    def on_item(self, value: int) -> tuple[list[tuple[int, int]], bool]:
        window = value // WINDOW_MS
        self._counts[window] = self._counts.get(window, 0) + 1
        low = value - LATENESS_MS
        over = [window for window in self._counts if (window + 1) * WINDOW_MS <= low]
        return [(window, self._counts.pop(window)) for window in over], self.RETAIN

    def on_eof(self) -> tuple[list[tuple[int, int]], bool]:
        return list(self._counts.items()), self.DISCARD

    def snapshot(self) -> dict[int, int]:
        return dict(self._counts)


class Nowhere(StatelessSinkPartition[Any]):
    """Throws results away."""

    def write_batch(self, items: list[Any]) -> None:
        pass


class Nothing(DynamicSink[Any]):
    """A `Nowhere` for each worker."""

    def build(self, step_id: str, worker_index: int, worker_count: int) -> Nowhere:
        return Nowhere()


flow = Dataflow("windows")
records = op.input("records", flow, Parts())
op.output("out", op.stateful("count", records, PerWindow), Nothing())
