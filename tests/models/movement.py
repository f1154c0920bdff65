"""Can two containers run one shard at once, or can it be lost for ever? A model of shard movement.

One shard, two containers, a Shard Manager that keeps nothing but the store's record. Messages may be lost,
late, doubled and out of order: everything that was ever true may still arrive, any number of times, so that
the history of the record is the network. Leases are abstract here: a container cut off stops before its lease
is over. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """All True is the protocol; each one can be taken away."""

    record_before_message: bool = True  # the store changes first, then the message goes out
    every_change_new_epoch: bool = True  # entering `dropping` too
    larger_epochs_only: bool = True  # a message is obeyed only above everything obeyed for the shard
    older_sets_ignored: bool = True  # a full set made before anything applied is not applied
    add_waits_for_drop: bool = True  # nobody else gets the shard before the DROP is acknowledged
    drop_acked_when_reaped: bool = True  # not: when it was heard
    unknown_drop_acked: bool = True  # also by a container that never had the shard
    failover_waits_for_lease: bool = True  # a silent container may still run
    incarnation_checked: bool = True  # what was meant for an earlier start of a container is ignored


class Record(NamedTuple):
    """The shard in the store."""

    epoch: int
    owner: int
    incarnation: int = 0  # of the owner
    dropping: bool = False


class Container(NamedTuple):
    """A container: its link to the rest, what it has obeyed, what it runs."""

    link: str = "up"  # up, cut (its lease still runs), over
    incarnation: int = 0
    seen: int = 0  # the largest epoch obeyed for the shard
    applied: int = 0  # the newest store version that anything applied was made from
    wanted: bool = False
    runs: bool = False
    ack_due: int = 0  # the epoch of a DROP to acknowledge


class State(NamedTuple):
    """The record with its history, the containers, the acknowledgements on their way."""

    history: tuple[Record, ...] = (Record(1, 0),)
    containers: tuple[Container, Container] = (Container(), Container())
    acks: frozenset[tuple[int, int]] = frozenset()
    unwritten: Record | None = None  # only in the manager's memory
    moves_left: int = 3
    cuts_left: int = 1
    restarts_left: int = 1


class MovementModel:
    """Moves, failovers, registrations and every delivery of every message."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def initial(self) -> Iterator[State]:
        """The record says container 0; nobody was told yet."""
        yield State()

    def actions(self, state: State) -> Iterator[tuple[str, State]]:
        """What the manager, the network or a container may do next."""
        yield from self._manager_actions(state)
        for who in (0, 1):
            if state.containers[who].link == "up":
                yield from self._messages(state, who)
                yield from self._full_sets(state, who)
            yield from self._container_actions(state, who)
            yield from self._link_actions(state, who)

    def _manager_actions(self, state: State) -> Iterator[tuple[str, State]]:
        now = state.history[-1]
        if state.unwritten is not None:
            yield "the record is written", _change(state._replace(unwritten=None), state.unwritten)
            if state.restarts_left:
                yield "fault: the manager restarts", state._replace(unwritten=None, restarts_left=0)
            return
        if not now.dropping and state.moves_left:
            # Whoever does not acknowledge an ADD loses the shard again in the same way.
            epoch = now.epoch + 1 if self._rules.every_change_new_epoch else now.epoch
            moved = state._replace(moves_left=state.moves_left - 1)
            yield "a move: DROP", self._decide(moved, now._replace(epoch=epoch, dropping=True))
        if now.dropping and ((now.owner, now.epoch) in state.acks or not self._rules.add_waits_for_drop):
            yield from self._give(state, "a move: ADD", but=now.owner)
        lost = ("over",) if self._rules.failover_waits_for_lease else ("over", "cut")
        if state.containers[now.owner].link in lost:
            yield from self._give(state, "a failover: ADD", but=now.owner)

    def _give(self, state: State, label: str, *, but: int) -> Iterator[tuple[str, State]]:
        heirs = [who for who in (1 - but, but) if state.containers[who].link == "up"]
        if heirs:
            heir, epoch = heirs[0], state.history[-1].epoch + 1
            record = Record(epoch, heir, state.containers[heir].incarnation)
            yield f"{label} to {heir}", self._decide(state, record)

    def _decide(self, state: State, record: Record) -> State:
        return (
            _change(state, record) if self._rules.record_before_message else state._replace(unwritten=record)
        )

    def _messages(self, state: State, who: int) -> Iterator[tuple[str, State]]:
        """DROP and ADD, the newest or an old one."""
        container = state.containers[who]
        sent = state.history if state.unwritten is None else (*state.history, state.unwritten)
        for record in sent:
            is_mine = record.incarnation == container.incarnation or not self._rules.incarnation_checked
            if record.owner != who or not is_mine:
                continue
            repeated = record.epoch == container.seen and record.dropping
            if self._rules.larger_epochs_only and record.epoch <= container.seen and not repeated:
                continue
            after = self._obey(container, record)._replace(applied=max(container.applied, record.epoch))
            if after != container:
                name = "DROP" if record.dropping else "ADD"
                yield f"{who} gets {name} {record.epoch}", _with_container(state, who, after)

    def _full_sets(self, state: State, who: int) -> Iterator[tuple[str, State]]:
        """Heartbeat replies: the whole assignment of the container, of now or of some earlier time."""
        container = state.containers[who]
        for record in state.history:
            meant_for = record.incarnation if record.owner == who else container.incarnation
            if self._rules.incarnation_checked and meant_for != container.incarnation:
                continue
            if self._rules.older_sets_ignored and record.epoch < container.applied:
                continue
            after = container._replace(applied=max(container.applied, record.epoch))
            if record.owner != who:
                after = after._replace(wanted=False, ack_due=0)
            else:
                after = self._obey(after, record)
            if after != container:
                yield f"{who} gets the full set of {record.epoch}", _with_container(state, who, after)

    def _obey(self, container: Container, record: Record) -> Container:
        seen = max(container.seen, record.epoch)
        if not record.dropping:
            return container._replace(seen=seen, wanted=True, ack_due=0)
        is_known = container.wanted or container.runs
        due = record.epoch if is_known or self._rules.unknown_drop_acked else container.ack_due
        return container._replace(seen=seen, wanted=False, ack_due=due)

    def _container_actions(self, state: State, who: int) -> Iterator[tuple[str, State]]:
        container = state.containers[who]
        if container.wanted and not container.runs and container.link != "over":
            yield f"{who} starts the tasks", _with_container(state, who, container._replace(runs=True))
        if container.runs and not container.wanted:
            yield f"{who} has reaped the tasks", _with_container(state, who, container._replace(runs=False))
        may_ack = not container.runs or not self._rules.drop_acked_when_reaped
        if container.ack_due and may_ack and container.link == "up":
            acked = _with_container(state, who, container._replace(ack_due=0))
            acks = state.acks | {(who, container.ack_due)}
            yield f"{who} acknowledges DROP {container.ack_due}", acked._replace(acks=acks)

    def _link_actions(self, state: State, who: int) -> Iterator[tuple[str, State]]:
        container, now = state.containers[who], state.history[-1]
        match container.link:
            case "up" if state.cuts_left:
                cut = _with_container(state, who, container._replace(link="cut"))
                yield f"fault: {who} is cut off", cut._replace(cuts_left=state.cuts_left - 1)
            case "cut":
                yield f"{who} is heard again", _with_container(state, who, container._replace(link="up"))
                ended = container._replace(link="over", wanted=False, runs=False, ack_due=0)
                yield f"{who} stops, its lease is over", _with_container(state, who, ended)
            case "over" if state.unwritten is None:
                # A new incarnation knows nothing; a shard it kept gets a new epoch.
                anew = Container(incarnation=container.incarnation + 1)
                registered = _with_container(state, who, anew)
                if now.owner == who:
                    registered = _change(registered, Record(now.epoch + 1, who, anew.incarnation))
                yield f"{who} registers anew", registered

    def violation(self, state: State) -> str | None:
        """Never two at once."""
        return "two at once" if all(one.runs for one in state.containers) else None

    def final_violation(self, state: State) -> str | None:
        """Whether the shard runs again is asked of every state, not of the last ones."""
        return None


def is_good(state: State) -> bool:
    """The owner in the record runs the shard, and nobody else."""
    now = state.history[-1]
    owner, other = state.containers[now.owner], state.containers[1 - now.owner]
    settled = not now.dropping and state.unwritten is None
    return settled and owner.link == "up" and owner.wanted and owner.runs and not other.runs


def _change(state: State, record: Record) -> State:
    return state._replace(history=(*state.history, record))


def _with_container(state: State, who: int, container: Container) -> State:
    first, second = state.containers
    return state._replace(containers=(container, second) if who == 0 else (first, container))
