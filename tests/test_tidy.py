"""The rules of `tidy_rules.py`, each over all files in one test, and each on something it must catch."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests import tidy_rules as tidy
from tests.tidy_rules import ROOT, RULES, TEXT_RULES, Rule, Source, TextRule
from tests.waiting import LIMIT_S

SOURCES = tidy.package_sources()
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in tidy.text_files()}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps_the_rule(rule: Rule):
    complaints = [f"penstock/{source.path}: {said}" for source in SOURCES.values() for said in rule(source)]
    assert not complaints, "\n".join(["", rule.__doc__ or "", *complaints])


def test_what_calls_itself_pure_reaches_no_effect():
    complaints = list(tidy.impure(SOURCES))
    assert not complaints, "\n".join(["", *complaints])


def test_the_lists_of_exceptions_name_files_that_exist():
    paths = {source.path for source in SOURCES.values()}
    assert {*tidy.MAY_WAIT, *tidy.MAY_CATCH_ALL, *tidy.RE_EXPORTING} <= paths
    prefixes = {*tidy.SCRIPTS, *(name for names in tidy.EXTRAS.values() for name in names)}
    assert [each for each in prefixes if not any(name.startswith(each) for name in SOURCES)] == []


@pytest.mark.parametrize("rule", TEXT_RULES, ids=lambda rule: rule.name)
def test_every_text_file_keeps_the_rule(rule: TextRule):
    complaints = [said for path, text in TEXTS.items() for said in rule.complaints(path, text)]
    assert not complaints, "\n".join(["", *complaints])


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-build.lock"])
def test_a_lock_file_holds_pins_and_hashes_and_nothing_else(name: str):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if not tidy.LOCK_LINE.match(line)]
    pins = [number for number, line in enumerate(lines) if "==" in line]
    assert len(pins) >= 5
    assert all(lines[number + 1].startswith("    --hash=sha256:") for number in pins)


def test_the_control_plane_imports_without_a_jvm_and_without_its_extras():
    """Plan: import every module that needs no extra in a fresh process that finds no extra's packages."""
    extras = tuple(
        name for names in tidy.EXTRAS.values() for name in names if name not in tidy.EXTRAS["alarms"]
    )
    modules = [module for module in SOURCES if not module.startswith((*extras, *tidy.SCRIPTS))]
    program = (
        "import importlib, sys\n"
        "sys.modules.update(dict.fromkeys(('pyspark', 'py4j', 'pandas', 'confluent_kafka', 'fastavro', 'apprise', 'pytest'), None))\n"
        "for module in sys.argv[1:]: importlib.import_module(module)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


# --- each rule catches what it is for

BREAKS: list[tuple[Rule, str, str]] = [
    (tidy.imports_only_downwards, "core/a.py", "from penstock.jobs import config"),
    (tidy.imports_only_downwards, "jobs/a.py", "import penstock.container.task_manager"),
    (tidy.imports_only_downwards, "fleet/a.py", "from penstock.streams.bus.log import partition_of"),
    (tidy.imports_only_downwards, "fleet/a.py", "from ..streams import keys"),
    (
        tidy.imports_only_downwards,
        "streams/a.py",
        "def f():\n    from penstock.container.task_manager import TaskManager",
    ),
    (tidy.imports_only_downwards, "scaling/a.py", "from penstock.app import App"),
    (tidy.imports_only_downwards, "sim/a.py", "from penstock.streams.bus.embedded.log import EmbeddedLog"),
    (tidy.imports_only_downwards, "app.py", "from penstock.sim.simulation import Simulation"),
    (tidy.imports_only_downwards, "server/a.py", "from penstock.cli import main"),
    (tidy.imports_only_downwards, "leftovers/a.py", "x = 1"),
    (tidy.spark_stays_in_its_folder, "streams/bus/embedded/log.py", "from pyspark.sql import SparkSession"),
    (tidy.spark_stays_in_its_folder, "app.py", "def f():\n    import pyspark"),
    (tidy.waits_only_in_the_loop, "jobs/syncer/state_syncer.py", "import time"),
    (tidy.waits_only_in_the_loop, "jobs/syncer/state_syncer.py", "from time import sleep"),
    (tidy.waits_only_in_the_loop, "fleet/a.py", "import threading\nthreading.Thread(target=print).start()"),
    (tidy.waits_only_in_the_loop, "fleet/a.py", "from threading import Timer"),
    (tidy.waits_only_in_the_loop, "fleet/a.py", "from datetime import datetime\nnow = datetime.now()"),
    (tidy.waits_only_in_the_loop, "core/loop.py", "x = 1"),
    (tidy.catches_only_what_it_knows, "jobs/a.py", "try:\n    pass\nexcept Exception:\n    pass"),
    (tidy.catches_only_what_it_knows, "jobs/a.py", "try:\n    pass\nexcept:\n    pass"),
    (
        tidy.catches_only_what_it_knows,
        "jobs/a.py",
        "try:\n    pass\nexcept (OSError, BaseException):\n    pass",
    ),
    (tidy.functions_fit_a_screen, "jobs/a.py", "def f():\n" + "    x = 1\n" * tidy.FUNCTION_LINES_MAX),
    (tidy.packages_only_re_export, "jobs/__init__.py", '"""Jobs."""\nfrom penstock.jobs import config'),
    (tidy.packages_only_re_export, "core/__init__.py", '"""Core."""\nprint("hello")'),
    (tidy.nothing_is_left_undone, "jobs/a.py", "def f():\n    raise NotImplementedError('later')"),
    (tidy.imports_only_what_is_declared, "jobs/a.py", "import pandas"),
    (tidy.imports_only_what_is_declared, "streams/bus/avro.py", "import pyspark"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_catches_what_it_forbids(rule: Rule):
    texts = [(path, text) for each, path, text in BREAKS if each is rule]
    assert texts, "has nothing that it catches"
    assert [path for path, text in texts if not list(rule(Source(path, text)))] == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "fleet/a.py",
            '"""A."""\nfrom penstock.core.errors import Fenced\nfrom penstock.jobs.syncer.plan_runner import DataPlane',
        ),
        ("sim/a.py", '"""A."""\nfrom penstock.streams.bus.memory import MemoryLog'),
        ("streams/spark/a.py", '"""A."""\nfrom pyspark.sql import SparkSession'),
        ("jobs/a_store.py", '"""A."""\nimport sqlalchemy as sa\nimport threading\nlock = threading.RLock()'),
        (
            "cli/a.py",
            '"""A."""\nfrom urllib.parse import urlsplit\nfrom penstock.installation import Installation',
        ),
    ],
)
def test_what_is_allowed_passes_every_rule(path: str, text: str):
    assert not [complaint for rule in RULES for complaint in rule(Source(path, text))]


