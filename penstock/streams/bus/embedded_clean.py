"""What dead publishers and creators leave on the embedded log, and how it goes without hurting live ones."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from penstock.core.clock import Millis
from penstock.streams.bus import log_index, log_retention
from penstock.streams.bus.embedded_publish import give_up, remove_file
from penstock.streams.bus.log import CategorySpec
from penstock.streams.bus.log_index import LogIndex
from penstock.streams.bus.retention_age import count_on, is_note_due
from penstock.streams.bus.segments import SUFFIX, translated

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
