"""Planted bugs: each takes one rule away, and some seed must notice. A simulation that finds none is blind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.sim.mutants import MUTANTS, SEEDS_MAX, Find, Mutant, hunt
from penstock.sim.scenario import Bugs
from penstock.sim.simulation import InvariantBroken


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found(mutant: Mutant):
    # The same seeds without a bug take longer: `python -m penstock.sim --mutants` runs them.
    find = hunt(mutant, compares=False)
    assert find.broken is not None, f"{SEEDS_MAX} seeds did not notice"
    assert find.is_as_expected, str(find.broken)
    assert f"replay with seed {find.broken.seed}" in str(find.broken)


def test_there_are_at_least_twelve_of_the_task_layer():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert sum(mutant.bugs.parts.syncer.__module__ != "penstock.sim.mutants" for mutant in MUTANTS) >= 12


def test_the_real_code_is_not_found():
    assert hunt(replace(MUTANTS[0], bugs=Bugs()), seeds_max=1).broken is None


def test_only_a_find_by_the_right_invariant_that_the_real_code_does_not_show_counts():
    def seen(name: str) -> InvariantBroken:
        return InvariantBroken(seed=3, name=name, seen="x", now_ms=0, events=())

    find = Find(mutant=MUTANTS[0], seeds=4, broken=seen("I2 old tokens are void"))
    assert find.is_as_expected
    assert not replace(find, without=seen("I2 old tokens are void")).is_as_expected
    assert not replace(find, broken=seen("I22 something else")).is_as_expected
    assert not replace(find, broken=None).is_as_expected
