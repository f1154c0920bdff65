"""Never more than there is; privileged and important jobs first; what is taken comes back, in order; it settles."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.scaling.capacity import HEADROOM, BringBack, Claim, OutOfRoom, StopJob, decide_stops, take_stock
from penstock.scaling.lending import (
    RECLAIM_AFTER_MS,
    SHORT,
    SPARE,
    ClusterRoom,
    LendableContainer,
    decide_reclaim,
    decide_transfers,
    has_spare,
    is_short,
    least_free,
)

TOTAL = {"cpu": 100.0, "memory_mb": 100_000.0}


def a_claim(job: str, cpu: float, priority: int = 0, **changes) -> Claim:
    return Claim(job=job, reserved={"cpu": cpu, "memory_mb": cpu * 100}, priority=priority, **changes)


def test_stock_adds_up_and_keeps_headroom():
    stock = take_stock(
        TOTAL, [a_claim("a", 40), a_claim("b", 30, is_stopped=True), a_claim("c", 20, used={"cpu": 5.0})]
    )
    assert stock.reserved["cpu"] == 60 and stock.used["cpu"] == 45 and stock.remaining["cpu"] == 30
    assert stock.short_of == ()
    assert take_stock(TOTAL, [a_claim("a", 95)]).short_of == ("cpu",)


def test_the_lowest_priority_stops_only_when_more_is_reserved_than_there_is():
    claims = [a_claim("a", 50, 5), a_claim("b", 30, 1), a_claim("c", 40, 3), a_claim("d", 0, -9)]
    assert [type(move) for move in decide_stops({"cpu": 121.0, "memory_mb": 1e6}, claims)] == []
    stops = decide_stops(TOTAL, claims)
    assert [move.job for move in stops if isinstance(move, StopJob)] == ["b"], "d would not help"
    assert "priority 1" in stops[0].reason


def test_of_one_priority_the_largest_stops_and_the_small_are_spared():
    claims = [a_claim("a", 1), a_claim("b", 2), a_claim("c", 60), a_claim("d", 40, 9)]
    assert [move.job for move in decide_stops(TOTAL, claims)] == ["c"]


def test_a_low_priority_whose_stop_is_not_needed_goes_on():
    """Plan: 50 are missing. The low one has 1, so that the next must stop anyway, and that alone is enough."""
    claims = [a_claim("low", 1, -5), a_claim("mid", 60), a_claim("high", 89, 9)]
    assert [move.job for move in decide_stops(TOTAL, claims)] == ["mid"]


def test_privileged_jobs_are_never_stopped_somebody_is_told():
    claims = [a_claim("a", 80, privileged=True), a_claim("b", 60, -5, privileged=True), a_claim("c", 5, 99)]
    stops = decide_stops(TOTAL, claims)
    assert [type(move) for move in stops] == [StopJob, OutOfRoom] and stops[0].job == "c"


def test_who_stopped_comes_back_the_most_important_first_and_nobody_passes():
    claims = [
        a_claim("run", 50, 9),
        a_claim("big", 45, 5, is_stopped=True),
        a_claim("small", 1, 1, is_stopped=True),
    ]
    assert decide_stops(TOTAL, claims) == (), "big does not fit, small waits behind it"
    assert [move.job for move in decide_stops({"cpu": 200.0, "memory_mb": 1e6}, claims)] == ["big", "small"]


amounts = st.floats(0, 60)
claims_drawn = st.lists(
    st.tuples(amounts, st.integers(-3, 3), st.booleans(), st.booleans()), max_size=12
).map(
    lambda rows: [
        Claim(
            job=f"j{n}",
            reserved={"cpu": cpu, "memory_mb": cpu * 50},
            priority=priority,
            privileged=privileged,
            is_stopped=stopped and not privileged,
        )
        for n, (cpu, priority, privileged, stopped) in enumerate(rows)
    ]
)
kinds_drawn = st.lists(
    st.tuples(st.floats(0, 60), st.floats(0, 60_000), st.integers(-2, 2), st.booleans()), max_size=8
).map(
    lambda rows: [
        Claim(
            job=f"j{n}",
            reserved={"cpu": cpu, "memory_mb": memory},
            priority=priority,
            privileged=privileged,
        )
        for n, (cpu, memory, priority, privileged) in enumerate(rows)
    ]
)


def _is_over(claims, stopped) -> bool:
    left = take_stock(TOTAL, [claim for claim in claims if claim.job not in stopped]).reserved
    return any(left[kind] > most * (1 + 1e-9) for kind, most in TOTAL.items())


@given(kinds_drawn)
def test_nobody_stops_whose_stop_is_not_needed(claims):
    moves = decide_stops(TOTAL, claims)
    stopped = {move.job for move in moves if isinstance(move, StopJob)}
    if any(isinstance(move, OutOfRoom) for move in moves):
        assert _is_over(claims, {claim.job for claim in claims if not claim.privileged})
        return
    assert not _is_over(claims, stopped)
    assert all(_is_over(claims, stopped - {job}) for job in stopped)


@given(kinds_drawn)
def test_no_priority_stops_where_lower_ones_would_be_enough(claims):
    moves = decide_stops(TOTAL, claims)
    stopped = {move.job for move in moves if isinstance(move, StopJob)}
    top = max((claim.priority for claim in claims if claim.job in stopped), default=None)
    if top is not None and not any(isinstance(move, OutOfRoom) for move in moves):
        lower = {claim.job for claim in claims if claim.priority < top and not claim.privileged}
        assert _is_over(claims, lower)


@given(st.lists(st.floats(0.1, 60), max_size=8))
def test_of_one_priority_and_kind_as_few_stop_as_can_be(amounts):
    claims = [Claim(job=f"j{n}", reserved={"cpu": cpu}) for n, cpu in enumerate(amounts)]
    stops = decide_stops({"cpu": 100.0}, claims)
    fewest = next(n for n in range(9) if sum(sorted(amounts)[: len(amounts) - n]) <= 100.0 * (1 + 1e-9))
    assert len(stops) == fewest


def applied(claims, moves):
    stopped = {move.job for move in moves if isinstance(move, StopJob)}
    back = {move.job for move in moves if isinstance(move, BringBack)}
    return [
        replace(claim, is_stopped=(claim.is_stopped or claim.job in stopped) and claim.job not in back)
        for claim in claims
    ]


@given(claims_drawn)
def test_stops_make_room_and_spare_the_privileged(claims):
    moves = decide_stops(TOTAL, claims)
    stopped = {move.job for move in moves if isinstance(move, StopJob)}
    by_name = {claim.job: claim for claim in claims}
    assert not any(by_name[job].privileged for job in stopped)
    after = applied(claims, moves)
    reserved = sum(claim.reserved["cpu"] for claim in after if not claim.is_stopped)
    assert reserved <= TOTAL["cpu"] + 1e-6 or any(isinstance(move, OutOfRoom) for move in moves)


@given(claims_drawn)
def test_stopping_and_coming_back_settles(claims):
    """Plan: the same cluster round after round. Nobody stops and comes back in turn."""
    for _ in range(3):
        claims = applied(claims, decide_stops(TOTAL, claims))
    moves = [move for move in decide_stops(TOTAL, claims) if not isinstance(move, OutOfRoom)]
    assert moves == []


@given(claims_drawn)
def test_coming_back_leaves_the_headroom_and_keeps_the_order(claims):
    moves = decide_stops(TOTAL, claims)
    back = [move.job for move in moves if isinstance(move, BringBack)]
    by_name = {claim.job: claim for claim in claims}
    waiting = [c for c in claims if c.is_stopped and c.job not in back]
    assert all(by_name[job].priority >= claim.priority for job in back for claim in waiting)
    if any(by_name[job].reserved["cpu"] > 0 for job in back):
        stock = take_stock(TOTAL, applied(claims, moves))
        assert stock.reserved["cpu"] <= TOTAL["cpu"] * (1 - HEADROOM) + 1e-6


# --- containers between clusters


def a_cluster(name: str, containers: int, cpu: float, **changes) -> ClusterRoom:
    rooms = tuple(
        LendableContainer(name=f"{name}{n}", size={"cpu": 10.0}, owner=name) for n in range(containers)
    )
    return ClusterRoom(**({"name": name, "rooms": rooms, "reserved": {"cpu": cpu}} | changes))


def moved(clusters, moves):
    rooms = {cluster.name: list(cluster.rooms) for cluster in clusters}
    for move in moves:
        room = next(room for room in rooms[move.source] if room.name == move.container)
        rooms[move.source].remove(room)
        rooms[move.target].append(room)
    return [replace(cluster, rooms=tuple(rooms[cluster.name]), is_short=False) for cluster in clusters]


def test_a_cluster_that_is_short_borrows_from_the_one_with_most_to_spare():
    clusters = [a_cluster("a", 10, 99), a_cluster("b", 10, 20), a_cluster("c", 10, 50)]
    (move,) = decide_transfers(clusters)
    assert (move.source, move.target, move.is_return) == ("b", "a", False) and "short" in move.reason


def test_what_was_borrowed_goes_back_when_it_is_over():
    clusters = [a_cluster("a", 10, 99), a_cluster("b", 10, 20)]
    lent = moved(clusters, decide_transfers(clusters))
    assert decide_transfers(lent) == () and len(lent[0].rooms) == 11
    calm = [replace(lent[0], reserved={"cpu": 50.0}), lent[1]]
    (back,) = decide_transfers(calm)
    assert back.is_return and (back.source, back.target) == ("a", "b")


def test_an_owner_in_need_gets_its_containers_back_if_they_can_be_spared():
    clusters = [a_cluster("a", 10, 99), a_cluster("b", 10, 20)]
    lent = moved(clusters, decide_transfers(clusters))
    need = [replace(lent[0], reserved={"cpu": 90.0}), replace(lent[1], reserved={"cpu": 88.0})]
    assert [(move.source, move.target, move.is_return) for move in decide_transfers(need)] == [
        ("a", "b", True)
    ]


def test_what_the_borrower_has_reserved_is_not_taken_from_it():
    clusters = [a_cluster("a", 10, 99), a_cluster("b", 10, 20)]
    lent = moved(clusters, decide_transfers(clusters))
    need = [replace(lent[0], reserved={"cpu": 104.0}), replace(lent[1], reserved={"cpu": 88.0})]
    assert decide_transfers(need) == ()


def test_nobody_lends_what_it_needs_itself():
    assert decide_transfers([a_cluster("a", 10, 99), a_cluster("b", 10, 65)]) == ()


clusters_drawn = st.lists(
    st.tuples(st.integers(1, 8), st.floats(0, 1.2), st.booleans()), min_size=1, max_size=4
).map(
    lambda rows: [
        a_cluster("abcd"[n], count, share * count * 10, is_short=short)
        for n, (count, share, short) in enumerate(rows)
    ]
)


@given(clusters_drawn)
def test_containers_are_neither_lost_nor_doubled_and_no_lender_gets_short(clusters):
    moves = decide_transfers(clusters)
    after = moved(clusters, moves)
    assert sorted(room.name for c in clusters for room in c.rooms) == sorted(
        r.name for c in after for r in c.rooms
    )
    for move in moves:
        lender = next(cluster for cluster in after if cluster.name == move.source)
        assert least_free(lender.rooms, lender.reserved) >= SHORT - 1e-9


@given(clusters_drawn)
def test_lending_settles(clusters):
    for _ in range(40):
        clusters = moved(clusters, decide_transfers(clusters))
    assert decide_transfers(clusters) == ()


def test_savings_are_reclaimed_after_they_held():
    cluster = a_cluster("a", 10, 20)
    assert has_spare(cluster) and not is_short(cluster)
    assert decide_reclaim(cluster, spare_since_ms=None, now_ms=10**13) is None
    assert decide_reclaim(cluster, spare_since_ms=10**13 - RECLAIM_AFTER_MS + 1, now_ms=10**13) is None
    assert decide_reclaim(cluster, spare_since_ms=10**13 + 5, now_ms=10**13) is None, "a clock that jumped"
    found = decide_reclaim(cluster, spare_since_ms=10**13 - RECLAIM_AFTER_MS, now_ms=10**13)
    assert found is not None and len(found.containers) == 7 and "hours" in found.reason


@given(clusters_drawn)
def test_reclaiming_never_makes_a_cluster_short_and_leaves_one(clusters):
    for cluster in clusters:
        found = decide_reclaim(cluster, spare_since_ms=0, now_ms=RECLAIM_AFTER_MS)
        if found is not None:
            rest = [room for room in cluster.rooms if room.name not in found.containers]
            assert rest and least_free(rest, cluster.reserved) >= SPARE
