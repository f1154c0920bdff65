"""Can the old and the new mapping run at once, or a job stay down, during its plan? A model of plans.

One job, two containers that follow the task list, a plan that takes generation 1 to generation 2 or gives up,
and leaders that come and go. Task lists are levels: the service serves what the store says; answers may be
late. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

HELD = 0  # a list that says: no tasks of this job
OLD, NEW, OLD_AGAIN = (
    1,
    2,
    3,
)  # generations; a plan given up runs the old config, with the old mapping, as the third


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """All True is the protocol; each one can be taken away."""

    hold_is_level: bool = True  # the list itself says no tasks; not: a stop message
    newer_lists_only: bool = True  # a late answer with an older list is not followed
    acked_when_reaped: bool = True  # a container acknowledges a list once nothing else runs any more
    all_confirm: bool = True  # the commit waits for every container
    commit_lifts_hold: bool = True  # in the same transaction, not before
    plan_is_row: bool = True  # a new leader goes on where the old one was
    given_up_recommits: bool = True  # the old config runs again, under a further generation
    commit_compares: bool = True  # on version, plan, step and term: a deposed leader's commit changes nothing


class Container(NamedTuple):
    """A container: which list it follows, what it runs, what it has acknowledged."""

    known: int = 0
    runs: int = OLD  # the generation; 0: nothing
    acked: int = 0
    stop_acked: bool = False  # only when stopping is a message


class State(NamedTuple):
    """The lists ever served, the plan, the containers."""

    lists: tuple[int, ...] = (OLD,)  # the generation of each version; HELD: none
    step: str = "open"  # open -> hold -> confirmed -> (lifted ->) done
    containers: tuple[Container, Container] = (Container(), Container())
    generation: int = OLD
    stale_commit: bool = False  # a deposed leader is just about to commit generation 2
    leaders_left: int = 1


class PlansModel:
    """One plan's steps, the containers' rounds, late lists and leaders that are replaced."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def initial(self) -> Iterator[State]:
        """Generation 1 runs everywhere; the plan has just been written."""
        yield State()

    def actions(self, state: State) -> Iterator[tuple[str, State]]:
        """What the leader or a container may do next."""
        yield from self._leader_actions(state)
        if state.stale_commit:
            refused = state._replace(stale_commit=False)
            committed = refused._replace(lists=(*state.lists, NEW), generation=NEW)
            yield "the deposed leader commits", refused if self._rules.commit_compares else committed
        for who in (0, 1):
            yield from self._container_actions(state, who)

    def _leader_actions(self, state: State) -> Iterator[tuple[str, State]]:
        rules = self._rules
        if state.step == "open":
            lists = (*state.lists, HELD) if rules.hold_is_level else state.lists
            yield "the plan holds the job", state._replace(lists=lists, step="hold")
        elif state.step == "hold" and self._is_confirmed(state):
            yield "the plan is confirmed", state._replace(step="confirmed")
        elif state.step == "confirmed" and not rules.commit_lifts_hold:
            yield "the hold is lifted", state._replace(lists=(*state.lists, OLD), step="lifted")
        elif state.step in ("confirmed", "lifted"):
            yield "the plan commits generation 2", _commit(state, NEW)
        if state.step in ("hold", "confirmed"):
            given_up = state._replace(step="done")
            yield "the plan is given up", _commit(state, OLD_AGAIN) if rules.given_up_recommits else given_up
            if state.leaders_left:
                stale = state.step == "confirmed"
                replaced = state._replace(leaders_left=0, stale_commit=stale)
                if not rules.plan_is_row:
                    replaced = replaced._replace(step="done")
                yield "fault: the leader is replaced", replaced

    def _is_confirmed(self, state: State) -> bool:
        held = len(state.lists) - 1
        if self._rules.hold_is_level:
            answers = [one.acked >= held for one in state.containers]
        else:
            answers = [one.stop_acked for one in state.containers]
        return all(answers) if self._rules.all_confirm else any(answers)

    def _container_actions(self, state: State, who: int) -> Iterator[tuple[str, State]]:
        container = state.containers[who]
        for version in range(len(state.lists)):
            is_news = (
                version > container.known if self._rules.newer_lists_only else version != container.known
            )
            if is_news:
                fetched = container._replace(known=version)
                yield f"{who} gets list {version}", _with_container(state, who, fetched)
        wanted = state.lists[container.known]
        if container.runs and container.runs != wanted:
            reaped = container._replace(runs=0)
            yield f"{who} reaps generation {container.runs}", _with_container(state, who, reaped)
        elif not container.runs and wanted:
            started = container._replace(runs=wanted)
            yield f"{who} starts generation {wanted}", _with_container(state, who, started)
        may_ack = container.runs in (0, wanted) or not self._rules.acked_when_reaped
        if container.acked < container.known and may_ack:
            acked = container._replace(acked=container.known)
            yield f"{who} acknowledges list {container.known}", _with_container(state, who, acked)
        if not self._rules.hold_is_level and state.step == "hold" and not container.stop_acked:
            stopped = container._replace(runs=0, stop_acked=True)
            yield f"{who} gets the stop message", _with_container(state, who, stopped)

    def violation(self, state: State) -> str | None:
        """The old and the new mapping of partitions to tasks at once are two owners of a partition."""
        running = {one.runs for one in state.containers}
        return (
            f"two mappings at once: {sorted(running)}" if running in ({OLD, NEW}, {NEW, OLD_AGAIN}) else None
        )

    def final_violation(self, state: State) -> str | None:
        """Whether the job runs again is asked of every state."""
        return None


def is_good(state: State) -> bool:
    """The plan is over, and every container runs the generation that is committed."""
    return state.step == "done" and all(one.runs == state.generation for one in state.containers)


def _commit(state: State, generation: int) -> State:
    return state._replace(lists=(*state.lists, generation), step="done", generation=generation)


def _with_container(state: State, who: int, container: Container) -> State:
    first, second = state.containers
    return state._replace(containers=(container, second) if who == 0 else (first, container))
