from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pytest

from .explorer import TooManyStates, explore


class Counter(NamedTuple):
    """Two processes add one each to a shared number; `read` is what each has read and not yet written."""

    value: int = 0
    read: tuple[int | None, int | None] = (None, None)
    done: tuple[bool, bool] = (False, False)


class CounterModel:
    def __init__(self, *, atomic: bool) -> None:
        self._atomic = atomic

    def initial(self) -> Iterable[Counter]:
        return [Counter()]

    def actions(self, state: Counter) -> Iterable[tuple[str, Counter]]:
        for who in (0, 1):
            if state.done[who]:
                continue
            held = state.read[who]
            done = (state.done[0] or who == 0, state.done[1] or who == 1)
            if self._atomic:
                yield f"{who} adds", state._replace(value=state.value + 1, done=done)
            elif held is None:
                yield f"{who} reads", state._replace(read=_with(state.read, who, state.value))
            else:
                yield f"{who} writes", Counter(held + 1, _with(state.read, who, None), done)

    def violation(self, state: Counter) -> str | None:
        return None

    def final_violation(self, state: Counter) -> str | None:
        return None if state.value == 2 else f"lost update: {state.value}"


def _with(read: tuple[int | None, int | None], who: int, value: int | None) -> tuple[int | None, int | None]:
    return (value, read[1]) if who == 0 else (read[0], value)


class Walk:
    """A walk over a grid from corner to corner, right or up; with `trap`, one field that has no way out."""

    def __init__(self, size: int, *, trap: bool = False, way_out: str = "") -> None:
        self._last, self._trap, self._way_out = size - 1, trap, way_out

    def initial(self) -> Iterable[tuple[int, int]]:
        return [(0, 0)]

    def actions(self, state: tuple[int, int]) -> Iterable[tuple[str, tuple[int, int]]]:
        x, y = state
        if self._trap and state == (0, self._last):
            if self._way_out:
                yield self._way_out, (self._last, self._last)
            return
        if x < self._last:
            yield "right", (x + 1, y)
        if y < self._last:
            yield "up", (x, y + 1)

    def violation(self, state: tuple[int, int]) -> str | None:
        return None

    def final_violation(self, state: tuple[int, int]) -> str | None:
        return None


def test_the_planted_race_is_found_with_its_shortest_trace() -> None:
    """A search that misses the textbook lost update finds nothing."""
    found = explore(CounterModel(atomic=False))
    assert found.problem == "lost update: 1"
    assert sorted(found.trace) == ["0 reads", "0 writes", "1 reads", "1 writes"]
    assert {label.split()[1] for label in found.trace[:2]} == {"reads"}
    assert "1. " in found.story() and "lost update" in found.story()


def test_an_atomic_counter_has_no_problem() -> None:
    """A search that cries wolf is of no use either."""
    found = explore(CounterModel(atomic=True))
    assert found.problem is None
    assert found.finals == {Counter(2, (None, None), (True, True))}
    assert found.states == 4


@pytest.mark.parametrize("size", [2, 5, 9])
def test_every_state_and_step_of_a_known_model_is_counted_once(size: int) -> None:
    """A wrong count means states left out or taken twice."""
    found = explore(Walk(size))
    assert (found.states, found.steps) == (size * size, 2 * size * (size - 1))
    assert found.reaches(lambda state: state == (size - 1, size - 1))
    assert not found.reaches(lambda state: state == (size, size))


def test_a_state_without_a_way_to_the_goal_is_found() -> None:
    """A trap that is not a forbidden state must be found by the goal."""
    found = explore(Walk(3, trap=True), goal=lambda state: state == (2, 2))
    assert found.problem is not None and found.problem.startswith("stuck")
    assert found.trace == ("up", "up")


def test_a_way_out_by_a_fault_does_not_count() -> None:
    """A system that gets well only by a further fault is stuck."""
    lucky = Walk(3, trap=True, way_out="fault: wind")
    assert explore(lucky, goal=lambda state: state == (2, 2)).problem is not None
    assert explore(Walk(3, trap=True, way_out="jump"), goal=lambda state: state == (2, 2)).problem is None


def test_a_model_that_outgrows_its_bound_is_an_error_not_a_success() -> None:
    """A search cut short must not pass for an exhaustive one."""
    with pytest.raises(TooManyStates):
        explore(Walk(50), states_max=100)
