"""Any command as a task, on real processes: started, measured, stopped, killed with its kin, reported when it dies."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.container.process_runner import (
    ProcessRunner,
    RotatedFile,
    UnknownField,
    command_of,
    find_groups,
)
from penstock.core.system_clock import SystemClock
from penstock.jobs.tasks import FINAL, Runner, RunState, RunStatus
from tests.fleet.harness import a_spec
from tests.kin import kin_of
from tests.waiting import until

SLEEPS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'not yet'))  # a print may meet itself
print('up', flush=True)
while True:
    time.sleep(600)
""",
]
PARENT = [
    sys.executable,
    "-c",
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print('up', flush=True); time.sleep(600)",
]
HUNGRY = [
    sys.executable,
    "-c",
    "import time; data = bytearray(200 * 2**20); print('up', flush=True); time.sleep(600)",
]


@pytest.fixture(params=["watched", "limited"])
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ProcessRunner]:
    groups = find_groups() if request.param == "limited" else None
    if request.param == "limited" and groups is None:
        pytest.skip("the kernel lets us make no memory groups here")
    found = ProcessRunner(tmp_path, SystemClock(), groups)
    yield found
    for status in found.poll():
        found.kill(status.task_id)
    until(lambda: all(status.state in FINAL for status in found.poll()))


def start(runner: ProcessRunner, command: list[str], task: str = "a/0", **config: object) -> None:
    runner.start(a_spec(task, config={"command": command, **config}), shard_epoch=7)


def status(runner: ProcessRunner, task: str = "a/0") -> RunStatus:
    return next(found for found in runner.poll() if found.task_id == task)


def text(folder: Path, task: str = "a_0") -> str:
    path = folder / "logs" / f"{task}.log"
    return path.read_text() if path.exists() else ""


def test_it_is_a_runner(runner: ProcessRunner):
    fits: Runner = runner
    assert fits.poll() == ()


def test_a_command_runs_until_it_is_stopped(runner: ProcessRunner, tmp_path: Path):
    start(runner, SLEEPS)
    until(lambda: "up" in text(tmp_path))
    assert status(runner).state is RunState.RUNNING
    runner.stop("a/0")
    until(lambda: status(runner).state is RunState.STOPPED)
    runner.forget("a/0")
    assert runner.poll() == ()


def test_one_that_does_not_stop_is_killed(runner: ProcessRunner, tmp_path: Path):
    start(runner, STUBBORN)
    until(lambda: "up" in text(tmp_path))
    runner.stop("a/0")
    until(lambda: "not yet" in text(tmp_path))
    assert status(runner).state is RunState.STOPPING
    runner.kill("a/0")
    until(lambda: status(runner).state is RunState.STOPPED)


def test_what_a_task_started_ends_with_it(runner: ProcessRunner, tmp_path: Path):
    start(runner, PARENT)
    until(lambda: "up" in text(tmp_path))
    kin = {process: command for process, command in kin_of(os.getpid()).items() if "600" in command}
    assert len(kin) == 2
    parent = next(process for process, command in kin.items() if "Popen" in command)
    os.kill(parent.pid, signal.SIGKILL)  # it dies alone; the child would live on
    until(lambda: status(runner).state is RunState.FAILED)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in kin)
    assert "SIGKILL" in status(runner).error


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ([sys.executable, "-c", "raise SystemExit(3)"], "it ended with code 3"),
        ([sys.executable, "-c", "pass"], "it ended with code 0"),
        (["no-such-command-anywhere"], "cannot start `no-such-command-anywhere`"),
        ([], "the job has no command"),
        (["echo", "{nothing}"], "{nothing} is not a field"),
        (["a\0b"], "cannot start"),
    ],
)
def test_an_end_that_nobody_asked_for_is_a_failure_that_says_why(runner: ProcessRunner, command, error):
    start(runner, command)
    until(lambda: status(runner).state is RunState.FAILED)
    assert error in status(runner).error


