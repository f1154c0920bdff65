"""A pipeline that calls a service for each record, what the service does, and what must come out of it.

The service is a folder: files in it say how long a call takes, where it takes longer, whether it fails, and
how much memory it leaves behind. Tasks look at it twice a second.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.cli.pipelines import compile_file
from penstock.client import new_key
from penstock.streams.bus.log import LOW_MAX
from penstock.streams.dsl.injector import Injector
from tests.e2e.platform import Platform

PARTITIONS = 6
KEYS = tuple(f"key {n}" for n in range(60))
SLICE_S = 0.2
PIPELINE = '''"""Numbers the calls of each key."""

import json
import os
import time
from pathlib import Path

from penstock import Computation, Context, Pipeline, Record, Value

SERVICE = Path({service!r})


class Service:
    """How it behaves now, as far as this process has looked."""

    def __init__(self) -> None:
        self.seen, self.owed_s, self.ballast = -1.0, 0.0, b""
        self.says: dict = {{}}

    def call(self) -> None:
        now = time.monotonic()
        if now - self.seen > 0.5:
            self.says, self.seen = json.loads((SERVICE / "says.json").read_text()), now
        if self.says.get("away"):
            raise ConnectionRefusedError("the service of this job refuses connections")
        if len(self.ballast) < self.says.get("memory_mb", 0) * 2**20:
            self.ballast = bytearray(os.urandom(2**20)) * self.says["memory_mb"]
        slow_in = self.says.get("slow_in")
        is_slow = slow_in is not None and f"/containers/{{slow_in}}/" in os.environ["SPARK_HOME"]
        self.owed_s += self.says.get("slow_ms" if is_slow else "call_ms", 0) / 1000
        if self.owed_s > 0.01:
            time.sleep(self.owed_s)
            self.owed_s = 0.0


service = Service()


class Call(Computation):
    """Calls, and numbers what it called."""

    outputs = {{"out": {{"who": "string", "n": "bigint"}}}}
    calls = Value(int)

    def process_record(self, record: Record, ctx: Context) -> None:
        service.call()
        ctx.state.calls = (ctx.state.calls or 0) + 1
        ctx.produce({{"who": ctx.key, "n": ctx.state.calls}})


p = Pipeline({name!r}, partitions={partitions})
p.source({source!r}).key_by("who", name="by_who").process(Call, name="call").sink({sink!r})
'''


class Calling:
    """One pipeline of calls on a platform: its jobs, its records, its service."""

    def __init__(self, platform: Platform, name: str, folder: Path) -> None:
        self.platform, self.name = platform, name
        self.job, self.source, self.sink = f"{name}.call", f"{name}_in", f"{name}_out"
        self._folder = folder / name
        self._folder.mkdir()
        self.says(call_ms=0)
        self.rate, self.hot_rate = 0.0, 0.0
        self.sent: Counter[str] = Counter()
        self._random, self._over = random.Random(1), threading.Event()
        self._thread = threading.Thread(target=self._feed, name=f"feed of {name}", daemon=True)
        self.error: BaseException | None = None

    def says(self, **behaviour: Any) -> None:
        """How the service behaves from now on."""
        new = self._folder / "says.new"
        new.write_text(json.dumps(behaviour))
        new.replace(self._folder / "says.json")

    def start(self, settings: Mapping[str, Any]) -> None:
        """Submit it with these settings of the job that calls, and wait until that runs."""
        client = self.platform.client
        client.create_category(
            {
                "name": self.source,
                "partitions": PARTITIONS,
                "columns": [["who", "string"], ["ts", "bigint"]],
                "format": "json",
                "watermark": "injector",
                "ts_column": "ts",
            }
        )
        path = self._folder / "pipeline.py"
        names = {"name": self.name, "source": self.source, "sink": self.sink, "partitions": PARTITIONS}
        path.write_text(PIPELINE.format(service=str(self._folder.resolve()), **names))
        compiled, package = compile_file(path, client, version="1")
        client.put_package(package.hash, package.data)
        client.submit_pipeline(compiled.to_json(), why="a drill", key=new_key())
        client.patch_layer(self.job, "base", settings, why="settings of the drill", key=new_key())
        wanted = settings.get("task_count", 1)
        self.platform.wait(
            "all tasks", lambda: len(self.platform.running(self.job)) == wanted and self.is_in_sync()
        )
        self._injector = Injector(self.platform.log, self.source, "drill", epoch=1)
        self._thread.start()

    def is_in_sync(self) -> bool:
        return bool(self.platform.client.job(self.job)["is_in_sync"])

    def finish(self) -> None:
        """Let all calls be quick, send the end, and compare every call with what was sent."""
        self.says(call_ms=0)
        self._over.set()
        self._thread.join()
        assert self.error is None, self.error
        self._injector.close(now_ms=_now_ms())
        log = self.platform.log
        self.platform.wait("the end of the stream", lambda: log.watermark(self.sink) == LOW_MAX, seconds=240)
        found: Counter[tuple[str, int]] = Counter()
        for partition, end in enumerate(log.end_offsets(self.sink)):
            for batch in log.read(self.sink, partition, 0, end):
                found.update((row["who"], row["n"]) for row in batch.to_pylist())
        assert found == Counter((who, n + 1) for who, count in self.sent.items() for n in range(count))
        self.remove()

    def remove(self) -> None:
        """Stop feeding and take its jobs away, so that the next drill has the machine to itself."""
        self._over.set()
        client = self.platform.client
        for line in client.jobs():
            if line["name"].startswith(f"{self.name}."):
                client.set_state(line["name"], "stopped", why="the drill is over", key=new_key())

    # -- what is seen of it ------------------------------------------------------------------------------

    def lag_s(self) -> float:
        load = self.platform.line(self.job)["load"]
        return float(load["lag_s"]) if load else float("inf")

    def task_count(self) -> int:
        return int(self.platform.client.job(self.job)["config"]["task_count"])

    def layer(self, name: str) -> dict[str, Any]:
        """What a layer says of the job."""
        layers = self.platform.client.job(self.job)["layers"]
        return next((dict(row["body"]) for row in layers if row["layer"] == name), {})

    def decisions(self, actor: str) -> list[dict[str, Any]]:
        """What one decided about the job, newest first."""
        found = self.platform.client.decisions(self.job, limit=100)["decisions"]
        return [entry for entry in found if entry["actor"] == actor]

    def alarms(self) -> dict[str, str]:
        """Its alarms that fire: by kind, what they say."""
        return {row["kind"]: row["text"] for row in self.platform.client.alarms(job=self.job)["alarms"]}

    def explained(self) -> str:
        """`penstock explain`, without its line ends."""
        return self.told("explain", self.job)

    def told(self, *command: str) -> str:
        """What a command prints, on one line."""
        done = self.platform.cli(*command)
        assert done.returncode == 0, done.stderr
        return " ".join(done.stdout.split())

    # -- records -----------------------------------------------------------------------------------------

    def _feed(self) -> None:
        owed, hot, last = 0.0, 0.0, time.monotonic()
        try:
            while not self._over.wait(SLICE_S):
                now = time.monotonic()
                owed, hot = owed + self.rate * (now - last), hot + self.hot_rate * (now - last)
                last = now
                whom = self._random.choices(KEYS, k=int(owed)) + ["hot"] * int(hot)
                owed, hot = owed - int(owed), hot - int(hot)
                self._publish(whom)
        except BaseException as error:
            self.error = error
            raise

    def _publish(self, whom: list[str]) -> None:
        now_ms = _now_ms()
        if whom:
            values = [json.dumps({"who": who, "ts": now_ms}).encode() for who in whom]
            keys = [str(self._random.randrange(10**9)) for _ in whom]
            self._injector.publish(keys, [now_ms] * len(whom), values)
            self.sent.update(whom)
        self._injector.report_low(now_ms, now_ms=now_ms)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
