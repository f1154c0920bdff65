"""The file injector: every line once whatever dies, and a low watermark that nothing on time falls behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, Fenced
from penstock.streams.bus.embedded.log import EmbeddedLog
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, CategorySpec, Log
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.dsl.file_injector import FileInjector, FileProgress, find_files, low_watermark_of
from penstock.streams.inspect.record_lines import LineRules
from tests.tidy_rules import ROOT
from tests.waiting import LIMIT_S, until

SPEC = CategorySpec(
    name="in",
    partitions=3,
    columns=(("q", "string"), ("ts", "bigint")),
    format="json",
    watermark="injector",
    lateness_ms=0,
    ts_column="ts",
)


class Crash(BaseException):
    """The process dies here."""


def write(path: Path, *stamps: int, mode: str = "a") -> None:
    with path.open(mode) as file:
        for ts in stamps:
            file.write(json.dumps({"q": f"k{ts % 7}", "ts": ts}) + "\n")


def injector(log: Log, epoch: int = 1, spec: CategorySpec = SPEC) -> FileInjector:
    return FileInjector(log, LineRules(spec=spec, key_column="q"), "files", epoch=epoch)


def stamps(log: Log) -> list[int]:
    return sorted(
        row["_ts"]
        for partition, end in enumerate(log.end_offsets("in"))
        for batch in log.read("in", partition, 0, end)
        for row in batch.to_pylist()
    )


def a_log() -> MemoryLog:
    log = MemoryLog()
    log.create(SPEC)
    return log


@pytest.mark.parametrize(
    ("places", "low"),
    [
        ([], None),
        ([FileProgress(next=5)], 5),
        ([FileProgress(last=9)], 9),  # at its end, and the newest
        ([FileProgress(last=9), FileProgress(next=20)], 20),  # nothing more is expected of the older one
        ([FileProgress(last=9, next=12), FileProgress(next=20)], 12),
        ([FileProgress(next=30), FileProgress(last=20)], 20),
        ([FileProgress(last=9), FileProgress()], None),  # the newer one is still empty
        (
            [FileProgress(last=9, is_open=True), FileProgress(next=20)],
            None,
        ),  # lines that do not tell their time
    ],
)
def test_the_low_is_that_of_the_oldest_line_not_sent(places: list[FileProgress], low: int | None):
    assert low_watermark_of(places) == low


def test_lines_that_are_appended_follow_once_each(tmp_path: Path):
    log, path = a_log(), tmp_path / "a.log"
    mine = injector(log)
    write(path, 10, 20)
    assert mine.round([path], now_ms=1000) == 2
    assert mine.round([path], now_ms=2000) == 0
    write(path, 30)
    with path.open("a") as file:
        file.write('{"q": "half')
    assert mine.round([path], now_ms=3000) == 1 and stamps(log) == [10, 20, 30]
    assert log.watermark("in") == 30


def test_a_last_line_without_its_break_counts_once_nothing_more_comes(tmp_path: Path):
    log, path = a_log(), tmp_path / "a.log"
    path.write_text('{"q": "x", "ts": 10}\n\n{"q": "x", "ts": 20}')
    mine = injector(log)
    assert mine.round([path], now_ms=1000) == 1
    assert mine.round([path], now_ms=2000, is_last=True) == 1
    mine.close(now_ms=3000)
    assert stamps(log) == [10, 20] and log.watermark("in") == LOW_MAX


def test_files_of_a_folder_are_sent_in_the_order_of_their_names(tmp_path: Path):
    log = a_log()
    write(tmp_path / "2.log", 30, 40)
    write(tmp_path / "1.log", 10, 20)
    mine = injector(log)
    mine.round(find_files([tmp_path]), now_ms=1000)
    assert stamps(log) == [10, 20, 30, 40]
    assert log.watermark("in") in (10, 40) and log.producers("in") == {"files": 40}
    write(tmp_path / "3.log", 50)
    mine.round(find_files([tmp_path]), now_ms=2000)
    assert log.producers("in") == {"files": 50}


def test_what_cannot_be_read_is_sent_to_be_put_aside_and_moves_no_watermark(tmp_path: Path):
    log, path = a_log(), tmp_path / "a.log"
    path.write_text('broken\n{"q": "x"}\n{"q": "x", "ts": 20}\n')
    injector(log).round([path], now_ms=10**12)
    assert sum(log.end_offsets("in")) == 3 and log.watermark("in") == 20


def test_a_file_that_was_cut_is_refused_by_name(tmp_path: Path):
    log, path = a_log(), tmp_path / "a.log"
    write(path, 10, 20)
    injector(log).round([path], now_ms=1000)
    write(path, 30, mode="w")
    with pytest.raises(ConfigError, match="shorter than the part that was sent"):
        injector(log, epoch=2).round([path], now_ms=2000)


def test_an_older_life_is_refused(tmp_path: Path):
    log, path = a_log(), tmp_path / "a.log"
    write(path, 10)
    old = injector(log, epoch=1)
    injector(log, epoch=2).round([path], now_ms=1000)
    write(path, 20)
    with pytest.raises(Fenced):
        old.round([path], now_ms=2000)


class Dying:
    """Dies at the n-th point, counted anew in each life."""

    def __init__(self, points: list[int | None]) -> None:
        self.points, self.count = points, 0

    def fault(self, point: str) -> None:
        self.count += 1
        if self.points and self.count == self.points[0]:
            self.count = 0
            self.points.pop(0)
            raise Crash


def live(log: Log, folder: Path, epoch: int) -> None:
    """A life from its start: all that is there, in batches of a few lines, then a file that comes meanwhile."""
    mine = injector(log, epoch)
    mine.round(find_files([folder]), now_ms=epoch * 10_000)
    write(folder / "b.log", *range(200, 206), mode="w")
    mine.round(find_files([folder]), now_ms=epoch * 10_000 + 500)
    mine.round(find_files([folder]), now_ms=epoch * 10_000 + 1000, is_last=True)
    mine.close(now_ms=epoch * 10_000 + 1500)


def test_killed_at_every_effect_it_goes_on_without_a_gap_or_a_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Crash at the n-th effect of the bus, before or after it; the next life finishes; and the same with two
    crashes. Whatever died, each line is there once, and nothing that came later than a mark is behind it."""
    monkeypatch.setattr("penstock.streams.dsl.file_injector.BATCH_BYTES", 60)
    crashes = 0
    for first in range(1, 200):
        for second in (None, 3, 10):
            folder = tmp_path / f"{first}.{second}"
            folder.mkdir()
            write(folder / "a.log", *range(100, 110))
            log, deaths, dying = MemoryLog(), 0, Dying([first, second])
            log.create(SPEC)
            log._fault = dying.fault
            for epoch in (1, 2, 3):
                try:
                    live(log, folder, epoch)
                    break
                except Crash:
                    deaths += 1
            assert stamps(log) == [*range(100, 110), *range(200, 206)], (first, second)
            assert log.watermark("in") == LOW_MAX
            for partition in range(3):
                for mark in log.marks("in", partition, above=LOW_MIN, up_to=10**9):
                    after = log.read("in", partition, mark.end, log.end_offsets("in")[partition])
                    rows = [row["_ts"] for batch in after for row in batch.to_pylist()]
                    assert all(ts >= mark.low for ts in rows) or mark.low == LOW_MAX
            crashes += deaths
        if deaths == 0:
            break
    assert crashes > 30 and first < 199


