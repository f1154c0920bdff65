"""Planted bugs: each takes one rule away, and some seed must notice. A simulation that finds none is blind."""

from __future__ import annotations

import pytest

from penstock.sim.mutants import MUTANTS, SEEDS_MAX, Mutant, hunt


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found(mutant: Mutant):
    find = hunt(mutant)
    assert find.broken is not None, f"{SEEDS_MAX} seeds did not notice"
    assert find.without is None, str(find.without)
    assert find.is_as_expected, str(find.broken)
    assert f"replay with seed {find.broken.seed}" in str(find.broken)


def test_there_are_at_least_twelve_of_the_task_layer():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert sum(mutant.bugs.parts.syncer.__module__ != "penstock.sim.mutants" for mutant in MUTANTS) >= 12
