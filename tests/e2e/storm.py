"""A storm on real Spark: records without pause, a fault every few seconds, and in the end every count compared.

`python -m tests.e2e.storm --minutes 10 --seed 1`: kill -9 of Python workers, of the JVM, of an engine, of a
whole container; a container frozen beyond its lease and woken; rescaling 1 → 4 → 2 → 6; releases that change what
one job hands to the next; a restart of the database, which has the control plane's tables and, with
`--rows postgres`, the state of the jobs. A quarter of the faults do not wait until the one before is over. Two
pipelines are under it: Zeitgeist (window counter, model calculator, spike and dip detector; its counts go to a
sink too), and a join of what was asked with clicks. A few of the queries come seconds after their time is over:
they are dropped and counted, each once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from penstock.client import new_key
from penstock.core.errors import PenstockError
from penstock.streams.bus.log import LOW_MAX
from penstock.streams.dsl.injector import Injector
from tests.e2e.platform import ZEITGEIST, Platform, pause
from tests.examples.test_anomalies import reference, rounded
from tests.kin import kin_of
from tests.postgres import PostgresServer, postgres_server

CONTAINERS = 3
PARTITIONS = 6
RECORDS_PER_SECOND = 400
FROZEN_S = 14  # the lease is over after 8 s, fail-over comes after 12 s
RECOVERY_S_MAX = 120
ROWS_RECOVERY_S_MAX = 240  # without the server of the rows all tasks end, and they start at once
QUERIES = 50
TRIGGER_MS = 2_000  # nine jobs of up to six tasks: a batch a second of each would be more than two cores have
LATE_PER_SECOND, LATE_S = 3, 3  # so many queries come so late
CONNECTIONS_MAX = 300  # each worker of Spark and each query's planner keeps one to the rows
COUNT, COUNTS = "anomalies.window_counter", "query_counts"
MODELS = "anomalies.model_calculator"
DETECTOR, ANOMALIES = "anomalies.spike_dip_detector", "anomalies"
COLUMNS = ("--columns", "query:string,lang:string,ts:bigint", "--ts", "ts", "--watermark", "injector")
CLICKS = ("--columns", "query:string,click:bigint,ts:bigint", "--ts", "ts", "--watermark", "injector")
PAIRS, PAIRED, PAIRED_JOB = Path(__file__).parent / "pairs_pipeline.py", "query_clicks", "pairs.paired"
CLICKS_PER_SECOND, JOIN_MS = 10, 500
ONE_COLUMN, OTHER_COLUMNS = '.select("lower(query) AS query")', '.select("lower(query) AS query", "lang")'
JOBS, OUTPUTS = (COUNT, MODELS, DETECTOR, PAIRED_JOB), (COUNTS, ANOMALIES, PAIRED)


def asked(second: int, n: int) -> str:
    """All alike, but every five seconds one is asked by many, and another by nobody."""
    if second % 5 == 0 and n < 120:
        return f"query {second // 5 % QUERIES}"
    missing = second // 5 * 3 % QUERIES if second % 5 == 2 else -1
    return f"query {n % QUERIES if n % QUERIES != missing else (missing + 1) % QUERIES}"


@dataclass(frozen=True, slots=True)
class Blow:
    """A fault as it was dealt, and how long it took until results came again; None: nobody waited."""

    at_s: float
    what: str
    recovered_s: float | None


@dataclass
class Storm:
    """One storm over one platform."""

    platform: Platform
    server: PostgresServer
    seed: int
    folder: Path
    has_rows: bool  # the state of the jobs is on the server too
    blows: list[Blow] = field(default_factory=list)
    lows: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in OUTPUTS})
    anomalies: int = 0
    clicks: list[tuple[int, str]] = field(default_factory=list)  # (ts, query), by number
    late: int = 0  # queries that were sent behind the low
    _over: threading.Event = field(default_factory=threading.Event)
    _errors: list[BaseException] = field(default_factory=list)

    def run(self, *, seconds: float, faults_min: int, say: Callable[[str], None] = print) -> None:
        """Deal faults for so long, and at least so many; then end the stream and compare everything."""
        rng, began = random.Random(self.seed), time.monotonic()
        self._prepare()
        self._rescales = cycle((4, 2, 6, 1))
        faults = [
            self._kill_worker,
            self._kill_jvm,
            self._kill_engine,
            self._kill_container,
            self._freeze_container,
            self._release,
            self._restart_database,
        ]
        helpers = [threading.Thread(target=self._guarded, args=(work,)) for work in (self._load, self._watch)]
        for helper in helpers:
            helper.start()
        try:
            hand: list[Callable[[random.Random], str]] = []
            while time.monotonic() - began < seconds or len(self.blows) < faults_min:
                # Each once in any order, and another number of tasks before each half of them.
                if not hand:
                    dealt = rng.sample(faults, len(faults))
                    hand = [*dealt[:4], self._rescale, *dealt[4:], self._rescale]
                self._deal(hand.pop(), rng, began, say)
                assert not self._errors, self._errors
        finally:
            self._over.set()
            for helper in helpers:
                helper.join()
        assert not self._errors, self._errors
        for injector in (self._injector, self._clicker):
            injector.close(now_ms=10**15)
        self.platform.assert_exact()
        self._assert_in_order()
        self._assert_anomalies()
        self._assert_paired()
        self._assert_late()
        for name, lows in self.lows.items():
            assert lows == sorted(lows), f"the watermark of {name} went back"

    def _prepare(self) -> None:
        for name, columns in (("queries", COLUMNS), ("clicks", CLICKS)):
            created = self.platform.cli(
                "category", name, "--create", "--partitions", str(PARTITIONS), *columns
            )
            assert created.returncode == 0, created.stderr
        self._releases = 0
        self._release(random.Random(0))
        for line in self.platform.client.jobs():
            settings = {"trigger_ms": TRIGGER_MS}
            self.platform.client.patch_layer(line["name"], "base", settings, why="storm", key=new_key())
        self._injector = Injector(self.platform.log, "queries", "storm", epoch=1)
        self._clicker = Injector(self.platform.log, "clicks", "storm", epoch=1)
        self._inject(range(1, 3))
        for output in (COUNTS, PAIRED):
            self.platform.wait(f"first {output}", lambda n=output: sum(self.platform.log.end_offsets(n)) > 0)

    def _deal(
        self,
        fault: Callable[[random.Random], str],
        rng: random.Random,
        began: float,
        say: Callable[[str], None],
    ) -> None:
        at_s, low = time.monotonic() - began, self.platform.log.watermark(COUNTS)
        try:
            what = fault(rng)
        except (PenstockError, StopIteration, IndexError, psutil.NoSuchProcess, ProcessLookupError) as error:
            say(f"{at_s:6.1f} s  {fault.__name__[1:]}: nobody there to hit ({error})")
            time.sleep(1)
            return
        recovered = None
        if rng.random() < 0.75:
            # Results of what was injected after the fault.
            goal, log = max(low, self._injected_low()) + 1000, self.platform.log
            is_past = lambda: min(map(log.watermark, OUTPUTS)) >= goal - JOIN_MS  # noqa: E731
            recovered = self.platform.wait(f"results after: {what}", is_past, seconds=self._patience_s)
        self.blows.append(Blow(at_s, what, recovered))
        say(
            f"{at_s:6.1f} s  {what}"
            + ("" if recovered is None else f": results again after {recovered:.1f} s")
        )
        time.sleep(rng.uniform(0, 2))

    @property
    def _patience_s(self) -> float:
        return ROWS_RECOVERY_S_MAX if self.has_rows else RECOVERY_S_MAX

    def _injected_low(self) -> int:
        return self.platform.injected[-1][0] * 1000

    # -- what goes on all the time

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._errors.append(error)

    def _load(self) -> None:
        second = 3
        while not self._over.wait(1):
            self._inject(range(second, second + 1))
            second += 1

    def _inject(self, seconds: range) -> None:
        for second in seconds:
            low = second * 1000 - JOIN_MS
            stamps = [low + (n * 397) % 1000 for n in range(CLICKS_PER_SECOND)]
            texts = [f"query {(second + 7 * n) % 60}" for n in range(CLICKS_PER_SECOND)]  # some nobody asked
            first = len(self.clicks)
            values = [
                json.dumps({"query": query, "click": first + n, "ts": ts}).encode()
                for n, (query, ts) in enumerate(zip(texts, stamps, strict=True))
            ]
            self.clicks += zip(stamps, texts, strict=True)
            self._clicker.publish([str(first + n) for n in range(len(values))], stamps, values)
            self._clicker.report_low(low + 1000, now_ms=time.time_ns() // 1_000_000)
            self._inject_late(second)
            self.platform.inject(
                self._injector, seconds=range(second, second + 1), per_second=RECORDS_PER_SECOND, asked=asked
            )

    def _inject_late(self, second: int) -> None:
        """Queries of a second that is over: the low said so two reports ago."""
        if second <= LATE_S:
            return
        stamps = [(second - LATE_S) * 1000 + n * 331 for n in range(LATE_PER_SECOND)]
        values = [
            json.dumps({"query": f"query {(second + n) % QUERIES}", "lang": "en", "ts": ts}).encode()
            for n, ts in enumerate(stamps)
        ]
        self._injector.publish([f"late {n}" for n in range(LATE_PER_SECOND)], stamps, values)
        self.late += len(stamps)

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            for name, lows in self.lows.items():
                lows.append(self.platform.log.watermark(name))

    def _assert_anomalies(self) -> None:
        """Every spike and every dip once, as the reference finds them in one pass over all that was asked."""
        self.platform.wait("the last anomaly", lambda: self.platform.log.watermark(ANOMALIES) == LOW_MAX)
        columns = ("query", "second", "kind", "count", "expected")
        found = [tuple(row[name] for name in columns) for row in self._records(ANOMALIES)]
        expected = rounded(reference().anomalies_of((ts, query, "en") for ts, query in self.platform.asked))
        assert {kind for _, _, kind, _, _ in expected} == {"spike", "dip"}
        assert rounded(found) == expected and len(found) == len(expected), (len(found), len(expected))
        self.anomalies = len(found)

    def _records(self, category: str) -> Iterator[dict[str, Any]]:
        log = self.platform.log
        for partition, end in enumerate(log.end_offsets(category)):
            for batch in log.read(category, partition, 0, end):
                yield from batch.to_pylist()

    def _assert_paired(self) -> None:
        """Every click once with each query of the half second before it, or once alone."""
        log = self.platform.log
        self.platform.wait("the last pair", lambda: log.watermark(PAIRED) == LOW_MAX)
        found = Counter((row["click"], row["asked"]) for row in self._records(PAIRED))
        times: dict[str, list[int]] = {}
        for ts, query in self.platform.asked:
            times.setdefault(query, []).append(ts)
        expected: Counter[tuple[int, int | None]] = Counter()
        for click, (clicked, query) in enumerate(self.clicks):
            near = [ts for ts in times.get(query, ()) if clicked - JOIN_MS <= ts <= clicked]
            expected.update((click, ts) for ts in near or [None])
        assert found == expected, (len(found), len(expected), list((found - expected).items())[:5])

    def _assert_late(self) -> None:
        """Both who read the queries dropped each late one, and counted it once whatever died."""
        assert self.late > 0
        for job in (COUNT, PAIRED_JOB):
            counted: list[int] = []

            def is_counted(job: str = job, counted: list[int] = counted) -> bool:
                tasks = self.platform.running(job)
                counted.append(int(sum(task["metrics"].get("late", 0) for task in tasks)))
                return len(tasks) == self.platform.line(job)["task_count"] and counted[-1] == self.late

            try:
                self.platform.wait(f"{self.late} late ones in {job}", is_counted, seconds=120)
            except AssertionError as error:
                raise AssertionError(f"{job} counted {counted[-1:]} late ones of {self.late}") from error

    def _assert_in_order(self) -> None:
        """Seconds of one query were reported in their order: its timers fired so."""
        for category in (COUNTS, ANOMALIES):
            last: dict[str, int] = {}
            for row in self._records(category):
                assert row["second"] > last.get(row["query"], -1), (category, row)
                last[row["query"]] = row["second"]

    # -- faults

    def _somebody(self, rng: random.Random) -> str:
        """A container with a task of one of the jobs; while the fault before is not over there may be none for a moment."""
        found: set[str] = set()
        job = rng.choice(JOBS)
        self.platform.wait(
            "somebody to hit",
            lambda: found.update(task["container"] for task in self.platform.running(job)) or found,
            seconds=self._patience_s,
        )
        return rng.choice(sorted(found))

    def _kill_below(self, rng: random.Random, mark: str, what: str) -> str:
        container = self._somebody(rng)
        kin = kin_of(self.platform.engine_pid(container))
        rng.choice(sorted((p for p, command in kin.items() if mark in command), key=lambda p: p.pid)).kill()
        return f"kill -9 of {what} in {container}"

    def _kill_worker(self, rng: random.Random) -> str:
        return self._kill_below(rng, "worker_daemon", "a Python worker")

    def _kill_jvm(self, rng: random.Random) -> str:
        return self._kill_below(rng, "org.apache.spark.deploy.SparkSubmit", "the JVM")

    def _kill_engine(self, rng: random.Random) -> str:
        container = self._somebody(rng)
        os.kill(self.platform.engine_pid(container), signal.SIGKILL)
        return f"kill -9 of the engine of {container}"

    def _kill_container(self, rng: random.Random) -> str:
        container = self._somebody(rng)
        os.kill(self.platform.engine_pid(container), signal.SIGKILL)
        os.kill(self.platform.warden_pid(container), signal.SIGKILL)
        return f"kill -9 of the whole container {container}"

    def _freeze_container(self, rng: random.Random) -> str:
        container = self._somebody(rng)
        wakers = [pause(self.platform.engine_pid(container)), pause(self.platform.warden_pid(container))]
        time.sleep(FROZEN_S)
        for wake in wakers:
            wake()
        return f"{container} frozen for {FROZEN_S} s, beyond its lease"

    def _rescale(self, rng: random.Random) -> str:
        tasks = next(self._rescales)
        for job in JOBS:
            # Four times six are too many for two cores.
            count = min(tasks, 2) if job in (DETECTOR, MODELS) else tasks
            said = self.platform.cli("oncall", "set", job, f"task_count={count}", "--why", "storm")
            assert said.returncode == 0, said.stderr
        return f"rescale to {tasks} tasks"

    def _release(self, rng: random.Random) -> str:
        """New code. Every other release hands one column more to the window counter, in another category."""
        self._releases += 1
        columns = OTHER_COLUMNS if self._releases % 2 == 0 else ONE_COLUMN
        shutil.copy(ZEITGEIST / "pipeline.py", self.folder)  # the next one imports it
        for source, more in ((ZEITGEIST / "anomalies.py", f"counted.sink({COUNTS!r})"), (PAIRS, "")):
            path = self.folder / source.name
            text = source.read_text().replace(ONE_COLUMN, columns)
            path.write_text(f"{text}\n{more}\nRELEASE = {self._releases}\n")
            said = self.platform.cli("submit", str(path), "--version", str(self._releases), "--yes")
            assert said.returncode == 0, said.stderr
        return f"release {self._releases}, with{'' if columns == OTHER_COLUMNS else 'out'} a further column"

    def _restart_database(self, rng: random.Random) -> str:
        self.server.restart()
        return f"restart of PostgreSQL{' with the rows' if self.has_rows else ''}"


@contextmanager
def storm(folder: Path, *, seed: int, rows: str = "sqlite") -> Iterator[Storm]:
    """A platform on PostgreSQL to storm over, its rows there too or on SQLite; nothing of it is left afterwards."""
    with postgres_server() as server:
        environment = {"PENSTOCK_DATABASE": server.new_database()}
        if rows == "postgres":
            server.restart_with_connections(CONNECTIONS_MAX)
            environment["PENSTOCK_ROWS"] = server.new_database()
        platform = Platform(folder / "penstock", containers=CONTAINERS, environment=environment)
        try:
            platform.start()
            yield Storm(platform, server, seed, folder, has_rows=rows == "postgres")
        finally:
            platform.kill()


def main() -> int:
    """Run one, and say how long each recovery took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--faults", type=int, default=20, help="at least so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", choices=("postgres", "sqlite"), default="postgres", help="where state is")
    options = parser.parse_args()
    console = Console()
    with (
        tempfile.TemporaryDirectory(prefix="storm-") as folder,
        storm(Path(folder), seed=options.seed, rows=options.rows) as found,
    ):
        found.run(seconds=options.minutes * 60, faults_min=options.faults, say=console.print)
        left = found.platform.stop()
    where = {"postgres": "on PostgreSQL, as the control plane's tables", "sqlite": "on SQLite"}[options.rows]
    title = f"{len(found.blows)} faults, seed {options.seed}, rows {where}"
    table = Table(title=title, title_justify="left")
    for column in ("at", "fault", "results again after"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for blow in found.blows:
        again = "not waited for" if blow.recovered_s is None else f"{blow.recovered_s:.1f} s"
        table.add_row(f"{blow.at_s:.0f} s", blow.what, again)
    console.print(table)
    console.print(
        f"{len(found.platform.injected):,} queries, {len(found.clicks):,} clicks; every count, every pair and each "
        f"of {found.anomalies:,} spikes and dips is there once, seconds in order; {found.late:,} late queries were "
        "dropped and counted; no watermark went back"
    )
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
