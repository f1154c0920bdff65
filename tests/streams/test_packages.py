"""User code as packages: the same bytes everywhere, nothing outside its folder, its mistakes told plainly."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import struct
import subprocess
import sys
import textwrap
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.core.errors import CorruptData, PipelineError
from penstock.streams import package_entries
from penstock.streams.packages import build_package, load_entry, load_pipeline, unpack_package

PIPELINE = """
from penstock.streams.pipeline import Pipeline

p = Pipeline("demo")
p.source("queries").sink("out")
"""


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        inside = name.replace("__", "/").replace("INIT", "__init__").replace("PYCACHE", "__pycache__")
        path = folder / f"{inside}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


def a_zip(*entries: tuple[str, bytes], mode: int = stat.S_IFREG | 0o644, deflate: bool = False) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED) as archive:
        for name, content in entries:
            info = zipfile.ZipInfo(name)
            info.filename = name  # ZipInfo tidies names; an attacker does not
            info.external_attr = mode << 16
            info.compress_type = archive.compression
            archive.writestr(info, content)
    return buffer.getvalue()


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


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
    assert package.ref("7").to_json() == {
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
        package_entries.pack_entries({f"f{n}": b"" for n in range(10_001)})
    with pytest.raises(PipelineError, match="the same file"):
        package_entries.pack_entries({"a.py": b"", "A.py": b""})


def test_an_ordinary_deflated_zip_with_folders_is_read():
    data = a_zip(("lib/", b""), ("lib/a.py", b"x = 1\n" * 1000), ("pipeline.py", b""), deflate=True)
    assert package_entries.read_entries(data) == {"lib/a.py": b"x = 1\n" * 1000, "pipeline.py": b""}


# --- importing in a container --------------------------------------------------------------------------------------


def test_versions_of_one_package_live_side_by_side(tmp_path):
    """Each version sees its own neighbour of the same name, also when it imports later, inside a function."""
    source = """
    import helpers
    from lib.words import WORD

    def answer():
        import late
        from lib import words
        return helpers.NUMBER, WORD, late.NUMBER, words.WORD
    """
    modules = []
    for version in (1, 2):
        folder = write(
            tmp_path / f"v{version}",
            pipeline=source,
            helpers=f"import late\nNUMBER = {version}",
            late=f"NUMBER = {version * 10}",
            lib__words=f"WORD = 'v{version}'",
        )
        modules.append(load_entry(folder, "pipeline.py", f"side{version}"))
    assert [module.answer() for module in modules] == [(1, "v1", 10, "v1"), (2, "v2", 20, "v2")]
    assert modules[0].__name__ == "penstock_package_side1"
    assert not {"helpers", "late", "lib", "lib.words"} & sys.modules.keys()


def test_a_package_is_imported_once(tmp_path):
    folder = write(tmp_path, pipeline="ran = []\nran.append(1)")
    assert load_entry(folder, "pipeline.py", "once") is load_entry(folder, "pipeline.py", "once")


def test_threads_that_import_at_once_wait_for_one_import(tmp_path):
    folder = write(tmp_path, pipeline="import time\ntime.sleep(0.05)\nready = True")
    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(load_entry, folder, "pipeline.py", "threads") for _ in range(4)]
        modules = [load.result() for load in loads]
    assert all(module is modules[0] and module.ready for module in modules)


def test_importing_leaves_no_files_and_no_paths_behind(tmp_path):
    folder = write(tmp_path, pipeline="import helpers", helpers="x = 1")
    before = list(sys.path)
    load_entry(folder, "pipeline.py", "clean")
    assert sys.path == before
    assert sorted(path.name for path in folder.iterdir()) == ["helpers.py", "pipeline.py"]


def test_neighbours_may_import_each_other_and_the_entry(tmp_path):
    folder = write(
        tmp_path,
        pipeline="NAME = 'entry'\nimport pkg.a as a\nimport pkg.b\nfrom . import single\nvalue = (a.x, pkg.b.y, single.z)",
        pkg__INIT="",
        pkg__a="from .b import y\nx = y + 1",
        pkg__b="y = 1",
        single="import pipeline\nfrom pkg import b\nz = (pipeline.NAME, b.y)",
    )
    assert load_entry(folder, "pipeline.py", "circle").value == (2, 1, ("entry", 1))


def test_classes_of_a_package_know_their_module(tmp_path):
    source = """
    from dataclasses import dataclass
    import pickle

    @dataclass
    class Point:
        x: int

    copied = pickle.loads(pickle.dumps(Point(1)))
    """
    module = load_entry(write(tmp_path, pipeline=source), "pipeline.py", "pickles")
    assert module.copied == module.Point(1)


def test_a_failed_import_is_tried_again(tmp_path):
    folder = write(tmp_path, pipeline="import helpers", helpers="1 / 0")
    for _ in range(2):
        with pytest.raises(PipelineError, match=r"helpers.py:1: ZeroDivisionError"):
            load_entry(folder, "pipeline.py", "retry")
    write(folder, helpers="x = 1")
    assert load_entry(folder, "pipeline.py", "retry").helpers.x == 1


def test_a_missing_entry_or_module_is_named(tmp_path):
    with pytest.raises(PipelineError, match="there is no file"):
        load_entry(tmp_path, "pipeline.py", "none")
    folder = write(tmp_path, pipeline="import no_such_library")
    with pytest.raises(PipelineError, match=r"pipeline.py:1: there is no module 'no_such_library'") as caught:
        load_entry(folder, "pipeline.py", "missing")
    assert "install 'no_such_library'" in caught.value.fix


# --- loading in the client -----------------------------------------------------------------------------------------


def test_a_pipeline_is_found_in_its_file(tmp_path):
    pipeline = load_pipeline(write(tmp_path, pipeline=PIPELINE) / "pipeline.py")
    assert pipeline.name == "demo"
    assert [step.place.line for step in pipeline.graph().steps] == [5, 5]
    assert pipeline.graph().steps[0].place.file == "pipeline.py"


def test_a_file_is_read_again_when_it_changed(tmp_path):
    path = write(tmp_path, pipeline=PIPELINE) / "pipeline.py"
    load_pipeline(path)
    path.write_text(path.read_text().replace("demo", "omed"))
    assert load_pipeline(path).name == "omed"


def test_modules_beside_the_file_are_listed_for_the_package(tmp_path):
    folder = write(
        tmp_path, pipeline="import names\nfrom lib import more" + PIPELINE, names="x = 1", lib__more="y = 2"
    )
    pipeline = load_pipeline(folder / "pipeline.py")
    assert pipeline.local_files == (folder / "names.py", folder / "lib" / "more.py")
    package = build_package(folder / "pipeline.py", pipeline.local_files)
    target = tmp_path / "unpacked"
    unpack_package(package.data, package.hash, target)
    assert load_entry(target, package.entry, package.hash).p.name == "demo"


def test_the_platform_is_not_taken_from_the_users_folder(tmp_path):
    folder = write(tmp_path, pipeline=PIPELINE, penstock__INIT="raise RuntimeError('wrong one')")
    assert load_pipeline(folder / "pipeline.py").name == "demo"


COMPUTATION = """
from penstock.streams.computation import Computation
from penstock.streams.pipeline import Pipeline

