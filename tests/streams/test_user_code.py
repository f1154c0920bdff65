"""User code is imported in containers and loaded in the client, without traces, mistakes told in three parts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.core.errors import PipelineError
from penstock.streams.compile.packages import build_package, load_entry, load_pipeline, unpack_package
from tests.streams.package_files import PIPELINE, write
from tests.waiting import LIMIT_S, join

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
from penstock.streams.dsl.computation import Computation
from penstock.streams.dsl.pipeline import Pipeline

class Count(Computation):
    outputs = {"out": {"n": "int"}}

p = Pipeline("demo")
p.source("q").key_by("a").process(Count).sink("out")
"""

BAD_FILES = {
    "syntax": ("x = 1\n  y = (2\n", ["pipeline.py:2: syntax error", "y = (2", "^"]),
    "unclosed": (
        "x = (1,\n",
        ["pipeline.py:1: syntax error: '(' was never closed", "    x = (1,\n        ^"],
    ),
    "null byte": ("x = 1\0", ["pipeline.py"]),
    "exception": (
        "def f():\n    return {}['x']\n\nf()\n",
        ["pipeline.py:2: KeyError: 'x'", "return {}['x']"],
    ),
    "missing module": ("import pandsa\n", ["pipeline.py:1: there is no module 'pandsa'", "install 'pandsa'"]),
    "exit": ("import sys\nsys.exit(0)\n", ["pipeline.py:2: the file calls sys.exit()", "sys.exit()"]),
    "no pipeline": ("x = 1\n", ["defines no pipeline", 'p = Pipeline("name")']),
    "two pipelines": (PIPELINE + "q = Pipeline('other')\n", ["defines 2 pipelines: p, q", "its own file"]),
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
    code = "import sys; from pathlib import Path; from penstock.streams.compile.packages import build_package as b; "
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


@pytest.mark.parametrize("in_main", [True, False])
def test_an_import_that_does_not_end_is_broken_off_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_main: bool
):
    """In the main thread and in another one; an `except Exception` around the loop does not help it."""
    monkeypatch.setattr("penstock.streams.dsl.user_code.IMPORT_S", 0.3)
    path = tmp_path / "endless.py"
    path.write_text("n = 0\nwhile True:\n    try:\n        n += 1\n    except Exception:\n        pass\n")
    found: list[PipelineError] = []

    def load() -> None:
        with pytest.raises(PipelineError) as caught:
            load_entry(tmp_path, "endless.py", f"endless-{in_main}")
        found.append(caught.value)

    if in_main:
        load()
    else:
        thread = threading.Thread(target=load)
        thread.start()
        join(thread)
    assert "endless.py:" in found[0].what and "did not end within 0.3 s" in found[0].what
    monkeypatch.setattr("penstock.streams.dsl.user_code.IMPORT_S", LIMIT_S)
    path.write_text("fine = 1\n")
    assert load_entry(tmp_path, "endless.py", f"endless-{in_main}").fine == 1


def test_a_wait_in_the_main_thread_is_broken_off_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock.streams.dsl.user_code.IMPORT_S", 0.3)
    # The runner of tests has an alarm of its own, which stays as it is: here it is put aside.
    before = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        (tmp_path / "waits.py").write_text("import time\ntime.sleep(600)\n")
        with pytest.raises(PipelineError, match="did not end within"):
            load_entry(tmp_path, "waits.py", "waits")
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
