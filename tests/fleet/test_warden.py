"""Claims about the watchdog, on real processes: an engine that must not go on does not, nor does anything it started."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from penstock.container.sessions import is_session_alive, kill_previous_session, write_pid_file
from penstock.container.warden import KILL_TIMES_MAX, KillTimes, Renewal, Warden
from penstock.core.errors import EnvironmentProblem, StoreUnavailable
from penstock.core.system_clock import SystemClock
from penstock.fleet.messages import FAST, PAPER, Heartbeat, HeartbeatReply, HeartbeatVerdict, Profile
from tests.waiting import join, until

# Beats are quick; the rest is so long that it passes only when a test lets it, however slow the machine is.
PROFILE = Profile(heartbeat_ms=100, deadline_ms=600_000, failover_ms=1_200_000, engine_stale_ms=900_000)
# An engine that gives signs of life until its pipe closes, and starts a worker in a process group of its own.
# Its clock is the test's: a file says how much later it is.
ENGINE = """
import json, os, subprocess, sys, threading, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
def listen():
    for line in sys.stdin:
        if "stop" in json.loads(line):
            os._exit(0)
    os._exit(70)
threading.Thread(target=listen, daemon=True).start()
while True:
    at = int(time.clock_gettime(time.CLOCK_BOOTTIME) * 1000) + int(open(sys.argv[1]).read())
    print(json.dumps({"at_ms": at, "report": {"engine_ready": True}}), flush=True)
    time.sleep(0.1)
