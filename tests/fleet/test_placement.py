from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.fleet.placement.placement import Mode, Placement, place_shards

SHARDS = range(12)


def after(current: dict[int, str], placement: Placement) -> dict[int, str]:
    return {**current, **{move.shard: move.target for move in placement.moves}}


def counts(current: dict[int, str], names: list[str]) -> list[int]:
    return [sum(owner == name for owner in current.values()) for name in names]


def test_orphans_are_spread_evenly():
    placement = place_shards(SHARDS, ["c1", "c2", "c3"], {}, loads={}, mode=Mode.EMERGENCY)
    assert counts(after({}, placement), ["c1", "c2", "c3"]) == [4, 4, 4]
    assert {move.reason for move in placement.moves} == {"it has no owner"}


def test_the_few_shards_with_tasks_are_spread_before_the_many_without():
    placement = place_shards(
        range(64), ["c1", "c2"], {}, loads={5: 1.0, 9: 1.0, 40: 1.0, 63: 1.0}, mode=Mode.EMERGENCY
    )
    current = after({}, placement)
    assert sorted(current[shard] for shard in (5, 9, 40, 63)) == ["c1", "c1", "c2", "c2"]
    assert counts(current, ["c1", "c2"]) == [32, 32]


def test_an_orphan_with_tasks_goes_where_the_load_is_least_though_more_shards_are_there():
    current = {0: "c1", 1: "c2", 2: "c2", 3: "c2"}
    loads = {0: 5.0, 4: 1.0}
    placement = place_shards(range(6), ["c1", "c2"], current, loads=loads, mode=Mode.EMERGENCY)
    assert {move.shard: move.target for move in placement.moves} == {4: "c2", 5: "c1"}


def test_a_balance_moves_tasks_apart_though_the_counts_are_level():
    current = {shard: "c1" if shard < 6 else "c2" for shard in SHARDS}
    placement = place_shards(SHARDS, ["c1", "c2"], current, loads={0: 1.0, 1: 1.0}, mode=Mode.PERIODIC)
    loaded = {after(current, placement)[shard] for shard in (0, 1)}
    assert loaded == {"c1", "c2"}
    assert counts(after(current, placement), ["c1", "c2"]) == [6, 6]
    assert len(placement.moves) == 2


def test_an_emergency_leaves_everything_owned_where_it_is():
    current = dict.fromkeys(range(11), "c1")
    placement = place_shards(SHARDS, ["c1", "c2"], current, loads={}, mode=Mode.EMERGENCY)
    assert [(move.shard, move.target) for move in placement.moves] == [(11, "c2")]


def test_a_new_container_is_filled_in_steps():
    current = dict.fromkeys(SHARDS, "c1")
    placement = place_shards(SHARDS, ["c1", "c2"], current, loads={}, mode=Mode.PERIODIC, moves_max=2)
    assert counts(after(current, placement), ["c1", "c2"]) == [10, 2]


def test_a_leaving_container_loses_its_shards_and_gets_none():
    current = {shard: "c1" if shard < 6 else "c2" for shard in SHARDS}
    placement = place_shards(
        SHARDS, ["c1", "c2"], current, loads={}, mode=Mode.PERIODIC, leaving=frozenset({"c1"}), moves_max=4
    )
    assert [(move.source, move.target) for move in placement.moves] == [("c1", "c2")] * 4
    assert len(placement.refusals) == 2 and "limit of" in placement.refusals[0].reason


def test_without_a_container_every_orphan_is_refused_by_name():
    placement = place_shards(SHARDS, [], {0: "c1"}, loads={}, mode=Mode.EMERGENCY)
    assert placement.moves == ()
    assert [refusal.shard for refusal in placement.refusals] == list(range(1, 12))


def test_a_shard_in_motion_counts_where_it_goes_and_is_not_moved_again():
    current = {shard: "c2" if shard < 6 else "c1" for shard in SHARDS}
    placement = place_shards(
        SHARDS, ["c1", "c2"], current, loads={0: 1.0}, mode=Mode.PERIODIC, in_motion=frozenset(range(6))
    )
    assert placement == Placement()


names = st.lists(st.sampled_from(["c1", "c2", "c3", "c4", "c5"]), unique=True, max_size=5)
worlds = st.tuples(
    names,
    st.dictionaries(st.integers(0, 15), st.sampled_from(["c1", "c2", "c3", "c4", "c5", "gone"]), max_size=16),
    st.dictionaries(st.integers(0, 15), st.floats(0, 8), max_size=16),
    st.sampled_from(list(Mode)),
    st.frozensets(st.sampled_from(["c1", "c2", "gone"]), max_size=1),
    st.integers(0, 20),
)


@given(worlds)
def test_no_shard_is_lost_or_moved_twice_or_without_a_reason(world):
    containers, current, loads, mode, leaving, moves_max = world
    placement = place_shards(
        range(16), containers, current, loads=loads, mode=mode, leaving=leaving, moves_max=moves_max
    )
    moved = [move.shard for move in placement.moves]
    assert len(moved) == len(set(moved))
    for move in placement.moves:
        assert move.reason and move.source == current.get(move.shard) and move.target != move.source
        assert move.target in set(containers) - leaving
    refused = {refusal.shard for refusal in placement.refusals}
    orphans = set(range(16)) - set(current)
    assert orphans <= set(moved) | refused and not set(moved) & refused
    assert len(set(moved) - orphans) <= (moves_max if mode is Mode.PERIODIC else 0)


@given(worlds)
def test_the_same_world_gives_the_same_moves(world):
    containers, current, loads, mode, leaving, moves_max = world
    shuffled = dict(reversed(current.items()))
    first = place_shards(
        range(16), containers, current, loads=loads, mode=mode, leaving=leaving, moves_max=moves_max
    )
    again = place_shards(
        reversed(range(16)),
        containers[::-1],
        shuffled,
        loads=loads,
        mode=mode,
        leaving=leaving,
        moves_max=moves_max,
    )
    assert first == again


@given(worlds.filter(lambda world: world[0]))
def test_balancing_settles_and_then_nothing_moves(world):
    containers, current, loads, _, leaving, moves_max = world
    for _ in range(200):
        placement = place_shards(
            range(16),
            containers,
            current,
            loads=loads,
            mode=Mode.PERIODIC,
            leaving=leaving,
            moves_max=moves_max + 1,
        )
        if not placement.moves:
            break
        current = after(current, placement)
    assert placement.moves == ()


@given(
    names.filter(bool), st.dictionaries(st.integers(0, 15), st.sampled_from(["c1", "c2", "c3", "c4", "c5"]))
)
def test_without_loads_settled_counts_differ_by_one_at_most(containers, current):
    current = {shard: name for shard, name in current.items() if name in containers}
    placement = place_shards(range(16), containers, current, loads={}, mode=Mode.PERIODIC, moves_max=99)
    settled = counts(after(current, placement), containers)
    assert max(settled) - min(settled) <= 1
