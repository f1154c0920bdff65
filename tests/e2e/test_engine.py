"""An engine's JVM dies and a task moves into a process of its own, in a real container; the results stay exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.streams.dsl.injector import Injector
from tests.e2e.platform import COUNT, PARSE, ZEITGEIST, Platform
from tests.kin import kin_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    found = Platform(tmp_path / "penstock", containers=1)
    try:
        found.start()
        yield found
    finally:
        found.kill()


def jvms(platform: Platform) -> list[psutil.Process]:
    kin = kin_of(platform.engine_pid("c1"))
    return [process for process, command in kin.items() if "org.apache.spark.deploy.SparkSubmit" in command]


def test_a_jvm_that_dies_is_replaced_and_a_task_may_have_its_own(platform: Platform) -> None:
    """Plan: submit; kill the engine's JVM; it comes back; give a job its own process; kill that JVM too; compare."""
    columns = ("--columns", "query:string,lang:string,ts:bigint", "--ts", "ts", "--watermark", "injector")
    assert platform.cli("category", "queries", "--create", "--partitions", "6", *columns).returncode == 0
    assert platform.cli("submit", str(ZEITGEIST / "pipeline.py")).returncode == 0
    injector = Injector(platform.log, "queries", "test", epoch=1)
    platform.inject(injector, seconds=range(1, 3), per_second=200)
    platform.wait("first counts", lambda: sum(platform.log.end_offsets("query_counts")) > 0)

    (jvm,) = jvms(platform)
    jvm.kill()
    platform.inject(injector, seconds=range(3, 5), per_second=200)
    platform.wait("the next engine's work", lambda: platform.log.watermark("query_counts") >= 5000)
    assert not jvm.is_running()

    fields = ("isolation=process", "resources.memory_mb=2048")
    assert platform.cli("oncall", "set", COUNT, *fields, "--why", "it eats memory").returncode == 0
    platform.wait("a second JVM", lambda: len(jvms(platform)) == 2)
    platform.inject(injector, seconds=range(5, 7), per_second=200)
    platform.wait("its work", lambda: platform.log.watermark("query_counts") >= 7000)
    own = max(jvms(platform), key=lambda process: process.create_time())
    own.kill()
    platform.inject(injector, seconds=range(7, 9), per_second=200)
    injector.close(now_ms=10**15)
    platform.assert_exact()
    assert platform.running(PARSE)
    assert platform.stop() == []
