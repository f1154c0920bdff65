"""Whatever user code raises becomes a ComputationFailed that says for whom it ran, and at which line."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import penstock
from penstock.core.errors import ComputationFailed, PenstockError, StateMismatch

MESSAGE_CHARS_MAX, KEY_CHARS_MAX = 500, 80
_NOT_USERS = (
    Path(penstock.__file__).parent,
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")),
)
# Of the packages that were loaded here: files in them are called as the package calls them.
USER_FOLDERS: set[Path] = set()
_INSTALLED = ("site-packages", "dist-packages")


class Place(NamedTuple):
    """What user code was called for."""

    job: str
    name: str
    key: str = ""
    offset: int | None = None


@contextmanager
def blaming(where: Callable[[], Place]) -> Iterator[None]:
    """Run user code in it. Interrupts, and errors of the rows, which say all already, go through."""
    try:
        yield
    except StateMismatch:
        raise
    except ComputationFailed as error:
        place = where()
        error.what = f"{error.what}{_at(error)}: job {place.job!r}, {place.name}"
        error.job, error.key, error.offset = place.job, place.key, place.offset
        raise
    except Exception as error:  # user code may raise anything
        place = where()
        raise ComputationFailed(
            f"user code failed{_at(error)}: job {place.job!r}, {place.name}",
            why=error.what if isinstance(error, PenstockError) else said_by(error),
            fix=(error.fix if isinstance(error, PenstockError) else "")
            or "correct the computation and release a new version; the records come again",
            job=place.job,
            key=place.key,
            offset=place.offset,
        ) from error


def said_by(error: BaseException) -> str:
    """The class of an error and its message, as one line of limited length."""
    try:
        message = " ".join(str(error).split())
    except Exception as broken:  # its `__str__` is user code too
        message = f"its message cannot be shown ({type(broken).__name__})"
    return f"{type(error).__name__}: {cut_short(message, MESSAGE_CHARS_MAX)}"


def user_line(error: BaseException) -> str:
    """The innermost line of the user's own files that an error came through, as in `shops.py:12 in total`; ""
    if there is none.
    """
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        found = line_of_user(frame.f_code.co_filename, line, frame.f_code.co_name) or found
    return found


def line_of_user(file: str, line: int, function: str) -> str:
    """One line of a traceback if it lies in a user's file, else ""."""
    path = Path(file)
    folders = [folder for folder in USER_FOLDERS if path.is_relative_to(folder)]
    if not folders and (file.startswith("<") or any(map(path.is_relative_to, _NOT_USERS))):
        return ""
    name = path.relative_to(max(folders, key=lambda folder: len(folder.parts))) if folders else path
    if any(part in _INSTALLED for part in name.parts):
        return ""
    shown = name.as_posix() if folders else name.name
    return f"{shown}:{line}" + (f" in {function}" if function != "<module>" else "")


def shown_key(key: object) -> str:
    """A key as it is shown: of limited length."""
    return cut_short(repr(key), KEY_CHARS_MAX)


def cut_short(text: str, length_max: int) -> str:
    """A text of limited length, which shows where it was cut."""
    return text if len(text) <= length_max else f"{text[: length_max - 1]}…"


def _at(error: BaseException) -> str:
    line = user_line(error)
    return f" at {line}" if line else ""
