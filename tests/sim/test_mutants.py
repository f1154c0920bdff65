"""Planted bugs: each takes one rule away, and some seed must notice. A simulation that finds none is blind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.jobs.syncer.state_syncer import StateSyncer
from penstock.sim.scenario import PlantedBugs
from penstock.sim.simulation import InvariantBroken
from tests.support.planted_bugs import MUTANTS, SEEDS_MAX, Find, Mutant, hunt

# A seed that noticed soon when it was last looked. Once it does not any more the others are tried, which takes longer;
# `make sim-tasks` tries them one after another.
QUICK = {
    "epochs not compared when an interval is taken": 11,
    "late replies obeyed: an old ADD undoes a DROP": 16,
    "fail-over right after a pause of our own": 6,
    "lease renewed while it is withheld": 1,
    "a replaced Shard Manager goes on writing": 4,
    "a replaced State Syncer goes on writing": 13,
    "lease counted from receipt": 11,
    "two containers with one identity": 8,
    "beats of a superseded incarnation count": 1,
    "quarantine of a shard ignored": 4,
    "stop believed without proof": 1,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found(mutant: Mutant):
    # The same seeds without a bug take longer: `python -m tests.support.planted_bugs` runs them.
    find = hunt(mutant, compares=False, first=QUICK.get(mutant.name, 0))
    assert find.broken is not None, f"{SEEDS_MAX} seeds did not notice"
    assert find.is_as_expected, str(find.broken)
    assert f"replay with seed {find.broken.seed}" in str(find.broken)


def test_there_are_at_least_twelve_of_the_task_layer():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert sum(mutant.bugs.parts.syncer is StateSyncer for mutant in MUTANTS) >= 12


def test_every_seed_is_tried_whichever_is_first():
    """Plan: a seed that notices nothing is first; the hunt goes on to one that does, and counts both."""
    (mutant,) = [
        mutant for mutant in MUTANTS if mutant.name == "late replies obeyed: an old ADD undoes a DROP"
    ]
    find = hunt(mutant, seeds_max=4, compares=False, first=2)
    assert find.broken is not None and find.seeds > 1 and find.broken.seed == find.seeds - 2
    assert {name for name in QUICK} <= {mutant.name for mutant in MUTANTS}


def test_the_real_code_is_not_found():
    assert hunt(replace(MUTANTS[0], bugs=PlantedBugs()), seeds_max=1).broken is None


def test_only_a_find_by_the_right_invariant_that_the_real_code_does_not_show_counts():
    def seen(name: str) -> InvariantBroken:
        return InvariantBroken(seed=3, name=name, seen="x", now_ms=0, events=())

    find = Find(mutant=MUTANTS[0], seeds=4, broken=seen("I2 old tokens are void"))
    assert find.is_as_expected
    assert not replace(find, without=seen("I2 old tokens are void")).is_as_expected
    assert not replace(find, broken=seen("I22 something else")).is_as_expected
    assert not replace(find, broken=None).is_as_expected
