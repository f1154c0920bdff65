"""What the demos of pipelines share: two containers, a kill, the end of a stream, and the comparison."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from feeding import Feed
from pauses import PauseWatch
from story import Story
from watching import ready, size

from penstock import open_log
from penstock.cli.output import connect
from penstock.cli.pipelines import compile_file
from penstock.client import Client
from penstock.container.sessions import kill_session
from penstock.streams.bus.log import LOW_MAX
from penstock.streams.compile.compiled import CompiledPipeline


class StreamStory(Story):
    """The story of a pipeline on two containers."""

    patience_s = 90.0

    def _start_two(self, category: Path) -> tuple[Client, Any]:
        """Both containers, and the category that the generator writes; returns the client and the bus."""
        self._say("starting a control plane and two containers")
        self._start_up("--containers", "2")
        client = connect(self._folder)
        self._wait("both containers are ready", lambda: ready(client) == {"c1", "c2"}, seconds=120)
        client.create_category(json.loads(category.read_text()))
        return client, open_log(f"embedded:{self._folder / 'bus'}")

    def _put(self, client: Client, pipeline: Path, *, version: str, why: str) -> CompiledPipeline:
        """Submit a pipeline."""
        compiled, package = compile_file(pipeline, client, version=version)
        client.put_package(package.hash, package.data)
        client.submit_pipeline(compiled.to_json(), why=why, key=f"demo-{pipeline.name}-{version}")
        jobs = ", ".join(job.name for job in compiled.jobs)
        self._say(f"submitted {pipeline.name} as version {version}: {jobs}")
        return compiled

    def _reworded(self, pipeline: Path) -> Path:
        """The same pipeline as new code."""
        release = self._folder / "release" / pipeline.name
        release.parent.mkdir()
        release.write_text(pipeline.read_text() + "\n# Version 2: the same, in new words.\n")
        return release

    def _kill(self, client: Client, watch: PauseWatch, is_back: Callable[[int], bool]) -> None:
        """Kill the container with the most tasks; `is_back` knows whether all run without that engine."""
        victim = max(client.status()["containers"], key=lambda row: row["tasks"])
        with watch.event("failover of a killed container"):
            warden = int((self._folder / "containers" / victim["name"] / "warden.pid").read_text())
            self._say(f"kill -9 of container {victim['name']} and everything in it ({victim['tasks']} tasks)")
            psutil.Process(warden).kill()
            kill_session(victim["pid"])
            took = self._wait("its tasks run again", lambda: is_back(victim["pid"]))
        self.numbers["killed container's tasks run again after"] = f"{took:.1f} s (limit 20 s)"
        if took > 20:
            self.failures.append(f"failover took {took:.1f} s, more than 20 s")
        self._wait("the killed container is back", lambda: len(ready(client)) == 2 and watch.is_moving())

    def _end(self, log: Any, feed: Feed, sink: str) -> None:
        """Wait until what was sent has reached the sink."""
        feed.finish()
        self._say(f"the generator is done: {feed.published:,} records")
        self._wait(
            "the end of the stream has reached the sink", lambda: log.watermark(sink) == LOW_MAX, seconds=120
        )

    def _judge(
        self, log: Any, feed: Feed, found: Counter[Any], expected: Counter[Any], *, out: str, dead: str
    ) -> None:
        """Compare what came out with the reference; `out`: what it is called."""
        lost, doubled, aside = expected - found, found - expected, size(log, dead)
        self.numbers["records in"] = f"{feed.published:,}"
        self.numbers[f"{out} out"] = f"{found.total():,}"
        self.numbers["broken records, all in the dead letters"] = f"{aside} of {feed.broken}"
        if lost or doubled or aside != feed.broken:
            self.failures.append(
                f"{lost.total()} {out} lost or wrong, {doubled.total()} too many, {aside} of {feed.broken} "
                f"dead letters; e.g. {list(lost)[:3]} against {list(doubled)[:3]}"
            )
        verdict = "DIFFERENT" if lost or doubled else "equal"
        self._say(f"compared {found.total():,} {out}, record by record: {verdict}")
