"""Alarms on a store: what is told is owed until a route takes it, in order, and never holds anybody up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from penstock.alarms.decide import RESOLVE_AFTER_MS, Alarm, Notice, Silence
from penstock.alarms.delivery import TRIES_MAX, AlarmSender, LogRoute, WebhookRoute, backoff_ms
from penstock.alarms.store import AlarmStore, put_silence
from penstock.core.errors import ConfigError, CorruptData, NotFound, PenstockError
from penstock.core.journal import Entry
from penstock.core.workers import Finished, InlineWorkers
from penstock.db.database import Database
from penstock.db.journal_store import JournalStore
from penstock.scaling.policies.policy import ChangeLayer, RaiseAlert
from penstock.scaling.policies.policy_manager import POLICY_RECORDS, PolicyRecordStore
from penstock.scaling.policies.ports import RecordUpdate
from penstock.scaling.policies.round import OpenAction, PolicyRecord

NOW = 1_790_000_000_000
LAG = RaiseAlert(key="lag", text="it lags", evidence={"lag_s": 200.0})


class Catching(InlineWorkers):
    """Inline, but what a route raises comes back as the threads bring it back."""

    def start(self, key: str, work: Any, now_ms: int) -> None:
        try:
            super().start(key, work, now_ms)
        except PenstockError as error:
            self._finished.append(Finished(key=key, work=work, result=None, error=error))


class Channel:
    """A route that can be away."""

    def __init__(self, name: str = "channel") -> None:
        self.name, self.is_away, self.got = name, False, list[tuple[str, int]]()

    def send(self, notice: Notice, notice_id: int) -> None:
        if self.is_away:
            raise PenstockError("nobody answers")
        self.got.append((notice.kind, notice_id))


@pytest.fixture
def database() -> Iterator[Database]:
    database = Database(None)
    yield database
    database.close()


def a_store(database: Database, *routes: str) -> AlarmStore:
    return AlarmStore(database, JournalStore(database), routes or ("channel",))


def test_a_trouble_is_kept_told_and_journalled(database):
    store, channel = a_store(database), Channel()
    sender = AlarmSender(store, [channel], Catching())
    store.report("shops", {"doctor": (LAG,)}, NOW)
    store.report("shops", {"doctor": (LAG,)}, NOW + 60_000)
    sender.tick(NOW)
    sender.tick(NOW)
    assert [kind for kind, _ in channel.got] == ["fired"] and store.pending() == ()
    store.report("shops", {"doctor": ()}, NOW + 60_000 + RESOLVE_AFTER_MS)
    sender.tick(NOW + 1)
    assert [kind for kind, _ in channel.got] == ["fired", "resolved"]
    decisions = [entry.decision for entry in JournalStore(database).entries("shops")]
    assert decisions == ["doctor/lag fired", "doctor/lag resolved"]


def test_a_route_that_is_away_gets_everything_later_in_order_and_others_do_not_wait(database):
    store, away, other = a_store(database, "away", "other"), Channel("away"), Channel("other")
    away.is_away = True
    sender = AlarmSender(store, [away, other], Catching())
    store.report("shops", {"doctor": (LAG,)}, NOW)
    store.report("shops", {"doctor": ()}, NOW + RESOLVE_AFTER_MS)
    now_ms = NOW
    for _ in range(6):
        sender.tick(now_ms)
    assert [kind for kind, _ in other.got] == ["fired", "resolved"] and away.got == []
    away.is_away = False
    sender.tick(now_ms)
    assert away.got == [], "its pause is not over"
    for _ in range(4):
        now_ms += 600_000
        sender.tick(now_ms)
    assert [kind for kind, _ in away.got] == ["fired", "resolved"]


def test_a_notice_that_nobody_takes_is_given_up_in_the_end(database):
    store, channel = a_store(database), Channel()
    channel.is_away = True
    sender = AlarmSender(store, [channel], Catching())
    store.report("shops", {"doctor": (LAG,)}, NOW)
    now_ms = NOW
    for _ in range(2 * TRIES_MAX + 2):  # one tick sends, the next hears
        sender.tick(now_ms)
        now_ms += 600_000
    assert store.pending() == ()
    assert "not delivered" in JournalStore(database).entries("shops")[-1].decision
    assert [backoff_ms(tries) for tries in (1, 2, 3, 20)] == [2_000, 4_000, 8_000, 600_000]


def test_a_notice_of_a_route_that_is_gone_is_dropped(database):
    store = a_store(database, "old")
    store.report("shops", {"doctor": (LAG,)}, NOW)
    AlarmSender(store, [], Catching()).tick(NOW)
    assert store.pending() == ()


def test_a_look_that_began_before_the_alarm_tells_nothing_of_it(database):
    """Plan: a sweep and another source read their clocks a moment before the report that comes first."""
    store = a_store(database)
    store.report("shops", {"doctor": (RaiseAlert(key="lag", text="it lags", severity="critical"),)}, NOW)
    store.sweep(NOW - 5)
    store.report("shops", {"doctor": ()}, NOW - 5)
    assert [entry.decision for entry in JournalStore(database).entries("shops")] == ["doctor/lag fired"]
    assert store.alarms()[0].is_firing


def test_an_alarm_is_found_by_its_id(database):
    store = a_store(database)
    store.report("shops", {"doctor": (LAG,)}, NOW)
    (alarm,) = store.alarms("shops")
    assert store.alarm(alarm.id) == alarm and store.alarms("other") == ()
    with pytest.raises(NotFound) as caught:
        store.alarm("0" * 12)
    assert caught.value.why and caught.value.fix


def test_old_alarms_and_silences_go(database):
    store = a_store(database)
    store.report("shops", {"doctor": (LAG,)}, NOW)
    with database.transaction() as connection:
        put_silence(connection, Silence(id="s1", until_ms=NOW + 1000, by="dana", why="a release"))
    assert [silence.id for silence in store.silences(NOW)] == ["s1"] and store.silences(NOW + 1000) == ()
    store.sweep(NOW + 2 * 3_600_000)
    assert not store.alarms()[0].is_firing
    store.sweep(NOW + 20 * 86_400_000)
    assert store.alarms() == () and store.silences(NOW) == ()


def test_the_log_takes_every_notice(capsys):
    alarm = Alarm(
        job="shops", source="doctor", key="lag", severity="critical", text="x", first_ms=1, last_ms=1
    )
    for kind in ("fired", "resolved"):
        LogRoute().send(Notice(kind=kind, alarm=alarm, at_ms=NOW), 1)
    assert "alarm fired" in capsys.readouterr().out


# --- the webhook


class _Hook(BaseHTTPRequestHandler):
    answers: list[int] = []
    got: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.got.append(msgspec.json.decode(body) | {"header": self.headers["idempotency-key"]})
        self.send_response(self.answers.pop(0) if self.answers else 204)
        self.send_header("location", "http://127.0.0.1:1/elsewhere")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[str]:
    _Hook.answers, _Hook.got = [], []
    with HTTPServer(("127.0.0.1", 0), _Hook) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/secret-path"
        server.shutdown()
        thread.join()


def test_a_webhook_gets_the_whole_alarm_and_a_refusal_is_tried_again(database, hook):
    store, route = AlarmStore(database, JournalStore(database), ("webhook",)), WebhookRoute(hook)
    sender = AlarmSender(store, [route], Catching())
    _Hook.answers = [503, 302, 204]
    store.report("shops", {"doctor": (LAG,)}, NOW)
    for minute in range(8):
        sender.tick(NOW + minute * 60_000)
    route.close()
    assert len(_Hook.got) == 3 and store.pending() == ()
    assert {got["header"] for got in _Hook.got} == {"1"}
    assert _Hook.got[-1]["kind"] == "fired" and _Hook.got[-1]["alarm"]["evidence"] == {"lag_s": 200.0}


def test_what_a_webhook_says_never_has_its_address():
    route = WebhookRoute("http://127.0.0.1:1/services/SECRET", timeout_s=5)
    alarm = Alarm(job="a", source="b", key="c", severity="info", text="x", first_ms=1, last_ms=1)
    with pytest.raises(PenstockError) as caught:
        route.send(Notice(kind="fired", alarm=alarm, at_ms=NOW), 1)
    route.close()
    assert "SECRET" not in str(caught.value) and "127.0.0.1" in str(caught.value)


@pytest.mark.parametrize("url", ["", "ftp://host/x", "http://example.org/x", "https://", "webhook"])
def test_an_address_that_cannot_be_is_refused(url):
    with pytest.raises(ConfigError) as caught:
        WebhookRoute(url)
    assert caught.value.why and caught.value.fix


# --- what policies remember


def test_records_are_kept_under_a_version(database):
    store = PolicyRecordStore(database, JournalStore(database))
    assert store.load("shops") == (PolicyRecord(), 0)
    action = ChangeLayer(changes={"task_count": 8, "resources": {"cpu": 1.5}}, text="more")
    open_ = OpenAction(
        policy="a", priority=1, symptom="lag", action=action, undo={"task_count": None}, at_ms=1, check_ms=2
    )
    record = PolicyRecord(open=open_, acted={"a": 1}, useless={"x": 9}, said={"p": "a:applied"})
    assert store.save("shops", record, 0)
    assert store.load("shops") == (record, 1)
    assert not store.save("shops", PolicyRecord(), 0), "somebody else was first"
    assert store.save("shops", PolicyRecord(), 1) and store.load("shops") == (PolicyRecord(), 2)
    store.forget("shops")
    assert store.load("shops") == (PolicyRecord(), 0)


def test_many_records_are_kept_at_once_each_by_its_own_version(database):
    """Plan: three are written with an entry each; of them one was written by somebody else meanwhile."""
    journal = JournalStore(database)
    store = PolicyRecordStore(database, journal)
    assert store.save("b", PolicyRecord(acted={"theirs": 1}), 0)
    mine = PolicyRecord(acted={"mine": 2})
    kept = [RecordUpdate(job=job, record=mine, version=0, entry=an_entry(job)) for job in ("a", "b", "c")]
    assert store.save_all(kept) == {"b"}
    found = store.load_all(["a", "b", "c", "d"])
    assert found == {
        "a": (mine, 1),
        "b": (PolicyRecord(acted={"theirs": 1}), 1),
        "c": (mine, 1),
        "d": (PolicyRecord(), 0),
    }
    assert [(entry.subject, entry.data) for entry in journal.entries()] == [
        ("a", {"lag_s": 1.5}),
        ("c", {"lag_s": 1.5}),
    ]
    assert store.save_all([]) == frozenset()


def test_a_damaged_record_is_told_and_the_others_are_read(database):
    store = PolicyRecordStore(database, JournalStore(database))
    assert store.save("a", PolicyRecord(), 0) and store.save("b", PolicyRecord(), 0)
    with database.transaction() as connection:
        connection.execute(sa.update(POLICY_RECORDS).where(POLICY_RECORDS.c.job == "a").values(body='{"ac'))
    found = store.load_all(["a", "b"])
    assert isinstance(found["a"], CorruptData) and "policy_records" in found["a"].fix
    assert found["b"] == (PolicyRecord(), 1)
    with pytest.raises(CorruptData):
        store.load("a")


def an_entry(job: str) -> Entry:
    return Entry(
        at_ms=1,
        actor="autoscaler",
        kind="scale",
        subject=job,
        decision="nothing",
        reason="it is well",
        data={"lag_s": 1.5},
    )
