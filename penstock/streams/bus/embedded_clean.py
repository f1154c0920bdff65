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
            pending = log_index.load_pending(connection)
            known = log_index.known_segments(connection, there)
        if any(seen_ms is None for seen_ms in pending.values()):
            with index.writing("see") as connection:
                log_index.see_pending(connection, now_ms)
        removed = 0
        for segment, seen_ms in pending.items():
            if now_ms - (now_ms if seen_ms is None else seen_ms) >= older_than_ms:
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


def expire_category(index: LogIndex, spec: CategorySpec, *, now_ms: Millis) -> int:
    """Let records go that were appended longer ago than the category keeps them."""
    if not spec.retention_ms:
        return 0
    with index.reading() as connection:
        before = log_retention.find_expired(connection, now_ms - spec.retention_ms)
    return truncate_category(index, before) if before else 0


def clean_unfinished(folder: Path, *, now_ms: Millis, older_than_ms: Millis) -> int:
    """Remove categories that were never finished and not touched for `older_than_ms`."""
    removed = 0
    for path in folder.glob(f"{UNFINISHED}*"):
        with translated(path):
            try:
                age_ms = now_ms - path.stat().st_mtime_ns // 1_000_000
            except FileNotFoundError:  # finished in the meantime
                continue
            if age_ms >= older_than_ms:
                shutil.rmtree(path, ignore_errors=True)
                removed += 1
    return removed
