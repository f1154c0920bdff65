"""Claims about tokens over HTTP: issued once, listed without themselves, taken back at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.errors import OutcomeUnknown, Refused
from penstock.db.database import Database
from penstock.db.tokens import CACHE_MS, TokenStore
from penstock.jobs.job_service import Actor
from penstock.jobs.job_store import JobStore
from penstock.jobs.token_service import TokenService
from tests.server.test_api import is_problem
from tests.server.world import World, a_client

NEW = {"name": "dana", "role": "developer", "why": "a new colleague"}


def issue(world: World, **changes: object) -> dict[str, object]:
    answer = world.ask("POST", "/tokens", json={**NEW, **changes})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def test_a_new_token_works_with_its_role_and_no_more(world: World):
    issued = issue(world)
    world.tokens["dana"] = str(issued["token"])
    assert world.ask("GET", "/jobs", role="dana").status_code == 200
    assert world.ask("GET", "/tokens", role="dana").status_code == 403
    assert (issued["name"], issued["role"], issued["issued_by"]) == ("dana", "developer", "a-admin")
    assert issued["expires_ms"] - issued["issued_ms"] == 365 * 24 * 3_600_000  # type: ignore[operator]


def test_the_list_has_everything_but_the_tokens(world: World):
    issued = issue(world)
    listed = world.ask("GET", "/tokens")
    assert str(issued["token"]) not in listed.text
    row = next(row for row in listed.json()["tokens"] if row["id"] == issued["id"])
    assert row == {name: value for name, value in issued.items() if name != "token"}


def test_a_revoked_token_is_refused_at_once_though_it_was_just_believed(world: World):
    issued = issue(world)
    world.tokens["dana"] = str(issued["token"])
    assert world.ask("GET", "/jobs", role="dana").status_code == 200
    revoked = world.ask("DELETE", f"/tokens/{issued['id']}", params={"why": "gone"})
    assert revoked.status_code == 200 and revoked.json()["revoked_ms"] > 0
    assert world.ask("GET", "/jobs", role="dana").status_code == 401
    again = world.ask("DELETE", f"/tokens/{issued['id']}", params={"why": "to be sure"})
    assert again.json() == revoked.json()


def test_issuing_and_revoking_are_audited_with_their_reasons(world: World):
    issued = issue(world)
    world.ask("DELETE", f"/tokens/{issued['id']}", params={"why": "gone"})
    entries = world.ask("GET", "/audit", params={"subject": issued["id"]}).json()["entries"]
    assert [(entry["action"], entry["reason"], entry["actor"]) for entry in entries] == [
        ("token.revoked", "gone", "a-admin"),
        ("token.issued", "a new colleague", "a-admin"),
    ]


def test_a_repeat_issues_nothing_and_shows_no_token(world: World):
    first = world.ask("POST", "/tokens", json=NEW, headers={"Idempotency-Key": "t1"})
    before = world.everything()
    again = world.ask("POST", "/tokens", json=NEW, headers={"Idempotency-Key": "t1"})
    assert again.status_code == 201 and again.json() == {**first.json(), "token": None}
    assert world.everything() == before
    other = {**NEW, "role": "admin"}
    is_problem(world.ask("POST", "/tokens", json=other, headers={"Idempotency-Key": "t1"}), 422, "KeyReused")
    with a_client(world) as client, pytest.raises(OutcomeUnknown, match="its secret was lost"):
        client.issue_token("dana", "developer", days=365, why="a new colleague", key="t1")


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "emperor"},
        {"role": 5},
        {"name": ""},
        {"name": "../x"},
        {"name": "x" * 300},
        {"name": "a\u202eb"},
        {"days": 0},
        {"days": 3651},
        {"days": "10"},
        {"days": 1.5},
        {"days": True},
        {"why": ""},
        {"why": "a\nb"},
        {"hash": "x"},
    ],
)
def test_a_token_that_cannot_be_is_422_and_not_issued(shared: World, changes: dict[str, object]):
    before = shared.everything()
    is_problem(shared.ask("POST", "/tokens", json={**NEW, **changes}), 422, "ConfigError")
    assert shared.everything() == before


def test_an_unknown_id_is_404_and_what_is_no_id_is_422(shared: World):
    before = shared.everything()
    is_problem(shared.ask("DELETE", f"/tokens/{'0' * 16}", params={"why": "x"}), 404, "NotFound")
    for wrong in ("x", "%25", "0" * 15, "0" * 64, "ABCDEF0123456789"):
        is_problem(shared.ask("DELETE", f"/tokens/{wrong}", params={"why": "x"}), 422, "ConfigError")
    assert shared.everything() == before


def test_the_service_itself_asks_for_an_admin(place: Path | str | None):
    database = Database(place)
    store = TokenStore(database)
    service = TokenService(JobStore(database), store)
    for role in ("reader", "developer", "oncall", "scaler", "container", "emperor"):
        asked = {"actor": Actor(name="x", role=role), "reason": "r", "idempotency_key": None, "now_ms": 5}
        with pytest.raises(Refused):
            service.issue("y", "reader", lifetime_ms=1000, **asked)  # type: ignore[arg-type]
        with pytest.raises(Refused):
            service.revoke("0" * 16, **asked)  # type: ignore[arg-type]
    assert store.rows() == ()
    database.close()


def test_another_instance_notices_a_revocation_within_a_second(place: Path | str | None):
    """Plan: two stores on one database; one revokes, the other goes on believing for half a second at most."""
    if place is None:
        pytest.skip("memory has one instance")
    one, two = Database(place), Database(place)
    here, there = TokenStore(one), TokenStore(two)
    service = TokenService(JobStore(one), here)
    asked = {"actor": Actor(name="root", role="admin"), "reason": "r", "idempotency_key": None}
    row, token = service.issue("x", "reader", lifetime_ms=10**9, **asked, now_ms=1000)  # type: ignore[arg-type]
    assert token is not None and there.caller(token, now_ms=1000).name == "x"
    service.revoke(row.id, **asked, now_ms=1001)  # type: ignore[arg-type]
    with pytest.raises(Refused):
        here.caller(token, now_ms=1001)
    assert CACHE_MS <= 1000
    assert there.caller(token, now_ms=1000 + CACHE_MS - 1).name == "x"
    with pytest.raises(Refused):
        there.caller(token, now_ms=1000 + CACHE_MS)
    one.close()
    two.close()


def test_what_was_read_before_a_revocation_is_not_believed_after_it():
    """Plan: a lookup has read the row; the token is revoked; only then the lookup would remember it."""
    database = Database(None)
    store = TokenStore(database)
    token = store.issue("x", "reader", now_ms=0)
    find = store._find

    def slow(digest: str) -> object:
        row = find(digest)
        store.revoked()
        return row

    store._find = slow  # type: ignore[method-assign, assignment]
    store.caller(token, now_ms=1)
    assert store.cached_caller(token, now_ms=1) is None


def test_a_clock_that_goes_back_does_not_prolong_a_belief():
    store = TokenStore(Database(None))
    token = store.issue("x", "reader", now_ms=0)
    store.caller(token, now_ms=10_000)
    assert store.cached_caller(token, now_ms=10_100) is not None
    assert store.cached_caller(token, now_ms=9_000) is None


def test_a_believed_token_ends_in_time():
    store = TokenStore(Database(None))
    token = store.issue("x", "reader", now_ms=0, lifetime_ms=100)
    store.caller(token, now_ms=99)
    assert store.cached_caller(token, now_ms=100) is None


def test_reads_with_a_believed_token_ask_the_store_for_nothing():
    store = TokenStore(Database(None))
    token = store.issue("x", "reader", now_ms=0)
    store.caller(token, now_ms=0)

    def fail(digest: str) -> None:
        raise AssertionError("was asked")

    store._find = fail  # type: ignore[method-assign]
    assert store.caller(token, now_ms=CACHE_MS - 1).name == "x"
    with pytest.raises(AssertionError):
        store.caller(token, now_ms=CACHE_MS)
