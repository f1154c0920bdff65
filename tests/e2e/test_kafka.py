"""A whole installation on a real Kafka broker: a container dies, the broker goes away and returns, and every record is
delivered once."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import StoreUnavailable
from penstock.streams.dsl.injector import Injector
from tests.e2e.platform import Platform

pytestmark = pytest.mark.timeout(900)

CLEAN = """
from penstock import Pipeline

p = Pipeline("clean", partitions=2)
p.source("orders").filter("amount > 0").select("id", "customer", "amount").sink("clean_orders")
"""
DELIVER = """
CREATE PIPELINE deliver WITH (partitions = 2);
INSERT INTO deliveries SELECT id, customer, amount >= 50 AS is_large FROM clean_orders DISTRIBUTE BY customer;
"""


@pytest.fixture
def platform(tmp_path: Path, kafka: Any) -> Iterator[Platform]:
    found = Platform(tmp_path / "penstock", containers=2, bus=kafka.new_place())
    try:
        found.start()
        yield found
    finally:
        found.kill()


def inject(injector: Injector, ids: range) -> None:
    rows = [{"id": n, "customer": f"c{n % 40}", "amount": n % 100} for n in ids]
    injector.publish(
        [row["customer"] for row in rows],
        [row["id"] for row in rows],
        [json.dumps(row).encode() for row in rows],
    )


def delivered(platform: Platform) -> Counter[tuple[int, bool]]:
    found: Counter[tuple[int, bool]] = Counter()
    for partition, end in enumerate(platform.log.end_offsets("deliveries")):
        for batch in platform.log.read("deliveries", partition, 0, end):
            found.update((row["id"], row["is_large"]) for row in batch.to_pylist())
    return found


def expected(count: int) -> Counter[tuple[int, bool]]:
    return Counter((n, n % 100 >= 50) for n in range(count) if n % 100 > 0)


@pytest.mark.slow
def test_every_record_is_delivered_once_while_a_container_and_the_broker_die(
    platform: Platform, kafka: Any, tmp_path: Path
) -> None:
    """Plan: submit two jobs; kill -9 the container of one; kill -9 the broker, start it again; count; stop."""
    columns = [["id", "bigint"], ["customer", "string"], ["amount", "bigint"]]
    platform.client.create_category(
        {"name": "orders", "partitions": 2, "columns": columns, "watermark": "injector"}
    )
    for name, text in (("clean.py", CLEAN), ("deliver.sql", DELIVER)):
        (tmp_path / name).write_text(text)
        submitted = platform.cli("submit", str(tmp_path / name))
        assert submitted.returncode == 0, submitted.stderr
        sink = "clean_orders" if name == "clean.py" else "deliveries"
        platform.wait(f"the sink of {name}", lambda sink=sink: bool(platform.log.describe(sink)))
    injector = Injector(platform.log, "orders", "test", epoch=1)
    inject(injector, range(2000))
    platform.wait("the first records", lambda: delivered(platform) == expected(2000))
    jobs = [line["name"] for line in platform.client.jobs()]

    os.kill(platform.warden_pid(platform.owner(jobs[0])), signal.SIGKILL)
    inject(injector, range(2000, 4000))
    platform.wait("the killed container's records", lambda: delivered(platform) == expected(4000))

    inject(injector, range(4000, 5000))  # may be under way while it goes
    kafka.kill()
    said = platform.cli("category", "orders")
    assert said.returncode == 5 and "Kafka" in said.stderr, said.stderr
    kafka.start()
    platform.wait("the broker", lambda: bool(platform.log.end_offsets("orders")))
    inject(injector, range(5000, 6000))
    platform.wait("everything", lambda: delivered(platform) == expected(6000))

    platform.wait(
        "no lag",
        lambda: all(task["metrics"]["lag_records"] == 0 for job in jobs for task in platform.running(job)),
    )
    assert platform.stop() == []
    again = platform.cli("bus", "tail", "orders", "-n", "1", "-o", "json")
    assert len(again.stdout.splitlines()) == 2, "the folder knows its bus without the control plane"


def test_a_broker_that_is_not_there_is_named(tmp_path: Path) -> None:
    alone = Platform(tmp_path / "penstock", containers=0, bus="kafka://127.0.0.1:1/none-")
    with pytest.raises((AssertionError, StoreUnavailable)):
        alone.start()
    said = (tmp_path / "penstock" / "up.log").read_text()
    assert (
        "no Kafka broker answers at 127.0.0.1:1" in said and "what to do" in said and "Traceback" not in said
    )