def test_a_task_above_its_memory_is_killed_and_says_how_much_it_used(runner: ProcessRunner):
    start(runner, HUNGRY, resources={"memory_mb": 64})
    until(lambda: status(runner).state is RunState.FAILED)
    assert "out of memory" in status(runner).error and "reserved 64 MB" in status(runner).error


def test_what_a_task_starts_counts_as_its_memory(runner: ProcessRunner):
    """The child that wants too much is in a session of its own, as Spark's workers are in groups of their own."""
    parent = f"import subprocess, time; subprocess.Popen({HUNGRY!r}, start_new_session=True); time.sleep(600)"
    start(runner, [sys.executable, "-c", parent], resources={"memory_mb": 64})
    until(lambda: status(runner).state is RunState.FAILED)
    assert status(runner).error.startswith("out of memory: it used")
    assert status(runner).metrics["memory_peak_mb"] >= 60


def test_it_measures_cpu_and_memory(runner: ProcessRunner):
    start(runner, [sys.executable, "-c", "while True: sum(range(10000))"])
    until(lambda: status(runner).metrics.get("cpu_ms_total", 0) > 100)
    first = until(lambda: found if (found := status(runner).metrics)["cpu"] > 0 else None)
    assert first["memory_mb"] > 1
    until(lambda: status(runner).metrics["cpu_ms_total"] > first["cpu_ms_total"])
    later = status(runner).metrics
    assert later["cpu_started_ms"] == first["cpu_started_ms"] < first["cpu_at_ms"] < later["cpu_at_ms"]


def test_a_task_knows_its_place_and_nothing_that_opens_doors(
    runner: ProcessRunner, tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("PENSTOCK_TOKEN", "pk_secret")
    monkeypatch.setenv("PENSTOCK_DATABASE", "postgresql://u:secret@h/x")
    show = "import os, sys; print(sys.argv[1:], sorted(os.environ.items()), os.getcwd(), flush=True)"
    start(
        runner,
        [
            sys.executable,
            "-c",
            show,
            "{task}",
            "{index}/{count}",
            "{partitions}",
            "{arguments.mode}",
            "{}",
            "a{b",
        ],
        task_count=4,
        arguments={"mode": "fast; rm -rf /"},
        environment={"COLOUR": "blue"},
    )
    until(lambda: status(runner).state in FINAL and text(tmp_path))
    said = text(tmp_path)
    assert "['a/0', '0/4', '0', 'fast; rm -rf /', '{}', 'a{b']" in said
    assert (
        "('COLOUR', 'blue')" in said
        and "('PENSTOCK_TASK', 'a/0')" in said
        and "('PENSTOCK_EPOCH', '7')" in said
    )
    assert "secret" not in said and str(tmp_path / "work") in said


def test_fields_are_filled_in_once():
    spec = a_spec("a/0", config={"command": ["{arguments.x}"], "arguments": {"x": "{job}"}})
    assert command_of(spec) == ["{job}"]
    with pytest.raises(UnknownField):
        command_of(a_spec("a/0", config={"command": ["{arguments.y}"]}))


def test_logs_are_turned_over_and_nothing_is_lost(tmp_path: Path):
    file = RotatedFile(tmp_path / "a.log", bytes_max=100, kept=2)
    for number in range(30):
        file.write(f"line {number:03d}\n".encode())
    file.close()
    names = ["a.log.2", "a.log.1", "a.log"]
    together = "".join((tmp_path / name).read_text() for name in names)
    assert together.splitlines() == [f"line {number:03d}" for number in range(30)]
    assert all((tmp_path / name).stat().st_size <= 100 for name in names)


def test_a_flood_of_output_neither_blocks_nor_loses(runner: ProcessRunner, tmp_path: Path):
    start(runner, [sys.executable, "-c", "for n in range(20000): print(n)"])
    until(lambda: status(runner).state in FINAL)
    until(lambda: text(tmp_path).endswith("19999\n"))
    assert text(tmp_path).splitlines() == [str(number) for number in range(20_000)]
