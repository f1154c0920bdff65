"""`make setup` finds a Java that Spark runs on, does nothing twice, and says what to type when it cannot go on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.tidy_rules import ROOT
from tests.waiting import LIMIT_S


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("penstock_setup", ROOT / "scripts" / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


setup = load_script()


def a_java(home: Path, version: str) -> Path:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    java.chmod(0o755)
    return home.resolve()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_392"', 8),
        ('Picked up _JAVA_OPTIONS: -Xmx1g\nopenjdk version "21.0.2" 2024-01-16', 21),
        ("command not found", None),
    ],
)
def test_the_version_of_java_is_read_from_what_it_says(text, version):
    assert setup.parse_java_version(text) == version


def test_the_java_you_set_wins_over_the_one_on_the_path_and_that_over_the_rest(tmp_path):
    in_place = a_java(tmp_path / "usr" / "lib" / "jvm" / "java-17", "17.0.1")
    on_path = a_java(tmp_path / "somewhere", "21.0.1")
    set_one = a_java(tmp_path / "a folder with spaces", "17.0.9")
    path = str(on_path / "bin")
    assert setup.find_java({"JAVA_HOME": str(set_one), "PATH": path}, tmp_path) == set_one
    assert setup.find_java({"PATH": path}, tmp_path) == on_path
    assert setup.find_java({}, tmp_path) == in_place


def test_a_java_that_spark_cannot_use_is_passed_over(tmp_path):
    too_new = a_java(tmp_path / "new", "25.0.1")
    good = a_java(tmp_path / "usr" / "lib" / "jvm" / "java-21", "21.0.1")
    broken = tmp_path / "broken"
    environment = {"JAVA_HOME": str(broken), "PATH": str(too_new / "bin")}
    assert setup.find_java(environment, tmp_path) == good


def test_without_any_java_there_is_none(tmp_path):
    assert setup.find_java({"JAVA_HOME": str(tmp_path), "PATH": str(tmp_path)}, tmp_path) is None


def test_the_message_about_java_has_three_parts_and_the_line_to_type():
    what, why, *fix = str(setup.no_java("apt-get", "nothing leads to one")).splitlines()
    assert what == "no Java 17 or 21 was found"
    assert why == "Why: nothing leads to one"
    assert fix[0].startswith("What to do: ")
    assert "sudo apt-get install -y --no-install-recommends openjdk-21-jre-headless" in "\n".join(fix)
    assert "dnf" not in "\n".join(fix)


def test_without_a_known_package_manager_every_line_is_told():
    message = str(setup.no_java(None, "nothing leads to one"))
    assert all(f" {name} " in message for name in setup.JAVA_INSTALL)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in setup.INPUTS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    return tmp_path


@pytest.mark.parametrize("name", setup.INPUTS)
def test_the_stamp_changes_with_everything_the_environment_is_made_from(tree, name):
    before = setup.stamp_key(tree, "Python 3.11.7")
    assert setup.stamp_key(tree, "Python 3.11.7") == before
    (tree / name).write_text("changed")
    assert setup.stamp_key(tree, "Python 3.11.7") != before


def test_the_stamp_changes_with_the_python_and_the_place(tree, tmp_path_factory):
    before = setup.stamp_key(tree, "Python 3.11.7")
    assert setup.stamp_key(tree, "Python 3.12.1") != before
    moved = tmp_path_factory.mktemp("moved") / "here"
    tree.rename(moved)
    assert setup.stamp_key(moved, "Python 3.11.7") != before


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_stamp_counts_as_none(tmp_path, text):
    (tmp_path / "stamp").write_text(text)
    assert setup.read_stamp(tmp_path / "stamp") == {}
    assert setup.read_stamp(tmp_path / "absent") == {}


def test_without_a_python_the_script_says_what_to_type(tmp_path):
    """Plan: a copy of the scripts, without `.venv`, with a PATH that has a shell's tools and a Python too old."""
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "setup.sh"
    script.write_text((ROOT / "scripts" / "setup.sh").read_text())
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("cat", "dirname"):
        found = next(Path(folder) / tool for folder in ("/usr/bin", "/bin") if (Path(folder) / tool).exists())
        (tools / tool).symlink_to(found)
    (tools / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tools / "python3").chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", str(script)],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 1
    assert [line.split(":")[0] for line in done.stderr.splitlines()[:3]] == ["setup", "Why", "What to do"]
    assert "apt-get install -y python3 python3-venv" in done.stderr


@pytest.mark.parametrize("name", ["scripts/setup.sh", "scripts/lock.sh", ".ci/run"])
def test_scripts_may_be_run(name):
    assert os.access(ROOT / name, os.X_OK)
