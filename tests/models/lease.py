"""Has a container always stopped before its shards are given away? A model of leases, in ticks of time.

One container, a Shard Manager and perhaps its deposed predecessor. The container stops DEADLINE ticks after
the sending of what last extended its lease; the manager waits FAILOVER ticks of its own. Beats and answers
take any time, come twice or never. All times are ages, capped, so that the model is finite without an end of
time. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

DEADLINE, FAILOVER = 2, 3  # the tick between them is the time to kill what does not stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """All True is the protocol; each one can be taken away."""

    counted_from_sending: bool = True  # not: from the receipt of the answer
    container_stops_at_deadline: bool = True
    renewals_compared: bool = True  # who renews in the store is alive, heard or not
    failover_one_transaction: bool = True  # compared and given away at once
    failover_checks_term: bool = True  # a deposed manager gives nothing away
    answers_inside_term: bool = True  # and extends no lease
    manager_waits_full_interval: bool = True  # a new manager knows nobody silent before its own clock says so
    queue_drained_first: bool = True  # beats that wait are heard before time is looked at


class Manager(NamedTuple):
    """What a manager has seen of the container: the age of its last beat and of its last new renewal."""

    heard_age: int = 0
    looked_age: int = 0
    decided: bool = False  # only when deciding and acting are two transactions


class State(NamedTuple):
    """The container with its lease, the row with its renewals, the managers."""

    runs: bool = True
    dead: bool = False
    lease_left: int = DEADLINE
    answered_age: int = 0  # how long ago the newest answered beat was sent; its answer may arrive any time
    queue_age: int | None = None  # the same of a beat that waits at the manager
    renewed: bool = False  # the row's renewals changed since the manager looked
    manager: Manager = Manager()
    deposed: Manager | None = None  # a manager that does not know yet that it is none
    moved: bool = False
    broken: str = ""


class LeaseModel:
    """Beats, answers, renewals, ticks, deaths and new managers."""

    def __init__(self, rules: Rules, *, overlap_alone: bool = False) -> None:
        self._rules, self._overlap_alone = (
            rules,
            overlap_alone,
        )  # overlap_alone: look for nothing but two owners

    def initial(self) -> Iterator[State]:
        """The container runs, just heard."""
        yield State()

    def actions(self, state: State) -> Iterator[tuple[str, State]]:
        """What may happen next; time passes only when nobody is past a deadline."""
        yield from self._container_actions(state)
        if not state.moved:
            yield from self._manager_actions(state)
        must_stop = state.runs and state.lease_left == 0 and self._rules.container_stops_at_deadline
        if not must_stop:
            yield "a tick", _tick(state)

    def _container_actions(self, state: State) -> Iterator[tuple[str, State]]:
        if state.dead:
            return
        yield "fault: the container dies", state._replace(dead=True, runs=False, lease_left=0)
        if state.runs and state.lease_left == 0:
            yield "the container stops at its deadline", state._replace(runs=False)
        if not state.runs and state.lease_left > 0:
            yield "the container runs again", state._replace(runs=True)
        # An answer says which beat it answers; the container knows when it sent that one.
        extended = DEADLINE - state.answered_age if self._rules.counted_from_sending else DEADLINE
        if extended > state.lease_left:
            yield "an answer arrives", state._replace(lease_left=extended)
        for age in range(DEADLINE + 1):
            if state.queue_age is None and not state.moved:
                yield f"a beat of {age} ticks ago reaches the manager's queue", state._replace(queue_age=age)
            is_news = age < state.answered_age
            if state.deposed is not None and is_news and not self._rules.answers_inside_term:
                label = f"the deposed manager answers a beat of {age} ticks ago"
                yield label, state._replace(answered_age=age)
        if state.moved:
            yield "the row refuses a renewal", state._replace(runs=False, lease_left=0)
        else:
            yield "the container renews in the row", state._replace(renewed=True, lease_left=DEADLINE)

    def _manager_actions(self, state: State) -> Iterator[tuple[str, State]]:
        manager = state.manager
        if state.queue_age is not None:
            heard = manager._replace(heard_age=0, decided=False)
            answered = min(state.answered_age, state.queue_age)
            yield (
                "the manager hears and answers",
                state._replace(manager=heard, queue_age=None, answered_age=answered),
            )
        if state.renewed:
            looked = manager._replace(looked_age=0, decided=False)
            yield "the manager sees a renewal", state._replace(manager=looked, renewed=False)
        yield from self._failovers(state, manager, "the manager")
        if state.deposed is None:
            fresh = Manager() if self._rules.manager_waits_full_interval else Manager(FAILOVER, FAILOVER)
            yield "fault: a new manager takes over", state._replace(manager=fresh, deposed=manager)
        elif not self._rules.failover_checks_term:
            yield from self._failovers(state, state.deposed, "the deposed manager")

    def _failovers(self, state: State, manager: Manager, name: str) -> Iterator[tuple[str, State]]:
        silent = manager.heard_age >= FAILOVER
        if self._rules.queue_drained_first and name == "the manager":
            silent = silent and state.queue_age is None
        if self._rules.renewals_compared:
            silent = silent and not state.renewed and manager.looked_age >= FAILOVER
        if self._rules.failover_one_transaction:
            if silent:
                yield f"{name} fails the container over", _fail_over(state)
        elif manager.decided:
            yield f"{name} fails the container over", _fail_over(state)
        elif silent and name == "the manager":
            yield f"{name} decides", state._replace(manager=manager._replace(decided=True))

    def violation(self, state: State) -> str | None:
        """Never two at once, and nobody who is heard is failed over."""
        if state.moved and state.runs:
            return "two at once"
        return None if self._overlap_alone else state.broken or None

    def final_violation(self, state: State) -> str | None:
        """Time never ends here; whether somebody runs is asked of every state."""
        return None


def is_good(state: State) -> bool:
    """Somebody runs the shard."""
    return state.moved or state.runs


def _fail_over(state: State) -> State:
    # The deposed one has no queue of its own; a beat that waits was sent to the manager in office.
    was_heard = state.queue_age is not None and not state.dead
    broken = "failed over although its beats arrived" if was_heard else ""
    return state._replace(moved=True, queue_age=None, broken=broken)


def _tick(state: State) -> State:
    queue_age = None if state.queue_age is None else min(state.queue_age + 1, DEADLINE)
    return state._replace(
        lease_left=max(state.lease_left - 1, 0),
        answered_age=min(state.answered_age + 1, DEADLINE),
        queue_age=queue_age,
        manager=_older(state.manager),
        deposed=None if state.deposed is None else _older(state.deposed),
    )


def _older(manager: Manager) -> Manager:
    heard, looked = min(manager.heard_age + 1, FAILOVER), min(manager.looked_age + 1, FAILOVER)
    return manager._replace(heard_age=heard, looked_age=looked)
