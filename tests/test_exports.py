"""The public face, pinned: names, version, the command, the marker for type checkers.

A failure here means: users will notice. Change the table on purpose, and say so in CHANGELOG.md.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest

import penstock
from penstock.former_names import FORMER
from tests.tidy_rules import PACKAGE, ROOT
from tests.waiting import LIMIT_S

PUBLIC: dict[str, set[str]] = {
    "penstock": {
        *("Computation", "Context", "ListState", "MapState", "Opaque", "Pipeline", "Record", "Timer"),
        *("Value", "VectorComputation"),
        *("Injector", "open_log"),
        *("session", "sliding", "tumbling"),
    },
    "penstock.client": {"Client", "new_key"},
    "penstock.core": set(),
    "penstock.streams": set(),
    "penstock.testing": {
        *("OutputsDiffer", "PipelineRun", "Produced", "Run", "Tried", "crash_everywhere", "cut_everywhere"),
    },
}

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize(("package", "names"), PUBLIC.items(), ids=PUBLIC)
def test_a_package_exports_exactly_these_names(package: str, names: set[str]):
    listed = getattr(importlib.import_module(package), "__all__", [])
    assert set(listed) == names
    assert list(listed) == sorted(listed)


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package in PUBLIC for name in sorted(PUBLIC[package])]
)
def test_an_exported_name_leads_to_something_documented(package: str, name: str):
    assert getattr(importlib.import_module(package), name).__doc__


def test_a_name_that_is_not_exported_is_a_plain_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        penstock.no_such_name  # noqa: B018


def test_the_version_is_told_the_same_everywhere():
    assert penstock.__version__ == PROJECT["version"] == metadata.version("penstock")


def test_the_command_is_installed_and_can_be_loaded():
    (command,) = [
        entry for entry in metadata.distribution("penstock").entry_points if entry.name == "penstock"
    ]
    assert command.value == PROJECT["scripts"]["penstock"] == "penstock.cli.main:main"
    assert callable(command.load())


def test_type_checkers_are_told_that_the_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_the_control_plane_is_declared_without_spark():
    assert not [line for line in PROJECT["dependencies"] if line.startswith(("pyspark", "pandas"))]
    assert "pyspark==4.3.0" in PROJECT["optional-dependencies"]["spark"]


@pytest.mark.parametrize(("former", "now"), [(name, now) for name, now in FORMER.items() if now])
def test_a_module_that_users_import_is_found_by_its_former_name(former: str, now: str):
    """Packages that an earlier version stored say it; a fresh process, since a module is imported once."""
    names = [name for name in dir(importlib.import_module(now)) if not name.startswith("_")]
    program = f"import {former} as a, {now} as b; assert a is b; from {former} import {names[0]}"
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", program],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{former} was renamed to {now}" in done.stderr


def test_a_module_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match="never_was"):
        importlib.import_module("penstock.streams.never_was")
