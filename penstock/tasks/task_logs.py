"""Reading what a task printed: the end of its log, then on from a place, also across files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.tasks.process_logs import LOGS_KEPT

ANSWER_BYTES_MAX = 256 * 1024
TAIL_BYTES_MAX = 4 * 1024 * 1024


def log_file(container_folder: Path, task_id: str) -> Path:
    """Where a container keeps what a task prints."""
    return container_folder / "tasks" / "logs" / f"{task_id.replace('/', '_')}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some text of a log, and the place behind it: the file by its number, and how far into it."""

    text: str
    file: int
    offset: int
    is_gap: bool = False  # what lay between was turned over before it was read


def read_tail(path: Path, lines: int) -> Piece | None:
    """The last lines, also of older files; None: there is no log."""
    parts: list[bytes] = []
    place: tuple[int, int] | None = None
    for number, size, file in _files(path):
        with contextlib.closing(os.fdopen(file, "rb")) as source:
            place = place or (number, size)
            room = TAIL_BYTES_MAX - sum(map(len, parts))
            source.seek(max(0, size - room))
            parts.insert(0, source.read(min(size, room)))
        if sum(part.count(b"\n") for part in parts) > lines or sum(map(len, parts)) >= TAIL_BYTES_MAX:
            break
    if place is None:
        return None
    kept = b"".join(parts).splitlines(keepends=True)[-lines:]
    return Piece(text=_text(b"".join(kept)), file=place[0], offset=place[1])


def read_on(path: Path, *, file: int, offset: int) -> Piece | None:
    """What was printed since a place, up to a size; None: there is no log."""
    newest_first = list(_files(path))
    try:
        numbers = [number for number, _, _ in newest_first]
        if not numbers:
            return None
        is_gap = file not in numbers
        index = len(numbers) - 1 if is_gap else numbers.index(file)
        number, size, handle = newest_first[index]
        begin = 0 if is_gap else min(offset, size)
        data = os.pread(handle, ANSWER_BYTES_MAX, begin)
        end = begin + len(data)
        if end >= size and index > 0:  # this one is finished: go on at the beginning of the next
            number, end = numbers[index - 1], 0
        return Piece(text=_text(data), file=number, offset=end, is_gap=is_gap)
    finally:
        for _, _, handle in newest_first:
            os.close(handle)


def _files(path: Path) -> Iterator[tuple[int, int, int]]:
    """(number, size, open file) of the log and its older parts, newest first; each once."""
    seen: set[int] = set()
    for name in (path, *(path.with_name(f"{path.name}.{age}") for age in range(1, LOGS_KEPT + 1))):
        try:
            handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # not there, or no file that can be read
        found = os.fstat(handle)
        if found.st_ino in seen:  # turned over between two looks
            os.close(handle)
            continue
        seen.add(found.st_ino)
        yield found.st_ino, found.st_size, handle


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
