"""Can a record that is on time come behind a mark that excludes it? A model of lows and marks.

Two producers write to one category. Producer 0 has two steps: the first produces a record of time 5 and sets
a timer whose hold is 8, the second fires it; producer 1 has one step with a record of time 3. Reports may be
late, doubled and out of order; two writers turn the producers' lows into marks (W, E). Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

NEVER = -1  # the low of a producer that has not reported, and W before the first mark
END = 20


class Step(NamedTuple):
    """What a step commits: the input low it reaches, the times of its productions, the hold it leaves."""

    input_low: int
    produced: tuple[int, ...]
    hold: int = END


SCRIPTS = ((Step(10, (5,), 8), Step(END, (8,))), (Step(END, (3,)),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """All True is the protocol; each one can be taken away."""

    low_counts_undelivered: bool = True  # output low <= the oldest undelivered production
    low_counts_holds: bool = True  # output low <= the oldest hold of a timer
    report_after_commit: bool = True  # never above what is durable
    delivered_after_answer: bool = True  # a production counts as undelivered until the bus has it
    report_raises_only: bool = True  # the authority keeps max(old, new)
    registered_count: bool = True  # W is the minimum over all registered producers, heard of or not
    low_read_before_end: bool = True  # first W, then E
    mark_compared_and_set: bool = True  # a mark is appended only behind the mark its writer knew


class Producer(NamedTuple):
    """One producing interval, as it is durable; `flying` was sent and is not answered yet."""

    steps_done: int = 0
    input_low: int = NEVER
    outbox: tuple[int, ...] = ()
    hold: int = END
    flying: int | None = None
    arrived: bool = False


class Writer(NamedTuple):
    """Somebody who makes a mark: what was read so far, and how many marks there were."""

    known: int = 0
    low: int | None = None
    end: int | None = None


class State(NamedTuple):
    """The category with its marks, the authority's table, producers, reports on their way, mark writers."""

    log: tuple[int, ...] = ()
    marks: tuple[tuple[int, int], ...] = ()
    lows: tuple[int, int] = (NEVER, NEVER)
    producers: tuple[Producer, Producer] = (Producer(), Producer())
    reports: frozenset[tuple[int, int]] = frozenset()
    writers: tuple[Writer, Writer] = (Writer(), Writer())
    broken: str = ""


