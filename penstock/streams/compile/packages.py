"""Packages of user code, named by hash: built from a pipeline's file, unpacked and imported in a container.

Packages are not trusted. Entries outside of the folder, duplicate names and zip bombs are refused before
anything is written to disk.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import stat
import tempfile
import unicodedata
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from penstock.core.disk import make_durable_folder, sync_folder
from penstock.core.errors import CorruptData, DiskFull, PipelineError
from penstock.streams.compile.graph import safe_name
from penstock.streams.dsl.pipeline import Pipeline
from penstock.streams.dsl.sql import pipeline_from_sql
from penstock.streams.dsl.user_code import UserCode

if TYPE_CHECKING:
    from penstock.jobs.config import PackageRef

# --- files of a package ----------------------------------------------------------------------------------

PACKAGE_BYTES_MAX = 100 * 2**20
UNPACKED_BYTES_MAX = 500 * 2**20
RATIO_MAX = 100
RATIO_FREE_BYTES = 2**20  # below this size any ratio is allowed
ENTRIES_MAX = 10_000
_NAME_CHARS_MAX = 255
_DEPTH_MAX = 32
_FOLDER = "/"
# Fixed metadata, so that the same files give the same bytes on every machine.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_FILE_MODE = (stat.S_IFREG | 0o644) << 16


def pack_entries(files: Mapping[str, bytes]) -> bytes:
    """A zip of these files; the same files give the same bytes."""
    _check_names(files)
    _check_sizes(len(files), sum(map(len, files.values())))
    buffer = io.BytesIO()
    # Stored, not deflated: compressed bytes differ between versions of zlib, and so would the hash.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, date_time=_EPOCH)
            info.create_system, info.external_attr = 3, _FILE_MODE
            archive.writestr(info, files[name])
    data = buffer.getvalue()
    _check_package_size(len(data))
    return data


def read_entries(data: bytes) -> dict[str, bytes]:
    """The files of a package by name; PipelineError if anything about it is not safe."""
    _check_package_size(len(data))
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
            _check_infos(infos, len(data))
            return {info.filename: archive.read(info) for info in infos if not info.is_dir()}
    except (zipfile.BadZipFile, zlib.error, EOFError, UnicodeDecodeError, NotImplementedError) as error:
        raise PipelineError(
            "the package cannot be read",
            why=f"it is not a whole zip file: {error}",
            fix="build it again with `penstock submit`",
        ) from error


def _check_infos(infos: list[zipfile.ZipInfo], package_bytes: int) -> None:
    unpacked = sum(info.file_size for info in infos)
    _check_sizes(len(infos), unpacked)
    if unpacked > RATIO_FREE_BYTES and unpacked > RATIO_MAX * package_bytes:
        raise _unsafe(
            f"{package_bytes} bytes would become {unpacked}",
            f"more than {RATIO_MAX} times as many: this is a zip bomb",
        )
    for info in infos:
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise _unsafe(f"entry {info.filename!r} is a link or a device", "it could point outside")
        if info.flag_bits & 0x1:
            raise _unsafe(f"entry {info.filename!r} is encrypted", "it cannot be read without a password")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise _unsafe(f"entry {info.filename!r} is compressed in an unknown way", "only deflate is read")
        if info.orig_filename != info.filename:
            raise _unsafe(f"entry {info.orig_filename!r} has a hidden part in its name", "not what it seems")
    _check_names(info.filename for info in infos)


def _check_names(names: Iterable[str]) -> None:
    """Names must be relative, plain, and different on every kind of disk."""
    seen: dict[str, str] = {}
    files: set[str] = set()
    folders: set[str] = set()
    for name in names:
        parts = name.removesuffix(_FOLDER).split(_FOLDER)
        if name.startswith(_FOLDER) or (len(name) > 1 and name[1] == ":"):
            raise _unsafe(f"entry {name!r} has an absolute path", "files must stay inside the package")
        if "\\" in name or any(unicodedata.category(char) in ("Cc", "Cs") for char in name):
            raise _unsafe(f"entry {name!r} has a backslash or a control character", "systems differ on it")
        if any(part in ("", ".", "..") for part in parts):
            raise _unsafe(f"entry {name!r} leads outside", "'..', '.' and empty parts may leave the package")
        if len(name) > _NAME_CHARS_MAX or len(parts) > _DEPTH_MAX:
            raise _unsafe(f"entry {name[:60]!r}… is too long or too deep", f"at most {_NAME_CHARS_MAX}")
        plain = _folded(name.removesuffix(_FOLDER))
        if plain in seen:
            raise _unsafe(
                f"{seen[plain]!r} and {name!r} are the same file on some disks", "one would replace the other"
            )
        seen[plain] = name
        above = {_folded(_FOLDER.join(parts[:depth])) for depth in range(1, len(parts))}
        folders |= above | ({plain} if name.endswith(_FOLDER) else set())
        files |= set() if name.endswith(_FOLDER) else {plain}
    clash = sorted(files & folders)
    if clash:
        raise _unsafe(f"{seen[clash[0]]!r} is both a file and a folder", "one would replace the other")


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _check_sizes(entries: int, unpacked: int) -> None:
    if entries > ENTRIES_MAX:
        raise _unsafe(f"it has {entries} entries", f"the limit is {ENTRIES_MAX}")
    if unpacked > UNPACKED_BYTES_MAX:
        raise _unsafe(f"it holds {unpacked} bytes", f"the limit is {UNPACKED_BYTES_MAX}")


def _check_package_size(size: int) -> None:
    if size > PACKAGE_BYTES_MAX:
        raise _unsafe(f"it has {size} bytes", f"the limit is {PACKAGE_BYTES_MAX}")


def _unsafe(what: str, why: str) -> PipelineError:
    return PipelineError(
        f"the package is refused: {what}",
        why=why,
        fix="package only the pipeline's own source files; bring data in as a stream",
    )


# --- packages --------------------------------------------------------------------------------------------

SQL_SUFFIX = ".sql"
_SKIPPED = ("__pycache__",)
_loaded: dict[str, UserCode] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A zip of user code; `hash` is the SHA-256 of its bytes, `entry` the pipeline's file in it."""

    name: str
    hash: str
    entry: str
    data: bytes

    def ref(self, version: str = "") -> PackageRef:
        """The reference in a job's config. The default version is the start of the hash."""
        from penstock.jobs.config import PackageRef  # workers import this module, and need no pydantic

        return PackageRef(name=self.name, version=version or self.hash[:12], hash=self.hash, entry=self.entry)


