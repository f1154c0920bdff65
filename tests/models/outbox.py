"""Can a strong production be lost, doubled, reordered or seen before it is durable? A model of the outbox.

Two lives of one interval, two steps, two output partitions. Step 1 produces x and y, step 2 produces z; user
code cannot be replayed, so a production carries the life that made it. The number of partitions changes
between the lives. Life 1 is never told to stop. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

STEPS = ("xy", "z")
PARTITION_OF = ({"x": 0, "y": 1, "z": 0}, {"x": 1, "y": 0, "z": 1})  # by life: P changes between them


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """All True is the protocol; each one can be taken away."""

    sent_after_commit: bool = True  # a production is sent from the outbox, never before its step is durable
    sequence_per_partition: bool = True  # not: one counter for all output partitions
    oldest_first: bool = True  # a batch is a prefix of the outbox
    leftovers_first: bool = True  # what an earlier life left comes before what this life made
    one_in_flight: bool = True  # the next batch waits for the answer to the last one
    trimmed_by_record: bool = True  # not: a batch that begins below the mark is dropped whole
    gap_refused: bool = True  # first > last + 1 is a named error
    delivered_checks_token: bool = True  # marking rows delivered is a token-checked write
    fenced_publish_raises: bool = True  # not: taken for an answer
    partition_stored: bool = True  # not: computed again from the key when sent
    bus_compared_at_acquire: bool = True  # a bus ahead of the rows is a named error
    fenced_before_compared: bool = True  # the earlier life's publishes are refused before the marks are read


class Production(NamedTuple):
    """A record to be sent: which key, made by which life."""

    key: str
    life: int


class OutboxRow(NamedTuple):
    """A production stored with the state, with the place it will take on the bus."""

    production: Production
    partition: int
    sequence: int


class Rows(NamedTuple):
    """The interval in the row store; `history` is everything it ever committed, for the check alone."""

    token: int = 1
    steps_done: int = 0
    next_sequence: tuple[int, int] = (1, 1)
    outbox: tuple[OutboxRow, ...] = ()
    history: tuple[tuple[Production, int], ...] = ()  # with the output partition


class Bus(NamedTuple):
    """The output category: records and the producer's last sequence, per partition; its highest epoch."""

    logs: tuple[tuple[Production, ...], tuple[Production, ...]] = ((), ())
    last: tuple[int, int] = (0, 0)
    epoch: int = 1


class Flight(NamedTuple):
    """A batch on its way, or answered."""

    batch: tuple[OutboxRow, ...]
    outbox_read: tuple[OutboxRow, ...]  # what the sender believed the outbox to be
    answered: bool = False


class Life(NamedTuple):
    """One start of the task."""

    phase: str = "absent"  # absent -> (acquired -> fenced/compared ->) running -> stopped
    flights: tuple[Flight, ...] = ()
    pending: tuple[OutboxRow, ...] = ()  # only when sent before the commit


class State(NamedTuple):
    """Rows, bus and the two lives."""

    rows: Rows = Rows()
    bus: Bus = Bus()
    lives: tuple[Life, Life] = (Life("running"), Life())
    fault: str = ""  # "rows" or "bus" was put back to an older copy
    alarm: str = ""  # the named error somebody stopped with


