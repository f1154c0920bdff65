"""User code as packages: the same bytes everywhere, nothing outside its folder, its mistakes told plainly."""

from __future__ import annotations

import io
import os
import stat
import struct
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.core.errors import CorruptData, PipelineError
from penstock.streams.compile import packages
from penstock.streams.compile.packages import build_package, unpack_package
from tests.streams.package_files import PIPELINE, a_zip, hash_of, write

# --- building ------------------------------------------------------------------------------------------------------


def test_the_same_files_give_the_same_bytes_whenever_and_wherever(tmp_path):
    """Other folder, other times, other modes, other order of includes: the same hash."""
    packages = []
    for index, name in enumerate(("one", "two")):
        folder = write(tmp_path / name, pipeline=PIPELINE, b="x = 1", lib__a="y = 2", lib__INIT="")
        for file in folder.rglob("*.py"):
            os.utime(file, (1e9 + index * 1e6, 1e9 + index * 1e6))
            file.chmod(0o600 if index else 0o755)
        write(folder, lib__PYCACHE__a="junk")
        include = [folder / "b.py", folder / "lib"]
        packages.append(build_package(folder / "pipeline.py", include[::-1] if index else include))
    assert packages[0] == packages[1]
    assert packages[0].hash == hash_of(packages[0].data)
    assert zipfile.ZipFile(io.BytesIO(packages[0].data)).namelist() == [
        "b.py",
        "lib/__init__.py",
        "lib/a.py",
        "pipeline.py",
    ]


def test_the_hash_of_a_known_package_is_written_down(tmp_path):
    """If this changes, every pipeline looks changed to everybody: it must be meant."""
    (tmp_path / "pipeline.py").write_bytes(b"x = 1\n")
    package = build_package(tmp_path / "pipeline.py")
    assert package.hash == "79e4c945e05fbe3e67311623cdd43f0536dc66ca4bf8f806efdf188baf3ab2e6"


def test_a_changed_byte_gives_another_hash(tmp_path):
    first = build_package(write(tmp_path, pipeline=PIPELINE) / "pipeline.py")
    second = build_package(write(tmp_path, pipeline=PIPELINE + "\n") / "pipeline.py")
    assert first.hash != second.hash


def test_a_package_names_itself_for_jobs(tmp_path):
    package = build_package(write(tmp_path, pipeline=PIPELINE) / "pipeline.py", name="demo")
    assert package.ref("7").model_dump() == {
        "name": "demo",
        "version": "7",
        "hash": package.hash,
        "entry": "pipeline.py",
    }
    assert package.ref().version == package.hash[:12]


def test_a_file_from_another_folder_goes_to_the_top(tmp_path):
    write(tmp_path / "app", pipeline=PIPELINE)
    write(tmp_path / "shared", tools__words="x = 1", notes="y = 2")
    package = build_package(
        tmp_path / "app" / "pipeline.py", [tmp_path / "shared" / "tools", tmp_path / "shared" / "notes.py"]
    )
    names = zipfile.ZipFile(io.BytesIO(package.data)).namelist()
    assert names == ["notes.py", "pipeline.py", "tools/words.py"]


def test_what_cannot_be_packaged_is_told(tmp_path):
    entry = write(tmp_path / "a", pipeline=PIPELINE) / "pipeline.py"
    write(tmp_path / "b", pipeline="other = 1")
    (tmp_path / "a" / "link.py").symlink_to(entry)
    for include, said in [
        (tmp_path / "none.py", "nothing to include"),
        (tmp_path / "a" / "link.py", "is a link"),
        (tmp_path / "b" / "pipeline.py", "two files would be 'pipeline.py'"),
    ]:
        with pytest.raises(PipelineError, match=said) as caught:
            build_package(entry, [include])
        assert caught.value.why and caught.value.fix
    with pytest.raises(PipelineError, match="there is no file"):
        build_package(tmp_path / "none.py")
    with pytest.raises(PipelineError, match="there is no file") as caught:
        build_package(tmp_path / "a")
    assert "this is a folder" in caught.value.why


# --- unpacking -----------------------------------------------------------------------------------------------------


def test_what_was_packed_is_unpacked(tmp_path):
    folder = write(tmp_path / "src", pipeline=PIPELINE, lib__a="y = 2")
    package = build_package(folder / "pipeline.py", [folder / "lib"])
    target = tmp_path / "packages" / package.hash
    unpack_package(package.data, package.hash, target)
    assert (target / "pipeline.py").read_text() == (folder / "pipeline.py").read_text()
    assert (target / "lib" / "a.py").read_text() == "y = 2"
    unpack_package(package.data, package.hash, target)
    assert [path.name for path in target.parent.iterdir()] == [package.hash]


def test_many_may_unpack_at_once(tmp_path):
    data = a_zip(*((f"m{index}.py", b"x" * 1000) for index in range(50)))
    target = tmp_path / "p"
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(unpack_package, data, hash_of(data), target) for _ in range(8)]:
            done.result()
    assert len(list(target.iterdir())) == 50 and len(list(tmp_path.iterdir())) == 1


def test_a_wrong_hash_is_damage(tmp_path):
    data = a_zip(("a.py", b""))
    with pytest.raises(CorruptData, match="the package is not") as caught:
        unpack_package(data + b"x", hash_of(data), tmp_path / "p")
    assert caught.value.why and caught.value.fix
    assert list(tmp_path.iterdir()) == []


