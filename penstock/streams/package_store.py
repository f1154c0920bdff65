"""Packages on disk, named by their hash. The control plane stores them without opening them."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path

from penstock.core.disk import make_durable_folder, sync_folder
from penstock.core.errors import ConfigError, DiskFull, NotFound
from penstock.streams.compile.packages import unpack_package

PACKAGE_BYTES_MAX = 100 * 1024 * 1024
_HASH = re.compile(r"[0-9a-f]{64}")


class PackageStore:
    """A folder of packages; each is stored under the SHA-256 of its content."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        make_durable_folder(folder)

    def put(self, hash_: str, data: bytes) -> None:
        """Store a package durably. Idempotent; a wrong hash is refused."""
        path = self._path(hash_)
        actual = hashlib.sha256(data).hexdigest()
        if actual != hash_:
            raise ConfigError(
                "the package does not match its hash",
                why=f"it was sent as {hash_[:12]}… but the hash of its content is {actual[:12]}…",
                fix="send it again: it was damaged during the transfer",
            )
        temporary = self._folder / f".{secrets.token_hex(8)}"
        try:
            if path.exists():
                sync_folder(self._folder)  # the process that wrote it may have crashed before this
                return
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_folder(self._folder)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise DiskFull(
                "the package could not be stored", why=str(error), fix="free disk space, then submit again"
            ) from error

    def get(self, hash_: str) -> bytes:
        """The bytes of a package, or NotFound."""
        try:
            return self._path(hash_).read_bytes()
        except FileNotFoundError as error:
            raise NotFound(
                f"there is no package {hash_[:12]}…",
                why="it was never stored here",
                fix="submit the pipeline again",
            ) from error

    def has(self, hash_: str) -> bool:
        """Whether it is stored here."""
        return self._path(hash_).exists()

    def may_have(self, hash_: str) -> bool:
        """Like `has`, but False for a text that is not a hash."""
        return _HASH.fullmatch(hash_) is not None and self.has(hash_)

    def _path(self, hash_: str) -> Path:
        if not _HASH.fullmatch(hash_):
            raise ConfigError(
                f"{hash_[:80]!r} is not a package hash",
                why="it must be 64 hex digits",
                fix="use the hash that `penstock submit` computes",
            )
        return self._folder / f"{hash_}.zip"


class UnpackedPackages:
    """A container's cache of unpacked packages, each fetched at first use."""

    def __init__(self, folder: Path, fetch: Callable[[str], bytes]) -> None:
        self._folder, self._fetch = folder, fetch

    def folder_of(self, hash_: str) -> Path:
        """The folder of the package, unpacked and checked."""
        target = self._folder / hash_
        if not target.is_dir():
            unpack_package(self._fetch(hash_), hash_, target)
        return target
