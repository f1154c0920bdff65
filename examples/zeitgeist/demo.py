"""`make demo`: the whole of Penstock on this machine in about four minutes, checked record by record at the
end.

Starts a control plane with two containers in a temporary folder, submits the Zeitgeist pipeline, lets the
load rise until the scaler gives more tasks, kills a container, lets the load fall until the scaler takes them
back, plays the paper's example of isolation meanwhile, overrides the scaler, releases new code, and compares
what came out with an independent reference. Exit code 0: nothing was lost and nothing doubled. Nothing is
left running.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from generator import QueryGenerator
from isolation import show_isolation
from pauses import PauseWatch
from story import tell
from stream_story import StreamStory
from watching import line_of, records, running, runs_version, size

from penstock import Injector
from penstock.client import Client

HERE = Path(__file__).parent
COUNT, PARSE = "zeitgeist.count_per_second", "zeitgeist.by_query"
CALM_RATE, BUSY_RATE = 500, 2_250
# One counting task may read this many records per batch and second, so that one is not enough on any machine.
TASK_ROWS = 1_000
SLO_S = 4
# Less is given back after a quiet minute; no whole minute is left out after a change.
LIMITS = {
    "batch_rows_max": TASK_ROWS,
    "slo.lag_s": SLO_S,
    "task_count_max": 3,
    "scaler.quiet_s": 60,
    "scaler.settle_s": 0,
}
# Of the last change two minutes must be whole, and they are recorded a little later.
DOWN_S = 300.0


class Demo(StreamStory):
    """The story of a pipeline."""

    def run(self) -> None:
        """Everything, in order."""
        client, log = self._start_two(HERE / "queries.json")
        self._put(client, HERE / "pipeline.py", version="1", why="first release")
        client.patch_layer(COUNT, "base", LIMITS, why="limits of the demo", key="demo-limits")
        generator = QueryGenerator(Injector(log, "queries", "demo", epoch=1), seed=1)
        watch = PauseWatch(client, f"sqlite:{self._folder / 'rows'}", (PARSE, COUNT))
        self._wait("both jobs run", lambda: running(client, PARSE) == 1 and running(client, COUNT) == 1)
        watch.start()
        generator.rate = CALM_RATE
        generator.start()
        self._wait("first counts in the sink", lambda: size(log, "query_counts") > 0)
        self._let_the_load_rise(client, generator, watch)
        self._kill(client, watch, lambda dead: _all_run(client, dead))
        self._let_the_load_fall(client, generator, watch)
        self._override(client, watch)
        self._release(client, watch)
        self._end(log, generator, "query_counts")
        watch.stop()
        columns = ("query", "second", "count")
        found = Counter(tuple(row[name] for name in columns) for row in records(log, "query_counts"))
        expected = Counter({(query, second, n): 1 for (query, second), n in generator.expected.items()})
        self._judge(log, generator, found, expected, out="counts", dead="queries.dead")

    def _hold(self, token: str) -> Client:
        return Client(json.loads((self._folder / "endpoint.json").read_text())["url"], token)

    def _let_the_load_rise(self, client: Client, generator: QueryGenerator, watch: PauseWatch) -> None:
        self._wait("one task is enough", lambda: _lag(client, COUNT) < SLO_S and watch.is_moving())
        with watch.event("rescale 1 → 3 tasks"):
            generator.rate = BUSY_RATE
            self._say(f"the load rises from {CALM_RATE:,} to {BUSY_RATE:,} records/s")
            self._wait("the scaler asks for 3 tasks", lambda: client.job(COUNT)["config"]["task_count"] == 3)
            self._say(f"the scaler's reason: {_reason(client)}")
            self._wait("3 counting tasks run", lambda: running(client, COUNT) == 3)
        self._wait(
            "the lag is within its SLO again", lambda: _lag(client, COUNT) < SLO_S and watch.is_moving()
        )

    def _let_the_load_fall(self, client: Client, generator: QueryGenerator, watch: PauseWatch) -> None:
        generator.rate = CALM_RATE
        self._say(f"the load falls to {CALM_RATE:,} records/s; meanwhile, three who decide on one job:")
        self.failures += show_isolation(client, self._hold, self._say)
        self._wait("the scaler takes tasks back", lambda: _scaled(client) < 3, seconds=DOWN_S)
        self._say(f"the scaler's reason: {_reason(client)}")
        with watch.event(f"rescale 3 → {_scaled(client)} tasks"):
            self._wait("fewer counting tasks run", lambda: running(client, COUNT) == _scaled(client))
        self._wait("they are enough", lambda: _lag(client, COUNT) < SLO_S and watch.is_moving())

    def _override(self, client: Client, watch: PauseWatch) -> None:
        wished = _scaled(client)
        with watch.event(f"rescale {wished} → 3 tasks by oncall"):
            client.patch_layer(COUNT, "oncall", {"task_count": 3}, why="guests", key="demo-oncall")
            self._say(f"oncall sets task_count=3 above the scaler's {wished}")
            self._wait("3 counting tasks run", lambda: running(client, COUNT) == 3)
        job = client.job(COUNT)
        scaler = next(row["body"]["task_count"] for row in job["layers"] if row["layer"] == "scaler")
        decided = job["provenance"]["task_count"]["layer"]
        if (scaler, job["running"]["config"]["task_count"], decided) != (wished, 3, "oncall"):
            self.failures.append("the oncall override did not win over the scaler")
        self._say(
            f"scaler layer says {scaler}, oncall says 3, running are {job['running']['config']['task_count']}"
        )
        self._wait("every partition moves on", watch.is_moving)

    def _release(self, client: Client, watch: PauseWatch) -> None:
        release = self._reworded(HERE / "pipeline.py")
        with watch.event("release of new code"):
            self._put(client, release, version="2", why="second release")
            self._wait(
                "every task runs version 2",
                lambda: all(runs_version(client, job, "2") for job in (PARSE, COUNT)),
            )


def _all_run(client: Client, dead: int) -> bool:
    return running(client, COUNT, without=dead) == 3 and running(client, PARSE, without=dead) == 1


def _scaled(client: Client) -> int:
    """What the scaler layer asks for."""
    layers = client.job(COUNT)["layers"]
    return next((int(row["body"]["task_count"]) for row in layers if row["layer"] == "scaler"), 1)


def _reason(client: Client) -> str:
    """Why the scaler did what it did last, as `penstock explain` tells it."""
    found = client.decisions(COUNT)["decisions"]
    return str(next(e["reason"] for e in found if e["actor"] == "autoscaler" and e["data"].get("applied")))


def _lag(client: Client, job: str) -> float:
    load = line_of(client, job)["load"]
    return float(load["lag_s"]) if load else float("inf")


if __name__ == "__main__":
    sys.exit(tell(Demo, title="the demo in numbers", whole="whole demo", more=lambda: PauseWatch.finished))
