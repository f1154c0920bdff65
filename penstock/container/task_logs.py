"""Reading what a task printed: the end of its log, then on from a place, also across files."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.container.process_runner import LOGS_KEPT

ANSWER_BYTES_MAX = 256 * 1024
TAIL_BYTES_MAX = 4 * 1024 * 1024
MARK_BYTES = 256


def log_file(container_folder: Path, task_id: str) -> Path:
    """Where a container keeps what a task prints."""
    return container_folder / "tasks" / "logs" / f"{task_id.replace('/', '_')}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some text of a log, and the place behind it: which file, and how far into it."""

    text: str
    file: int  # its inode and a checksum of its beginning: inodes are used again
    offset: int
    is_gap: bool = False  # what lay between was turned over before it was read


def read_tail(path: Path, lines: int) -> Piece | None:
    """The last lines, also of older files; None: there is no log."""
    with _opened(path) as files:
        if not files:
            return None
        parts: list[bytes] = []
        for file in files:
            room = TAIL_BYTES_MAX - sum(map(len, parts))
            parts.insert(0, os.pread(file.handle, room, max(0, file.size - room))[: file.size])
            if sum(part.count(b"\n") for part in parts) > lines or sum(map(len, parts)) >= TAIL_BYTES_MAX:
                break
        kept = b"".join(parts).splitlines(keepends=True)[-lines:]
        return Piece(text=_text(kept), file=files[0].mark(files[0].size), offset=files[0].size)


def read_on(path: Path, *, file: int, offset: int) -> Piece | None:
    """What was printed since a place, up to a size; None: there is no log."""
    with _opened(path) as files:
        if not files:
            return None
        found = next((n for n, known in enumerate(files) if known.mark(offset) == file), None)
        number = len(files) - 1 if found is None else found
        at = files[number]
        begin = 0 if found is None else min(offset, at.size)
        data = os.pread(at.handle, ANSWER_BYTES_MAX, begin)
        end = begin + len(data)
        if end >= at.size and number > 0:  # this one is finished: go on at the beginning of the next
            at, end = files[number - 1], 0
        return Piece(text=_text([data]), file=at.mark(end), offset=end, is_gap=found is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    handle: int
    inode: int
    size: int

    def mark(self, offset: int) -> int:
        """What tells this file from others: of its beginning, as much as was there at `offset`."""
        start = os.pread(self.handle, min(offset, MARK_BYTES), 0)
        return (self.inode << 32) | zlib.crc32(start)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[list[_File]]:
    """The log and its older parts, newest first; each once."""
    found: dict[int, _File] = {}
    with contextlib.ExitStack() as handles:
        for name in (path, *(path.with_name(f"{path.name}.{age}") for age in range(1, LOGS_KEPT + 1))):
            try:
                handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # not there, or no file that can be read
            handles.callback(os.close, handle)
            about = os.fstat(handle)
            # One that was turned over between two looks is there already.
            found.setdefault(about.st_ino, _File(handle=handle, inode=about.st_ino, size=about.st_size))
        yield list(found.values())


def _text(parts: Sequence[bytes]) -> str:
    return b"".join(parts).decode(errors="replace")
