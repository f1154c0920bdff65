"""`make demo`: the whole of Penstock on this machine in about two minutes, checked record by record at the
end.

Starts a control plane with two containers in a temporary folder, submits the Zeitgeist pipeline, lets the
load rise, kills a container, overrides the scaler, plays the paper's example of isolation with a conflict and
a rollback, releases new code, and compares what came out with an independent reference. Exit code 0: nothing
was lost and nothing doubled. Nothing is left running.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from generator import QueryGenerator
from isolation import show_isolation
from pauses import PauseWatch
from story import Story, tell
from watching import line_of, ready, records, running, runs_version, size

from penstock.cli.compiling import compile_file
from penstock.cli.connection import connect
from penstock.client import Client
from penstock.streams.bus.log import LOW_MAX
from penstock.streams.injector import Injector
from penstock.streams.places import open_log
from penstock.tasks.sessions import kill_session

HERE = Path(__file__).parent
COUNT, PARSE = "zeitgeist.count_per_second", "zeitgeist.by_query"
CALM_RATE, BUSY_RATE = 1_000, 4_500
# One counting task may read this many records per batch and second, so that one is not enough on any machine.
TASK_ROWS = 2_000


class Demo(Story):
    """The story of a pipeline."""

    patience_s = 90.0

    def run(self) -> None:
        """Everything, in order."""
        self._start()
        client = connect(self._folder)
        client.create_category(json.loads((HERE / "queries.json").read_text()))
        log = open_log(f"embedded:{self._folder / 'bus'}")
        self._submit(client, HERE / "pipeline.py", version="1", why="first release")
        generator = QueryGenerator(Injector(log, "queries", "demo", epoch=1), seed=1)
        watch = PauseWatch(client, f"sqlite:{self._folder / 'rows'}", (PARSE, COUNT))
        self._wait("both jobs run", lambda: running(client, PARSE) == 1 and running(client, COUNT) == 1)
        watch.start()
        generator.rate = CALM_RATE
        generator.start()
        self._wait("first counts in the sink", lambda: size(log, "query_counts") > 0)
        self._let_the_load_rise(client, generator, watch)
        self._kill_a_container(client, watch)
        self._override(client, generator, watch)
        self.failures += show_isolation(client, self._hold, self._say)
        self._release(client, watch)
        self._finish(client, log, generator)
        watch.stop()
        self._compare(log, generator)

    def _hold(self, token: str) -> Client:
        return Client(json.loads((self._folder / "endpoint.json").read_text())["url"], token)

    def _start(self) -> None:
        self._say("starting a control plane and two containers")
        self._start_up("--containers", "2")
        client = connect(self._folder)
        self._wait("both containers are ready", lambda: ready(client) == {"c1", "c2"}, seconds=120)

    def _submit(self, client: Client, pipeline: Path, *, version: str, why: str) -> None:
        compiled, package = compile_file(pipeline, client, version=version)
        client.put_package(package.hash, package.data)
        client.submit_pipeline(compiled.to_json(), why=why, key=f"demo-{version}")
        self._say(
            f"submitted {pipeline.name} as version {version}: {', '.join(job.name for job in compiled.jobs)}"
        )
        if version == "1":
            settings = {
                "batch_rows_max": TASK_ROWS,
                "slo.lag_s": 3,
                "task_count_max": 3,
                "scaler.quiet_s": 600,
            }
            client.patch_layer(COUNT, "base", settings, why="limits of the demo", key="demo-limits")

    def _let_the_load_rise(self, client: Client, generator: QueryGenerator, watch: PauseWatch) -> None:
        self._wait("one task is enough", lambda: _lag(client, COUNT) < 3 and watch.is_moving())
        with watch.event("rescale 1 → 3 tasks"):
            generator.rate = BUSY_RATE
            self._say(f"the load rises from {CALM_RATE:,} to {BUSY_RATE:,} records/s")
            self._wait("the scaler asks for 3 tasks", lambda: client.job(COUNT)["config"]["task_count"] == 3)
            decision = next(e for e in reversed(client.journal(subject=COUNT)) if e["actor"] == "autoscaler")
            self._say(f"the scaler's reason: {decision['reason']}")
            self._wait("3 counting tasks run", lambda: running(client, COUNT) == 3)
        self._wait("the lag is within its SLO again", lambda: _lag(client, COUNT) < 3 and watch.is_moving())

    def _kill_a_container(self, client: Client, watch: PauseWatch) -> None:
        victim = max(client.status()["containers"], key=lambda row: row["tasks"])
        with watch.event("failover of a killed container"):
            warden = int((self._folder / "containers" / victim["name"] / "warden.pid").read_text())
            self._say(f"kill -9 of container {victim['name']} and everything in it ({victim['tasks']} tasks)")
            psutil.Process(warden).kill()
            kill_session(victim["pid"])
            took = self._wait(
                "its tasks run again",
                lambda: (
                    running(client, COUNT, without=victim["pid"]) == 3
                    and running(client, PARSE, without=victim["pid"]) == 1
                ),
            )
        self.numbers["killed container's tasks run again after"] = f"{took:.1f} s (limit 20 s)"
        if took > 20:
            self.failures.append(f"failover took {took:.1f} s, more than 20 s")
        self._wait("the killed container is back", lambda: len(ready(client)) == 2 and watch.is_moving())

    def _override(self, client: Client, generator: QueryGenerator, watch: PauseWatch) -> None:
        generator.rate = CALM_RATE
        self._say(f"the load falls to {CALM_RATE:,} records/s")
        with watch.event("rescale 3 → 2 tasks by oncall"):
            client.patch_layer(COUNT, "oncall", {"task_count": 2}, why="trying two", key="demo-oncall")
            self._say("oncall sets task_count=2 above the scaler's 3")
            self._wait("2 counting tasks run", lambda: running(client, COUNT) == 2)
        job = client.job(COUNT)
        scaler = next(row["body"]["task_count"] for row in job["layers"] if row["layer"] == "scaler")
        decided = job["provenance"]["task_count"]["layer"]
        if (scaler, job["running"]["config"]["task_count"], decided) != (3, 2, "oncall"):
            self.failures.append("the oncall override did not win over the scaler")
        self._say(
            f"scaler layer says {scaler}, oncall says 2, running are {job['running']['config']['task_count']}"
        )
        self._wait("every partition moves on", watch.is_moving)

    def _release(self, client: Client, watch: PauseWatch) -> None:
        release = self._folder / "release" / "pipeline.py"
        release.parent.mkdir()
        release.write_text((HERE / "pipeline.py").read_text() + "\n# Version 2: the same, in new words.\n")
        with watch.event("release of new code"):
            self._submit(client, release, version="2", why="second release")
            self._wait(
                "every task runs version 2",
                lambda: all(runs_version(client, job, "2") for job in (PARSE, COUNT)),
            )

    def _finish(self, client: Client, log: Any, generator: QueryGenerator) -> None:
        generator.finish()
        self._say(f"the generator is done: {generator.published:,} records")
        self._wait(
            "the end of the stream has reached the sink",
            lambda: log.watermark("query_counts") == LOW_MAX,
            seconds=120,
        )

    def _compare(self, log: Any, generator: QueryGenerator) -> None:
        found: Counter[tuple[str, int, int]] = Counter()
        for row in records(log, "query_counts"):
            found[row["query"], row["second"], row["count"]] += 1
        expected = Counter({(query, second, n): 1 for (query, second), n in generator.expected.items()})
        lost, doubled = expected - found, found - expected
        dead = size(log, "queries.dead")
        self.numbers["records in"] = f"{generator.published:,}"
        self.numbers["counts out"] = f"{found.total():,}"
        self.numbers["broken records, all in the dead letters"] = f"{dead} of {generator.broken}"
        if lost or doubled or dead != generator.broken:
            self.failures.append(
                f"{lost.total()} counts lost or wrong, {doubled.total()} too many, {dead} of "
                f"{generator.broken} dead letters; e.g. {list(lost)[:3]} against {list(doubled)[:3]}"
            )
        verdict = "DIFFERENT" if lost or doubled else "equal"
        self._say(f"compared {found.total():,} counts, record by record: {verdict}")


def _lag(client: Client, job: str) -> float:
    load = line_of(client, job)["load"]
    return float(load["lag_s"]) if load else float("inf")


if __name__ == "__main__":
    sys.exit(tell(Demo, title="the demo in numbers", whole="whole demo", more=lambda: PauseWatch.finished))
