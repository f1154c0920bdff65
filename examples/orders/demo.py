"""`make demo`, third part: three jobs without state on Spark, and everything that may happen to them.

Orders are parsed, filtered and projected (Python), brought together by customer (SQL) and delivered (SQL). A
container is killed with -9, the first job is rescaled 1 -> 4 -> 2 under load, a container is drained, new
code is released. At the end every order that should be delivered is there exactly once.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from generator import OrderGenerator
from pauses import PauseWatch
from story import tell
from stream_story import StreamStory
from watching import records, running, runs_version, size

from penstock import Injector
from penstock.client import Client

HERE = Path(__file__).parent
CLEAN, REGROUP, DELIVER = "clean.clean_orders", "regroup.orders_by_customer", "deliver.deliveries"
JOBS = (CLEAN, REGROUP, DELIVER)
RATE = 2_000


class Demo(StreamStory):
    """The story of three jobs."""

    def run(self) -> None:
        """Everything, in order."""
        client, log = self._start_two(HERE / "orders.json")
        for name in ("clean.py", "regroup.sql", "deliver.sql"):
            self._submit(client, HERE / name, version="1")
        self._wait("three jobs run", lambda: all(running(client, job) == 1 for job in JOBS))
        feed = OrderGenerator(Injector(log, "orders", "demo", epoch=1), seed=1)
        watch = PauseWatch(client, f"sqlite:{self._folder / 'rows'}", JOBS)
        watch.start()
        feed.rate = RATE
        feed.start()
        self._wait("first deliveries", lambda: size(log, "deliveries") > 0 and watch.is_moving())
        self._kill(client, watch, lambda dead: all(running(client, job, without=dead) == 1 for job in JOBS))
        self._rescale(client, watch)
        self._drain(client, watch)
        self._release(client, watch)
        self._end(log, feed, "deliveries")
        watch.stop()
        columns = ("id", "customer", "amount", "is_large")
        found = Counter(tuple(row[name] for name in columns) for row in records(log, "deliveries"))
        self._judge(log, feed, found, feed.expected, out="deliveries", dead="orders.dead")

    def _submit(self, client: Client, pipeline: Path, *, version: str) -> None:
        (job,) = self._put(client, pipeline, version=version, why=f"version {version}").jobs
        sinks = {output.category for output in job.outputs}
        self._wait("its sink is there", lambda: sinks <= {c["spec"]["name"] for c in client.categories()})

    def _rescale(self, client: Client, watch: PauseWatch) -> None:
        for before, after in ((1, 4), (4, 2)):
            with watch.event(f"rescale {before} → {after} tasks"):
                change, key = {"task_count": after}, f"demo-tasks-{after}"
                client.patch_layer(CLEAN, "oncall", change, why="a rescale under load", key=key)
                self._wait(f"{after} tasks run", lambda count=after: running(client, CLEAN) == count)
            self._wait("every partition moves on", watch.is_moving)

    def _drain(self, client: Client, watch: PauseWatch) -> None:
        with watch.event("drain of a container"):
            client.drain("c1", why="planned work")
            self._wait("c1 has no tasks", lambda: _tasks_of(client, "c1") == 0)
            self._wait("all run on c2", lambda: sum(running(client, job) for job in JOBS) == 4)
        client.uncordon("c1", why="the work is done")
        self._wait("every partition moves on", watch.is_moving)

    def _release(self, client: Client, watch: PauseWatch) -> None:
        release = self._reworded(HERE / "clean.py")
        with watch.event("release of new code"):
            self._submit(client, release, version="2")
            self._wait("every task runs version 2", lambda: runs_version(client, CLEAN, "2"))


def _tasks_of(client: Client, container: str) -> int:
    return sum(row["tasks"] for row in client.status()["containers"] if row["name"] == container)


if __name__ == "__main__":
    sys.exit(tell(Demo, title="three jobs in numbers", whole="whole demo", more=lambda: PauseWatch.finished))
