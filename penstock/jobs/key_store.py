"""Idempotency keys: what a request was answered, so that a repeat is not done again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from penstock.core import json_text
from penstock.core.clock import Millis
from penstock.core.errors import KeyReused
from penstock.core.quick_store import MADE_ONCE, Ask, insert_all, keep_ahead, later, taken_ahead
from penstock.core.sql_store import METADATA

KEYS_KEPT_MS = 7 * 24 * 3600 * 1000
_ANSWER = "answer"  # what is read ahead
Name = tuple[str, str]  # an actor and a key of theirs

KEYS = sa.Table(
    "idempotency_keys",
    METADATA,
    sa.Column("actor", sa.String, primary_key=True),
    sa.Column("key", sa.String, primary_key=True),
    sa.Column("request", sa.String, nullable=False),
    sa.Column("answer", sa.JSON, nullable=False),
    sa.Column("at_ms", sa.BigInteger, nullable=False, index=True),
)

_KEY = sa.select(KEYS.c.request, KEYS.c.answer, KEYS.c.at_ms)
_KEY = _KEY.where(KEYS.c.actor == sa.bindparam("of"), KEYS.c.key == sa.bindparam("called"))
_KEY = _KEY.execution_options(**MADE_ONCE)
_PAIRS = sa.func.json_to_recordset(sa.cast(sa.bindparam("pairs", type_=sa.Text), sa.JSON)).table_valued(
    sa.column("actor", sa.String), sa.column("key", sa.String), name="given"
)
_PAIRS = _PAIRS.render_derived(name="given", with_types=True)
_SOME_KEYS = (  # on PostgreSQL only
    sa.select(KEYS.c.actor, KEYS.c.key, KEYS.c.request, KEYS.c.answer, KEYS.c.at_ms)
    .select_from(KEYS.join(_PAIRS, sa.and_(KEYS.c.actor == _PAIRS.c.actor, KEYS.c.key == _PAIRS.c.key)))
    .execution_options(**MADE_ONCE)
)
_OWN_KEY = sa.delete(KEYS).where(KEYS.c.actor == sa.bindparam("of"), KEYS.c.key == sa.bindparam("called"))
_OLD_KEYS = sa.delete(KEYS).where(KEYS.c.at_ms < sa.bindparam("before_ms"))
_NEW_KEY = insert_all(KEYS)


def ask_answers(names: Sequence[Name]) -> Ask:
    """The statement that reads the answers under these keys, and its values. On PostgreSQL only."""
    return _SOME_KEYS, {"pairs": json_text.dumps([{"actor": actor, "key": key} for actor, key in names])}


def keep_answers(connection: sa.Connection, names: Sequence[Name], rows: Iterable[Sequence[Any]]) -> None:
    """What that statement found, for `recall_answer`."""
    kept = {(actor, key): tuple(row) for actor, key, *row in rows}
    for name in names:
        keep_ahead(connection, (_ANSWER, *name), kept.get(name))


def recall_answer(
    connection: sa.Connection, *, actor: str, key: str, request: str, now_ms: Millis
) -> Any | None:
    """What this request was answered when it first came, None if it is new."""
    ahead = taken_ahead(connection, (_ANSWER, actor, key))
    row = connection.execute(_KEY, {"of": actor, "called": key}).first() if ahead is None else ahead[0]
    if row is None:
        return None
    kept, answer, at_ms = row
    if at_ms < now_ms - KEYS_KEPT_MS:
        connection.execute(_OWN_KEY, {"of": actor, "called": key})
        return None
    if kept != request:
        raise KeyReused(
            f"the idempotency key {key!r} was used for another request",
            why="a key names one request, so that repeating it is safe",
            fix="take a new key for a new request",
        )
    return answer


def keep_answer(
    connection: sa.Connection, *, actor: str, key: str, request: str, answer: Any, now_ms: Millis
) -> None:
    """Remember the answer, in the transaction that made it true."""
    values = {"actor": actor, "key": key, "request": request, "answer": answer, "at_ms": now_ms}
    taken_ahead(connection, (_ANSWER, actor, key))
    later(connection, _NEW_KEY, values)


def forget_answers(connection: sa.Connection, *, now_ms: Millis) -> None:
    """Take the answers away that are too old to be asked for again."""
    connection.execute(_OLD_KEYS, {"before_ms": now_ms - KEYS_KEPT_MS})
