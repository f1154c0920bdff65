"""The folder of an installation: who may look into it, which process has it, and where it keeps its address.

The tokens of people are not in it, since the code of jobs runs there: they are in a folder of their user.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from penstock.core.errors import EnvironmentProblem

# What an earlier version left in a folder with other rights. Nothing else in there is ours to change.
OWN_NAMES = (
    "bus",
    "bus.json",
    "containers",
    "endpoint.json",
    "lock",
    "packages",
    "policies",
    "rows",
    "rows.json",
    "store.db",
    "store.db-shm",
    "store.db-wal",
    "tokens",
)


def endpoint_file(folder: Path) -> Path:
    """Where a running `penstock up` says how to reach it."""
    return folder / "endpoint.json"


def token_file(folder: Path, role: str) -> Path:
    """Where `penstock up` keeps a token that it issued for this machine.

    Those of people are in a folder of their user, not in the one that the code of jobs runs in.
    """
    return tokens_folder(folder) / role


def tokens_folder(folder: Path) -> Path:
    """Where the tokens of people for a `penstock up` are kept: below XDG_CONFIG_HOME, or ~/.config."""
    named = Path(os.environ.get("XDG_CONFIG_HOME") or "")
    try:
        config = named if named.is_absolute() else Path.home() / ".config"
    except RuntimeError as error:
        raise EnvironmentProblem(
            "there is no place for tokens",
            why=f"this user has no home folder: {error}",
            fix="set HOME, or XDG_CONFIG_HOME to a folder that only this user can read",
        ) from error
    return config / "penstock" / "tokens" / hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]


def own_folder(folder: Path) -> None:
    """Make a folder that only this user can look into. What this process makes from now on is its own too."""
    os.umask(0o077)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


@contextlib.contextmanager
def folder_lock(folder: Path, what: str) -> Iterator[None]:
    """Hold a folder for this process alone; the lock dies with it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise EnvironmentProblem(
                f"another process already runs {what} in {folder}",
                why="it holds the folder's lock: two would undo each other's work",
                fix="stop the other one, or name another folder with --folder (with --join: --dir)",
            ) from error
        yield


def make_folder(folder: Path) -> None:
    """Ours alone, and all that is in it; a folder of an earlier version is corrected."""
    try:
        if folder.is_dir() and stat.S_IMODE(folder.stat().st_mode) & 0o077:
            for name in OWN_NAMES:
                _make_private(folder / name)
        own_folder(folder)
        (folder / "lock").touch()
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot use the folder {folder}", why=str(error), fix="name another one with --folder"
        ) from error


def _make_private(top: Path) -> None:
    """Take all rights of others from a file, or from a folder and what is in it. Links are left alone."""
    paths = [top]
    while paths:
        path = paths.pop()
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(mode):
            continue
        if mode & 0o077:
            path.chmod(stat.S_IMODE(mode) & ~0o077)
        if stat.S_ISDIR(mode):
            paths += path.iterdir()


def write_endpoint(folder: Path, url: str, ca: Path | None = None) -> None:
    """Say where the control plane of this folder answers, and how to know that it is the one."""
    endpoint = {"url": url, "pid": os.getpid()} | ({} if ca is None else {"ca": str(ca)})
    write_private(endpoint_file(folder), json.dumps(endpoint))


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, all of it or nothing."""
    temporary = path.with_suffix(".new")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        temporary.replace(path)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot write {path}",
            why=str(error),
            fix="look at the folder's rights and the disk's free space",
        ) from error