class Count(Computation):
    outputs = {"out": {"n": "int"}}

p = Pipeline("demo")
p.source("q").key_by("a").process(Count).sink("out")
"""

BAD_FILES = {
    "syntax": ("x = 1\n  y = (2\n", ["pipeline.py:2: the file does not parse", "y = (2", "^"]),
    "unclosed": (
        "x = (1,\n",
        ["pipeline.py:1: the file does not parse: '(' was never closed", "    x = (1,\n        ^"],
    ),
    "null byte": ("x = 1\0", ["pipeline.py"]),
    "exception": (
        "def f():\n    return {}['x']\n\nf()\n",
        ["pipeline.py:2: KeyError: 'x'", "return {}['x']"],
    ),
    "missing module": ("import pandsa\n", ["pipeline.py:1: there is no module 'pandsa'", "install 'pandsa'"]),
    "exit": ("import sys\nsys.exit(0)\n", ["pipeline.py:2: the file ends the program", "sys.exit()"]),
    "no pipeline": ("x = 1\n", ["makes no pipeline", 'p = Pipeline("name")']),
    "two pipelines": (PIPELINE + "q = Pipeline('other')\n", ["makes 2 pipelines: p, q", "its own file"]),
    "wrong call": (PIPELINE.replace("sink", "snik"), ["pipeline.py:5: AttributeError", "snik"]),
    "dsl mistake": (PIPELINE.replace('"out"', '"queries"'), ["pipeline.py:5: category 'queries' is both"]),
    "renamed class": (COMPUTATION + "Counter = Count\ndel Count\n", ["computation Count is not found"]),
    "not text": (b"x = '\xff\xfe'\n", ["pipeline.py"]),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_told_in_three_parts(case, tmp_path):
    text, said = BAD_FILES[case]
    path = tmp_path / "pipeline.py"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PipelineError) as caught:
        load_pipeline(path)
    error = caught.value
    assert error.what and error.why and error.fix
    for words in said:
        assert words in str(error)
    assert str(tmp_path) not in error.what


def test_a_missing_file_is_told_in_three_parts(tmp_path):
    with pytest.raises(PipelineError, match="there is no file") as caught:
        load_pipeline(tmp_path / "none.py")
    assert caught.value.why and caught.value.fix


def test_an_interrupt_is_not_a_mistake_of_the_file(tmp_path):
    path = write(tmp_path, pipeline="raise KeyboardInterrupt") / "pipeline.py"
    with pytest.raises(KeyboardInterrupt):
        load_pipeline(path)


def test_two_names_for_one_pipeline_are_one(tmp_path):
    assert load_pipeline(write(tmp_path, pipeline=PIPELINE + "again = p\n") / "pipeline.py").name == "demo"


def test_the_hash_does_not_depend_on_the_process(tmp_path):
    path = write(tmp_path, pipeline=PIPELINE, b="x = 1") / "pipeline.py"
    code = "import sys; from pathlib import Path; from penstock.streams.packages import build_package as b; "
    code += "print(b(Path(sys.argv[1]), [Path(sys.argv[2])]).hash)"
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "b.py")]
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "TZ": "Asia/Tokyo",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    other = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert other == build_package(path, [tmp_path / "b.py"]).hash
