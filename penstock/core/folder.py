"""The folder of an installation: its permissions, its lock, and the file with the API's address.

Users' tokens are not in it, because job code runs there: they are in the configuration folder of each user.
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

# Files of an earlier version, whose permissions are corrected. No other file in the folder is changed.
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
    """The file with the address of a running `penstock up`."""
    return folder / "endpoint.json"


def token_file(folder: Path, role: str) -> Path:
    """The file of a token that `penstock up` issued for this machine."""
    return tokens_folder(folder) / role


def tokens_folder(folder: Path) -> Path:
    """The folder of the user's tokens for one installation: below XDG_CONFIG_HOME, or ~/.config."""
    named = Path(os.environ.get("XDG_CONFIG_HOME") or "")
    try:
        config = named if named.is_absolute() else Path.home() / ".config"
    except RuntimeError as error:
        raise EnvironmentProblem(
            "there is no folder for tokens",
            why=f"this user has no home folder: {error}",
            fix="set HOME, or XDG_CONFIG_HOME to a folder that only this user can read",
        ) from error
    return config / "penstock" / "tokens" / hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]


def make_private_folder(folder: Path) -> None:
    """Create a folder that only this user can read. Also sets the umask of this process to 077."""
    os.umask(0o077)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


@contextlib.contextmanager
def folder_lock(folder: Path, what: str) -> Iterator[None]:
    """Lock a folder for this process; the lock is released when the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise EnvironmentProblem(
                f"another process already runs {what} in {folder}",
                why="it holds the lock of the folder; two processes would overwrite each other's data",
                fix="stop the other process, or choose another folder with --folder (with --join: --dir)",
            ) from error
        yield


def prepare_folder(folder: Path) -> None:
    """Create the installation folder with private permissions; correct those of an earlier version."""
    try:
        if folder.is_dir() and stat.S_IMODE(folder.stat().st_mode) & 0o077:
            for name in OWN_NAMES:
                _make_private(folder / name)
        make_private_folder(folder)
        (folder / "lock").touch()
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot use the folder {folder}", why=str(error), fix="choose another folder with --folder"
        ) from error


def _make_private(top: Path) -> None:
    """Remove the permissions of group and others from a file or a folder tree. Links are not followed."""
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
    """Write the URL of this folder's control plane, and the CA to verify its certificate with."""
    endpoint = {"url": url, "pid": os.getpid()} | ({} if ca is None else {"ca": str(ca)})
    write_private(endpoint_file(folder), json.dumps(endpoint))


def write_private(path: Path, text: str) -> None:
    """Write a file atomically that only this user can read."""
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
            fix="check the permissions of the folder and the free space of the disk",
        ) from error
