"""Long rounds rest in between, and miss nothing."""

from __future__ import annotations

from penstock.core.workers import SLICE, RoundPace, jobs_per_round


def test_a_rest_comes_after_so_many_steps():
    rests: list[int] = []
    pace, done = RoundPace(lambda: rests.append(len(done))), list[int]()
    for item in pace.over(range(3 * SLICE - 1)):
        done.append(item)
    assert done == [*range(3 * SLICE - 1)] and rests == [SLICE, 2 * SLICE]
    pace.step()
    assert rests[2:] == [len(done)], "what was left of one loop counts in the next"
    pace.step(100 * SLICE)
    assert len(rests) == 4, "much at once is one rest"


def test_slices_are_whole_and_in_order():
    rests: list[int] = []
    pace = RoundPace(lambda: rests.append(1), size=4)
    assert [*pace.slices([*range(10)])] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] and len(rests) == 3
    assert [*pace.slices([])] == [] and len(rests) == 3


def test_nobody_has_to_rest():
    assert [*RoundPace().over("abc")] == ["a", "b", "c"]


def test_rounds_share_many_jobs():
    assert [jobs_per_round(count, least=50, rounds=30) for count in (0, 3, 1_500, 1_501, 10_000)] == [
        50,
        50,
        50,
        51,
        334,
    ]