class OutboxModel:
    """Steps, publishes and their answers, in every order."""

    def __init__(self, rules: Rules, *, with_restore: bool = False) -> None:
        self._rules, self._with_restore = rules, with_restore

    def initial(self) -> Iterator[State]:
        """Life 1 owns the interval; nothing was produced yet."""
        yield State()

    def actions(self, state: State) -> Iterator[tuple[str, State]]:
        """What either life, the bus or the environment may do next."""
        if state.alarm:
            return
        for who in (0, 1):
            if state.lives[who].phase == "running":
                yield from self._step(state, who)
                yield from self._send(state, who)
            yield from self._answers(state, who)
        yield from self._second_life(state)
        if self._with_restore and not state.fault and state.lives[1].phase == "absent":
            yield from _restores(state)

    def _second_life(self, state: State) -> Iterator[tuple[str, State]]:
        """Raise the row's token and the bus's epoch, in either order; compare; run."""
        rows, bus, life, rules = state.rows, state.bus, state.lives[1], self._rules
        if rows.token == 1 and life.phase == "absent":
            yield "life 2 takes the rows", state._replace(rows=rows._replace(token=2))
        if bus.epoch == 1 and life.phase in ("absent", "compared"):
            yield "life 2 fences the bus", state._replace(bus=bus._replace(epoch=2))
        may_compare = rows.token == 2 and life.phase == "absent"
        if may_compare and (bus.epoch == 2 or not rules.fenced_before_compared):
            ahead = any(
                last >= following for last, following in zip(bus.last, rows.next_sequence, strict=True)
            )
            if ahead and rules.bus_compared_at_acquire:
                yield "life 2 finds the bus ahead", state._replace(alarm="row store older than the bus")
            else:
                yield "life 2 finds the bus in order", _with_life(state, 1, life._replace(phase="compared"))
        if life.phase == "compared" and bus.epoch == 2:
            yield "life 2 starts", _with_life(state, 1, life._replace(phase="running"))

    def _step(self, state: State, who: int) -> Iterator[tuple[str, State]]:
        rows, life, label = state.rows, state.lives[who], f"life {who + 1} "
        if rows.steps_done == len(STEPS):
            return
        if rows.token != who + 1:
            yield label + "is fenced in its step", _with_life(state, who, life._replace(phase="stopped"))
            return
        made, following = self._produce(rows, who)
        if not self._rules.sent_after_commit and life.pending != made:
            if not life.flights:
                flights = (Flight(made, made),)
                yield (
                    label + "sends before its commit",
                    _with_life(state, who, Life("running", flights, made)),
                )
            return
        committed = rows._replace(
            steps_done=rows.steps_done + 1,
            next_sequence=following,
            outbox=rows.outbox + made,
            history=rows.history + tuple((row.production, row.partition) for row in made),
        )
        after = _with_life(state, who, life._replace(pending=()))
        yield label + f"commits step {rows.steps_done + 1}", after._replace(rows=committed)

    def _produce(self, rows: Rows, who: int) -> tuple[tuple[OutboxRow, ...], tuple[int, int]]:
        following, made = list(rows.next_sequence), []
        for key in STEPS[rows.steps_done]:
            partition = PARTITION_OF[who][key]
            counter = partition if self._rules.sequence_per_partition else 0
            made.append(OutboxRow(Production(key, who + 1), partition, following[counter]))
            following[counter] += 1
        return tuple(made), (following[0], following[1])

    def _send(self, state: State, who: int) -> Iterator[tuple[str, State]]:
        rows, life, rules = state.rows, state.lives[who], self._rules
        flying = {row for flight in life.flights for row in flight.batch}
        if rows.token != who + 1 or (flying and rules.one_in_flight):
            return
        waiting = [row for row in rows.outbox if row not in flying]
        if not rules.leftovers_first:
            waiting.sort(key=lambda row: row.production.life != who + 1)  # its own first
        starts = [0] if rules.oldest_first else range(len(waiting))
        for start in starts:
            for end in range(start + 1, len(waiting) + 1):
                flight = Flight(tuple(waiting[start:end]), rows.outbox)
                names = " ".join(row.production.key for row in flight.batch)
                flights = (*life.flights, flight)
                yield f"life {who + 1} sends {names}", _with_life(state, who, life._replace(flights=flights))

    def _answers(self, state: State, who: int) -> Iterator[tuple[str, State]]:
        for index, flight in enumerate(state.lives[who].flights):
            names = " ".join(row.production.key for row in flight.batch)
            if flight.answered:
                yield f"life {who + 1} marks {names} delivered", self._delivered(state, who, index)
            else:
                yield f"the bus gets {names} from life {who + 1}", self._arrive(state, who, index)

    def _arrive(self, state: State, who: int, index: int) -> State:
        life, flight = state.lives[who], state.lives[who].flights[index]
        rest = life.flights[:index] + life.flights[index + 1 :]
        answered = life._replace(flights=(*rest, flight._replace(answered=True)))
        if state.bus.epoch > who + 1:
            fenced = life._replace(phase="stopped", flights=rest, pending=())
            return _with_life(state, who, fenced if self._rules.fenced_publish_raises else answered)
        bus = self._append(state.bus, self._placed(flight.batch, who))
        if bus is None:
            return state._replace(alarm="gap in the sequence")
        return _with_life(state._replace(bus=bus), who, answered)

    def _placed(self, batch: tuple[OutboxRow, ...], who: int) -> tuple[OutboxRow, ...]:
        if self._rules.partition_stored:
            return batch
        return tuple(row._replace(partition=PARTITION_OF[who][row.production.key]) for row in batch)

    def _append(self, bus: Bus, batch: tuple[OutboxRow, ...]) -> Bus | None:
        logs, lasts = list(bus.logs), list(bus.last)
        for partition in (0, 1):
            rows = [row for row in batch if row.partition == partition]
            if not self._rules.trimmed_by_record and rows and rows[0].sequence <= lasts[partition]:
                continue
            for row in rows:
                if row.sequence <= lasts[partition]:
                    continue
                if row.sequence > lasts[partition] + 1 and self._rules.gap_refused:
                    return None
                logs[partition] = (*logs[partition], row.production)
                lasts[partition] = row.sequence
        return bus._replace(logs=(logs[0], logs[1]), last=(lasts[0], lasts[1]))

    def _delivered(self, state: State, who: int, index: int) -> State:
        rows, life, flight = state.rows, state.lives[who], state.lives[who].flights[index]
        rest = life.flights[:index] + life.flights[index + 1 :]
        after = _with_life(state, who, life._replace(flights=rest))
        if rows.token == who + 1:
            kept = tuple(row for row in rows.outbox if row not in flight.batch)
        elif self._rules.delivered_checks_token:
            return _with_life(after, who, life._replace(phase="stopped", flights=()))
        else:
            # An unchecked write puts down the list as its writer knew it.
            kept = tuple(row for row in flight.outbox_read if row not in flight.batch)
        return after._replace(rows=rows._replace(outbox=kept))

    def violation(self, state: State) -> str | None:
        """Only durable productions are seen, each once, each partition in order and without a hole."""
        if state.alarm:
            return None if state.fault else f"false alarm: {state.alarm}"
        seen = [production for log in state.bus.logs for production in log]
        if len(seen) != len(set(seen)):
            return f"doubled: {state.bus.logs}"
        if state.fault == "rows":
            return None  # what lies on the bus was made in a history that the rows forgot; the end tells
        durable = {production for production, _ in state.rows.history}
        if not durable >= set(seen):
            return f"not durable: {set(seen) - durable}"
        for partition, log in enumerate(state.bus.logs):
            made = tuple(one for one, place in state.rows.history if place == partition)
            if not set(log) <= set(made):
                return f"misplaced: {log} in a partition meant for {made}"
            if log != made[: len(log)]:
                return f"hole: {log} instead of {made}"
        return None

    def final_violation(self, state: State) -> str | None:
        """Unless somebody stopped with a named error, every durable production is on the bus."""
        # What a damaged bus lost cannot be brought back; only a hole before later records would hide it.
        if state.alarm or state.fault == "bus":
            return None
        missing = {one for one, _ in state.rows.history} - {one for log in state.bus.logs for one in log}
        if missing:
            return f"lost: {sorted(missing)}"
        return None if state.rows.steps_done == len(STEPS) else "stuck: steps left undone"


def _with_life(state: State, who: int, life: Life) -> State:
    return state._replace(lives=(life, state.lives[1]) if who == 0 else (state.lives[0], life))


def _restores(state: State) -> Iterator[tuple[str, State]]:
    """Either store goes back to an empty copy; with the rows, life 1 finds its range above the offset."""
    stopped = _with_life(state, 0, state.lives[0]._replace(phase="stopped"))
    if state.rows.steps_done and state.rows.token == 1:
        yield "fault: the rows go back to an older copy", stopped._replace(rows=Rows(), fault="rows")
    if any(state.bus.last):
        bus = Bus(epoch=state.bus.epoch)
        yield "fault: the bus goes back to an older copy", state._replace(bus=bus, fault="bus")
