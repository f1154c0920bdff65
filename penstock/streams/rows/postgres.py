"""The row store on a PostgreSQL server: reached from every machine, one short transaction per write.

The first statement of a write locks the interval's row, and what it then says decides. A read is one moment.
Every row carries a checksum: a damaged one is CorruptData, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import psycopg

from penstock.core.clock import Millis
from penstock.core.errors import StoreUnavailable
from penstock.db.server_checks import translate_postgres
from penstock.streams.bus.log import LOW_MAX, LOW_MIN
from penstock.streams.rows import postgres_server as sql
from penstock.streams.rows.postgres_server import PooledConnection, PostgresConnections
from penstock.streams.rows.row_store import (
    NOTHING,
    PAGE_BYTES,
    PREFIX,
    PREFIX_END,
    Changes,
    IntervalRef,
    IntervalRow,
    ScannedState,
    ScannedTimer,
    Snapshot,
    StoredSize,
    TimerRow,
    after_acquire,
    after_commit,
    after_delivery,
    after_fence,
    after_repeated_create,
    check_birth,
    check_token,
    check_version,
    name_of,
    new_row,
    outbox_of,
    record_of_outbox,
    record_of_row,
    record_of_timer,
    row_of,
    scanned_states,
    scanned_timers,
    state_crc,
    state_of,
    timer_of,
    unseen_names,
)

# Bounds each statement far below the statement timeout.
ROWS_PER_STATEMENT = 10_000
BYTES_PER_STATEMENT = 8 * 2**20
# What fits into a socket buffer: for more, psycopg may wait for a response before it has sent all.
PIPELINE_BYTES = 16 * 2**10
ROWS_PER_COUNT = 100_000


def keys_of(keys: Sequence[str]) -> Iterator[list[bytes]]:
    """Keys as stored, in lists of bounded size."""
    for (chunk,) in lists_of([(key.encode(),) for key in keys]):
        yield chunk


def fits_pipeline(keys: Sequence[str]) -> bool:
    """True if these keys may be pipelined with other statements. Pure."""
    return sum(4 * len(key) + 8 for key in keys) <= PIPELINE_BYTES


def lists_of(records: Sequence[tuple[Any, ...]]) -> Iterator[list[list[Any]]]:
    """The columns of records, in chunks of bounded size. Pure."""
    first, size = 0, 0
    for number, record in enumerate(records):
        weight = sum(len(part) for part in record if isinstance(part, bytes))
        if number > first and (size + weight > BYTES_PER_STATEMENT or number - first >= ROWS_PER_STATEMENT):
            yield _columns(records[first:number])
            first, size = number, 0
        size += weight
    if first < len(records):
        yield _columns(records[first:])


def read_states(ref: IntervalRef, cursors: Iterable[psycopg.Cursor[tuple[Any, ...]]]) -> dict[str, bytes]:
    """The states in the results of several statements."""
    states: dict[str, bytes] = {}
    for cursor in cursors:
        for raw, value, crc in cursor:
            key = text_of(raw)
            states[key] = state_of(ref, key, value, crc)
    return states


def write_changes(connection: psycopg.Connection[Any], interval: int, changes: Changes) -> Millis:
    """Write all but the interval's row; returns the oldest work there is afterwards.

    Not in a pipeline: a worker that is paused between two of these statements is idle in its transaction, and
    the server ends that. In one it would wait for the rest for ever, with the row locked.
    """
    for statement, values in _statements(interval, changes):
        connection.execute(statement, values)
    return oldest_work(connection, interval)


def oldest_work(connection: psycopg.Connection[Any], interval: int) -> Millis:
    """The oldest undelivered production or hold."""
    found = connection.execute(sql.OLDEST_WORK, (interval, interval)).fetchone()
    assert found is not None
    return min(LOW_MAX if oldest is None else oldest for oldest in found)


def sizes_of(connection: psycopg.Connection[Any], interval: int, keys: Sequence[str]) -> StoredSize:
    """The size of these states."""
    found = NOTHING
    for chunk in keys_of(keys):
        found = _plus(found, connection.execute(sql.SIZE_STATES, (interval, chunk)).fetchone())
    return found


def count_all(connection: psycopg.Connection[Any], interval: int) -> StoredSize:
    """The size of all states: reads every one, in statements of bounded time."""
    found, start = NOTHING, b""
    while True:
        last = connection.execute(sql.PAGE_END, (interval, start, ROWS_PER_COUNT)).fetchone()
        end = None if last is None else last[0]
        values = (interval, start, end, end, PREFIX.encode(), PREFIX_END.encode())
        found = _plus(found, connection.execute(sql.COUNT_PAGE, values).fetchone())
        if end is None:
            return found
        start = end


def text_of(raw: bytes) -> str:
    """A key or tag; bytes that are not text become a text whose checksum does not match."""
    return raw.decode(errors="replace")


def _statements(interval: int, changes: Changes) -> Iterator[tuple[str, tuple[Any, ...]]]:
    kept = [
        (key.encode(), state, state_crc(key, state))
        for key, state in sorted(changes.states.items())
        if state is not None
    ]
    for columns in lists_of(kept):
        yield sql.WRITE_STATES, (interval, *columns)
    for gone in keys_of(sorted(key for key, state in changes.states.items() if state is None)):
        yield sql.DELETE_STATES, (interval, gone)
    for columns in lists_of([(key.encode(), tag.encode()) for key, tag in changes.timers_deleted]):
        yield sql.DELETE_TIMERS, (*columns, interval)
    last = {(timer.key, timer.tag): timer for timer in changes.timers_set}  # each row once per statement
    records = (record_of_timer(timer) for _, timer in sorted(last.items()))
    for columns in lists_of([(key.encode(), tag.encode(), *rest) for key, tag, *rest in records]):
        yield sql.WRITE_TIMERS, (interval, *columns)
    for out in changes.outbox:  # one statement per row, so that ids follow their order
        yield sql.WRITE_OUTBOX, (interval, *record_of_outbox(out))


def _plus(kept: StoredSize, counted: tuple[int, int] | None) -> StoredSize:
    assert counted is not None, "an aggregate has one row"
    return StoredSize(rows=kept.rows + counted[0], bytes=kept.bytes + counted[1])


def _columns(records: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    return [list(column) for column in zip(*records, strict=True)]


# A pooled connection may be broken, or a write may end without a response: a second try decides.
_ATTEMPTS = 3

Found = TypeVar("Found")
_Cursor = psycopg.Cursor[tuple[Any, ...]]
# Writes the changes besides the interval's row, and returns the new row.
_Decide = Callable[[psycopg.Connection[Any], int, IntervalRow], IntervalRow]


class _Lost(Exception):
    """The connection was lost. `new`: the row that may have been committed, if COMMIT was in progress."""

    def __init__(self, error: psycopg.Error, new: IntervalRow | None) -> None:
        super().__init__(str(error))
        self.error, self.new = error, new


class PostgresRows:
    """The `RowStore` protocol on PostgreSQL. May be pickled, forked and shared by threads.

    `fault(point)` is called at "begin", "commit" and "committed" of every write; tests raise or die there.
    """

    def __init__(self, place: str, *, fault: Callable[[str], None] | None = None) -> None:
        self._place, self._fault, self._links = place, fault, PostgresConnections(place)

    def __reduce__(self) -> tuple[object, ...]:
        return PostgresRows, (self._place,)

    def create(self, ref: IntervalRef, *, offsets: Mapping[str, int], low: Millis) -> None:
        """Create the interval, or add new inputs."""

        def add_inputs(_connection: object, _interval: int, row: IntervalRow) -> IntervalRow:
            return after_repeated_create(ref, row, offsets)

        new = record_of_row(new_row(ref, offsets, low))
        self._write(ref, add_inputs, or_create=(ref.job_birth, ref.partition, *new))

    def exists(self, ref: IntervalRef) -> bool:
        """True if there is one of this birth."""
        return self._find(ref) is not None

    def acquire(self, ref: IntervalRef, *, generation: int, shard_epoch: int) -> IntervalRow:
        """Take ownership under a new token."""

        def decide(connection: psycopg.Connection[Any], interval: int, row: IntervalRow) -> IntervalRow:
            new = after_acquire(ref, row, generation=generation, shard_epoch=shard_epoch)
            return new if new.kept is not None else replace(new, kept=count_all(connection, interval))

        # Not checked whether an earlier try was written: another owner could have written the same row.
        return self._write(ref, decide)

    def fence(self, ref: IntervalRef, *, generation: int) -> int:
        """Refuse every owner of a smaller generation."""
        return self._write(
            ref, lambda _connection, _interval, row: after_fence(row, generation=generation)
        ).token

    def snapshot(
        self,
        ref: IntervalRef,
        *,
        token: int,
        keys: Iterable[str],
        timers_up_to: Millis,
        wall_up_to: Millis = LOW_MIN,
    ) -> Snapshot:
        """One consistent read under the token; with few keys in one round trip."""
        which, wanted = _which(ref), list(dict.fromkeys(keys))
        up_to, is_small = (timers_up_to, wall_up_to), fits_pipeline(wanted)

        def read(pooled: PooledConnection) -> Snapshot:
            ask = _executor(pooled)
            with pooled.connection.pipeline() if is_small else nullcontext():
                pooled.connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                found = ask(sql.READ_ROW, which)
                due = [ask(sql.READ_TIMERS[wall], (*which, up_to[wall])) for wall in (0, 1)]
                values = [ask(sql.READ_STATES_OF_TIMERS[wall], (*which, up_to[wall])) for wall in (0, 1)]
                values += [ask(sql.READ_STATES, (*which, chunk)) for chunk in keys_of(wanted)]
                sent = ask(sql.READ_OUTBOX, which)
                pooled.connection.execute("COMMIT")
            row = _row_of(ref, found.fetchone())[1]
            check_token(ref, row, token)
            return Snapshot(
                row=row,
                states=read_states(ref, values),
                timers=tuple(_timer_of(ref, record) for cursor in due for record in cursor),
                outbox=tuple(outbox_of(ref, record) for record in sent),
            )

        return self._read(ref, read)

    def commit(self, ref: IntervalRef, *, token: int, version: int, changes: Changes) -> IntervalRow:
        """Write one step, all of it or nothing."""

        def decide(connection: psycopg.Connection[Any], interval: int, row: IntervalRow) -> IntervalRow:
            check_token(ref, row, token)
            check_version(ref, row, version)
            # Usually there are none, and no query is sent.
            unseen = sizes_of(connection, interval, unseen_names(row, changes))
            work = write_changes(connection, interval, changes)
            return after_commit(row, changes, oldest_work=work, unseen=unseen)

        return self._write(ref, decide, is_known_by_its_row=True)

    def delivered(self, ref: IntervalRef, *, token: int, ids: Iterable[int]) -> IntervalRow:
        """Delete published outbox rows."""
        gone = list(ids)

        def decide(connection: psycopg.Connection[Any], interval: int, row: IntervalRow) -> IntervalRow:
            check_token(ref, row, token)
            for (chunk,) in lists_of([(sent,) for sent in gone]):
                connection.execute(sql.DELETE_OUTBOX, (interval, chunk))
            return after_delivery(row, oldest_work=oldest_work(connection, interval))

        return self._write(ref, decide)

    def peek(self, ref: IntervalRef) -> IntervalRow:
        """The current row."""
        found = self._find(ref)
        check_birth(ref, None if found is None else found.birth)
        assert found is not None
        return found

    @contextmanager
    def view(self, ref: IntervalRef) -> Iterator[_View]:
        """A view: a read-only transaction on a snapshot, without locks."""
        with ExitStack() as until_read:
            moment = self._begin_look(ref, until_read)
            try:
                yield moment
            except psycopg.Error as error:
                raise self._translated(ref, error, committing=False) from error

    def scan(self, ref: IntervalRef, *, start: str, limit: int) -> tuple[ScannedState, ...]:
        """States from this key on."""
        with self.view(ref) as moment:
            return moment.states(start=start, limit=limit)

    def scan_timers(
        self, ref: IntervalRef, *, start: tuple[str, str], limit: int
    ) -> tuple[ScannedTimer, ...]:
        """Timers from this name on."""
        with self.view(ref) as moment:
            return moment.timers(start=start, limit=limit)

    def _begin_look(self, ref: IntervalRef, until_read: ExitStack) -> _View:
        """Begin a read; retries once on a new connection if the pooled one is broken."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                pooled = until_read.enter_context(self._links.take())
                if pooled.identity is None:
                    check_birth(ref, None)
                pooled.connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                found = _executor(pooled)(sql.READ_ROW, _which(ref)).fetchone()
                return _View(ref=ref, pooled=pooled, row=_row_of(ref, found)[1])
            except psycopg.OperationalError as error:
                until_read.close()
                self._after_failure(ref, error, is_last=attempt == _ATTEMPTS, committing=False)
            except psycopg.Error as error:
                raise self._translated(ref, error, committing=False) from error
        raise AssertionError("the last attempt returns or raises")

    def _find(self, ref: IntervalRef) -> IntervalRow | None:
        def read(pooled: PooledConnection) -> IntervalRow | None:
            found = _executor(pooled)(sql.READ_ROW, _which(ref)).fetchone()
            return None if found is None else _row_of(ref, found)[1]

        return self._read(ref, read, no_tables=lambda: None)

    def _read(
        self,
        ref: IntervalRef,
        read: Callable[[PooledConnection], Found],
        no_tables: Callable[[], Found] | None = None,
    ) -> Found:
        """Read; retries once on a new connection if the pooled one is broken."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with self._links.take() as pooled:
                    if pooled.identity is not None:
                        return read(pooled)
                break
            except psycopg.OperationalError as error:
                self._after_failure(ref, error, is_last=attempt == _ATTEMPTS, committing=False)
            except psycopg.Error as error:
                raise self._translated(ref, error, committing=False) from error
        if no_tables is None:
            check_birth(ref, None)
        assert no_tables is not None
        return no_tables()

    def _write(
        self,
        ref: IntervalRef,
        decide: _Decide,
        *,
        or_create: tuple[Any, ...] | None = None,
        is_known_by_its_row: bool = False,
    ) -> IntervalRow:
        """One transaction. If its end was not heard, the row tells whether it was written, or it is repeated:
        every write may be, since it decides on the row as it then is.
        """
        unsure: IntervalRow | None = None
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with self._links.take() as pooled:
                    new = self._write_once(ref, pooled, decide, or_create, unsure)
                self._point("committed")
                return new
            except _Lost as lost:
                is_open = lost.new is not None
                if is_known_by_its_row and is_open:
                    unsure = lost.new
                self._after_failure(ref, lost.error, is_last=attempt == _ATTEMPTS, committing=is_open)
            except psycopg.OperationalError as error:  # no connection could be opened
                self._after_failure(ref, error, is_last=attempt == _ATTEMPTS, committing=unsure is not None)
        raise AssertionError("the last attempt returns or raises")

    def _write_once(
        self,
        ref: IntervalRef,
        pooled: PooledConnection,
        decide: _Decide,
        or_create: tuple[Any, ...] | None,
        unsure: IntervalRow | None,
    ) -> IntervalRow:
        connection, new = pooled.connection, None
        try:
            if pooled.identity is None:
                if or_create is None:
                    check_birth(ref, None)
                self._links.make_tables(pooled)
            is_made, locked = _begin(connection, ref, or_create)
            self._point("begin")
            interval, row = _row_of(ref, locked)
            if unsure is not None and row == unsure:
                return row  # it was written; because we hold the lock, no other write is in progress
            decided = row if is_made else decide(connection, interval, row)
            self._point("commit")
            new = decided
            if new is row:
                connection.execute("COMMIT")
            else:
                values = (*record_of_row(new), interval)
                psycopg.ClientCursor(connection).execute(f"{sql.WRITE_ROW}; COMMIT", values)
            return new
        except psycopg.Error as error:
            if connection.closed or connection.broken:
                raise _Lost(error, new) from error
            raise self._translated(ref, error, committing=new is not None) from error

    def _after_failure(
        self, ref: IntervalRef, error: psycopg.Error, *, is_last: bool, committing: bool
    ) -> None:
        self._links.close_idle()
        if is_last:
            raise self._translated(ref, error, committing=committing) from error

    def _translated(self, ref: IntervalRef, error: psycopg.Error, *, committing: bool) -> Exception:
        text = f"interval {name_of(ref)}: {str(error).strip()}"
        found = translate_postgres(error, text, committing=committing)
        if isinstance(found, StoreUnavailable):
            found.fix = "look at the server; the step is repeated by itself, and nothing is done twice"
        return found

    def _point(self, name: str) -> None:
        if self._fault is not None:
            self._fault(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """A read transaction as an `IntervalView`."""

    ref: IntervalRef
    pooled: PooledConnection
    row: IntervalRow

    def states(self, *, start: str, limit: int) -> tuple[ScannedState, ...]:
        values = (*_which(self.ref), start.encode(), limit, PAGE_BYTES)
        found = _executor(self.pooled)(sql.SCAN_STATES, values).fetchall()
        return tuple(scanned_states(self.ref, ((text_of(key), value, crc) for key, value, crc in found)))

    def timers(self, *, start: tuple[str, str], limit: int) -> tuple[ScannedTimer, ...]:
        values = (*_which(self.ref), start[0].encode(), start[1].encode(), limit)
        found = _executor(self.pooled)(sql.SCAN_TIMERS, values).fetchall()
        named = ((text_of(key), text_of(tag), *rest) for key, tag, *rest in found)
        return tuple(scanned_timers(self.ref, named))


def _which(ref: IntervalRef) -> tuple[str, int, str]:
    return ref.job_birth, ref.partition, ref.birth


def _begin(
    connection: psycopg.Connection[Any], ref: IntervalRef, new: tuple[Any, ...] | None
) -> tuple[bool, tuple[Any, ...] | None]:
    """Begin with the interval's row locked: whether it was made now, and what it says.

    One text and not a pipeline, after which the server would not count a paused worker as idle.
    """
    begin = "BEGIN ISOLATION LEVEL READ COMMITTED"
    cursor = psycopg.ClientCursor(connection)
    if new is None:
        cursor.execute(f"{begin}; {sql.LOCK_ROW}", _which(ref))
    else:
        cursor.execute(f"{begin}; {sql.NEW_ROW}; {sql.LOCK_ROW}", (*new, *_which(ref)))
        cursor.nextset()
    is_made = new is not None and cursor.fetchone() is not None
    cursor.nextset()
    return is_made, cursor.fetchone()


def _executor(pooled: PooledConnection) -> Callable[[str, tuple[Any, ...]], _Cursor]:
    """Executes each statement in a new cursor, so that several can be pipelined; results are binary."""

    def ask(statement: str, values: tuple[Any, ...]) -> _Cursor:
        return pooled.connection.cursor(binary=True).execute(statement, values)

    return ask


def _row_of(ref: IntervalRef, found: tuple[Any, ...] | None) -> tuple[int, IntervalRow]:
    check_birth(ref, None if found is None else found[1])
    assert found is not None
    interval, *record = found
    return interval, row_of(ref, tuple(record))


def _timer_of(ref: IntervalRef, record: tuple[Any, ...]) -> TimerRow:
    key, tag, *others = record
    return timer_of(ref, (text_of(key), text_of(tag), *others))
