"""State Syncers in processes of their own, which kill themselves at a failpoint.

Each line of input is an order, {"place", "folder", "rules", "point"} as JSON; for each, a child process is forked
that runs the real syncer, with its worker threads, until all is settled, or until it is at the named failpoint and
gets a SIGKILL. The answer is a line with how it ended. The failpoints it came by are in the file `passed` of the
folder. A child of a process that has everything imported already costs milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.loop import WorkerThreads
from penstock.core.system_clock import SystemClock
from penstock.db.database import Database, take_term
from penstock.jobs.job_store import JobStore
from penstock.jobs.syncer.plan_runner import PlanOutcome
from penstock.jobs.syncer.state_syncer import StateSyncer, SyncerSettings
from tests.jobs.world import producers_of
from tests.waiting import LIMIT_S

SETTLED, KILLED_AT_NOTHING = 0, 3
# The fence comes into play at once: what waits for a deadline would only make the test slow.
SETTINGS = SyncerSettings(fence_after_ms=0)


class DurableTaskLayer:
    """A task layer whose effects survive it: a SQLite file with what is registered, fenced, and which calls were made.

    `rules` say what goes wrong: "fail prepare" fails every such call.
    """

    def __init__(self, path: Path, rules: tuple[str, ...] = ()) -> None:
        self._path, self._rules = path, rules
        with self._open() as connection:
            connection.executescript(
                "CREATE TABLE IF NOT EXISTS registered (category, producer, PRIMARY KEY (category, producer));"
                "CREATE TABLE IF NOT EXISTS fenced (job PRIMARY KEY, generation);"
                "CREATE TABLE IF NOT EXISTS calls (id INTEGER PRIMARY KEY, call, job, generation);"
            )

    def is_stopped(self, job: str, *, generation: int, list_version: int) -> bool:
        self._begin("is_stopped", job, generation)
        return False  # so that the fence is needed

    def prepare(self, job: str, birth: str, config: Mapping[str, Any]) -> None:
        self._begin("prepare", job)
        with self._open() as connection:
            rows = sorted(producers_of(birth, config))
            connection.executemany("INSERT OR IGNORE INTO registered VALUES (?, ?)", rows)

    def unread(
        self, job: str, birth: str, config: Mapping[str, Any], category: str, *, is_stopped: bool
    ) -> str:
        self._begin("unread", job)
        return ""

    def fence(self, job: str, birth: str, config: Mapping[str, Any], *, generation: int) -> None:
        self._begin("fence", job, generation)
        with self._open() as connection:
            connection.execute(
                "INSERT INTO fenced VALUES (?, ?) ON CONFLICT (job) DO UPDATE "
                "SET generation = max(generation, excluded.generation)",
                (job, generation),
            )

    def retire(self, job: str, birth: str, old: Mapping[str, Any], new: Mapping[str, Any] | None) -> None:
        self._begin("retire", job)
        gone = producers_of(birth, old) - (set() if new is None else producers_of(birth, new))
        with self._open() as connection:
            connection.executemany("DELETE FROM registered WHERE category = ? AND producer = ?", sorted(gone))

    def effects(self) -> dict[str, Any]:
        with self._open() as connection:
            return {
                "registered": sorted(connection.execute("SELECT * FROM registered")),
                "fenced": sorted(connection.execute("SELECT * FROM fenced")),
            }

    def calls(self) -> list[tuple[str, str, int]]:
        with self._open() as connection:
            return list(connection.execute("SELECT call, job, generation FROM calls ORDER BY id"))

    def _begin(self, call: str, job: str, generation: int = 0) -> None:
        with self._open() as connection:
            connection.execute("INSERT INTO calls VALUES (NULL, ?, ?, ?)", (call, job, generation))
        if f"fail {call}" in self._rules:
            raise ConfigError("poison")

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self._path, timeout=LIMIT_S)
        connection.execute("PRAGMA synchronous=OFF")  # a killed process loses nothing that the kernel has
        with closing(connection), connection:
            yield connection


def run_syncer(order: Mapping[str, Any]) -> int:
    """Rounds until nothing is left to do, or until the failpoint."""
    passed = Path(order["folder"]) / "passed"

    def reach(point: str) -> None:
        with passed.open("a") as file:
            file.write(f"{point}\n")
        if point == order["point"]:
            os.kill(os.getpid(), signal.SIGKILL)

    clock = SystemClock()
    place = order["place"] if order["place"].startswith("postgresql") else Path(order["place"])
    database = Database(place)
    layer = DurableTaskLayer(Path(order["folder"]) / "effects.db", tuple(order["rules"]))
    workers: WorkerThreads[PlanOutcome] = WorkerThreads("test", clock)
    syncer = StateSyncer(
        JobStore(database),
        layer,
        layer,
        term=take_term(database, "syncer", str(os.getpid())),
        settings=SETTINGS,
        workers=workers,
        measure_ms=clock.boot_ms,
        reach=reach,
    )
    while not syncer.sync_once(clock.now_ms()).is_idle:
        time.sleep(0.002)
    workers.stop()
    database.close()
    return SETTLED if order["point"] is None else KILLED_AT_NOTHING


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os._exit(run_syncer(json.loads(line)))
        status = os.waitpid(pid, 0)[1]
        ended = (
            f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
        )
        print(ended, flush=True)


if __name__ == "__main__":
    main()
