"""The row store on one host: one SQLite file per interval, one short transaction per write.

Every row carries a checksum: a damaged one is CorruptData, never a guess.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from penstock.core.clock import Millis
from penstock.core.disk import make_durable_folder
from penstock.core.errors import CorruptData, IntervalError, translate_sqlite
from penstock.streams.bus.log import LOW_MAX, LOW_MIN
from penstock.streams.rows.row_store import (
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

# Increased when the tables change. Older files are migrated when they are opened; newer ones are refused.
FORMAT = 2
BUSY_MS = 10_000
_OPEN_MAX = 32  # per thread; status pages read many intervals once

# A child must neither use nor close connections inherited through a fork, so they are referenced for ever.
_INHERITED: list[object] = []

_TIMER_INDEXES = (
    "CREATE INDEX timers_due ON timers (at_ms, key, tag) WHERE wall = 0",
    "CREATE INDEX timers_wall ON timers (at_ms, key, tag) WHERE wall = 1",
    "CREATE INDEX timers_hold ON timers (hold_ms) WHERE late = 0 AND wall = 0",
)
_FROM_1_TO_2 = (
    "ALTER TABLE timers ADD COLUMN wall INTEGER NOT NULL DEFAULT 0",
    "DROP INDEX timers_due",
    "DROP INDEX timers_hold",
    *_TIMER_INDEXES,
)

TABLES = (
    """CREATE TABLE interval (
        only INTEGER PRIMARY KEY CHECK (only = 1), birth TEXT NOT NULL, generation INTEGER NOT NULL,
        shard_epoch INTEGER NOT NULL, token INTEGER NOT NULL, version INTEGER NOT NULL, offsets TEXT NOT NULL,
        input_low INTEGER NOT NULL, output_low INTEGER NOT NULL, event_time_max TEXT NOT NULL,
        next_seq TEXT NOT NULL, intent TEXT NOT NULL, counters TEXT NOT NULL, crc INTEGER NOT NULL) STRICT""",
    """CREATE TABLE states (
        key TEXT PRIMARY KEY, value BLOB NOT NULL, crc INTEGER NOT NULL) STRICT, WITHOUT ROWID""",
    """CREATE TABLE timers (
        key TEXT NOT NULL, tag TEXT NOT NULL, at_ms INTEGER NOT NULL, hold_ms INTEGER NOT NULL,
        late INTEGER NOT NULL, crc INTEGER NOT NULL, wall INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (key, tag)) STRICT, WITHOUT ROWID""",
    *_TIMER_INDEXES,
    # AUTOINCREMENT: with a reused id a slow twin could mark the wrong row as delivered.
    """CREATE TABLE outbox (
        id INTEGER PRIMARY KEY AUTOINCREMENT, category TEXT NOT NULL, category_birth TEXT NOT NULL,
        partition INTEGER NOT NULL, first_seq INTEGER NOT NULL, count INTEGER NOT NULL,
        ts_min INTEGER NOT NULL, payload BLOB NOT NULL, crc INTEGER NOT NULL) STRICT""",
)


class SqliteFiles:
    """A cache of connections. Files are opened only by SQLite: any other open and close drops its locks."""

    def __init__(self) -> None:
        self._local = threading.local()

    def open(self, path: Path) -> sqlite3.Connection | None:
        """A connection of this process and thread; None if there is no complete file."""
        kept = self._kept()
        inode = _inode(path)
        found = kept.get(path)
        if found is not None:
            if found[0] == inode:
                kept.move_to_end(path)
                return found[1]
            self.discard(path)  # the file was removed or replaced
        connection = None if inode is None else self.open_apart(path)
        if connection is None or inode is None:
            return None
        kept[path] = (inode, connection)
        if len(kept) > _OPEN_MAX:
            kept.popitem(last=False)[1][1].close()
        return connection

    def open_apart(self, path: Path) -> sqlite3.Connection | None:
        """A connection for the caller alone, who closes it; None if there is no complete file."""
        if _inode(path) is None:
            return None
        connection = _connect(path, "rw")
        try:
            complete = format_of(connection) != 0
            if complete and format_of(connection) != FORMAT:
                connection.execute("BEGIN IMMEDIATE")
                migrate(connection)
                connection.execute("COMMIT")
        except (sqlite3.Error, CorruptData):
            connection.close()
            raise
        if not complete:
            connection.close()  # its creation was not committed
            return None
        return connection

    def discard(self, path: Path) -> None:
        """Close and drop the connection: after an error its state is unknown."""
        found = self._kept().pop(path, None)
        if found is not None:
            with suppress(sqlite3.Error):
                found[1].close()

    def _kept(self) -> OrderedDict[Path, tuple[int, sqlite3.Connection]]:
        if getattr(self._local, "pid", None) != os.getpid():
            _INHERITED.append(getattr(self._local, "kept", None))
            self._local.pid, self._local.kept = os.getpid(), OrderedDict()
        kept: OrderedDict[Path, tuple[int, sqlite3.Connection]] = self._local.kept
        return kept


@contextmanager
def creating(path: Path) -> Iterator[sqlite3.Connection]:
    """One transaction in which the file may be new: until it commits the file counts as absent."""
    try:
        make_durable_folder(path.parent)
        connection = _connect(path, "rwc")
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise translate_sqlite(error, f"{path.name}: {error}") from error


def format_of(connection: sqlite3.Connection) -> int:
    """The format of the file's tables; 0: none yet."""
    found: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return found


