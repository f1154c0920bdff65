"""Which states can a small protocol reach, and is one of them forbidden? A search, breadth first.

Pure: a model is a few functions over immutable, hashable states; the answer carries the shortest trace to
what went wrong. Labels that start with `fault:` are the environment's doing; nobody may rely on them to get
well again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)

FAULT = "fault:"


class Model(Protocol[S]):
    """A protocol small enough to be searched."""

    def initial(self) -> Iterable[S]:
        """The states it starts in."""

    def actions(self, state: S) -> Iterable[tuple[str, S]]:
        """Everything that may happen next: (label, next state)."""

    def violation(self, state: S) -> str | None:
        """What must never be seen, in any state."""

    def final_violation(self, state: S) -> str | None:
        """What must not be left over when nothing but faults can happen any more."""


class TooManyStates(AssertionError):
    """The model outgrew its bound: nothing was shown."""


@dataclass(frozen=True, slots=True)
class Found(Generic[S]):
    """What a search saw; `problem` is None when nothing forbidden is reachable."""

    states: int
    steps: int
    problem: str | None
    trace: tuple[str, ...]
    seen: frozenset[S] = field(repr=False)
    finals: frozenset[S] = field(repr=False)

    def reaches(self, claim: Callable[[S], bool]) -> bool:
        """Whether some reachable state makes the claim true (so that the search was not about nothing)."""
        return any(claim(state) for state in self.seen)

    def shows(self, *fragments: str) -> bool:
        """Whether labels with these fragments come in this order in the trace, others between them or not."""
        labels = iter(self.trace)
        return all(any(fragment in label for label in labels) for fragment in fragments)

    def story(self) -> str:
        """The trace, a line for each step, for a failing test's message."""
        lines = [f"{self.problem or 'no problem'} ({self.states} states, {self.steps} steps)"]
        return "\n".join(lines + [f"  {number}. {label}" for number, label in enumerate(self.trace, 1)])


@dataclass(slots=True)
class _Graph(Generic[S]):
    came_from: dict[S, tuple[S, str] | None]
    before: dict[S, list[S]]  # reversed steps, faults left out
    finals: set[S]
    steps: int = 0

    def trace_to(self, state: S) -> tuple[str, ...]:
        labels: list[str] = []
        link = self.came_from[state]
        while link is not None:
            labels.append(link[1])
            link = self.came_from[link[0]]
        return tuple(reversed(labels))

    def found(self, problem: str | None, state: S | None) -> Found[S]:
        trace = () if state is None else self.trace_to(state)
        seen, finals = frozenset(self.came_from), frozenset(self.finals)
        return Found(len(self.came_from), self.steps, problem, trace, seen, finals)


def explore(
    model: Model[S], *, states_max: int = 200_000, goal: Callable[[S], bool] | None = None
) -> Found[S]:
    """Search every state. With `goal`, also: from each of them a path without faults leads to the goal."""
    graph: _Graph[S] = _Graph({state: None for state in model.initial()}, {}, set())
    queue = deque(graph.came_from)
    while queue:
        state = queue.popleft()
        problem = model.violation(state) or _expand(model, graph, queue, state, keep_edges=goal is not None)
        if problem is not None:
            return graph.found(problem, state)
        if len(graph.came_from) > states_max:
            raise TooManyStates(f"more than {states_max} states")
    stuck = _first_without_way(graph, goal) if goal is not None else None
    return graph.found(None if stuck is None else "stuck: the goal is out of reach", stuck)


def _expand(model: Model[S], graph: _Graph[S], queue: deque[S], state: S, *, keep_edges: bool) -> str | None:
    is_final = True
    for label, following in model.actions(state):
        graph.steps += 1
        if following not in graph.came_from:
            graph.came_from[following] = (state, label)
            queue.append(following)
        if label.startswith(FAULT):
            continue
        is_final = False
        if keep_edges:
            graph.before.setdefault(following, []).append(state)
    if not is_final:
        return None
    graph.finals.add(state)
    return model.final_violation(state)


def _first_without_way(graph: _Graph[S], goal: Callable[[S], bool]) -> S | None:
    good = {state for state in graph.came_from if goal(state)}
    queue = deque(good)
    while queue:
        for earlier in graph.before.get(queue.popleft(), ()):
            if earlier not in good:
                good.add(earlier)
                queue.append(earlier)
    # came_from is in breadth-first order, so the first one has the shortest trace.
    return next((state for state in graph.came_from if state not in good), None)