class MarksModel:
    """Steps, publishes, reports, marks; in every order."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def initial(self) -> Iterator[State]:
        """Both producers are registered; nobody has done anything."""
        yield State()

    def actions(self, state: State) -> Iterator[tuple[str, State]]:
        """What a producer, the authority or a mark writer may do next."""
        for who in (0, 1):
            yield from self._producer_actions(state, who)
            yield from self._writer_actions(state, who)
        for who, low in sorted(state.reports):
            old = state.lows[who]
            new = max(old, low) if self._rules.report_raises_only else low
            if new != old:
                broken = f"went back: low of producer {who} from {old} to {new}" if new < old else ""
                lows = (new, state.lows[1]) if who == 0 else (state.lows[0], new)
                yield f"the authority hears {low} from {who}", state._replace(lows=lows, broken=broken)

    def _producer_actions(self, state: State, who: int) -> Iterator[tuple[str, State]]:
        producer = state.producers[who]
        if producer.steps_done < len(SCRIPTS[who]):
            step = SCRIPTS[who][producer.steps_done]
            committed = producer._replace(
                steps_done=producer.steps_done + 1,
                input_low=step.input_low,
                outbox=producer.outbox + step.produced,
                hold=step.hold,
            )
            yield f"{who} commits a step", _with_producer(state, who, committed)
            if not self._rules.report_after_commit:
                # This try of the step happens to produce nothing; it will be repeated by a later life.
                yield f"{who} reports before its commit", _report(state, who, step.input_low)
        yield from self._publish(state, who, producer)
        low = self._output_low(producer)
        if low > NEVER and (who, low) not in state.reports:
            yield f"{who} reports {low}", _report(state, who, low)

    def _publish(self, state: State, who: int, producer: Producer) -> Iterator[tuple[str, State]]:
        if producer.flying is None:
            if producer.outbox:
                sent = producer._replace(flying=producer.outbox[0], arrived=False)
                if not self._rules.delivered_after_answer:
                    sent = sent._replace(outbox=producer.outbox[1:])
                yield f"{who} sends {producer.outbox[0]}", _with_producer(state, who, sent)
        elif not producer.arrived:
            there = _with_producer(state, who, producer._replace(arrived=True))
            yield f"{producer.flying} is on the bus", there._replace(log=(*state.log, producer.flying))
        else:
            rest = producer.outbox[1:] if self._rules.delivered_after_answer else producer.outbox
            done = producer._replace(outbox=rest, flying=None, arrived=False)
            yield f"{who} marks {producer.flying} delivered", _with_producer(state, who, done)

    def _output_low(self, producer: Producer) -> int:
        low = producer.input_low
        if self._rules.low_counts_undelivered:
            low = min((low, *producer.outbox))
        return min(low, producer.hold) if self._rules.low_counts_holds else low

    def _watermark(self, state: State) -> int:
        heard = [low for low in state.lows if low > NEVER]
        if self._rules.registered_count and len(heard) < len(state.lows):
            return NEVER
        return min(heard, default=NEVER)

    def _writer_actions(self, state: State, index: int) -> Iterator[tuple[str, State]]:
        writer, label = state.writers[index], f"writer {index} "
        last = state.marks[-1][0] if state.marks else NEVER
        if writer.low is not None and writer.end is not None:
            yield from self._append(state, index, (writer.low, writer.end))
            return
        low_is_next = writer.low is None and (self._rules.low_read_before_end or writer.end is not None)
        if low_is_next:
            low = self._watermark(state)
            if low > last:
                known = writer.known if writer.end is not None else len(state.marks)
                read = writer._replace(known=known, low=low)
                yield label + f"reads W {low}", _with_writer(state, index, read)
            elif writer.end is not None:
                yield label + "finds W unchanged", _with_writer(state, index, Writer())
        else:
            known = writer.known if writer.low is not None else len(state.marks)
            # Without the rule this read may come at any time; it matters only while W can still rise.
            if writer.low is not None or last < END:
                read = writer._replace(known=known, end=len(state.log))
                yield label + f"reads E {len(state.log)}", _with_writer(state, index, read)

    def _append(self, state: State, index: int, mark: tuple[int, int]) -> Iterator[tuple[str, State]]:
        free = _with_writer(state, index, Writer())
        if self._rules.mark_compared_and_set and state.writers[index].known != len(state.marks):
            yield f"writer {index} lost the race", free
            return
        broken = ""
        if state.marks and (mark[0] < state.marks[-1][0] or mark[1] < state.marks[-1][1]):
            broken = f"went back: {mark} behind {state.marks[-1]}"
        yield f"writer {index} appends {mark}", free._replace(marks=(*state.marks, mark), broken=broken)

    def violation(self, state: State) -> str | None:
        """No record behind a mark is older than the mark says; no watermark goes back."""
        for low, end in state.marks:
            late = [time for time in state.log[end:] if time < low]
            if late:
                return f"late: {late} behind the mark {(low, end)}"
        return state.broken or None

    def final_violation(self, state: State) -> str | None:
        """In the end the marks say that everything has come."""
        reached = state.marks[-1][0] if state.marks else NEVER
        if reached < END:
            return f"stuck: the watermark stays at {reached}"
        return None if sorted(state.log) == [3, 5, 8] else f"lost: {state.log}"


def _report(state: State, who: int, low: int) -> State:
    return state._replace(reports=state.reports | {(who, low)})


def _with_producer(state: State, who: int, producer: Producer) -> State:
    first, second = state.producers
    return state._replace(producers=(producer, second) if who == 0 else (first, producer))


def _with_writer(state: State, index: int, writer: Writer) -> State:
    first, second = state.writers
    return state._replace(writers=(writer, second) if index == 0 else (first, writer))