def migrate(connection: sqlite3.Connection) -> None:
    """Migrate the tables to this format, inside the caller's write transaction."""
    found = format_of(connection)
    if not 1 <= found <= FORMAT:
        raise CorruptData(
            "the rows of an interval have a format that this version does not know",
            why=f"its format is {found}, this version supports 1 to {FORMAT}",
            fix="use the version of Penstock that wrote it",
        )
    if found == 1:
        for statement in _FROM_1_TO_2:
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version={FORMAT}")


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    address = f"file:{quote(str(path.absolute()))}?mode={mode}"
    connection = sqlite3.connect(address, uri=True, isolation_level=None, timeout=BUSY_MS / 1000)
    try:
        journal = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        connection.execute("PRAGMA synchronous=FULL")
        assert journal == "wal" and connection.execute("PRAGMA synchronous").fetchone()[0] == 2, (
            "an acknowledged write must be on disk"
        )
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _inode(path: Path) -> int | None:
    # stat() opens nothing, so it drops no locks.
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


_KEYS_PER_READ = 500
_OF_KEYS = f"FROM states WHERE key IN ({','.join('?' * _KEYS_PER_READ)})"
_SIZE = "count(*), coalesce(sum(length(CAST(key AS BLOB)) + length(value)), 0)"

_WRITE_ROW = (
    "INSERT OR REPLACE INTO interval (only, birth, generation, shard_epoch, token, version, offsets, "
    "input_low, output_low, event_time_max, next_seq, intent, counters, crc) "
    "VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_READ_ROW = (
    "SELECT birth, generation, shard_epoch, token, version, offsets, input_low, output_low, event_time_max, "
    "next_seq, intent, counters, crc FROM interval"
)
_WRITE_STATE = (
    "INSERT INTO states (key, value, crc) VALUES (?, ?, ?) "
    "ON CONFLICT (key) DO UPDATE SET value = excluded.value, crc = excluded.crc"
)
# An unchanged timer is not written again.
_WRITE_TIMER = (
    "INSERT INTO timers (key, tag, at_ms, hold_ms, late, wall, crc) VALUES (?, ?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (key, tag) DO UPDATE "
    "SET at_ms = excluded.at_ms, hold_ms = excluded.hold_ms, late = excluded.late, wall = excluded.wall, "
    "crc = excluded.crc WHERE at_ms <> excluded.at_ms OR hold_ms <> excluded.hold_ms "
    "OR late <> excluded.late OR wall <> excluded.wall"
)
_WRITE_OUTBOX = (
    "INSERT INTO outbox (category, category_birth, partition, first_seq, count, ts_min, payload, crc) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)


class SqliteRows:
    """The `RowStore` protocol on SQLite files. May be pickled, forked and shared by threads.

    `fault(point)` is called at "begin", "commit" and "committed" of every write; tests raise or die there.
    """

    def __init__(self, folder: Path, *, fault: Callable[[str], None] | None = None) -> None:
        self._folder, self._fault, self._files = Path(folder), fault, SqliteFiles()

    def __reduce__(self) -> tuple[object, ...]:
        return SqliteRows, (self._folder,)

    def create(self, ref: IntervalRef, *, offsets: Mapping[str, int], low: Millis) -> None:
        """Create the interval, or add new inputs."""
        with creating(self._path(ref)) as connection:
            self._point("begin")
            if format_of(connection) == 0:
                for table in TABLES:
                    connection.execute(table)
                connection.execute(f"PRAGMA user_version={FORMAT}")
                _write_row(connection, new_row(ref, offsets, low))
            else:
                migrate(connection)
                row = _read_row(ref, connection)
                assert row is not None, "a file with tables has a row"
                _write_row(connection, after_repeated_create(ref, row, offsets), unless=row)
            self._point("commit")
        self._point("committed")

    def exists(self, ref: IntervalRef) -> bool:
        """True if there is one of this birth."""
        with self._translated(ref):
            connection = self._files.open(self._path(ref))
            row = None if connection is None else _read_row(ref, connection)
            return row is not None and row.birth == ref.birth

    def acquire(self, ref: IntervalRef, *, generation: int, shard_epoch: int) -> IntervalRow:
        """Take ownership under a new token."""
        with self._write(ref) as (connection, row):
            new = after_acquire(ref, row, generation=generation, shard_epoch=shard_epoch)
            if new.kept is None:
                new = replace(new, kept=_count(connection))
            _write_row(connection, new)
        return new

    def fence(self, ref: IntervalRef, *, generation: int) -> int:
        """Refuse every owner of a smaller generation."""
        with self._write(ref) as (connection, row):
            new = after_fence(row, generation=generation)
            _write_row(connection, new, unless=row)
        return new.token

    def snapshot(
        self,
        ref: IntervalRef,
        *,
        token: int,
        keys: Iterable[str],
        timers_up_to: Millis,
        wall_up_to: Millis = LOW_MIN,
    ) -> Snapshot:
        """One consistent read under the token."""
        with self._read(ref) as (connection, row):
            check_token(ref, row, token)
            timers = _read_timers(ref, connection, timers_up_to, wall_up_to)
            states = _read_states(ref, connection, {*keys, *(timer.key for timer in timers)})
            found = connection.execute(
                "SELECT id, category, category_birth, partition, first_seq, count, ts_min, payload, crc "
                "FROM outbox ORDER BY id"
            )
            outbox = tuple(outbox_of(ref, record) for record in found)
        return Snapshot(row=row, states=states, timers=timers, outbox=outbox)

    def commit(self, ref: IntervalRef, *, token: int, version: int, changes: Changes) -> IntervalRow:
        """Write one step, all of it or nothing."""
        with self._write(ref) as (connection, row):
            check_token(ref, row, token)
            check_version(ref, row, version)
            unseen = _sizes(connection, unseen_names(row, changes))
            _write_changes(connection, changes)
            new = after_commit(row, changes, oldest_work=_oldest_work(connection), unseen=unseen)
            _write_row(connection, new)
        return new

    def delivered(self, ref: IntervalRef, *, token: int, ids: Iterable[int]) -> IntervalRow:
        """Delete published outbox rows."""
        with self._write(ref) as (connection, row):
            check_token(ref, row, token)
            connection.executemany("DELETE FROM outbox WHERE id = ?", [(sent,) for sent in ids])
            new = after_delivery(row, oldest_work=_oldest_work(connection))
            _write_row(connection, new)
        return new

    def peek(self, ref: IntervalRef) -> IntervalRow:
        """The current row."""
        with self._read(ref) as (_connection, row):
            return row

    @contextmanager
    def view(self, ref: IntervalRef) -> Iterator[_View]:
        """A view: a read transaction on the WAL file, on its own connection; writers are not blocked."""
        with self._translated(ref):
            connection = self._files.open_apart(self._path(ref))
            if connection is None:
                check_birth(ref, None)
            assert connection is not None
            with closing(connection):
                connection.execute("BEGIN")
                row = _read_row(ref, connection)
                check_birth(ref, None if row is None else row.birth)
                assert row is not None
                yield _View(ref=ref, connection=connection, row=row)

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

    def _path(self, ref: IntervalRef) -> Path:
        if re.fullmatch(r"[A-Za-z0-9_-]+/[A-Za-z0-9_-]+", f"{ref.job_birth}/{ref.birth}") is None:
            raise IntervalError(
                f"job {ref.job!r} has no rows under the birth ids {ref.job_birth!r} and {ref.birth!r}",
                why="a birth id is letters and digits; it names a folder and must not leave its place",
                fix="use the birth id that the job store gave",
            )
        return self._folder / ref.job_birth / f"p{ref.partition:05d}-{ref.birth}.db"

    def _point(self, name: str) -> None:
        if self._fault is not None:
            self._fault(name)

    @contextmanager
    def _translated(self, ref: IntervalRef) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            self._files.discard(self._path(ref))
            raise translate_sqlite(error, f"interval {name_of(ref)}: {error}") from error

    @contextmanager
    def _transaction(self, ref: IntervalRef, begin: str) -> Iterator[tuple[sqlite3.Connection, IntervalRow]]:
        with self._translated(ref):
            connection = self._files.open(self._path(ref))
            if connection is None:
                check_birth(ref, None)
            assert connection is not None
            connection.execute(begin)
            try:
                row = _read_row(ref, connection)
                check_birth(ref, None if row is None else row.birth)
                assert row is not None
                yield connection, row
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    with suppress(sqlite3.Error):  # the original error is raised
                        connection.execute("ROLLBACK")

    def _read(self, ref: IntervalRef) -> AbstractContextManager[tuple[sqlite3.Connection, IntervalRow]]:
        return self._transaction(ref, "BEGIN")

    @contextmanager
    def _write(self, ref: IntervalRef) -> Iterator[tuple[sqlite3.Connection, IntervalRow]]:
        # IMMEDIATE takes the write lock before the row is read: with a plain BEGIN a zombie could commit.
        with self._transaction(ref, "BEGIN IMMEDIATE") as (connection, row):
            self._point("begin")
            yield connection, row
            self._point("commit")
        self._point("committed")


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """A read transaction as an `IntervalView`."""

    ref: IntervalRef
    connection: sqlite3.Connection
    row: IntervalRow

    def states(self, *, start: str, limit: int) -> tuple[ScannedState, ...]:
        with closing(self.connection.cursor()) as cursor:
            cursor.execute(
                "SELECT key, value, crc FROM states WHERE key >= ? ORDER BY key LIMIT ?", (start, limit)
            )
            return tuple(scanned_states(self.ref, cursor))

    def timers(self, *, start: tuple[str, str], limit: int) -> tuple[ScannedTimer, ...]:
        with closing(self.connection.cursor()) as cursor:
            cursor.execute(
                "SELECT key, tag, at_ms, hold_ms, late, wall, crc FROM timers "
                "WHERE (key, tag) >= (?, ?) ORDER BY key, tag LIMIT ?",
                (*start, limit),
            )
            return tuple(scanned_timers(self.ref, cursor))


def _read_row(ref: IntervalRef, connection: sqlite3.Connection) -> IntervalRow | None:
    record = connection.execute(_READ_ROW).fetchone()
    return None if record is None else row_of(ref, record)


def _write_row(
    connection: sqlite3.Connection, row: IntervalRow, *, unless: IntervalRow | None = None
) -> None:
    if row is not unless:
        connection.execute(_WRITE_ROW, record_of_row(row))


def _read_states(ref: IntervalRef, connection: sqlite3.Connection, keys: set[str]) -> dict[str, bytes]:
    states = {}
    for chunk in _chunks(keys):
        for key, value, crc in connection.execute(f"SELECT key, value, crc {_OF_KEYS}", chunk):
            states[key] = state_of(ref, key, value, crc)
    return states


def _sizes(connection: sqlite3.Connection, keys: Iterable[str]) -> StoredSize:
    """The size of these states."""
    found = [connection.execute(f"SELECT {_SIZE} {_OF_KEYS}", chunk).fetchone() for chunk in _chunks(keys)]
    return StoredSize(rows=sum(rows for rows, _ in found), bytes=sum(size for _, size in found))


def _count(connection: sqlite3.Connection) -> StoredSize:
    """The size of all states: reads the whole table."""
    rows, size = connection.execute(
        f"SELECT {_SIZE} FROM states WHERE key < ? OR key >= ?", (PREFIX, PREFIX_END)
    ).fetchone()
    return StoredSize(rows=rows, bytes=size)


def _chunks(keys: Iterable[str]) -> Iterator[list[str]]:
    wanted = sorted(keys)
    for first in range(0, len(wanted), _KEYS_PER_READ):
        chunk = wanted[first : first + _KEYS_PER_READ]
        yield chunk + chunk[-1:] * (_KEYS_PER_READ - len(chunk))  # one prepared statement for all chunks


def _read_timers(
    ref: IntervalRef, connection: sqlite3.Connection, timers_up_to: Millis, wall_up_to: Millis
) -> tuple[TimerRow, ...]:
    # One statement for each kind: each has an index of its own.
    return tuple(
        timer_of(ref, record)
        for wall, up_to in ((0, timers_up_to), (1, wall_up_to))
        for record in connection.execute(
            "SELECT key, tag, at_ms, hold_ms, late, wall, crc FROM timers "
            f"WHERE wall = {wall} AND at_ms <= ? ORDER BY at_ms, key, tag",
            (up_to,),
        )
    )


def _write_changes(connection: sqlite3.Connection, changes: Changes) -> None:
    kept = sorted((key, state) for key, state in changes.states.items() if state is not None)
    connection.executemany(_WRITE_STATE, [(key, state, state_crc(key, state)) for key, state in kept])
    gone = sorted((key,) for key, state in changes.states.items() if state is None)
    connection.executemany("DELETE FROM states WHERE key = ?", gone)
    connection.executemany("DELETE FROM timers WHERE key = ? AND tag = ?", sorted(changes.timers_deleted))
    connection.executemany(_WRITE_TIMER, sorted(map(record_of_timer, changes.timers_set)))
    connection.executemany(_WRITE_OUTBOX, map(record_of_outbox, changes.outbox))


def _oldest_work(connection: sqlite3.Connection) -> Millis:
    hold = connection.execute("SELECT min(hold_ms) FROM timers WHERE late = 0 AND wall = 0").fetchone()[0]
    production = connection.execute("SELECT min(ts_min) FROM outbox").fetchone()[0]
    return min(LOW_MAX if hold is None else hold, LOW_MAX if production is None else production)
