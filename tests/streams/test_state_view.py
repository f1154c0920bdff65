"""What jobs keep, as people see it: typed by the plan, a page at a time, of one version, damage named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.core.errors import ConfigError, NotFound, PenstockError
from penstock.jobs.tasks import interval_birth
from penstock.streams.bus.log import LOW_MIN, CategorySpec, partition_of
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.dsl.computation import Opaque, StateCodec, Value
from penstock.streams.dsl.windows import session, tumbling
from penstock.streams.inspect.state_view import (
    StatefulJob,
    StateView,
    decode_block,
    decode_state,
    key_text,
    to_json_value,
)
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.rows.row_store import Changes, IntervalRef, TimerRow
from tests.builders import a_stored_config
from tests.streams import test_joins, test_vectorised, test_windows
from tests.streams.operator_world import REF, OperatorWorld, Rec
from tests.streams.step_world import CountPerSecond

PARTITIONS = 4
COUNT = {"class": "CountPerSecond", "keys": ["query"], "state": {"counts": "dict[int, int]", "total": "int"}}


class Kept:
    """A job's rows in memory, and the view of them."""

    def __init__(self, computation: dict[str, Any] | None = None, **config: Any) -> None:
        self.rows, self.log = MemoryRows(), MemoryLog()
        self.log.create(CategorySpec(name="in", partitions=PARTITIONS, columns=(("query", "string"),)))
        plan = {"computation": COUNT if computation is None else computation}
        body = {"kind": "stateful", "lineage": 0, "partitions": PARTITIONS, "plan": plan}
        body |= {"inputs": [{"category": "in"}], "outputs": []}
        self.job = StatefulJob(name="z.count", birth="j1", config=a_stored_config(**{**body, **config}))
        self.view = StateView(self.log, self.rows)
        for partition in range(PARTITIONS):
            self.rows.create(self.ref(partition), offsets={}, low=LOW_MIN)

    def ref(self, partition: int) -> IntervalRef:
        birth = interval_birth("j1", "stateful", 0, partition)
        return IntervalRef(job="z.count", job_birth="j1", partition=partition, birth=birth)

    def write(self, states: dict[str, bytes | None], timers: tuple[TimerRow, ...] = ()) -> None:
        for partition in range(PARTITIONS):
            mine = {key: v for key, v in states.items() if partition_of(key, PARTITIONS) == partition}
            due = tuple(timer for timer in timers if partition_of(timer.key, PARTITIONS) == partition)
            row = self.rows.peek(self.ref(partition))
            changes = Changes(states=mine, timers_set=due)
            self.rows.commit(self.ref(partition), token=row.token, version=row.version, changes=changes)


def counted(total: int) -> bytes:
    state = CountPerSecond.state_codec.blank()
    state.total, state.counts = total, {7: total}
    data = CountPerSecond.state_codec.encode(state)
    assert data is not None
    return data


def test_a_key_is_shown_with_its_values_and_timers():
    kept = Kept()
    timer = TimerRow(key="cats", tag="7", at_ms=8000, hold_ms=7999)
    kept.write({"cats": counted(3), "dogs": counted(1)}, (timer,))
    found = kept.view.get(kept.job, "cats")
    home = partition_of("cats", PARTITIONS)
    assert (found["key"], found["partition"], found["version"]) == ("cats", home, 1)
    assert found["states"] == [{"bytes": len(counted(3)), "state": {"counts": {"7": 3}, "total": 3}}]
    assert found["timers"] == [
        {"partition": home, "key": "cats", "tag": "7", "at_ms": 8000, "hold_ms": 7999, "late": False}
        | {"wall": False}
    ]


def test_a_key_that_lies_elsewhere_than_its_hash_says_is_found():
    kept = Kept()
    other = (partition_of("cats", PARTITIONS) + 1) % PARTITIONS
    kept.rows.commit(kept.ref(other), token=0, version=0, changes=Changes(states={"cats": counted(2)}))
    assert kept.view.get(kept.job, "cats")["partition"] == other


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("prefix", ["", "k1", "nothing"])
def test_pages_together_are_everything_once(limit: int, prefix: str):
    kept = Kept()
    keys = [f"k{number}" for number in range(25)] + ["", 'with "quotes" and ü', "nul\x00", "k1\x00"]
    timers = tuple(TimerRow(key=key, tag=tag, at_ms=5, hold_ms=4) for key in keys for tag in ("", "t"))
    kept.write({key: counted(len(key) + 1) for key in keys}, timers)
    found, after = [], ""
    for _ in range(100):
        page = kept.view.scan(kept.job, prefix=prefix, after=after, limit=limit)
        assert len(page["states"]) <= limit
        found += [item["key"] for item in page["states"]]
        if page["next"] is None:
            break
        after = page["next"]
    assert sorted(found) == sorted(key for key in keys if key.startswith(prefix))
    seen, after = [], ""
    while True:
        page = kept.view.timers(kept.job, after=after, limit=limit)
        seen += [(item["key"], item["tag"]) for item in page["timers"]]
        if page["next"] is None:
            break
        after = page["next"]
    assert sorted(seen) == sorted((key, tag) for key in keys for tag in ("", "t"))
    own = kept.view.timers(kept.job, key="k1")["timers"]
    assert [(item["key"], item["tag"]) for item in own] == [("k1", ""), ("k1", "t")]


