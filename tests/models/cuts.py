"""Do results depend on how the log was cut into batches? A model of a consumer that follows the marks.

Every short log of records and marks is tried, growing while the consumer reads, with every way to cut it. The
user's code counts records and sets a timer at the end of each record's window, which tells the count; late
records are dropped. It minds the order of records and timers, as windows, sessions and joins do. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple

NEVER = -1
WINDOW = 5


class Record(NamedTuple):
    """A record of this event time is appended."""

    time: int


class Marked(NamedTuple):
    """The mark (low, end) is appended; its writer read the end `missed` records ago."""

    low: int
    missed: int = 0


Script = tuple[Record | Marked, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """All True is the protocol; each one can be taken away."""

    cut_at_marks: bool = True  # records up to E, then timers up to W; not: the batch's records, then timers
    cut_at_every_mark: bool = True  # not: at the last mark of the batch alone
    end_is_current: bool = True  # E is still the log's end when the mark is appended


class Consumer(NamedTuple):
    """What the consuming step has committed."""

    position: int = 0
    low: int = NEVER
    records: int = 0  # counted by the user's code
    timers: tuple[int, ...] = ()
    said: tuple[str, ...] = ()


class State(NamedTuple):
    """Which log, how much of it is there, and how far the consumer is."""

    script: Script
    appended: int = 0
    consumer: Consumer = Consumer()


def all_scripts(length: int, *, missed: tuple[int, ...]) -> Iterator[Script]:
    """Every log of this length over two record times and two rising marks."""
    events: list[Record | Marked] = [Record(1), Record(6)]
    events += [Marked(low, back) for low in (5, 10) for back in missed]
    for script in product(events, repeat=length):
        lows = [event.low for event in script if isinstance(event, Marked)]
        ends = [end for _, end in _marks(script)]
        if lows == sorted(set(lows)) and ends == sorted(ends) and min(ends, default=0) >= 0:
            yield script


def event_time_script(times: tuple[int, ...], lateness: int) -> Script:
    """A log whose low is the running maximum of its times minus the lateness, record by record."""
    script: list[Record | Marked] = []
    low = NEVER
    for time, highest in zip(times, accumulate(times, max), strict=True):
        script.append(Record(time))
        if highest - lateness > low:
            low = highest - lateness
            script.append(Marked(low))
    return tuple(script)


class CutsModel:
    """One consumer, all logs, all batches."""

    def __init__(self, rules: Rules, scripts: tuple[Script, ...] | None = None) -> None:
        self._rules = rules
        missed = (0,) if rules.end_is_current else (0, 1)
        self._scripts = scripts if scripts is not None else tuple(all_scripts(5, missed=missed))

    def initial(self) -> Iterator[State]:
        """Every log, still empty."""
        for script in self._scripts:
            yield State(script)

    def actions(self, state: State) -> Iterator[tuple[str, State]]:
        """The log grows, or the consumer takes a batch that ends anywhere in what is there."""
        consumer = state.consumer
        if state.appended < len(state.script):
            event = state.script[state.appended]
            yield f"append {event}", state._replace(appended=state.appended + 1)
        visible = state.script[: state.appended]
        for end in range(consumer.position, len(_times(visible)) + 1):
            after = self._batch(consumer, visible, end)
            if after != consumer:
                yield f"batch [{consumer.position}, {end})", state._replace(consumer=after)

    def _batch(self, consumer: Consumer, visible: Script, end: int) -> Consumer:
        marks = [(low, at) for low, at in _marks(visible) if low > consumer.low and at <= end]
        times = _times(visible)
        if not self._rules.cut_at_marks:
            marks = [(low, end) for low, _ in marks[-1:]]
        elif not self._rules.cut_at_every_mark:
            marks = marks[-1:]
        for low, at in marks:
            consumer = _fire(_read(consumer, times, at), low)
        return _read(consumer, times, end)

    def violation(self, state: State) -> str | None:
        """Nothing is forbidden on the way: only the result counts."""
        return None

    def final_violation(self, state: State) -> str | None:
        """The result is that of taking the log event by event."""
        expected = Consumer()
        for length in range(1, len(state.script) + 1):
            visible = state.script[:length]
            expected = self._batch(expected, visible, len(_times(visible)))
        if state.consumer == expected:
            return None
        return f"depends on batches: {state.consumer.said} instead of {expected.said}"


def _read(consumer: Consumer, times: list[int], end: int) -> Consumer:
    for time in times[consumer.position : end]:
        if time < consumer.low:
            consumer = consumer._replace(said=(*consumer.said, f"late {time}"))
        else:
            timer = (time // WINDOW + 1) * WINDOW
            timers = tuple(sorted({*consumer.timers, timer}))
            consumer = consumer._replace(records=consumer.records + 1, timers=timers)
    return consumer._replace(position=max(consumer.position, end))


def _fire(consumer: Consumer, low: int) -> Consumer:
    due = tuple(timer for timer in consumer.timers if timer <= low)
    said = tuple(f"{consumer.records} at {timer}" for timer in due)
    return consumer._replace(low=low, timers=consumer.timers[len(due) :], said=consumer.said + said)


def _times(script: Script) -> list[int]:
    return [event.time for event in script if isinstance(event, Record)]


def _marks(script: Script) -> list[tuple[int, int]]:
    """The marks as (W, E)."""
    return [
        (event.low, len(_times(script[:index])) - event.missed)
        for index, event in enumerate(script)
        if isinstance(event, Marked)
    ]
