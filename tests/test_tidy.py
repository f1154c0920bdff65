"""The style is a test: the rules of `tidy_rules.py` on every file, and each rule on something it must catch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import tidy_rules as tidy
from tests.tidy_rules import ROOT, RULES, Rule, Source
from tests.waiting import LIMIT_S

SOURCES = tidy.package_sources()
KAFKA = ("penstock.streams.bus.kafka_", "penstock.streams.bus.avro")
CHANNELS = "penstock.web.channels"
ENGINE = ("penstock.streams.engine", "penstock.streams.bus.spark_source")


def needs_spark(module: str) -> bool:
    return module.startswith(ENGINE)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_module_keeps_the_rules(source: Source):
    complaints = [f"{rule.__name__}: {complaint}" for rule in RULES for complaint in rule(source)]
    assert not complaints, "\n".join(["", f"penstock/{source.path}", *complaints])


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_module_imports_only_what_is_declared(source: Source):
    needed = needs_spark(source.module), source.module.startswith(KAFKA), source.module == CHANNELS
    extras = dict(zip(("spark", "kafka", "alarms"), needed, strict=True))
    assert not list(tidy.undeclared(source, extras=tuple(name for name, needed in extras.items() if needed)))


def test_what_calls_itself_pure_reaches_no_effect():
    assert not list(tidy.impure(SOURCES))


def test_the_allow_lists_name_files_that_exist():
    named = {*tidy.MAY_WAIT, *tidy.MAY_CATCH_ALL}
    assert named <= {source.path for source in SOURCES.values()}


@pytest.mark.parametrize("path", list(tidy.text_files()), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_text_file_says_nothing_it_should_not(path: Path):
    text = path.read_text(encoding="utf-8")
    complaints = list(tidy.complaints_about_text(text))
    if (
        path.suffix == ".py"
        and path.name != "tidy_rules.py"
        and "tests" in path.parts
        and tidy.PATCHES.search(text)
    ):
        complaints.append("patches what it tests: pass a fake instead")
    name = path.relative_to(ROOT).as_posix()
    is_test = path.suffix == ".py" and name.startswith("tests/") and not name.startswith(tidy.MAY_TIME)
    if is_test and path.name not in ("tidy_rules.py", "test_tidy.py") and tidy.OWN_LIMITS.search(text):
        complaints.append("has a limit in seconds of its own: wait with tests/waiting.py")
    if path.suffix == ".py" and text.count("\n") > tidy.LINES_MAX:
        complaints.append(f"has more than {tidy.LINES_MAX} lines")
    assert not complaints, "\n".join(["", *complaints])


@pytest.mark.parametrize(
    "text",
    [
        "end = time.monotonic() + 5",
        "assert time.monotonic() - began < 5",
        "process.wait(10)",
        "run(timeout=60)",
    ],
)
def test_a_limit_of_a_tests_own_is_found(text: str):
    assert tidy.OWN_LIMITS.search(text)


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-build.lock"])
def test_a_lock_file_holds_pins_and_hashes_and_nothing_else(name: str):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if not tidy.LOCK_LINE.match(line)]
    pins = [number for number, line in enumerate(lines) if "==" in line]
    assert len(pins) >= 5
    assert all(lines[number + 1].startswith("    --hash=sha256:") for number in pins)


def test_the_control_plane_imports_without_its_extras():
    """Plan: import every module outside engine and Kafka in a fresh process that finds neither's packages."""
    # Alembic runs its environment as a script; nothing imports it.
    scripts = {"penstock.core.migrations.env"}
    bare = [module for module in SOURCES if not needs_spark(module) and not module.startswith(KAFKA)]
    modules = [module for module in bare if module not in scripts]
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
    (tidy.imports_only_downwards, "jobs/a.py", "import penstock.tasks.specs"),
    (tidy.imports_only_downwards, "tasks/a.py", "from penstock.streams.keys import partition_of"),
    (tidy.imports_only_downwards, "tasks/a.py", "from ..streams import keys"),
    (tidy.imports_only_downwards, "streams/a.py", "def f():\n    from penstock.tasks.specs import TaskSpec"),
    (tidy.imports_only_downwards, "resources/a.py", "from penstock.app import App"),
    (tidy.imports_only_downwards, "sim/a.py", "from penstock.streams.bus.embedded_log import EmbeddedLog"),
    (tidy.imports_only_downwards, "app.py", "from penstock.sim.simulation import Simulation"),
    (tidy.imports_only_downwards, "web/a.py", "from penstock.cli import main"),
    (tidy.imports_only_downwards, "leftovers/a.py", "x = 1"),
    (tidy.spark_stays_in_the_engine, "streams/bus/embedded_log.py", "from pyspark.sql import SparkSession"),
    (tidy.spark_stays_in_the_engine, "app.py", "def f():\n    import pyspark"),
    (tidy.http_stays_at_the_edge, "tasks/warden.py", "import httpx"),
    (tidy.http_stays_at_the_edge, "cli/up.py", "import uvicorn"),
    (tidy.http_stays_at_the_edge, "tasks/a.py", "from urllib.request import urlopen"),
    (tidy.http_stays_at_the_edge, "core/a.py", "import http.server"),
    (tidy.sql_stays_in_stores, "jobs/state_syncer.py", "import sqlalchemy as sa"),
    (tidy.sql_stays_in_stores, "streams/interval.py", "from sqlite3 import connect"),
    (tidy.waits_only_in_the_loop, "jobs/state_syncer.py", "import time"),
    (tidy.waits_only_in_the_loop, "jobs/state_syncer.py", "from time import sleep"),
    (tidy.waits_only_in_the_loop, "tasks/a.py", "import threading\nthreading.Thread(target=print).start()"),
    (tidy.waits_only_in_the_loop, "tasks/a.py", "from threading import Timer"),
    (tidy.waits_only_in_the_loop, "tasks/a.py", "from datetime import datetime\nnow = datetime.now()"),
    (tidy.waits_only_in_the_loop, "core/loop.py", "x = 1"),
    (tidy.catches_only_what_it_knows, "jobs/a.py", "try:\n    pass\nexcept Exception:\n    pass"),
    (tidy.catches_only_what_it_knows, "jobs/a.py", "try:\n    pass\nexcept:\n    pass"),
    (
        tidy.catches_only_what_it_knows,
        "jobs/a.py",
        "try:\n    pass\nexcept (OSError, BaseException):\n    pass",
    ),
    (tidy.has_a_docstring, "jobs/a.py", "x = 1"),
    (tidy.is_not_too_long, "jobs/a.py", "\n" * (tidy.LINES_MAX + 1)),
    (tidy.functions_fit_a_screen, "jobs/a.py", "def f():\n" + "    x = 1\n" * tidy.FUNCTION_LINES_MAX),
    (tidy.names_say_something, "jobs/utils.py", ""),
    (tidy.names_say_something, "jobs/sql_helpers.py", ""),
    (tidy.names_say_something, "common/a.py", ""),
    (tidy.names_say_something, "jobs/a.py", "class JobStoreImpl: ..."),
    (tidy.names_say_something, "jobs/a.py", "class AbstractStore: ..."),
    (tidy.names_say_something, "jobs/a.py", "class ConfigManager: ..."),
    (tidy.packages_only_re_export, "jobs/__init__.py", '"""Jobs."""\nfrom penstock.jobs import config'),
    (tidy.packages_only_re_export, "core/__init__.py", '"""Core."""\nprint("hello")'),
    (tidy.nothing_is_left_undone, "jobs/a.py", "def f():\n    raise NotImplementedError('later')"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BREAKS)
