"""Runs the groups of `make test`, `make test-all` or `make fast` one after another, and prints how long each took.

Some groups run side by side. It stops where one fails; the table is printed all the same.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

CHUNK_BYTES = 65536
POLL_S = 0.1
COUNT = re.compile(r"\d+ (?:passed|failed|skipped|errors?)\b")


@dataclass(frozen=True)
class Group:
    """What is run by one command."""

    name: str
    command: tuple[str, ...]
    marks: str = ""  # which tests pytest selects


def pytest_group(name: str, marks: str, *options: str) -> Group:
    """The tests with these marks."""
    command = (sys.executable, "-m", "pytest", "-q", "--durations", "10", *options, "-m", marks)
    return Group(name, command, marks)


# Three on two cores: tests wait for disks, servers and processes for a part of their time.
SPREAD = ("-n", "3", "--dist", "worksteal")
BROKER = ("-n", "2", "--dist", "loadgroup")  # all tests that need the Kafka broker go to one process
MORE_SEEDS = ("--seeds", "10")

# `make check` has run the rules of the house.
FAST = pytest_group("fast", "not (spark or e2e or slow or drill)", *SPREAD, "--ignore", "tests/test_tidy.py")
# Each suite is stages, one after another; the groups of a stage run at the same time.
SUITES: Mapping[str, tuple[tuple[Group, ...], ...]] = {
    "fast": ((FAST,),),
    "test": (
        (Group("check", ("make", "--no-print-directory", "check")),),
        (FAST,),
        (
            pytest_group("processes", "e2e and not (spark or slow or drill)", *BROKER),
            pytest_group("Spark", "spark and not (slow or drill)"),
        ),
    ),
    "test-all": (
        (pytest_group("slow", "slow and not (spark or e2e or drill)", *SPREAD, *MORE_SEEDS),),
        (
            pytest_group("slow Spark", "slow and spark and not drill"),
            pytest_group("slow processes", "slow and e2e and not (spark or drill)", *BROKER),
        ),
        (pytest_group("drills", "slow and drill", "-s"),),
    ),
}


@dataclass(frozen=True)
class Row:
    """What came of a group."""

    name: str
    seconds: float
    counts: str = ""  # of tests that passed, failed and so on
    code: int = 0


def run_groups(suite: str, stages: Sequence[Sequence[Group]]) -> int:
    """Run them up to the first stage that fails, and print the table; the exit code of the group that failed, or 0."""
    rows: list[Row] = []
    began = time.monotonic()
    for groups in stages:
        print(f"{suite}: {' beside '.join(group.name for group in groups)}", flush=True)
        with ThreadPoolExecutor(len(groups)) as pool:
            runs = [pool.submit(run, group, shows=group is groups[0]) for group in groups]
        for group, (row, output) in zip(groups, (each.result() for each in runs), strict=True):
            rows.append(row)
            if group is not groups[0]:
                print(f"{suite}: {group.name}, which ran beside it", output, sep="\n", flush=True)
        if any(row.code for row in rows):
            break
    print(table([*rows, Row(f"make {suite}", time.monotonic() - began)]), flush=True)
    return next((row.code for row in rows if row.code), 0)


def run(group: Group, *, shows: bool) -> tuple[Row, str]:
    """Run it; its output is shown as it comes, or only returned.

    It goes by a file: a process that a failed test left behind would keep a pipe open.
    """
    output = b""
    began = time.monotonic()
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(
            group.command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        while True:
            has_ended = process.poll() is not None
            more = os.pread(file.fileno(), CHUNK_BYTES, len(output))
            output += more
            if shows:
                sys.stdout.buffer.write(more)
                sys.stdout.buffer.flush()
            if has_ended and not more:
                break
            time.sleep(0 if more else POLL_S)
    text = output.decode(errors="replace").strip()
    counts = ", ".join(COUNT.findall(text.rpartition("\n")[2]))
    return Row(group.name, time.monotonic() - began, counts, process.returncode), text


def table(rows: Sequence[Row]) -> str:
    """Minutes and tests of each group, and the minutes of all."""
    width = max(len(row.name) for row in rows)
    lines = [
        f"{row.name:{width}}  {_minutes(row.seconds):>6}  {'FAILED ' if row.code else ''}{row.counts}".rstrip()
        for row in rows
    ]
    return "\n".join(["", f"{'':{width}}  {'min:s':>6}", *lines])


def _minutes(seconds: float) -> str:
    return f"{round(seconds) // 60}:{round(seconds) % 60:02}"


if __name__ == "__main__":
    (name,) = sys.argv[1:]
    sys.exit(run_groups(name, SUITES[name]))
