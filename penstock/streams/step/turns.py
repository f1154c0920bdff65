"""How much a batch may read, so that every task of a container gets its turn.

Spark gives the slots of a session to the oldest batch first. No task starves if each batch ends soon, so a
batch is limited by time: an interval may read as many records as fit into a turn, estimated from how long its
last records took. Planner, workers and driver of a task exchange this in small files beside its scratch
checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from penstock.core.clock import Millis

TURN_MS: Millis = 1_000  # how long a batch may hold a session's slots, if its trigger is not longer
TURN_MS_MIN: Millis = 100  # of one interval among many
ROWS_FIRST = 250  # before the first measurement
GROWTH_MAX = 20  # from one batch to the next
OVERHEAD_MS: Millis = 100  # fixed cost of a batch
PLANNED = "planned"


def turn_of(*, trigger_ms: Millis, slots: int, intervals: int) -> Millis:
    """How long one interval of a task may take, so that its whole batch takes one turn on all slots. Pure.

    A task whose trigger is longer than a turn may use all of the time between two triggers; otherwise it
    could never catch up.
    """
    whole_ms = max(TURN_MS, trigger_ms * 5 // 4)
    return max(TURN_MS_MIN, min(whole_ms, whole_ms * slots // max(1, intervals)))


def next_limit(limit: int, *, rows: int, took_ms: Millis, turn_ms: Millis) -> int:
    """How many rows the next batch may read, after a batch of `rows` that took `took_ms`. Pure."""
    if rows <= 0:
        return limit
    row_ms = max(0, took_ms - OVERHEAD_MS) / rows
    most = limit * GROWTH_MAX
    fits = most if row_ms * most <= turn_ms else max(1, int(turn_ms / row_ms))
    # A small batch is no good estimate: the limit grows only if at least half of it was used.
    return fits if fits < limit or 2 * rows >= limit else limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Totals of one interval's turns. Times are of the monotonic clock (since boot)."""

    limit: int = ROWS_FIRST
    began_ms: Millis = 0  # of the newest turn
    ended_ms: Millis = 0  # of the newest turn that ended
    waited_ms: Millis = 0  # for a slot, before the newest turn
    rows: int = 0  # total
    work_ms: Millis = 0  # total, with a slot
    user_ms: Millis = 0  # of these in user code

    def held_ms(self, now_ms: Millis) -> Millis:
        """Total time with a slot, including a turn that has not ended."""
        return self.work_ms + (max(0, now_ms - self.began_ms) if self.began_ms > self.ended_ms else 0)


class TurnFiles:
    """The turn files of one run of a task. I/O errors are ignored, as if there was no data: the folder is
    deleted with the task.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def plan(self, now_ms: Millis) -> None:
        """Note that a batch is planned, and waits for slots from now on."""
        self._write(PLANNED, str(now_ms))

    def planned_ms(self) -> Millis:
        """When the newest batch was planned; 0: no batch yet."""
        try:
            return int((self._folder / PLANNED).read_text())
        except (OSError, ValueError):
            return 0

    def of(self, partition: int) -> Turns:
        """The turns of an interval."""
        try:
            return Turns(**json.loads((self._folder / _name(partition)).read_text()))
        except (OSError, ValueError, TypeError):
            return Turns()

    def begin(self, partition: int, now_ms: Millis) -> None:
        """Note that the interval got a slot."""
        waited_ms = max(0, now_ms - (self.planned_ms() or now_ms))
        self._put(partition, replace(self.of(partition), began_ms=now_ms, waited_ms=waited_ms))

    def end(self, partition: int, now_ms: Millis, *, rows: int, user_ms: Millis, turn_ms: Millis) -> None:
        """Note that the interval's work in this batch is done."""
        known = self.of(partition)
        took_ms = max(0, now_ms - known.began_ms)
        after = replace(
            known,
            limit=next_limit(known.limit, rows=rows, took_ms=took_ms, turn_ms=turn_ms),
            ended_ms=now_ms,
            rows=known.rows + rows,
            work_ms=known.work_ms + took_ms,
            user_ms=known.user_ms + user_ms,
        )
        self._put(partition, after)

    def _put(self, partition: int, turns: Turns) -> None:
        self._write(_name(partition), json.dumps(asdict(turns)))

    def _write(self, name: str, text: str) -> None:
        new = self._folder / f".{name}.{os.getpid()}"
        with contextlib.suppress(OSError):
            new.write_text(text)
            os.replace(new, self._folder / name)


def _name(partition: int) -> str:
    return f"turns-{partition}"
