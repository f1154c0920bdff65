"""Claims about recording: a minute is written when it is over, across restarts, standbys and a store that is away."""

from __future__ import annotations

import pytest

from penstock.core.errors import StoreUnavailable
from penstock.db.database import Database
from penstock.fleet.messages import Heartbeat, TaskReport
from penstock.scaling.metrics.frames import Frame, NoFrame
from penstock.scaling.metrics.retriever import MetricQuery, Retriever
from penstock.scaling.metrics.store import MetricRecorder, MetricStore
from tests.server.world import JOB, a_world
from tests.support.stage import wait_for

START = 28_000_000 * 60_000
WANTED = MetricQuery(metrics=("processed_rate", "lag_records"), minutes=2)


def reports(at_s: int) -> dict[str, list[TaskReport]]:
    """One task that reads 100 records a second."""
    metrics = {"at_ms": at_s * 1000.0, "started_ms": 1.0, "read_total": at_s * 100.0, "lag_records": 7.0}
    return {
        "a": [TaskReport(task_id="a/0", job="a", generation=1, shard=0, state="running", metrics=metrics)]
    }


def run(recorder: MetricRecorder, first_s: int, end_s: int) -> None:
    for at_s in range(first_s, end_s, 5):
        recorder.tick(START + at_s * 1000, {"a": (1, 1)}, reports(at_s))


def frame(store: MetricStore, at_s: int, wanted: MetricQuery = WANTED) -> Frame:
    found = Retriever(store).frame("a", wanted, now_ms=START + at_s * 1000)
    assert isinstance(found, Frame), found
    return found


def test_minutes_are_recorded_as_they_end():
    store = MetricStore(Database(None))
    run(MetricRecorder(store), 0, 130)
    assert frame(store, 130).values["processed_rate"].tolist() == pytest.approx([100, 100], rel=1 / 256)
    assert frame(store, 130).last("lag_records") == 7


def test_a_restart_within_a_minute_loses_nothing_of_the_ones_before(tmp_path):
    """It stops in order 50 s into the second minute, and is back 5 s later."""
    database = Database(tmp_path / "store.db")
    first = MetricRecorder(MetricStore(database))
    run(first, 0, 110)
    first.stop()
    store = MetricStore(database)
    run(MetricRecorder(store), 115, 125)
    assert frame(store, 125).values["processed_rate"].tolist() == pytest.approx([100, 100], rel=1 / 256)
    database.close()


def test_after_a_crash_only_the_open_minute_is_gone(tmp_path):
    database = Database(tmp_path / "store.db")
    run(MetricRecorder(MetricStore(database)), 0, 110)  # the minute from 60 on was not over
    store = MetricStore(database)
    run(MetricRecorder(store), 130, 250)
    three = MetricQuery(metrics=("processed_rate",), minutes=4, missing_max=0.25)
    found = frame(store, 250, three).values["processed_rate"].tolist()
    assert found[1] != found[1] and [found[0], *found[2:]] == pytest.approx([100, 100, 100], rel=1 / 256)
    database.close()


def test_what_could_not_be_written_is_written_later(tmp_path):
    failing: list[str] = []

    def fault(point: str) -> None:
        if point in failing:
            raise StoreUnavailable("it is away", why="a test", fix="wait")

    database = Database(tmp_path / "store.db", fault=fault)
    store = MetricStore(database)
    recorder = MetricRecorder(store)
    run(recorder, 0, 60)
    failing.append("commit")
    for at_s in range(60, 180, 5):
        with pytest.raises(StoreUnavailable):
            recorder.tick(START + at_s * 1000, {"a": (1, 1)}, reports(at_s))
    failing.clear()
    run(recorder, 180, 185)
    three = MetricQuery(metrics=("processed_rate",), minutes=3)
    assert frame(store, 185, three).values["processed_rate"].tolist() == pytest.approx([100] * 3, rel=1 / 256)
    database.close()


