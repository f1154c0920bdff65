"""Claims about tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from penstock.core.errors import Refused
from penstock.db.database import Database
from penstock.db.tokens import ROLES, TOKENS, YEAR_MS, TokenStore


@pytest.fixture
def store() -> TokenStore:
    return TokenStore(Database(None))


@pytest.mark.parametrize("role", sorted(ROLES))
def test_a_token_tells_its_name_and_role(store: TokenStore, role: str):
    token = store.issue("dana", role, now_ms=0)
    caller = store.caller(token, now_ms=YEAR_MS - 1)
    assert (caller.name, caller.role) == ("dana", role)


def test_two_tokens_of_one_name_are_told_apart(store: TokenStore):
    one, two = (store.issue("dana", "reader", now_ms=0) for _ in range(2))
    assert one != two
    assert store.caller(one, now_ms=0).token_id != store.caller(two, now_ms=0).token_id
    assert store.caller(one, now_ms=0) == store.caller(one, now_ms=1)


def test_a_token_ends(store: TokenStore):
    token = store.issue("dana", "reader", now_ms=100, lifetime_ms=50)
    assert store.caller(token, now_ms=149).role == "reader"
    with pytest.raises(Refused, match="has expired") as caught:
        store.caller(token, now_ms=150)
    assert caught.value.why and caught.value.fix


@pytest.mark.parametrize(
    "change", [lambda t: t[:-1], lambda t: t + "x", str.upper, lambda t: "", lambda t: "%"]
)
def test_nothing_but_the_token_itself_is_known(store: TokenStore, change):
    token = store.issue("dana", "reader", now_ms=0)
    with pytest.raises(Refused, match="not known") as caught:
        store.caller(change(token), now_ms=0)
    assert caught.value.why and caught.value.fix
    assert token not in str(caught.value)


def test_the_store_keeps_no_token(tmp_path: Path):
    database = Database(tmp_path / "store.db")
    token = TokenStore(database).issue("dana", "admin", now_ms=0)
    with database.transaction() as connection:
        (row,) = connection.execute(sa.select(TOKENS)).all()
    assert token not in str(row) and row.hash != token
    assert TokenStore(database).caller(token, now_ms=0).token_id != token[:16]
    database.close()
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert token.encode() not in kept


def test_a_token_survives_a_restart(tmp_path: Path):
    first = Database(tmp_path / "store.db")
    token = TokenStore(first).issue("dana", "oncall", now_ms=0)
    first.close()
    second = Database(tmp_path / "store.db")
    assert TokenStore(second).caller(token, now_ms=0).name == "dana"
    second.close()


def test_an_unknown_role_is_a_bug(store: TokenStore):
    with pytest.raises(AssertionError):
        store.issue("dana", "emperor", now_ms=0)