def test_a_page_stops_when_it_is_large():
    kept = Kept()
    kept.write({f"k{number}": bytes(3 * 2**20) for number in range(5)})
    page = kept.view.scan(kept.job, limit=100)
    assert len(page["states"]) == 2 and page["next"] is not None


def test_an_export_is_of_one_version_however_much_is_written_meanwhile():
    kept = Kept()
    kept.write({"cats": counted(1), "more cats": counted(2)})
    home = partition_of("cats", PARTITIONS)
    lines = kept.view.export(kept.job, home)
    first = next(lines)
    kept.write({"cats": None, "more cats": None})
    found = [first, *lines]
    assert {line["version"] for line in found} == {1} and found[0]["state"]["total"] in (1, 2)
    assert list(kept.view.export(kept.job, home)) == []


def test_opaque_bytes_are_shown_as_hex_with_their_length():
    class Reversed:
        def encode(self, value: str) -> bytes:
            return value[::-1].encode()

        def decode(self, data: bytes) -> str:
            return data.decode()[::-1]

    codec = StateCodec("Own", {"model": Opaque(serializer=Reversed()), "raw": Opaque(), "best": Value(float)})
    state = codec.blank()
    state.model, state.raw, state.best = "ab", b"\x00\xff", -math.inf
    data = codec.encode(state)
    assert data is not None
    plan = {"class": "Own", "keys": ["k"], "state": codec.shape}
    assert decode_state(plan, "k", data) == {
        "state": {
            "model": {"hex": "6261", "bytes": 2},
            "raw": {"hex": "00ff", "bytes": 2},
            "best": "-inf",
        }
    }


def test_what_does_not_fit_the_plan_is_shown_as_bytes_with_the_reason():
    for plan in (COUNT, {**COUNT, "vectorised": True}, {"operator": "aggregate"}, {"operator": "join"}):
        found = decode_state(plan, "k", b"\xc1no msgpack")
        assert found["state"] == {"hex": b"\xc1no msgpack".hex(), "bytes": 11}
        assert "does not match the job's plan" in found["problem"]
    nested = to_json_value({1: {b"x", 2}, "ext": msgspec.msgpack.Ext(5, b"\x01")})
    assert nested["ext"] == {"hex": "01", "bytes": 1, "extension": 5} and len(nested["1"]) == 2
    json.dumps(nested, allow_nan=False)


def stored(world: OperatorWorld, steps: int) -> dict[str, bytes]:
    step = world.open()
    ends = [world.log.end_offsets(f"in{n}")[0] for n in range(len(world.inputs))]
    world.step(step, [0] * len(ends), [min(steps, end) for end in ends])
    found = world.rows.scan(REF, start="", limit=100)
    return {row.key: row.value for row in found if row.value is not None}


def test_windows_sessions_joins_and_tables_are_decoded_as_their_steps_wrote_them():
    events = [
        Rec(key="a", ts=3, values=(5,)),
        Rec(key="a", ts=4, values=(6,)),
        Rec(key="b", ts=25, values=(7,)),
    ]
    plan = test_windows.window_plan(tumbling(10))
    rows = stored(test_windows.a_world(events, tumbling(10)), 3)
    assert decode_state(plan, "#index", rows.pop("#index"))["state"] == {"blocks": 2}
    summaries = [decode_state(plan, name, row)["state"] for name, row in rows.items()]
    assert sorted((item["window_cell"], item["keys"]) for item in summaries) == [(0, 1), (20, 1)]
    lines = [line for name, row in rows.items() for line in decode_block(name, row)]
    assert sorted((key, state["window_cell"]) for key, state in lines) == [("a", 0), ("b", 20)]
    assert all(state["fired"] is False and len(state) > 3 for _, state in lines)

    for phase in ("partial", "combine"):
        told = [decode_state({**plan, "operator": phase}, name, row)["state"] for name, row in rows.items()]
        assert told == summaries, "the phases of an aggregate keep the same blocks"

    plan = test_windows.window_plan(session(gap=10))
    rows = stored(test_windows.a_world(events, session(gap=10)), 3)
    assert sorted(rows) == ["a", "b"]
    (open_session,) = decode_state(plan, "a", rows["a"])["state"]["sessions"]
    assert open_session["end.max"] == 14

    joined = test_joins.a_world([Rec(key="x", ts=3, values=(0, "x", 9), input=0)], "inner", None)
    plan = {
        "operator": "join",
        "columns": [[["k", "string"], ["a", "bigint"]], [["k", "string"], ["b", "bigint"]]],
    }
    (waiting,) = decode_state(plan, "x", stored(joined, 1)["x"])["state"]["waiting"]
    assert (waiting["side"], waiting["ts"], waiting["record"]["k"]) == ("left", 3, "x")

    rows = stored(test_vectorised.a_world(events[:2]), 2)
    plan = {"class": "Running", "vectorised": True, "keys": ["k"], "state": test_vectorised.Running.state}
    assert decode_state(plan, "a", rows["a"]) == {"state": {"n": 2, "total": 11}}
    longer = {**plan, "state": {**test_vectorised.Running.state, "added": "string"}}
    assert decode_state(longer, "a", rows["a"]) == {"state": {"n": 2, "total": 11, "added": None}}