"""


class Link:
    """A Shard Manager, and a store behind it, that answer as they are told."""

    def __init__(self) -> None:
        self.is_down, self.verdict = False, HeartbeatVerdict.OK
        self.is_store_down, self.is_over, self.renewals, self.refused = True, False, 0, 0
        self.registered: list[str] = []
        self.pids: list[int] = []  # of engines that said something
        self.started: set[int] = set()
        self.beats = 0

    def register(self, container: str, incarnation: str) -> None:
        if self.is_down:
            self.refused += 1
            raise StoreUnavailable("down", why="nobody is there", fix="wait")
        self.registered.append(incarnation)
        self.verdict = HeartbeatVerdict.OK

    def renew(self, container: str, incarnation: str) -> Renewal | None:
        if self.is_store_down:
            raise StoreUnavailable("down")
        self.renewals += 1
        return None if self.is_over else Renewal(assignment_version=1, shards=())

    def send_heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        if self.is_down:
            raise StoreUnavailable("down")
        self.beats += 1
        self.started.add(heartbeat.pid)
        if heartbeat.engine_ready and heartbeat.pid not in self.pids:
            self.pids.append(heartbeat.pid)
        return HeartbeatReply(verdict=self.verdict, term=1, sequence=heartbeat.sequence, assignment_version=1)


class Clock(SystemClock):
    """Real time, but a test may let minutes pass at once: here and in the engine."""

    def __init__(self, file: Path) -> None:
        self._file, self._later_ms = file, 0
        self.pass_ms(0)

    def boot_ms(self) -> int:
        return super().boot_ms() + self._later_ms

    def pass_ms(self, more_ms: int) -> None:
        self._later_ms += more_ms
        new = self._file.with_suffix(".new")
        new.write_text(str(self._later_ms))
        new.replace(self._file)


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path / "later_ms")


LIVES = itertools.count()


def a_warden(folder: Path, link: Link, clock: Clock) -> Warden:
    return Warden(
        container="c1",
        folder=folder,
        engine_command=[sys.executable, "-c", ENGINE, str(clock._file)],
        link=link,
        profile=PROFILE,
        clock=clock,
        new_incarnation=lambda: f"life-{next(LIVES)}",
    )


@contextlib.contextmanager
def running(warden: Warden) -> Iterator[Warden]:
    thread = threading.Thread(target=warden.run)
    thread.start()
    try:
        yield warden
    finally:
        warden.stop()
        join(thread, "the warden")


@pytest.fixture
def warden(tmp_path: Path, link: Link, clock: Clock) -> Iterator[Warden]:
    with running(a_warden(tmp_path, link, clock)) as found:
        yield found
    assert not any(is_session_alive(pid) for pid in link.started), "something was left running"


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_engine_whose_lease_is_over_dies_with_all_its_kin(warden: Warden, link: Link, clock: Clock):
    until(lambda: link.pids)
    engine = link.pids[0]
    until(lambda: bool(psutil.Process(engine).children()))
    workers = psutil.Process(engine).children()
    link.is_down = True
    clock.pass_ms(PROFILE.deadline_ms)
    until(lambda: not is_session_alive(engine))
    assert workers and not any(is_alive(worker) for worker in workers)
    link.is_down = False
    until(lambda: len(link.pids) == 2)
    assert len(set(link.registered)) == len(link.registered) >= 2


def test_an_engine_that_gives_no_sign_of_life_is_replaced(warden: Warden, link: Link, clock: Clock):
    """Plan: it is frozen for longer than a sign may be old; the lease lives on meanwhile, as beats are answered."""
    until(lambda: link.pids)
    os.kill(link.pids[0], signal.SIGSTOP)
    for _ in range(2):
        clock.pass_ms(PROFILE.engine_stale_ms // 2 + 1)
        until(lambda heard=link.beats: link.beats > heard + 2)
    until(lambda: len(link.pids) == 2)
    assert not is_session_alive(link.pids[0])


def test_an_engine_that_dies_is_replaced_by_a_new_incarnation(warden: Warden, link: Link):
    until(lambda: link.pids)
    os.kill(link.pids[0], signal.SIGKILL)
    until(lambda: len(link.pids) == 2 and len(link.registered) == 2)


def test_without_a_shard_manager_the_lease_lives_on_in_the_store(warden: Warden, link: Link, clock: Clock):
    """Plan: the Shard Manager falls silent for three deadlines while the store answers; then the store ends it."""
    until(lambda: link.beats > 2)
    link.is_store_down, link.is_down = False, True
    for _ in range(6):
        until(lambda done=link.renewals: link.renewals > done + 2)
        clock.pass_ms(PROFILE.deadline_ms // 2)
    assert len(link.registered) == 1
    link.is_down, heard = False, link.beats
    until(lambda: link.beats > heard + 2)
    assert len(link.registered) == 1
    link.is_down, link.is_over = True, True
    pid = link.pids[0]
    until(lambda: not is_session_alive(pid))


def test_a_refused_registration_is_told_once_and_whole(warden: Warden, link: Link, clock: Clock):
    until(lambda: link.beats)
    with capture_logs() as said:
        link.is_down = True
        clock.pass_ms(PROFILE.deadline_ms)
        until(lambda: any(line["event"] == "cannot register yet" for line in said))
        until(lambda: link.refused > 5)
    (told,) = [line for line in said if line["event"] == "cannot register yet"]
    assert (told["error"], told["why"], told["fix"]) == ("down", "nobody is there", "wait")


def test_a_reboot_verdict_ends_the_life(warden: Warden, link: Link):
    until(lambda: link.pids)
    link.verdict = HeartbeatVerdict.REBOOT
    until(lambda: len(link.pids) == 2)


def test_what_a_previous_life_left_is_reaped_and_nothing_else(tmp_path: Path):
    import subprocess

    mine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    path = tmp_path / "engine.pid"
    write_pid_file(path, mine.pid)
    path.write_text(path.read_text().replace('"started": ', '"started": 1'))  # of another process of that pid
    assert kill_previous_session(path) == 0 and mine.poll() is None
    write_pid_file(path, mine.pid)
    assert kill_previous_session(path) == 1 and mine.wait() == -signal.SIGKILL
    assert kill_previous_session(path) == 0
    path.write_text("not json")
    assert kill_previous_session(path) == 0


def test_how_long_a_kill_took_is_kept_and_two_that_took_too_long_end_the_warden(
    tmp_path: Path, link: Link, clock: Clock
):
    """Plan: an engine is killed, which is measured; then the folder says that it twice took longer than fits."""
    with running(a_warden(tmp_path, link, clock)):
        until(lambda: link.pids)
        link.is_down = True
        clock.pass_ms(PROFILE.deadline_ms)
        (took_ms,) = until(lambda: KillTimes(tmp_path).read())
        assert 0 <= took_ms < PROFILE.deadline_ms
        link.is_down = False
        until(lambda: len(link.pids) == 2)
    for _ in range(2):
        KillTimes(tmp_path).add(PROFILE.failover_ms)
    registered = len(link.registered)
    with pytest.raises(EnvironmentProblem, match="too slow for the container"):
        a_warden(tmp_path, link, clock).run()
    assert len(link.registered) == registered


def test_without_a_measurement_every_profile_will_do(tmp_path: Path):
    KillTimes(tmp_path).check(FAST)


@pytest.mark.parametrize(("took_ms", "fits"), [(3_999, True), (4_000, True), (4_001, False)])
def test_a_kill_must_fit_between_deadline_and_failover(tmp_path: Path, took_ms: int, fits: bool):
    times = KillTimes(tmp_path)
    times.add(5_000)
    times.add(100)
    times.check(FAST)  # once may be a bad moment
    times.add(took_ms)
    times.check(PAPER)
    if fits:
        times.check(FAST)
        return
    with pytest.raises(EnvironmentProblem, match="too slow for the container") as refused:
        times.check(FAST)
    assert "4001 ms" in refused.value.why and "4000 ms" in refused.value.why
    assert "--profile paper" in refused.value.fix and "kill_times.json" in refused.value.fix


def test_a_machine_that_became_faster_is_believed_after_a_few(tmp_path: Path):
    times = KillTimes(tmp_path)
    times.add(30_000)
    for _ in range(KILL_TIMES_MAX):
        times.add(50)
    assert times.read() == (50,) * KILL_TIMES_MAX
    times.check(FAST)


@pytest.mark.parametrize("text", ["", "{", "7", '{"a": 1}', '["x", null, 2.5]'])
def test_a_file_that_cannot_be_read_is_no_measurement(tmp_path: Path, text: str):
    (tmp_path / "kill_times.json").write_text(text)
    times = KillTimes(tmp_path)
    assert times.read() == ()
    times.add(7)
    assert json.loads((tmp_path / "kill_times.json").read_text()) == [7]
