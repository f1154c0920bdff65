"""What all tests share: how many seeds a simulation runs, how hypothesis draws, and the one Spark session."""

from __future__ import annotations

import gc
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# What commands print depends on the terminal, and on what a continuous integration says of itself. Here it is the
# same wherever the tests run. It is said before Rich and Typer are imported, which read some of it only then.
for name in ("FORCE_COLOR", "NO_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)
os.environ |= {"COLUMNS": "80", "LINES": "25", "TERMINAL_WIDTH": "80"}

from tests.ready import memory_folder, new_place  # noqa: E402

if folder := memory_folder():
    os.environ["TMPDIR"] = tempfile.tempdir = folder  # for this process and all that it starts

# Tokens of `penstock up` go to a folder of their user: not to that of whoever runs the tests.
_CONFIG = tempfile.TemporaryDirectory(prefix="penstock-config-")
os.environ["XDG_CONFIG_HOME"] = _CONFIG.name

SEEDS_DEFAULT = 5
SEEDS_IN_TEST = 2  # `make test` runs these; the others are marked `slow` and part of `make test-all`
# Objects made before the youngest are looked through. Applications and clients are cycles: the usual 700 looks
# through all that is alive every few tests.
GC_OBJECTS = 20_000

# `ci` gives the same examples every time, so that a failure is a change of the code; `explore` looks for new ones.
# A shared machine may stall anywhere, so no example has a deadline.
settings.register_profile(
    "ci", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seeds",
        type=int,
        default=SEEDS_DEFAULT,
        metavar="N",
        help=f"run every test that takes a `seed` with seeds 0..N-1 (default {SEEDS_DEFAULT})",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `seed` runs once per seed, unless it names its own; `make test` runs the first ones."""
    if "seed" in metafunc.fixturenames and not _names_its_own(metafunc, "seed"):
        metafunc.parametrize(
            "seed",
            [
                pytest.param(seed, marks=pytest.mark.slow if seed >= SEEDS_IN_TEST else ())
                for seed in range(metafunc.config.getoption("--seeds"))
            ],
        )


def _names_its_own(metafunc: pytest.Metafunc, argument: str) -> bool:
    names: set[str] = set()
    for mark in metafunc.definition.iter_markers("parametrize"):
        given = mark.args[0] if mark.args else mark.kwargs.get("argnames", "")
        names.update(part.strip() for part in (given.split(",") if isinstance(given, str) else given))
    return argument in names


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever takes the Spark session is marked `spark`, whatever lies in `tests/e2e` or needs a broker `e2e`; what is on
    Spark and no `smoke` is `slow`.

    Where tests are distributed over several processes by groups, all that need a broker go to one: it has the only one.
    """
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker("spark")
        if item.get_closest_marker("spark") and not item.get_closest_marker("smoke"):
            item.add_marker("slow")
        if _needs_broker(item):
            item.add_marker(pytest.mark.xdist_group("kafka"))
        if "e2e" in item.path.parts or _needs_broker(item):
            item.add_marker("e2e")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays until the end: nobody need look for garbage in it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_OBJECTS, *gc.get_threshold()[1:])


def _needs_broker(item: pytest.Item) -> bool:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return "kafka" in getattr(item, "fixturenames", ()) or "kafka" in parameters.values()


@pytest.fixture(scope="session")
def seed_count(request: pytest.FixtureRequest) -> int:
    """How many seeds were asked for, for tests that loop themselves."""
    return int(request.config.getoption("--seeds"))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The tuned session that containers use; one for the whole run, since a JVM takes seconds to start."""
    # Imported here: collecting the fast tests must need neither PySpark nor Java.
    from penstock.streams.spark.session import build_session

    session = build_session("penstock-tests", 2, tmp_path_factory.mktemp("spark"))
    yield session
    session.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """A real PostgreSQL server, one per process of the run; see `tests.postgres`."""
    from tests.postgres import postgres_server

    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def kafka() -> Iterator[Any]:
    """A real Kafka broker, one per process of the run; see `tests.kafka`."""
    from tests.kafka import NoBroker, kafka_server

    try:
        server = kafka_server()
        running = server.__enter__()
    except NoBroker as reason:
        pytest.skip(f"no Kafka broker: {reason}")
    try:
        yield running
    finally:
        server.__exit__(None, None, None)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str | None:
    """What `Database(place)` takes, for tests that must hold on every store."""
    return new_place(request.param, request, tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB, to be filled."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