def test_a_windows_key_is_gathered_from_its_blocks():
    events = [
        Rec(key="a", ts=3, values=(5,)),
        Rec(key="b", ts=4, values=(6,)),
        Rec(key="a", ts=25, values=(7,)),
    ]
    rows = stored(test_windows.a_world(events, tumbling(10)), 3)
    kept = Kept(test_windows.window_plan(tumbling(10)))
    home = partition_of("a", PARTITIONS)
    kept.rows.commit(kept.ref(home), token=0, version=0, changes=Changes(states=rows))
    found = kept.view.get(kept.job, "a")["states"]
    assert sorted(item["state"]["window_cell"] for item in found) == [0, 20]
    exported = [(line["key"], line["state"]["window_cell"]) for line in kept.view.export(kept.job, home)]
    assert sorted(exported) == [("a", 0), ("a", 20), ("b", 0)]


@pytest.mark.parametrize(
    ("ask", "error", "said"),
    [
        (lambda kept: kept.view.get(kept.job, "nobody"), NotFound, "stores nothing for the key 'nobody'"),
        (lambda kept: kept.view.scan(kept.job, after="north"), ConfigError, "not the position of a page"),
        (lambda kept: kept.view.scan(kept.job, after='["0","a"]'), ConfigError, "not the position"),
        (lambda kept: kept.view.timers(kept.job, after='[0,"a"]'), ConfigError, "not the position"),
        (lambda kept: list(kept.view.export(kept.job, 4)), NotFound, "has no partition 4"),
        (lambda kept: kept.view.scan(Kept(kind="stateless").job), ConfigError, "has no state"),
        (lambda kept: kept.view.scan(Kept(lineage=1).job), NotFound, "has no rows in partition 0"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_the_reason(
    ask: Callable[[Kept], object], error: type[PenstockError], said: str
):
    with pytest.raises(error, match=said) as refused:
        ask(Kept())
    assert refused.value.why and refused.value.fix


@pytest.mark.parametrize(
    ("names", "types", "given", "stored"),
    [
        (["query"], {}, "cats", "cats"),
        (["n"], {"n": "bigint"}, "-7", "-7"),
        (["n"], {"n": "bigint"}, "[null]", "[null]"),
        (["query"], {}, "[null]", "[null]"),
        (["n"], {"n": "bigint"}, "", ""),  # the text of NULL until it had one of its own
        (["a", "b"], {"b": "bigint"}, '["north", 3]', '["north","3"]'),
        (["a", "b"], {"b": "boolean"}, '["nörd", true]', '["nörd","true"]'),
        (["a", "b"], {}, '[null, ""]', '[null,""]'),
    ],
)
def test_a_key_is_looked_for_under_the_text_that_the_stream_gives_it(
    names: list[str], types: dict[str, str], given: str, stored: str
):
    assert key_text("j", names, types, given) == stored


@pytest.mark.parametrize(
    ("names", "types", "given", "why"),
    [
        (["n"], {"n": "bigint"}, "cats", "of type bigint"),
        (["n"], {"n": "boolean"}, "yes", "of type boolean"),
        (["a", "b"], {}, "north", "keyed by a, b"),
        (["a", "b"], {}, '["north"]', "keyed by a, b, but 1 values"),
        (["a", "b"], {"b": "bigint"}, '["north", "x"]', "of type bigint"),
    ],
)
def test_a_key_of_another_type_is_refused(names: list[str], types: dict[str, str], given: str, why: str):
    with pytest.raises(ConfigError, match="is not a key of job 'j'") as refused:
        key_text("j", names, types, given)
    assert why in refused.value.why and refused.value.fix