def test_a_standby_follows_and_takes_over(tmp_path):
    database = Database(tmp_path / "store.db")
    here, there = MetricStore(database), MetricStore(database)
    active, standby = MetricRecorder(here), MetricRecorder(there)
    run(active, 0, 125)
    standby.stand_by()
    assert frame(there, 125).values["processed_rate"].tolist() == pytest.approx([100, 100], rel=1 / 256)
    active.stand_by()
    run(standby, 125, 245)
    active.stand_by()
    assert frame(here, 245).values["processed_rate"].tolist() == pytest.approx([100, 100], rel=1 / 256)
    database.close()


class HandClock:
    """A clock that is set by hand; the boot clock goes with it."""

    def __init__(self, now_ms: int) -> None:
        self.at_ms = now_ms

    def now_ms(self) -> int:
        return self.at_ms

    def boot_ms(self) -> int:
        return self.at_ms


def test_the_control_plane_records_what_containers_report(tmp_path):
    """Plan: a job runs, a container beats every 5 s, the loop's round is called by hand over two minutes."""
    with a_world(tmp_path) as world:
        plane = world.plane
        config = {"pipeline": "p", "kind": "process", "command": ["sleep", "9"], "task_count": 2}
        assert world.ask("PUT", f"/jobs/{JOB}", json={"config": config, "why": "new"}).status_code == 201

        def is_running() -> bool:
            plane._sync()
            return JOB in plane.task_service.task_counts()

        wait_for(is_running, "the job to be in the task list")
        generation, task_count = plane.task_service.task_counts()[JOB]
        clock = plane.clock = HandClock(plane.clock.now_ms() // 60_000 * 60_000)  # type: ignore[assignment]
        plane.register_container("c1", "i", folder_id="f")
        begin = clock.at_ms
        for sequence in range(1, 26):
            clock.at_ms = begin + sequence * 5_000
            metrics = {
                "at_ms": float(clock.at_ms),
                "started_ms": 1.0,
                "read_total": sequence * 50.0,
                "lag_records": 7.0,
            }
            tasks = tuple(
                TaskReport(
                    task_id=f"{JOB}/{index}",
                    job=JOB,
                    generation=generation,
                    shard=0,
                    state="running",
                    metrics=metrics,
                )
                for index in range(task_count)
            )
            plane.on_heartbeat(Heartbeat(container="c1", incarnation="i", sequence=sequence, tasks=tasks))
            plane._record()
        found = world.ask("GET", f"/jobs/{JOB}/metrics?metrics=ingest_rate,task_count&minutes=2").json()[
            "metrics"
        ]
        assert found["ingest_rate"]["values"] == pytest.approx([10 * task_count] * 2, rel=1 / 256)
        assert found["task_count"]["values"] == [task_count] * 2


def kept(task: int, at_s: int, **told: float) -> TaskReport:
    """A task that keeps keys and tells of them, or not."""
    metrics = {"at_ms": at_s * 1000.0, "started_ms": 1.0, "read_total": 1.0, **told}
    return TaskReport(task_id=f"a/{task}", job="a", generation=1, shard=0, state="running", metrics=metrics)


def test_keys_and_bytes_of_state_are_sums_of_what_all_tasks_tell():
    """Plan: in the second minute one of two tasks has not counted its keys."""
    store = MetricStore(Database(None))
    recorder = MetricRecorder(store)
    for at_s in range(0, 130, 5):
        more = {"key_count": 24.0} if at_s < 60 else {}
        told = [
            kept(0, at_s, key_count=1000.0, state_bytes=4096.0),
            kept(1, at_s, state_bytes=1024.0, **more),
        ]
        recorder.tick(START + at_s * 1000, {"a": (1, 2)}, {"a": told})
    found = frame(store, 130, MetricQuery(metrics=("state_bytes",), minutes=2, optional=("key_count",)))
    assert found.values["state_bytes"].tolist() == [5120, 5120]
    keys = found.values["key_count"].tolist()
    assert keys[0] == 1024 and keys[1] != keys[1], "unknown is not zero"
    refused = Retriever(store).frame(
        "a", MetricQuery(metrics=("key_count",), minutes=2), now_ms=START + 130_000
    )
    assert isinstance(refused, NoFrame) and refused.metrics == ("key_count",)