def build_package(entry_file: Path, include: Iterable[Path] = (), *, name: str = "") -> Package:
    """Zip a pipeline's file and what it needs. The same files always give the same hash."""
    entry = _existing(entry_file, "the pipeline's file")
    files = {entry.name: entry.read_bytes()}
    for path in include:
        for file, inside in _files_of(path, entry.parent):
            content = file.read_bytes()
            if files.setdefault(inside, content) != content:
                raise PipelineError(
                    f"two files would be {inside!r} in the package",
                    why=f"one of them is {path}; files from other folders go to the top of the package",
                    fix="rename one of them, or put it beside the pipeline's file",
                )
    data = pack_entries(files)
    digest = hashlib.sha256(data).hexdigest()
    return Package(name=name or entry.stem, hash=digest, entry=entry.name, data=data)


def unpack_package(data: bytes, expected_hash: str, target: Path) -> None:
    """Write all of a package's files to `target`, or none. Several processes may do so at once."""
    actual = hashlib.sha256(data).hexdigest()
    if actual != expected_hash:
        raise CorruptData(
            f"the package is not {expected_hash[:12]}…",
            why=f"the hash of its bytes is {actual[:12]}…: it was damaged or replaced during the transfer",
            fix="fetch it again; if that does not help, submit the pipeline again",
        )
    files = read_entries(data)
    if not target.exists():
        try:
            _write_and_rename(files, target)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(
                    "no room to unpack a package", why=str(error), fix=f"free space under {target.parent}"
                ) from error
            raise
    _check_unpacked(files, target)


def load_entry(folder: Path, entry: str, hash: str) -> ModuleType:
    """The entry module of an unpacked package, imported once per process under a name of its own."""
    code = _loaded.get(hash)
    if code is None or code.entry != folder / entry:
        _existing(folder / entry, "the package's entry file")
        if code is not None:
            code.forget()
        code = _loaded[hash] = UserCode(f"penstock_package_{hash}", folder, entry)
    return code.load()


