"""Few slow tasks in few places are moved; hot keys are not; noise is neither."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.fleet.messages import TaskReport
from penstock.scaling.policies.balance import Even, Uneven, Unknown, judge_balance
from penstock.scaling.policies.facts import task_facts
from penstock.scaling.policies.policy import (
    ControlSettings,
    ExcludeContainers,
    Nothing,
    RaiseAlert,
    Verdict,
    evaluate,
)
from penstock.scaling.policies.stragglers import StragglerDetector, StragglerSettings, find_places
from tests.scaling.policies.kit import a_frame, a_task, some_facts

SLOW = {"busy": 0.98, "rate": 700.0}
HOT = {"busy": 0.98, "rate": 4000.0}


def look(*tasks, settings: ControlSettings | None = None, **changes) -> Verdict:
    verdict = evaluate(StragglerDetector(), some_facts(*tasks, **changes), settings or StragglerSettings())
    assert isinstance(verdict, Verdict), verdict
    return verdict


def fleet(odd: dict[int, dict], count: int = 8, containers: int = 4):
    return [a_task(n, f"c{n % containers}", **odd.get(n, {})) for n in range(count)]


def test_a_slow_task_is_moved_away_from_its_container_with_its_neighbours():
    verdict = look(*fleet({2: SLOW}))
    assert verdict.cause is not None and verdict.cause.name == "stragglers"
    action = verdict.resolution
    assert isinstance(action, ExcludeContainers)
    assert action.containers == ("c2",) and action.tasks == ("shops.total/2", "shops.total/6")
    assert verdict.cause.evidence["busy"] == 0.98 and verdict.cause.evidence["rate"] == 700


def test_a_slow_machine_costs_all_its_containers_the_job():
    tasks = [a_task(n, f"c{n}", host=f"h{n // 2}", **(SLOW if n in (4, 5) else {})) for n in range(8)]
    action = look(*tasks).resolution
    assert isinstance(action, ExcludeContainers) and action.containers == ("c4", "c5")


def test_without_lag_nobody_looks():
    assert look(*fleet({2: SLOW}), frame=a_frame(lag_s=89.0)).symptom is None
    assert look(*fleet({2: SLOW}), frame=a_frame(lag_s=float("nan"))).symptom is None
    early = StragglerSettings(lag_s=10)
    assert look(*fleet({2: SLOW}), settings=early, frame=a_frame(lag_s=11.0)).symptom is not None


def test_a_hot_key_is_skew_and_nothing_is_moved():
    verdict = look(*fleet({2: HOT}))
    assert verdict.cause is not None and verdict.cause.name == "skew"
    assert isinstance(verdict.resolution, Nothing) and "doctor" in verdict.resolution.reason


@pytest.mark.parametrize(("arrival", "cause"), [(9000.0, "skew"), (900.0, "straggler"), (None, "straggler")])
def test_of_a_task_that_is_long_in_one_batch_what_arrives_counts(arrival, cause):
    found = judge_balance(fleet({2: {"busy": 1.0, "rate": 0.0, "arrival": arrival}}))
    assert isinstance(found, Uneven)
    (odd,) = found.skewed if cause == "skew" else found.stragglers
    assert odd.task.task_id == "shops.total/2" and len(found.skewed) + len(found.stragglers) == 1


def test_many_slow_tasks_are_no_stragglers():
    verdict = look(*fleet(dict.fromkeys(range(3), SLOW)))
    assert verdict.cause is not None and verdict.cause.name == "many_stragglers"
    assert isinstance(verdict.resolution, Nothing)


def test_stragglers_all_over_the_place_are_told_not_moved():
    tasks = [a_task(n, f"c{n}", **(SLOW if n < 5 else {})) for n in range(20)]
    verdict = look(*tasks)
    assert isinstance(verdict.resolution, RaiseAlert) and verdict.resolution.key == "stragglers_spread"


def test_with_nowhere_else_to_go_it_is_told():
    tasks = fleet({2: SLOW}, containers=1)
    verdict = look(*tasks, containers=frozenset({"c0"}))
    assert isinstance(verdict.resolution, RaiseAlert) and verdict.resolution.key == "stragglers_stay"


@pytest.mark.parametrize("missing", [{"busy": None}, {"rate": None}, {"state": "starting"}])
def test_what_is_not_known_is_not_zero(missing):
    verdict = look(*fleet({2: SLOW, 3: missing}))
    assert verdict.cause is None


def test_two_tasks_cannot_be_compared():
    assert isinstance(judge_balance(fleet({1: SLOW}, count=2)), Unknown)


def test_facts_of_reports_leave_out_what_cannot_be():
    report = TaskReport(
        task_id="a/0",
        job="a",
        generation=1,
        shard=3,
        state="running",
        restarts=2,
        error="x",
        metrics={
            "busy": -1.0,
            "processed_rate": float("nan"),
            "lag_s": 3.0,
            "memory_mb": 10,
            "memory_peak_mb": 20,
        },
    )
    (task,) = task_facts([("c1", report)], {"c1": "h1"})
    assert (task.busy, task.rate, task.lag_s, task.memory_mb, task.host) == (None, None, 3.0, 20.0, "h1")


noise = st.lists(st.tuples(st.floats(0.9, 1.1), st.floats(0.9, 1.1)), min_size=3, max_size=60)


@given(noise, st.floats(0.01, 0.9), st.floats(1e-6, 1e9))
def test_noise_of_ten_per_cent_is_even(factors, busy, rate):
    tasks = [a_task(n, busy=busy * b, rate=rate * r) for n, (b, r) in enumerate(factors)]
    assert isinstance(judge_balance(tasks), Even)


def test_a_little_busier_than_full_peers_is_not_odd():
    tasks = [a_task(n, busy=0.87 if n == 8 else 0.72) for n in range(9)]
    assert isinstance(judge_balance(tasks), Even)


@given(noise, st.floats(1e-6, 1e6))
def test_units_of_the_rate_do_not_matter(factors, unit):
    tasks = [a_task(n, busy=0.4 * b, rate=1000.0 * r) for n, (b, r) in enumerate(factors)]
    tasks[0] = a_task(0, **SLOW)
    scaled = [a_task(n, busy=t.busy, rate=(t.rate or 0) * unit) for n, t in enumerate(tasks)]
    ours, theirs = judge_balance(tasks), judge_balance(scaled)
    assert type(ours) is type(theirs)
    if isinstance(ours, Uneven) and isinstance(theirs, Uneven):
        assert [odd.task.task_id for odd in ours.stragglers] == [
            odd.task.task_id for odd in theirs.stragglers
        ]


@given(st.permutations(range(8)))
def test_the_order_of_tasks_does_not_matter(order):
    tasks = fleet({2: SLOW})
    assert look(*[tasks[n] for n in order]) == look(*tasks)


@given(st.integers(4, 40), st.data())
def test_what_was_moved_is_not_moved_again(count, data):
    """Plan: the slow places are left; then all tasks are alike, and there is nothing to do."""
    slow = data.draw(st.integers(0, count - 1))
    tasks = [a_task(n, f"c{n}", **(SLOW if n == slow else {})) for n in range(count)]
    action = look(*tasks).resolution
    assert isinstance(action, ExcludeContainers) and f"shops.total/{slow}" in action.tasks
    after = [
        a_task(n, "spare" if task.task_id in action.tasks else task.container) for n, task in enumerate(tasks)
    ]
    assert isinstance(judge_balance(after), Even)
    assert isinstance(look(*after).resolution, Nothing)


@given(st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), min_size=1, max_size=12), st.integers(1, 5))
def test_places_hold_most_of_the_stragglers_or_there_are_none(containers, places_max):
    tasks = [a_task(n, container) for n, container in enumerate(containers)]
    places = find_places(tasks, places_max=places_max)
    assert len(places) <= places_max
    if places:
        assert 2 * sum(task.container in places for task in tasks) > len(tasks)
