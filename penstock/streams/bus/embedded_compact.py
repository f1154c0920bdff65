"""Small publishes lie in the index itself; here many of them become one file, without a moment in which a
reader sees them twice or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa

from penstock.core.errors import PenstockError
from penstock.streams.bus import log_index, log_retention
from penstock.streams.bus.embedded_publish import give_up
from penstock.streams.bus.log_index import Entry, LogIndex
from penstock.streams.bus.segments import encode, read_batch, segment_path, write_segment

COMPACT_FROM = 256  # fewer small runs are not worth a file
RUNS_MAX, ROWS_MAX = 2_000, 50_000  # of one partition in one file


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of one partition that follow each other and all lie in the index."""

    entries: tuple[Entry, ...]

    @property
    def rows(self) -> int:
        """How many records they hold."""
        return sum(entry.rows for entry in self.entries)


def compact_category(index: LogIndex, schema: pa.Schema, fault: Callable[[str], None]) -> int:
    """Move runs from the index into one file per round, until few are left; returns how many were moved."""
    moved = 0
    while True:
        with index.reading() as connection:
            groups = find_groups(log_retention.load_inline(connection))
        if sum(len(group.entries) for group in groups.values()) < COMPACT_FROM:
            return moved
        done = _compact(index, schema, groups, fault)
        if not done:
            return moved  # somebody truncated in between: the next round of the cleaner tries again
        moved += done


def find_groups(entries: list[Entry]) -> dict[int, Group]:
    """The first group of each partition that is worth it: at least two runs. `entries` ascend."""
    found: dict[int, list[Entry]] = {}
    done: dict[int, Group] = {}
    for entry in entries:
        runs = found.setdefault(entry.partition, [])
        if entry.partition in done:
            continue
        follows = bool(runs) and runs[-1].first + runs[-1].rows == entry.first
        is_full = len(runs) == RUNS_MAX or sum(run.rows for run in runs) + entry.rows > ROWS_MAX
        if runs and (not follows or is_full):
            if len(runs) > 1:
                done[entry.partition] = Group(tuple(runs))
                continue
            runs.clear()
        runs.append(entry)
    for partition, runs in found.items():
        if partition not in done and len(runs) > 1:
            done[partition] = Group(tuple(runs))
    return done


def _compact(
    index: LogIndex, schema: pa.Schema, groups: Mapping[int, Group], fault: Callable[[str], None]
) -> int:
    encoded = encode(schema, {partition: _whole(index, schema, group) for partition, group in groups.items()})
    with index.writing("register") as connection:
        segment = log_index.register_segment(connection, encoded.bytes)
    try:
        write_segment(segment_path(index.folder, segment), encoded, fault)
    except PenstockError:
        with suppress(PenstockError):  # then the cleaner does it
            give_up(index, segment)
        raise
    with index.writing("compact") as connection:
        is_same = all(log_retention.has_runs(connection, group.entries) for group in groups.values())
        if is_same and log_index.show_segment(connection, segment):
            for partition, group in groups.items():
                log_retention.replace_runs(connection, group.entries, segment, encoded.places[partition])
            return sum(len(group.entries) for group in groups.values())
    give_up(index, segment)
    return 0


def _whole(index: LogIndex, schema: pa.Schema, group: Group) -> pa.RecordBatch:
    batches = [
        read_batch(
            schema, entry.place, path=segment_path(index.folder, entry.segment), inline=entry.payload
        ).slice(entry.skip, entry.rows)
        for entry in group.entries
    ]
    (batch,) = pa.Table.from_batches(batches, schema=schema).combine_chunks().to_batches()
    return batch
