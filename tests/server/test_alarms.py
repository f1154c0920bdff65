"""Alarms in a running control plane: what is told survives a restart; people ask, acknowledge and silence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.alarms.checks import LOOP_FAILURES_MIN
from penstock.alarms.delivery import AlarmSender, WebhookRoute
from penstock.alarms.store import AlarmStore
from penstock.app import ControlPlane
from penstock.core.workers import InlineWorkers
from penstock.db.database import Database
from penstock.db.journal_store import JournalStore
from penstock.fleet.messages import Heartbeat, TaskReport
from penstock.scaling.policies.policy import RaiseAlert
from penstock.settings import Settings
from tests.builders import ADMIN
from tests.server.hooks import SECRET, Hook, a_hook
from tests.server.world import JOB, World, a_client, a_world
from tests.waiting import until

LAG = RaiseAlert(key="lag", text="it lags", severity="critical", evidence={"lag_s": 9.5}, what_to_do="look")
NOW = 1_790_000_000_000


@pytest.fixture
def hook() -> Iterator[Hook]:
    with a_hook() as hook:
        yield hook


def fire(world: World, job: str = JOB, alert: RaiseAlert = LAG) -> str:
    """An alarm of a job; returns its id."""
    world.plane.alarms.store.report(job, {"test": (alert,)}, world.plane.clock.now_ms())
    return next(alarm.id for alarm in world.plane.alarms.store.alarms(job) if alarm.key == alert.key)


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_what_is_owed_is_told_after_a_restart_once(
    request: pytest.FixtureRequest, tmp_path: Path, hook: Hook, store: str
):
    """Plan: the receiver refuses, the control plane ends, the next one on the same store tells it, once."""
    database = request.getfixturevalue("postgres").new_database() if store == "postgres" else ""
    settings = Settings(folder=tmp_path, database=database, alarms_ms=50, alarm_webhook=hook.url)
    hook.always = 503
    first = ControlPlane(settings)
    first.start()
    first.alarms.store.report("demo.a", {"test": (LAG,)}, first.clock.now_ms())
    until(lambda: hook.got)
    first.stop()
    assert hook.taken == []
    hook.always = 204
    second = ControlPlane(settings)
    second.start()
    until(lambda: not second.alarms.store.pending())
    second.stop()
    (told,) = hook.taken
    assert (told["kind"], told["alarm"]["job"], told["alarm"]["key"]) == ("fired", "demo.a", "lag")
    assert {body["key"] for _, body in hook.got} == {told["key"]}, "a repeat has the id of the first"


def test_a_crash_after_it_was_taken_sends_it_again_under_the_same_id(place: Path | str | None, hook: Hook):
    """Plan: one sender dies between the receiver's yes and the store's; its successor cannot know."""
    database = Database(place)
    store = AlarmStore(database, JournalStore(database), ["webhook"])
    store.report("demo.a", {"test": (LAG,)}, NOW)
    AlarmSender(store, [WebhookRoute(hook.url)], InlineWorkers()).tick(NOW)
    assert len(hook.taken) == 1 and store.pending() != ()
    second = AlarmSender(store, [WebhookRoute(hook.url)], InlineWorkers())
    for _ in range(3):
        second.tick(NOW)
    assert len(hook.taken) == 2 and len({body["id"] for body in hook.taken}) == 1 and store.pending() == ()
    database.close()


def test_a_loop_that_fails_fires_and_is_over_by_itself(tmp_path: Path):
    with a_world(tmp_path / "plane") as world:
        plane = world.plane
        loop = plane._loops[0]
        loop.streak, loop.last_error = 5, "StoreUnavailable: x"
        plane._alarming.tick(plane.clock.now_ms())
        (alarm,) = plane.alarms.alarms(job="fleet")
        assert alarm.key == "loop_state_syncer_fails" and alarm.severity == "critical"
        loop.streak = 0
        plane._alarming.tick(plane.clock.now_ms() + 6 * 60_000)
        assert plane.alarms.alarms() == () and len(plane.alarms.alarms(everything=True)) == 1


def test_a_damaged_category_fires_by_its_name_and_the_others_are_listed_and_marked(tmp_path: Path):
    """Plan: three categories, the index of one is overwritten; rounds of the bus, and what people see."""
    with a_world(tmp_path / "plane") as world:
        plane = world.plane
        for name in ("clicks", "orders", "views"):
            body = {"name": name, "partitions": 1, "columns": [["user", "string"]], "watermark": "injector"}
            assert world.ask("POST", "/categories", json=body).status_code == 201
            plane.log.register_producer(name, "injector")
        index = Path(plane.settings.bus_place.partition(":")[2]) / "orders" / "index.db"
        (tmp_path / "damaged").write_bytes(bytes(8192))
        os.replace(tmp_path / "damaged", index)
        for name in ("clicks", "views"):
            for low in (5, 6):
                plane.log.report_low(name, producer="injector", epoch=1, low=low, now_ms=1000)
        for _ in range(LOOP_FAILURES_MIN):
            plane._maintain_bus()
        assert [plane.log.watermark(name) for name in ("clicks", "views")] == [6, 6]
        plane._alarming.tick(plane.clock.now_ms())
        (alarm,) = plane.alarms.alarms(job="fleet")
        assert alarm.key == "category_orders_fails" and alarm.severity == "critical"
        assert "orders" in alarm.text and "damaged" in alarm.text and "the others" not in alarm.text
        told = world.ask("GET", "/categories").json()
        assert [found["spec"]["name"] for found in told["categories"]] == ["clicks", "views"]
        assert list(told["unreadable"]) == ["orders"] and "damaged" in told["unreadable"]["orders"]
        with a_client(world) as client:
            assert len(client.categories()) == 2 and list(client.unreadable_categories()) == ["orders"]
        assert world.ask("GET", "/watermarks").status_code == 200
        assert world.ask("GET", "/watermarks", params={"subject": "views"}).status_code == 200
        refused = world.ask("GET", "/categories/orders")
        assert refused.status_code >= 500 and "orders/index.db" in refused.text


def test_records_behind_a_low_watermark_that_a_task_reports_fire(tmp_path: Path):
    with a_world(tmp_path / "plane") as world, a_client(world, "container") as client:
        client.register("c1", "c1-1", "folder")
        metrics = {"behind_low": 3.0, "behind_low.1": 3.0}
        task = TaskReport(
            task_id=f"{JOB}/0", job=JOB, generation=1, shard=0, state="running", metrics=metrics
        )
        client.beat(Heartbeat(container="c1", incarnation="c1-1", sequence=1, tasks=(task,)))
        world.plane._alarming.tick(world.plane.clock.now_ms())
        (alarm,) = world.plane.alarms.alarms(job=JOB)
        assert (alarm.key, alarm.evidence) == ("behind_low", {"behind_low": 3, "behind_low.1": 3})
        assert alarm.text and alarm.what_to_do


def test_people_see_acknowledge_and_know_who(world: World):
    alarm_id = fire(world)
    with a_client(world, "oncall") as client:
        found = client.alarms(job=JOB)
        assert [alarm["id"] for alarm in found["alarms"]] == [alarm_id] and found["routes"] == ["log"]
        assert client.alarms(job="demo.other")["alarms"] == []
        seen = client.acknowledge_alarm(alarm_id, why="mine", key="k1")
        assert seen == client.acknowledge_alarm(alarm_id, why="mine", key="k1"), "once per key"
        assert (seen["acked_by"], client.alarm(alarm_id)["acked_by"]) == ("a-oncall", "a-oncall")
    audits = [row for row in world.plane.jobs.audit(subject=JOB) if row.action == "alarm.acknowledged"]
    assert [(row.actor, row.role, row.reason) for row in audits] == [("a-oncall", "oncall", "mine")]
    (entry,) = world.plane.journal.entries(subject=JOB, kind="alarm")[-1:]
    assert (entry.decision, entry.actor, entry.reason) == ("alarm.acknowledged", "a-oncall", "mine")
    events = world.ask("GET", "/events?since=1&wait_s=0").text
    assert "event: alarm" in events and "alarm.acknowledged" in events


def test_a_silence_holds_until_it_is_ended(world: World):
    with a_client(world, "oncall") as client:
        made = client.silence_alarms(job="demo.*", severity="critical", for_s=7200, why="a release", key="k")
        again = client.silence_alarms(job="demo.*", severity="critical", for_s=7200, why="a release", key="k")
        assert made == again and [row["id"] for row in client.silences()] == [made["id"]]
        alarm_id = fire(world)
        assert client.alarm(alarm_id)["is_silenced"] and client.alarm(alarm_id)["told_ms"] is None
        assert world.plane.alarms.store.pending() == ()
        assert client.end_silence(made["id"], why="done", key="k2")["id"] == made["id"]
        world.plane.alarms.store.sweep(world.plane.clock.now_ms())
        assert client.alarm(alarm_id)["told_ms"] is not None and world.plane.alarms.store.pending() != ()
    actions = [row.action for row in world.plane.jobs.audit(subject="demo.*")]
    assert actions == ["alarm.unsilenced", "alarm.silenced"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/alarms/000000000000", None, 404),
        ("GET", "/alarms/nonsense", None, 422),
        ("GET", "/alarms?job=../x", None, 422),
        ("POST", "/alarms/000000000000/acknowledge", {"why": "x"}, 404),
        ("POST", "/alarms/000000000000/acknowledge", {"why": " "}, 422),
        ("DELETE", "/silences/000000000000?why=x", None, 404),
        ("POST", "/silences", {"job": "a", "for_s": 0, "why": "x"}, 422),
        ("POST", "/silences", {"job": "a", "for_s": -60, "why": "x"}, 422),
        ("POST", "/silences", {"job": "a", "for_s": 10**9, "why": "x"}, 422),
        ("POST", "/silences", {"job": "a", "for_s": "60", "why": "x"}, 422),
        ("POST", "/silences", {"job": "", "for_s": 60, "why": "x"}, 422),
        ("POST", "/silences", {"job": "a b", "for_s": 60, "why": "x"}, 422),
        ("POST", "/silences", {"for_s": 60, "why": "x"}, 422),
        ("POST", "/silences", {"job": "a", "for_s": 60, "severity": "awful", "why": "x"}, 422),
        ("POST", "/silences", {"job": "a", "for_s": 60}, 422),
        ("POST", "/alarm-routes/test", {"why": ""}, 422),
    ],
)
def test_bad_input_changes_nothing(shared: World, method: str, path: str, body: Any, status: int):
    before = shared.everything()
    answer = shared.ask(method, path, role="oncall", json=body)
    problem = answer.json()
    assert answer.status_code == status and problem["title"] and problem["detail"] and problem["fix"]
    assert shared.everything() == before


def test_what_is_over_cannot_be_acknowledged(world: World):
    alarm_id = fire(world)
    now_ms = world.plane.clock.now_ms() + 2 * 3_600_000
    world.plane.alarms.store.sweep(now_ms)
    answer = world.ask("POST", f"/alarms/{alarm_id}/acknowledge", json={"why": "x"})
    assert answer.status_code == 403 and "is already resolved" in answer.json()["title"]


def test_a_test_says_what_each_route_answered_and_no_address(tmp_path: Path, hook: Hook):
    plane = ControlPlane(Settings(folder=tmp_path, alarm_webhook=hook.url))
    asked: Any = {"actor": ADMIN, "reason": "a test", "idempotency_key": None, "now_ms": NOW}
    hook.answers = [500]
    answers = plane.alarms.test(**asked)
    assert answers["log"] == "" and "500" in answers["webhook"] and SECRET not in str(answers)
    assert plane.alarms.test(**asked) == {"log": "", "webhook": ""}
    assert hook.taken[0]["kind"] == "test" and plane.alarms.store.pending() == ()
    entry = plane.journal.entries(subject="fleet")[-1]
    assert entry.decision == "alarm.tested" and SECRET not in str(entry)
    plane.stop()


def test_capacity_is_shown(world: World):
    with a_client(world, "reader") as client:
        found = client.capacity()
    assert not found["is_limited"] and found["jobs"] == 1
    assert {row["kind"]: row["reserved"] for row in found["kinds"]}["cpu"] > 0
