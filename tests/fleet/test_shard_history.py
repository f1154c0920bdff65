"""Claims about why a shard is where it is."""

from __future__ import annotations

from typing import Any

from penstock.core.journal import Entry
from penstock.fleet.placement.placement import Move, Refusal, describe_outlook, history_of


def an_entry(number: int, subject: str, decision: str, reason: str, **data: Any) -> Entry:
    return Entry(
        id=number,
        at_ms=number * 1000,
        actor="shard_manager",
        kind="placement",
        subject=subject,
        decision=decision,
        reason=reason,
        data=data,
    )


def test_only_what_names_the_shard_is_its_history_oldest_first():
    entries = [
        an_entry(4, "shard 3", "released", "mended"),
        an_entry(1, "shards", "move 2", "it has no owner", moves={"3": [None, "c1"], "4": [None, "c2"]}),
        an_entry(2, "c1", "failed over, 1 shards given", "silent", shards={"3": "c2"}),
        an_entry(3, "shards", "move 1", "c3 is nearly empty", moves={"3": ["c2", "c3"]}),
        an_entry(5, "shards", "move 1", "other", moves={"13": ["c2", "c3"]}),
        an_entry(6, "shard 13", "released", "other"),
    ]
    assert [(moved.decision, moved.reason) for moved in history_of(3, entries)] == [
        ("given to c1", "it has no owner"),
        ("c1 failed over, given to c2", "silent"),
        ("c2 → c3", "c3 is nearly empty"),
        ("released", "mended"),
    ]


def test_an_outlook_says_its_reason():
    move = Move(shard=1, source="c1", target="c2", reason="c1 is drained")
    assert describe_outlook(move) == "would move to c2: c1 is drained"
    assert describe_outlook(Refusal(shard=1, reason="no room")) == "should move but cannot: no room"
    assert describe_outlook(None).startswith("stays")
