"""Which files a package holds, and whether they may be written to a disk. Pure: bytes in, bytes out.

A package comes from outside. Everything that could leave its folder, hide a file behind another one, or fill
a disk is refused before a byte is written.
"""

from __future__ import annotations

import io
import stat
import unicodedata
import zipfile
import zlib
from collections.abc import Iterable, Mapping

from penstock.core.errors import PipelineError

PACKAGE_BYTES_MAX = 100 * 2**20
UNPACKED_BYTES_MAX = 500 * 2**20
RATIO_MAX = 100
RATIO_FREE_BYTES = 2**20  # so small that no ratio matters
ENTRIES_MAX = 10_000
_NAME_CHARS_MAX = 255
_DEPTH_MAX = 32
_FOLDER = "/"
# So that the same files give the same bytes, on every machine and in every year.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_FILE_MODE = (stat.S_IFREG | 0o644) << 16


def pack_entries(files: Mapping[str, bytes]) -> bytes:
    """A zip of these files; the same files give the same bytes."""
    _check_names(files)
    _check_sizes(len(files), sum(map(len, files.values())))
    buffer = io.BytesIO()
    # Stored, not deflated: compressed bytes differ between versions of zlib, and the hash would with them.
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
            f"{package_bytes} bytes would become {unpacked}", f"more than {RATIO_MAX} times: that is a bomb"
        )
    for info in infos:
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise _unsafe(f"entry {info.filename!r} is a link or a device", "it could point outside")
        if info.flag_bits & 0x1:
            raise _unsafe(f"entry {info.filename!r} is encrypted", "nobody here could read it")
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
