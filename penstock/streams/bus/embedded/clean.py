"""What dead publishers and creators leave on the embedded log, and how it goes without hurting live ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from penstock.core.clock import Millis
from penstock.core.errors import PenstockError
from penstock.streams.bus.embedded import index as log_index
from penstock.streams.bus.embedded import retention as log_retention
from penstock.streams.bus.embedded.index import Entry, LogIndex
from penstock.streams.bus.embedded.publish import give_up, remove_file
from penstock.streams.bus.embedded.segments import (
    SUFFIX,
    encode,
    read_batch,
    segment_path,
    translated,
    write_segment,
)
from penstock.streams.bus.log import CategorySpec
from penstock.streams.bus.retention_age import count_on, is_note_due

# Prefix of a category that is still being made; no category's name starts with a dot.
UNFINISHED = ".new-"


def clean_category(index: LogIndex, *, now_ms: Millis, older_than_ms: Millis) -> int:
    """Remove pending files that were first seen `older_than_ms` ago, and files without a row."""
    with translated(index.folder):
        # Files are listed before the index is read: a file is announced before it is written, so one without
        # a row has lost it for good, whatever its publisher still does.
        there = [int(path.stem) for path in index.folder.glob(f"*{SUFFIX}") if path.stem.isdigit()]
        with index.reading() as connection:
            found = log_index.load_pending(connection)
            known = log_index.known_segments(connection, there)
        pending = {one: now_ms if at is None else at for one, at in found.items()}
        if any(at is None or at > now_ms for at in found.values()):
            with index.writing("see") as connection:
                log_index.see_pending(connection, now_ms)
        removed = 0
        for segment, seen_ms in pending.items():
            if now_ms - seen_ms >= older_than_ms:
                removed += give_up(index, segment)
        for segment in there:
            if segment not in known:
                remove_file(index, segment)
                removed += 1
        return removed


def truncate_category(index: LogIndex, before: Mapping[int, int]) -> int:
    """Let records below these offsets go; returns how many segments went with them."""
    with index.writing("truncate") as connection:
        gone = log_retention.truncate(connection, before)
    for segment in gone:  # after the commit: a file that stays behind is garbage to the next cleaner
        remove_file(index, segment)
    return len(gone)


def expire_category(index: LogIndex, spec: CategorySpec, *, boot_id: str, now_ms: Millis) -> int:
    """Let records go that have been here longer than the category keeps them."""
    if not spec.retention_ms:
        return 0
    with index.reading() as connection:
        last = log_retention.load_reading(connection)
        now = count_on(last, boot_id=boot_id, boot_ms=now_ms)
        oldest_ms = now.counted_ms - spec.retention_ms
        before = {} if last is None else log_retention.find_expired(connection, oldest_ms)
    gone = truncate_category(index, before) if before else 0
    if is_note_due(last, now, retention_ms=spec.retention_ms):
        with index.writing("note") as connection:
            last = log_retention.load_reading(connection)  # another cleaner may have been faster
            now = count_on(last, boot_id=boot_id, boot_ms=now_ms)
            if is_note_due(last, now, retention_ms=spec.retention_ms):
                log_retention.note_ends(connection, now)
    return gone


def clean_unfinished(folder: Path, seen: dict[str, Millis], *, now_ms: Millis, older_than_ms: Millis) -> int:
    """Remove categories that were never finished and that this cleaner saw `older_than_ms` ago.

    `seen`: what it knows of them, by their names, from one call to the next.
    """
    removed = 0
    with translated(folder):
        there = {path.name: path for path in folder.glob(f"{UNFINISHED}*")}
    for name in set(seen) - set(there):
        del seen[name]
    for name, path in there.items():
        if now_ms - seen.setdefault(name, now_ms) >= older_than_ms:
            shutil.rmtree(path, ignore_errors=True)
            removed += 1
    return removed


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
