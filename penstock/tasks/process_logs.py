"""What processes print, into files turned over at a size: one thread for all tasks of a container."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from pathlib import Path

LOG_BYTES_MAX = 8 * 1024 * 1024
LOGS_KEPT = 3
_CHUNK = 64 * 1024


class RotatedFile:
    """Appends; when it is full it becomes `.1`, and what was `.1` becomes `.2`, up to a number."""

    def __init__(self, path: Path, *, bytes_max: int = LOG_BYTES_MAX, kept: int = LOGS_KEPT) -> None:
        self._path, self._bytes_max, self._kept = path, bytes_max, kept
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def write(self, data: bytes) -> None:
        if self._file.tell() + len(data) > self._bytes_max and self._file.tell():
            self._turn_over()
        self._file.write(data)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _turn_over(self) -> None:
        self._file.close()
        for number in range(self._kept, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            newer = self._path if number == 1 else self._path.with_name(f"{self._path.name}.{number - 1}")
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        self._file = self._path.open("ab")


class LogPump:
    """Reads the pipes of running processes and writes their files, until each pipe ends."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="logs", daemon=True).start()

    def follow(self, pipe: int, file: RotatedFile) -> None:
        """Take over a pipe's reading end."""
        os.set_blocking(pipe, False)
        with self._lock:
            self._selector.register(pipe, selectors.EVENT_READ, file)
        os.write(self._wake_write, b"x")

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    os.read(self._wake_read, _CHUNK)
                else:
                    self._take(key.fd, key.data)

    def _take(self, pipe: int, file: RotatedFile) -> None:
        try:
            data = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            # A full disk must not stop a task: what cannot be written is lost, and the task goes on.
            with contextlib.suppress(OSError):
                file.write(data)
            return
        with self._lock:
            self._selector.unregister(pipe)
        os.close(pipe)
        file.close()
