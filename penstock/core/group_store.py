"""Writes of many callers in one transaction: what waits for the writer in front goes with the next one.

A transaction has a price of its own (a lock, a write to the disk, on PostgreSQL five round trips) that all of
them share. Each is as alone as before: one that is refused before it wrote is refused alone; one that fails
later takes the transaction with it, and then each is repeated by itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.core.errors import PenstockError
from penstock.core.quick_store import flush, writes_of

if TYPE_CHECKING:
    import sqlalchemy as sa

    from penstock.core.sql_store import Database

Answer = TypeVar("Answer")
AT_ONCE = 16
GATHER_S = 0.004
# Reads what several writes will look at, in fewer statements than they would take.
ReadAhead = Callable[["sa.Connection", Sequence[Any]], None]


class _Asked(Generic[Answer]):
    """One caller's write, and what came of it."""

    def __init__(self, work: Callable[[sa.Connection], Answer], wanted: Any) -> None:
        self.work, self.wanted = work, wanted
        self.answer: Answer | None = None
        self.error: PenstockError | None = None
        self.is_taken = False
        self.is_over = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def wait(self, seconds: float = -1) -> None:
        """Until it is over, or it is this caller's turn to write, or so long."""
        self._gate.acquire(timeout=seconds)

    def wake(self) -> None:
        self._gate.release()


class GroupedWrites:
    """Runs writes for any number of threads, those that come meanwhile together.

    One thread writes at a time, for all that wait. When it is done it wakes those it wrote for, and the first
    of those that came meanwhile, which goes on: nobody whose write is done waits for the next ones.
    """

    def __init__(self, database: Database, read_ahead: ReadAhead | None = None) -> None:
        self._database, self._read_ahead = database, read_ahead
        self._waiting: deque[_Asked[Any]] = deque()
        self._mutex, self._is_writing = threading.Lock(), False

    def run(self, work: Callable[[sa.Connection], Answer], *, wanted: Any = None) -> Answer:
        """What `work` returns, once that is written. It may run twice, in any thread; it must not wait.

        `wanted`: what it will look at, for `read_ahead`.
        """
        asked = _Asked(work, wanted)
        with self._mutex:
            self._waiting.append(asked)
            is_next, self._is_writing = not self._is_writing, True
        if not is_next:
            asked.wait()
            if not asked.is_taken:
                # Others write too, so more are about to come: together they are done sooner.
                asked.wait(GATHER_S)
        if not asked.is_taken:
            return self._lead(asked)
        return self._outcome(asked)

    def run_each(
        self, works: Sequence[tuple[Callable[[sa.Connection], Answer], Any]]
    ) -> list[Answer | Exception]:
        """As `run` for several at once, in one thread: of each what it returns, or what it raised."""
        each = [_Asked(work, wanted) for work, wanted in works]
        if not each:
            return []
        with self._mutex:
            self._waiting.extend(each)
            is_next, self._is_writing = not self._is_writing, True
        return [self._settle(asked, is_next=is_next and asked is each[0]) for asked in each]

    def _settle(self, asked: _Asked[Any], *, is_next: bool) -> Any:
        if not is_next:
            asked.wait()
        try:
            return self._outcome(asked) if asked.is_taken else self._lead(asked)
        except Exception as error:  # the others' writes go on
            return error

    def _lead(self, first: _Asked[Answer]) -> Answer:
        """Write for all that wait, of whom `first` is the first."""
        taken = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
        assert taken[0] is first, "whoever came first writes"
        for asked in taken:
            asked.is_taken = True
        try:
            if len(taken) > 1:
                self._write_together(taken)
            return self._outcome(first)
        finally:
            for asked in taken[1:]:
                asked.wake()
            self._hand_over()

    def _hand_over(self) -> None:
        with self._mutex:
            self._is_writing = bool(self._waiting)
            following = self._waiting[0] if self._waiting else None
        if following is not None:
            following.wake()

    def _outcome(self, asked: _Asked[Answer]) -> Answer:
        if not asked.is_over:
            # Nobody else wrote meanwhile, or there was trouble: by itself that is this caller's alone.
            with self._database.transaction() as connection:
                self._look_ahead(connection, [asked])
                return asked.work(connection)
        if asked.error is not None:
            raise asked.error
        return asked.answer  # type: ignore[return-value]

    def _write_together(self, taken: Sequence[_Asked[Any]]) -> None:
        is_begun = is_done = False
        try:
            with self._database.transaction() as connection:
                is_begun = True
                self._look_ahead(connection, taken)
                for asked in taken:
                    _answer(asked, connection)
                flush(connection)
                is_done = True
        except PenstockError as error:
            # A store that is away, or did not say whether it has written, is so for all of them. Also for
            # those that were refused: that was decided on what the others had written.
            if is_done or not is_begun:
                is_done = True
                for asked in taken:
                    asked.error = error
        for asked in taken:
            asked.is_over = is_done

    def _look_ahead(self, connection: sa.Connection, taken: Sequence[_Asked[Any]]) -> None:
        wanted = [asked.wanted for asked in taken if asked.wanted is not None]
        if self._read_ahead is not None and wanted:
            self._read_ahead(connection, wanted)


def _answer(asked: _Asked[Any], connection: sa.Connection) -> None:
    before = writes_of(connection)
    try:
        asked.answer = asked.work(connection)
    except PenstockError as error:
        if writes_of(connection) != before:
            raise
        asked.error = error