def test_a_changed_folder_is_not_trusted(tmp_path):
    data = a_zip(("a.py", b"x = 1"))
    unpack_package(data, hash_of(data), tmp_path / "p")
    (tmp_path / "p" / "a.py").write_text("x = 2")
    with pytest.raises(CorruptData, match="was changed"):
        unpack_package(data, hash_of(data), tmp_path / "p")


def _lying_about_size() -> bytes:
    """A deflated megabyte whose headers say: ten bytes."""
    data = bytearray(a_zip(("a.py", b"\0" * 2**20), deflate=True))
    real, fake = struct.pack("<I", 2**20), struct.pack("<I", 10)
    return bytes(data.replace(real, fake))


def _encrypted() -> bytes:
    data = bytearray(a_zip(("a.py", b"x")))
    data[data.index(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


def _other_compression() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.py", b"x")
    return buffer.getvalue()


def _broken_sum() -> bytes:
    return a_zip(("a.py", b"MARK")).replace(b"MARK", b"MURK", 1)


ATTACKS = {
    "parent": (lambda: a_zip(("../evil.py", b"")), "leads outside"),
    "parent inside": (lambda: a_zip(("a/../../evil.py", b"")), "leads outside"),
    "parent folder": (lambda: a_zip(("../", b"")), "leads outside"),
    "dot": (lambda: a_zip(("./a.py", b"")), "leads outside"),
    "absolute": (lambda: a_zip(("/etc/evil", b"")), "absolute path"),
    "drive": (lambda: a_zip(("C:/evil.py", b"")), "absolute path"),
    "backslash": (lambda: a_zip(("..\\evil.py", b"")), "backslash"),
    "control character": (lambda: a_zip(("a\n.py", b"")), "control character"),
    "null": (lambda: a_zip(("a.pyX.txt", b"")).replace(b"a.pyX.txt", b"a.py\0.txt"), "hidden part"),
    "double slash": (lambda: a_zip(("a//b.py", b"")), "leads outside"),
    "link": (lambda: a_zip(("a.py", b"/etc/passwd"), mode=stat.S_IFLNK | 0o777), "link or a device"),
    "device": (lambda: a_zip(("a.py", b""), mode=stat.S_IFCHR | 0o666), "link or a device"),
    "pipe": (lambda: a_zip(("a.py", b""), mode=stat.S_IFIFO | 0o666), "link or a device"),
    "case clash": (lambda: a_zip(("a.py", b"1"), ("A.py", b"2")), "the same file on some disks"),
    "folder case clash": (lambda: a_zip(("lib/a.py", b"1"), ("LIB", b"2")), "both a file and a folder"),
    "accents": (lambda: a_zip(("\u00e9.py", b"1"), ("e\u0301.py", b"2")), "the same file on some disks"),
    "file and folder": (lambda: a_zip(("a", b"1"), ("a/b.py", b"2")), "both a file and a folder"),
    "long name": (lambda: a_zip(("a" * 300, b"")), "too long"),
    "deep": (lambda: a_zip(("a/" * 40 + "b", b"")), "too deep"),
    "bomb": (lambda: a_zip(("a.py", b"\0" * 20 * 2**20), deflate=True), "would become"),
    "many": (lambda: a_zip(*((f"{n}", b"") for n in range(10_001))), "10001 entries"),
    "large": (lambda: b"x" * (100 * 2**20 + 1), "bytes"),
    "lying size": (_lying_about_size, "cannot be read"),
    "encrypted": (_encrypted, "is encrypted"),
    "lzma": (_other_compression, "unknown way"),
    "wrong checksum": (_broken_sum, "cannot be read"),
    "no zip": (lambda: b"#!/bin/sh\n", "cannot be read"),
    "cut off": (lambda: a_zip(("a.py", b"x" * 100))[:-30], "cannot be read"),
    "empty": (lambda: b"", "cannot be read"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_and_writes_nothing(attack, tmp_path):
    make, said = ATTACKS[attack]
    data = make()
    with pytest.raises(PipelineError, match=said) as caught:
        unpack_package(data, hash_of(data), tmp_path / "packages" / "p")
    assert caught.value.why and caught.value.fix
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_entry_that_comes_twice_is_refused(tmp_path):
    data = a_zip(("a.py", b"good"), ("a.py", b"evil"))
    with pytest.raises(PipelineError, match="the same file"):
        unpack_package(data, hash_of(data), tmp_path / "p")
    assert list(tmp_path.iterdir()) == []


def test_the_limits_hold_for_builders_too():
    with pytest.raises(PipelineError, match="entries"):
        packages.pack_entries({f"f{n}": b"" for n in range(10_001)})
    with pytest.raises(PipelineError, match="the same file"):
        packages.pack_entries({"a.py": b"", "A.py": b""})


def test_an_ordinary_deflated_zip_with_folders_is_read():
    data = a_zip(("lib/", b""), ("lib/a.py", b"x = 1\n" * 1000), ("pipeline.py", b""), deflate=True)
    assert packages.read_entries(data) == {"lib/a.py": b"x = 1\n" * 1000, "pipeline.py": b""}
