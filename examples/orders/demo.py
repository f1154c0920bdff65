"""`make demo`, third part: three jobs without state on Spark, and everything that may happen to them.

Orders are parsed, filtered and projected (Python), brought together by customer (SQL) and delivered (SQL). A
container is killed with -9, the first job is rescaled 1 -> 4 -> 2 under load, a container is drained, new
code is released. At the end every order that should be delivered is there exactly once.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from generator import OrderGenerator
from pauses import PauseWatch
from story import Story, tell
from watching import ready, records, running, runs_version, size

from penstock.cli.compiling import compile_file
from penstock.cli.connection import connect
from penstock.client import Client
from penstock.streams.bus.log import LOW_MAX
from penstock.streams.injector import Injector
from penstock.streams.places import open_log
from penstock.tasks.sessions import kill_session

HERE = Path(__file__).parent
CLEAN, REGROUP, DELIVER = "clean.clean_orders", "regroup.orders_by_customer", "deliver.deliveries"
JOBS = (CLEAN, REGROUP, DELIVER)
RATE = 2_000


class Demo(Story):
    """The story of three jobs."""

    patience_s = 90.0

    def run(self) -> None:
        """Everything, in order."""
        self._say("starting a control plane and two containers")
        self._start_up("--containers", "2")
        client = connect(self._folder)
        self._wait("both containers are ready", lambda: ready(client) == {"c1", "c2"}, seconds=120)
        client.create_category(json.loads((HERE / "orders.json").read_text()))
        log = open_log(f"embedded:{self._folder / 'bus'}")
        for name in ("clean.py", "regroup.sql", "deliver.sql"):
            self._submit(client, HERE / name, version="1")
        self._wait("three jobs run", lambda: all(running(client, job) == 1 for job in JOBS))
        feed = OrderGenerator(Injector(log, "orders", "demo", epoch=1), seed=1)
        watch = PauseWatch(client, f"sqlite:{self._folder / 'rows'}", JOBS)
        watch.start()
        feed.rate = RATE
        feed.start()
        self._wait("first deliveries", lambda: size(log, "deliveries") > 0 and watch.is_moving())
        self._kill_a_container(client, watch)
        self._rescale(client, watch)
        self._drain(client, watch)
        self._release(client, watch)
        self._finish(log, feed)
        watch.stop()
        self._compare(log, feed)

    def _submit(self, client: Client, pipeline: Path, *, version: str) -> None:
        compiled, package = compile_file(pipeline, client, version=version)
        client.put_package(package.hash, package.data)
        why, key = f"version {version}", f"demo-{pipeline.name}-{version}"
        client.submit_pipeline(compiled.to_json(), why=why, key=key)
        (job,) = compiled.jobs
        self._say(f"submitted {pipeline.name} as version {version}: {job.name}")
        sinks = {output.category for output in job.outputs}
        self._wait("its sink is there", lambda: sinks <= {c["spec"]["name"] for c in client.categories()})

    def _kill_a_container(self, client: Client, watch: PauseWatch) -> None:
        victim = max(client.status()["containers"], key=lambda row: row["tasks"])
        with watch.event("failover of a killed container"):
            warden = int((self._folder / "containers" / victim["name"] / "warden.pid").read_text())
            self._say(f"kill -9 of container {victim['name']} and everything in it ({victim['tasks']} tasks)")
            psutil.Process(warden).kill()
            kill_session(victim["pid"])
            took = self._wait(
                "its tasks run again",
                lambda: all(running(client, job, without=victim["pid"]) == 1 for job in JOBS),
            )
        self.numbers["killed container's tasks run again after"] = f"{took:.1f} s (limit 20 s)"
        if took > 20:
            self.failures.append(f"failover took {took:.1f} s, more than 20 s")
        self._wait("the killed container is back", lambda: len(ready(client)) == 2 and watch.is_moving())

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
        release = self._folder / "release" / "clean.py"
        release.parent.mkdir()
        release.write_text((HERE / "clean.py").read_text() + "\n# Version 2: the same, in new words.\n")
        with watch.event("release of new code"):
            self._submit(client, release, version="2")
            self._wait("every task runs version 2", lambda: runs_version(client, CLEAN, "2"))

    def _finish(self, log: Any, feed: OrderGenerator) -> None:
        feed.finish()
        self._say(f"the generator is done: {feed.published:,} orders")
        self._wait(
            "the end of the stream has reached the sink",
            lambda: log.watermark("deliveries") == LOW_MAX,
            seconds=120,
        )

    def _compare(self, log: Any, feed: OrderGenerator) -> None:
        found = Counter(
            (row["id"], row["customer"], row["amount"], row["is_large"]) for row in records(log, "deliveries")
        )
        lost, doubled, dead = feed.expected - found, found - feed.expected, size(log, "orders.dead")
        self.numbers["orders in"] = f"{feed.published:,}"
        self.numbers["deliveries out"] = f"{found.total():,}"
        self.numbers["broken orders, all in the dead letters"] = f"{dead} of {feed.broken}"
        if lost or doubled or dead != feed.broken:
            self.failures.append(
                f"{lost.total()} lost, {doubled.total()} doubled, {dead} of {feed.broken} dead letters; "
                f"e.g. {list(lost)[:3]} against {list(doubled)[:3]}"
            )
        verdict = "DIFFERENT" if lost or doubled else "equal"
        self._say(f"compared {found.total():,} deliveries, record by record: {verdict}")


def _tasks_of(client: Client, container: str) -> int:
    return sum(row["tasks"] for row in client.status()["containers"] if row["name"] == container)


if __name__ == "__main__":
    sys.exit(tell(Demo, title="three jobs in numbers", whole="whole demo", more=lambda: PauseWatch.finished))
