"""The whole, on real processes: submitted, paused, killed, rescaled, released, stopped, and exact to the record."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.streams.dsl.injector import Injector
from tests.e2e.platform import COUNT, PARSE, ZEITGEIST, Platform, pause

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    found = Platform(tmp_path / "penstock", containers=2)
    try:
        found.start()
        yield found
    finally:
        found.kill()


def test_results_are_exact_through_every_kind_of_death(platform: Platform, tmp_path: Path) -> None:
    """Plan: submit; kill an engine; freeze a whole container beyond its lease and wake it as a zombie; kill -9 a whole
    container; rescale through oncall; break the code and release a fix; end the stream; compare; stop."""
    created = platform.cli(
        *(
            "category",
            "queries",
            "--create",
            "--partitions",
            "6",
            "--columns",
            "query:string,lang:string,ts:bigint",
        ),
        *("--ts", "ts", "--watermark", "injector"),
    )
    assert created.returncode == 0, created.stderr
    submitted = platform.cli("submit", str(ZEITGEIST / "pipeline.py"), "--version", "1")
    assert submitted.returncode == 0, submitted.stderr
    injector = Injector(platform.log, "queries", "test", epoch=1)
    platform.inject(injector, seconds=range(1, 4), per_second=500)
    platform.wait("both jobs", lambda: platform.running(PARSE) and platform.running(COUNT))
    platform.wait("first counts", lambda: sum(platform.log.end_offsets("query_counts")) > 0)

    # An engine dies: its warden starts another one, the container keeps its shards.
    os.kill(platform.engine_pid(platform.owner(PARSE)), signal.SIGKILL)
    platform.inject(injector, seconds=range(4, 6), per_second=500)
    platform.wait("its tasks again", lambda: platform.log.watermark("query_counts") >= 6000)

    # A container freezes, is failed over, and wakes: everything it does then is in vain.
    victim = platform.owner(COUNT)
    wakers = [pause(platform.engine_pid(victim)), pause(platform.warden_pid(victim))]
    platform.inject(injector, seconds=range(6, 8), per_second=500)
    platform.wait("fail-over", lambda: platform.running(COUNT) and platform.owner(COUNT) != victim)
    platform.wait("the successor's work", lambda: platform.log.watermark("query_counts") >= 8000)
    for wake in wakers:
        wake()
    platform.wait("the frozen container, new and empty", lambda: victim in platform.ready())

    # kill -9 of warden and engine: the host clears up, the shards move at once.
    victim = platform.owner(COUNT)
    os.kill(platform.warden_pid(victim), signal.SIGKILL)
    platform.inject(injector, seconds=range(8, 10), per_second=500)
    platform.wait("the rest of it", lambda: platform.log.watermark("query_counts") >= 10_000)
    platform.wait("the killed container", lambda: len(platform.ready()) == 2)

    # Oncall rescales; then somebody releases broken code, and then a fix.
    assert platform.cli("oncall", "set", COUNT, "task_count=3", "--why", "more of it").returncode == 0
    platform.wait("three tasks", lambda: len(platform.running(COUNT)) == 3)
    broken = tmp_path / "pipeline.py"
    broken.write_text((ZEITGEIST / "pipeline.py").read_text().replace("record.ts // 1000", "1 // 0"))
    assert platform.cli("submit", str(broken), "--version", "broken", "--yes").returncode == 0
    platform.inject(injector, seconds=range(10, 12), per_second=500)
    platform.wait(
        "the error", lambda: any("division" in task["error"] for task in platform.line(COUNT)["tasks"])
    )
    fixed = platform.cli("submit", str(ZEITGEIST / "pipeline.py"), "--version", "1", "--yes")
    assert fixed.returncode == 0
    injector.close(now_ms=10**15)
    platform.assert_exact()

    reasons = " ".join(entry["reason"] for entry in platform.client.journal(limit=1000))
    assert "more of it" in reasons
    assert platform.stop() == []