def sources_of(**texts: str) -> dict[str, Source]:
    found = [Source(f"jobs/{name}.py", text) for name, text in texts.items()]
    return {source.module: source for source in found}


def test_purity_is_checked_through_what_a_module_imports():
    sources = sources_of(
        plan='"""Plans. Pure: no clock."""\nfrom penstock.jobs.steps import Step',
        steps='"""Steps."""\nfrom . import clockwork',
        clockwork='"""Ticks."""\nimport time',
    )
    (complaint,) = tidy.impure(sources)
    assert complaint.endswith(
        "reaches time: penstock.jobs.plan -> penstock.jobs.steps -> penstock.jobs.clockwork"
    )


def test_a_pure_module_may_name_types_and_other_pure_modules():
    sources = sources_of(
        plan='"""Pure: yes."""\nfrom typing import TYPE_CHECKING\nfrom penstock.jobs.steps import Step\n'
        "if TYPE_CHECKING:\n    from random import Random",
        steps='"""Steps. Pure: values."""\nimport dataclasses',
        clockwork='"""Ticks."""\nimport time',
    )
    assert not list(tidy.impure(sources))


def test_circles_of_imports_do_not_hide_an_effect():
    sources = sources_of(
        a='"""Pure: no."""\nfrom penstock.jobs import b', b='"""B."""\nfrom penstock.jobs import a\nimport os'
    )
    assert len(list(tidy.impure(sources))) == 1


TEXT_BREAKS: dict[str, tuple[str, ...]] = {
    "undone": ("# TO" + "DO: later",),
    "machine path": ("see /ro" + "ot/notes", 'Path("/t' + 'mp/x")'),
    "registry": ("index-url = https://py" + "pi.org/simple", "--extra-index" + "-url https://mirror.example"),
    "patch": ("from unittest import mock", "with mock.patch('a.b'):"),
    "limit of its own": (
        "end = time.monotonic() + 5",
        "assert time.monotonic() - began < 5",
        "process.wait(10)",
        "run(timeout=60)",
    ),
}


@pytest.mark.parametrize("rule", TEXT_RULES, ids=lambda rule: rule.name)
def test_text_that_must_not_be_there_is_found(rule: TextRule):
    assert [text for text in TEXT_BREAKS[rule.name] if not list(rule.complaints("tests/a.py", text))] == []


@pytest.mark.parametrize("text", ["docs/work/notes", "GET /jobs/a", "a fraction of work/time", "~/work/x"])
def test_text_that_is_harmless_is_left_alone(text: str):
    assert not [said for rule in TEXT_RULES for said in rule.complaints("tests/a.py", text)]


@pytest.mark.parametrize(
    "line", ["-i https://mirror.example/simple", "a @ file:///x", "a==1.0", "a>=1.0 \\", "--hash=md5:0"]
)
def test_a_lock_line_that_is_neither_pin_nor_hash_is_found(line: str):
    assert not tidy.LOCK_LINE.match(line)


def test_an_exported_class_name_has_one_meaning():
    """A name that two modules give to different classes makes a reader look twice."""
    found: dict[str, list[str]] = {}
    for source in SOURCES.values():
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(source.path)
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}