def test_kill_9_while_the_file_grows_loses_and_doubles_nothing(tmp_path: Path):
    """`penstock inject -f` as a process, killed again and again while somebody writes."""
    bus, path = tmp_path / "bus", tmp_path / "a.log"
    log = EmbeddedLog(bus)
    log.create(SPEC)
    path.touch()
    command = [
        sys.executable, "-m", "penstock.cli.main", "inject", str(path), "--category", "in", "--key", "q",
        "--bus", f"embedded:{bus}",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    written = 0
    for life in range(2):
        process = subprocess.Popen(
            [*command, "-f"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        before = sum(log.end_offsets("in"))

        def write_more(pause_s: float = 0.02 * (life + 1)) -> None:
            nonlocal written
            write(path, *range(written, written + 10))
            written += 10
            time.sleep(pause_s)

        def is_there(process: subprocess.Popen[bytes] = process, end: int = before + 40) -> bool:
            return sum(log.end_offsets("in")) >= end or process.poll() is not None

        try:
            until(is_there, "lines on the bus", step=write_more)
        finally:
            process.kill()
            _, said = process.communicate()
        assert process.returncode == -signal.SIGKILL, said
    done = subprocess.run([*command, "--done"], cwd=tmp_path, env=env, capture_output=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert stamps(log) == list(range(written)) and log.watermark("in") == LOW_MAX
    log.close()