def test_a_rule_catches_what_it_forbids(rule: Rule, path: str, text: str):
    assert list(rule(Source(path, text)))


def test_every_rule_has_something_it_catches():
    assert {rule for rule, _, _ in BREAKS} == set(RULES)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "tasks/a.py",
            '"""A."""\nfrom penstock.core.errors import Fenced\nfrom penstock.jobs.ports import DataPlane',
        ),
        ("sim/a.py", '"""A."""\nfrom penstock.streams.bus.memory_log import MemoryLog'),
        ("streams/engine/a.py", '"""A."""\nfrom pyspark.sql import SparkSession'),
        ("jobs/a_store.py", '"""A."""\nimport sqlalchemy as sa\nimport threading\nlock = threading.RLock()'),
        ("cli/a.py", '"""A."""\nfrom urllib.parse import urlsplit\nfrom penstock.app import App'),
        ("tasks/shard_manager.py", '"""A."""\nclass ShardManager: ...'),
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


@pytest.mark.parametrize(
    "text",
    [
        "# TO" + "DO: later",
        "see /ro" + "ot/notes",
        'Path("/t' + 'mp/x")',
        "index-url = https://py" + "pi.org/simple",
        "--extra-index" + "-url https://mirror.example",
    ],
)
def test_text_that_must_not_be_there_is_found(text: str):
    assert list(tidy.complaints_about_text(text))


@pytest.mark.parametrize("text", ["docs/work/notes", "GET /jobs/a", "a fraction of work/time", "~/work/x"])
def test_text_that_is_harmless_is_left_alone(text: str):
    assert not list(tidy.complaints_about_text(text))


@pytest.mark.parametrize(
    "line", ["-i https://mirror.example/simple", "a @ file:///x", "a==1.0", "a>=1.0 \\", "--hash=md5:0"]
)
def test_a_lock_line_that_is_neither_pin_nor_hash_is_found(line: str):
    assert not tidy.LOCK_LINE.match(line)
