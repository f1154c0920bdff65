"""Can a stateless step, which publishes before it commits, lose, double or mix records? A model of intents.

Three input records, two output partitions (written one after the other), three lives. After the first life a
new package is released: package 1 writes record o as one row to partition o % 2, package 2 as two rows, one
to each. No life is told to stop, and each cuts its ranges where it likes. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

RECORDS = 3
PACKAGE_OF = (1, 2, 2)  # by life


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """All True is the protocol; each one can be taken away."""

    intent_first: bool = True  # range and package are durable before the first record is sent
    intent_checks_token: bool = True  # an earlier life cannot write an intent any more
    publish_before_commit: bool = True  # offsets are committed only for what is on the bus
    replay_same_range: bool = (
        True  # the successor repeats exactly the range of the intent, before anything else
    )
    replay_same_package: bool = True  # and with the package that the intent names
    package_kept: bool = True  # a package named by an intent is not cleaned away
    sequence_from_offset: bool = (
        True  # sequence = (input offset, index); not: a counter that goes on from the bus
    )


class Intent(NamedTuple):
    """What a step promised to publish."""

    start: int
    end: int
    package: int


class Output(NamedTuple):
    """A record on the bus: which input record, which of its rows, written by which package."""

    offset: int
    row: int
    package: int


class Life(NamedTuple):
    """One start of the task. `work` is the intent it holds in memory."""

    phase: str = "absent"  # absent -> acquired -> idle -> intended -> (half sent -> sent -> idle), or stopped
    work: Intent | None = None
    replaying: Intent | None = None  # found at acquire, to be repeated first


class State(NamedTuple):
    """The row, the bus, the lives, and whether package 1 is still there."""

    token: int = 1
    offset: int = 0
    intent: Intent | None = None
    logs: tuple[tuple[Output, ...], tuple[Output, ...]] = ((), ())
    last: tuple[tuple[int, int], tuple[int, int]] = ((-1, -1), (-1, -1))
    epoch: int = 1
    lives: tuple[Life, ...] = (Life("idle"), Life(), Life())
    package_1_there: bool = True


def rows_of(offset: int, package: int) -> dict[int, Output]:
    """What a package makes of a record: output partition -> row."""
    if package == 1:
        return {offset % 2: Output(offset, 0, 1)}
    return {0: Output(offset, 0, 2), 1: Output(offset, 1, 2)}


class IntentsModel:
    """Intent, publish, commit; lives with different packages."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def initial(self) -> Iterator[State]:
        """Life 1 owns the interval and has read nothing."""
        yield State()

    def actions(self, state: State) -> Iterator[tuple[str, State]]:
        """What a life or the cleaner may do next."""
        yield from self._next_life(state)
        for who in range(len(PACKAGE_OF)):
            match state.lives[who].phase:
                case "idle":
                    yield from self._intend(state, who)
                case "intended" | "half sent" | "sent" | "committed":
                    yield from self._go_on(state, who)
        named = state.intent is not None and state.intent.package == 1
        if state.package_1_there and state.token > 1 and not (self._rules.package_kept and named):
            yield "package 1 is cleaned away", state._replace(package_1_there=False)

    def _next_life(self, state: State) -> Iterator[tuple[str, State]]:
        token = state.token + 1
        if token <= len(PACKAGE_OF):
            found = Life("acquired", replaying=state.intent)
            yield f"life {token} takes the row", _with_life(state._replace(token=token), token - 1, found)
        for who, life in enumerate(state.lives):
            if life.phase == "acquired":
                fenced = state._replace(epoch=max(state.epoch, who + 1))
                yield f"life {who + 1} fences the bus", _with_life(fenced, who, life._replace(phase="idle"))

    def _ranges(self, state: State, who: int) -> Iterator[Intent]:
        rules, life = self._rules, state.lives[who]
        if life.replaying is None:
            for end in range(state.offset + 1, RECORDS + 1):
                yield Intent(state.offset, end, PACKAGE_OF[who])
            return
        kept = life.replaying
        package = kept.package if rules.replay_same_package else PACKAGE_OF[who]
        ends = [kept.end] if rules.replay_same_range else range(kept.start + 1, RECORDS + 1)
        for end in ends:
            yield Intent(kept.start, end, package)

    def _intend(self, state: State, who: int) -> Iterator[tuple[str, State]]:
        rules, life, is_owner = self._rules, state.lives[who], state.token == who + 1
        for work in self._ranges(state, who):
            label = f"life {who + 1} means to publish [{work.start}, {work.end}) with package {work.package}"
            if work.package == 1 and not state.package_1_there:
                continue  # the code is gone; nothing else may be done before it
            after = _with_life(state, who, life._replace(phase="intended", work=work))
            if not rules.intent_first:
                yield label, after
            elif is_owner or not rules.intent_checks_token:
                yield label, after._replace(intent=work)
            else:
                yield label + ", fenced", _with_life(state, who, Life("stopped"))

    def _go_on(self, state: State, who: int) -> Iterator[tuple[str, State]]:
        """Partition 0, partition 1, offsets; without the rule the offsets come first."""
        phases = ("intended", "half sent", "sent", "idle")
        if not self._rules.publish_before_commit:
            phases = ("committed", "half sent", "idle", "")
        phase = state.lives[who].phase
        if phase == phases[0]:
            yield f"life {who + 1} publishes to partition 0", self._publish(state, who, 0, phases[1])
        elif phase == phases[1]:
            yield f"life {who + 1} publishes to partition 1", self._publish(state, who, 1, phases[2])
        else:
            then = "idle" if phase == "sent" else "committed"
            yield f"life {who + 1} commits", self._commit(state, who, then)

    def _publish(self, state: State, who: int, partition: int, phase: str) -> State:
        if state.epoch > who + 1:
            return _with_life(state, who, Life("stopped"))
        work = state.lives[who].work
        assert work is not None
        log, last = state.logs[partition], state.last[partition]
        for offset in range(work.start, work.end):
            row = rows_of(offset, work.package).get(partition)
            if row is None:
                continue
            sequence = (offset, row.row) if self._rules.sequence_from_offset else (last[0] + 1, 0)
            if sequence > last:
                log, last = (*log, row), sequence
        logs = (log, state.logs[1]) if partition == 0 else (state.logs[0], log)
        lasts = (last, state.last[1]) if partition == 0 else (state.last[0], last)
        return _with_life(state._replace(logs=logs, last=lasts), who, state.lives[who]._replace(phase=phase))

    def _commit(self, state: State, who: int, phase: str) -> State:
        work = state.lives[who].work
        assert work is not None
        if state.token != who + 1:
            return _with_life(state, who, Life("stopped"))
        held = None if phase == "idle" else work
        return _with_life(state._replace(offset=work.end, intent=None), who, Life(phase, held))

    def violation(self, state: State) -> str | None:
        """No row twice; no record written partly by one package and partly by the other."""
        rows = [row for log in state.logs for row in log]
        if len(rows) != len(set(rows)):
            return f"doubled: {state.logs}"
        if len({(row.offset, row.package) for row in rows}) != len({row.offset for row in rows}):
            return f"mixed: {state.logs}"
        return None

    def final_violation(self, state: State) -> str | None:
        """Every record is on the bus, as one of the packages writes it."""
        if state.offset < RECORDS:
            return f"stuck: at offset {state.offset}, intent {state.intent}"
        rows = {row for log in state.logs for row in log}
        for offset in range(RECORDS):
            of_record = {row for row in rows if row.offset == offset}
            if all(of_record != set(rows_of(offset, package).values()) for package in (1, 2)):
                return f"lost: record {offset} is {sorted(of_record)}"
        return None


def _with_life(state: State, who: int, life: Life) -> State:
    return state._replace(lives=(*state.lives[:who], life, *state.lives[who + 1 :]))
