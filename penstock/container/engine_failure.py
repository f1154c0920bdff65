"""Why a container's engine ended, in the container's folder: for those who wait until it is ready."""

from __future__ import annotations

import contextlib
from pathlib import Path

CHARS_MAX = 4_000


def note_failure(folder: Path, reason: str) -> None:
    """Say why the engine ends."""
    with contextlib.suppress(OSError):  # it is in the log too
        _file(folder).write_text(reason[:CHARS_MAX], encoding="utf-8")


def forget_failure(folder: Path) -> None:
    """An engine is ready, or another life of the container begins."""
    with contextlib.suppress(OSError):
        _file(folder).unlink(missing_ok=True)


def last_failure(folder: Path) -> str:
    """Why the last engine ended, if none was ready since; "" if one was, or if the folder is elsewhere."""
    try:
        return _file(folder).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _file(folder: Path) -> Path:
    return folder / "failure"