def load_pipeline(path: Path) -> Pipeline:
    """The Pipeline of a Python or SQL file; PipelineError on any mistake in it."""
    file = _existing(path, "the pipeline's file")
    if file.suffix.lower() == SQL_SUFFIX:
        return pipeline_from_sql(read_sql(file), file=file.name, name=safe_name(file.stem))
    root = f"penstock_pipeline_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    code = UserCode(root, file.parent, file.name)
    code.forget()  # it may have changed since
    module = code.load()
    found = {id(value): (name, value) for name, value in vars(module).items() if isinstance(value, Pipeline)}
    if len(found) != 1:
        names = ", ".join(name for name, _ in found.values())
        raise PipelineError(
            f"{file.name} defines {'no pipeline' if not found else f'{len(found)} pipelines: {names}'}",
            why="a file must define exactly one pipeline, as a variable at the top level",
            fix="put each pipeline into its own file"
            if found
            else 'write p = Pipeline("name") at the top level',
        )
    ((_, pipeline),) = found.values()
    _check_computations(pipeline, module, file)
    pipeline.local_files = tuple(used for used in code.files if used != file)
    return pipeline


def read_sql(file: Path) -> str:
    """The text of an SQL file; PipelineError if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PipelineError(
            f"cannot read {file.name}",
            why=str(error),
            fix="save it as UTF-8 text, with permission to read it",
        ) from error


def _check_computations(pipeline: Pipeline, module: ModuleType, file: Path) -> None:
    for name, computation in pipeline.computations.items():
        if vars(module).get(name) is not computation:
            raise PipelineError(
                f"{file.name}: computation {name} is not found under its own name",
                why=f"a task looks up {name!r} in this file, where it is missing or another object",
                fix=f"define the class in this file, or import it by its name: from … import {name}",
            )


def _existing(path: Path, what: str) -> Path:
    if path.is_file():
        return path.resolve()
    raise PipelineError(
        f"there is no file {str(path)!r}",
        why=f"{what} must be a file" + (", and this is a folder" if path.is_dir() else ""),
        fix="check the path; it is relative to the current folder",
    )


def _files_of(path: Path, beside: Path) -> list[tuple[Path, str]]:
    """Files to include and their names in the package: relative to the entry file, else at the top."""
    top = path.absolute()
    if not top.exists():
        raise PipelineError(
            f"there is nothing to include at {str(path)!r}",
            why="the file or folder does not exist",
            fix="check the path; it is relative to the current folder",
        )
    resolved = top.parent.resolve() / top.name
    start = beside if resolved.is_relative_to(beside) else resolved.parent
    found = sorted(resolved.rglob("*")) if resolved.is_dir() else [resolved]
    kept = [file for file in (resolved, *found) if not _is_skipped(file.relative_to(start))]
    for file in kept:
        if file.is_symlink():
            raise PipelineError(
                f"{str(file)!r} is a link",
                why="a package holds files only, so that it is the same everywhere",
                fix="include the file it points to",
            )
    return [(file, file.relative_to(start).as_posix()) for file in dict.fromkeys(kept) if file.is_file()]


def _is_skipped(path: Path) -> bool:
    return path.suffix == ".pyc" or any(part in _SKIPPED or part.startswith(".") for part in path.parts)


def _write_and_rename(files: Mapping[str, bytes], target: Path) -> None:
    make_durable_folder(target.parent)
    unfinished = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=target.parent))
    try:
        for name, content in files.items():
            path = unfinished / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for folder, _, _ in os.walk(unfinished):
            sync_folder(Path(folder))
        unfinished.chmod(0o700)
        os.rename(unfinished, target)
        sync_folder(target.parent)
    except OSError as error:
        # Another process was first: its folder is compared below.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _check_unpacked(files: Mapping[str, bytes], target: Path) -> None:
    for name, content in files.items():
        path = target / name
        if path.is_symlink() or not path.is_file() or path.read_bytes() != content:
            raise CorruptData(
                f"the unpacked package at {str(target)!r} was changed",
                why=f"{name!r} is not as in the package",
                fix="remove the folder: it is unpacked again",
            )
