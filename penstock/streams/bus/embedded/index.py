"""The index of one category of the embedded log: what is visible, who is fenced, which marks there are.

All SQL of the embedded log is here. Functions that take a connection run inside the caller's transaction.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.core.clock import Millis
from penstock.core.disk import sync_folder
from penstock.core.errors import (
    CorruptData,
    DiskFull,
    EnvironmentProblem,
    StoreUnavailable,
    translate_sqlite,
)
from penstock.streams.bus import log as contract
from penstock.streams.bus.log import LOW_MIN, Category, CategorySpec, Mark, Seen

INDEX = "index.db"
BUSY_MS: Millis = 10_000  # how long anybody waits for others
_TURN_MS, _TURNS_MAX = 20, BUSY_MS // 20
_FORMAT = 3
_OLD_FORMATS = (1, 2)
_TABLES = """
CREATE TABLE category (one INTEGER PRIMARY KEY CHECK (one = 1), spec TEXT NOT NULL, birth TEXT NOT NULL,
    low INTEGER NOT NULL, marked_ms INTEGER);
CREATE TABLE partitions (partition INTEGER PRIMARY KEY, first INTEGER NOT NULL, next INTEGER NOT NULL);
CREATE TABLE segments (id INTEGER PRIMARY KEY AUTOINCREMENT, visible INTEGER NOT NULL, bytes INTEGER NOT NULL,
    payload BLOB, seen_ms INTEGER);
CREATE INDEX pending ON segments (id) WHERE visible = 0;
CREATE TABLE batches (partition INTEGER, first INTEGER, rows INTEGER NOT NULL, segment INTEGER NOT NULL,
    position INTEGER NOT NULL, length INTEGER NOT NULL, crc INTEGER NOT NULL, skip INTEGER NOT NULL,
    ts_min INTEGER NOT NULL, ts_max INTEGER NOT NULL, at_ms INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (partition, first)) WITHOUT ROWID;
CREATE TABLE producers (producer TEXT PRIMARY KEY, epoch INTEGER, low INTEGER) WITHOUT ROWID;
CREATE TABLE sequences (producer TEXT, partition INTEGER, last INTEGER NOT NULL, next INTEGER NOT NULL,
    PRIMARY KEY (producer, partition)) WITHOUT ROWID;
CREATE TABLE marks (partition INTEGER, low INTEGER, next INTEGER NOT NULL, marked_ms INTEGER NOT NULL,
    PRIMARY KEY (partition, low)) WITHOUT ROWID;
"""
# Of event-time categories: what is known of each partition, marks of idle ones, when records were
# appended; and of all categories the percentiles that somebody asked for.
_EVENT_TIME_TABLES = (
    "CREATE TABLE IF NOT EXISTS seen (partition INTEGER PRIMARY KEY, low INTEGER NOT NULL,"
    " next INTEGER NOT NULL, since_ms INTEGER NOT NULL, noted_ms INTEGER, follows INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS idle_marks (partition INTEGER, low INTEGER, next INTEGER NOT NULL,"
    " PRIMARY KEY (partition, low)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS appends (partition INTEGER, first INTEGER, at_ms INTEGER NOT NULL,"
    " PRIMARY KEY (partition, first)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS percentiles (percent INTEGER PRIMARY KEY, low INTEGER NOT NULL)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentEntry:
    """A visible run of records: offsets [first, first + rows) are the stored batch's rows from `skip` on."""

    partition: int
    first: int
    rows: int
    segment: int
    place: SegmentPlace
    skip: int
    payload: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Of a run: its smallest and largest event time, and when it was appended."""

    min: Millis
    max: Millis
    at_ms: Millis


class LogIndex:
    """One category's index file. Connections are pooled per process and never used across a fork."""

    def __init__(self, folder: Path, fault: Callable[[str], None]) -> None:
        self.folder, self._fault = folder, fault
        self._pool: tuple[int, list[sqlite3.Connection]] = (os.getpid(), [])
        # What came over a fork is kept and never touched: SQLite forbids even to close it here.
        self._inherited: list[list[sqlite3.Connection]] = []

    def close(self) -> None:
        """Close this process's idle connections; others are opened when needed."""
        idle = self._idle()
        while idle:
            idle.pop().close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Everything inside sees one state of the index."""
        with self._connection() as connection:
            connection.execute("BEGIN")
            yield connection
            connection.execute("COMMIT")

    @contextmanager
    def writing(self, effect: str) -> Iterator[sqlite3.Connection]:
        """Everything inside is written and on disk, or nothing is."""
        with self._connection() as connection:
            _begin(connection)
            yield connection
            self._fault(f"{effect}:before")
            connection.execute("COMMIT")
        self._fault(f"{effect}:after")

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        idle = self._idle()
        try:
            connection = idle.pop()  # atomic: no two threads get the same one
        except IndexError:
            connection = self._open()
        is_sound = True
        try:
            yield connection
        except sqlite3.Error as error:
            is_sound = False
            raise translate_sqlite(error, f"{self.folder.name}/{INDEX}: {error}") from error
        finally:
            if is_sound and connection.in_transaction:
                connection.execute("ROLLBACK")
            if is_sound:
                idle.append(connection)
            else:
                connection.close()  # rolls back what is open

    def _idle(self) -> list[sqlite3.Connection]:
        pid, idle = self._pool
        if pid != os.getpid():
            self._inherited.append(idle)
            idle = []
            self._pool = (os.getpid(), idle)
        return idle

    def _open(self) -> sqlite3.Connection:
        path = self.folder / INDEX
        if not path.exists():
            raise contract.missing(self.folder.name)
        try:
            return connect(path, create=False)
        except sqlite3.Error as error:
            raise translate_sqlite(error, f"{path}: {error}") from error


def _begin(connection: sqlite3.Connection) -> None:
    """Become the writer. SQLite itself asks more and more seldom, so of twenty who write all the time one may
    never get its turn; beginning to ask anew every few milliseconds all have the same chance.
    """
    connection.execute(f"PRAGMA busy_timeout={_TURN_MS}")
    try:
        for attempt in range(_TURNS_MAX):
            try:
                connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or attempt == _TURNS_MAX - 1:
                    raise
    finally:
        connection.execute(f"PRAGMA busy_timeout={BUSY_MS}")


def connect(path: Path, *, create: bool) -> sqlite3.Connection:
    """A connection whose commits are on disk when they return."""
    mode = "rwc" if create else "rw"
    # The pool hands a connection to one thread at a time, so SQLite's own check is not needed.
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_MS / 1000,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        (journal,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
        connection.execute("PRAGMA synchronous=FULL")
        (synchronous,) = connection.execute("PRAGMA synchronous").fetchone()
        assert (journal, synchronous) == ("wal", 2), "an acknowledged write must be on disk"
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def build(folder: Path, category: Category) -> None:
    """Write a new category's index; when it returns, the file stands alone and is on disk."""
    path = folder / INDEX
    connection = None
    try:
        connection = connect(path, create=True)
        more = "; ".join(_EVENT_TIME_TABLES)
        connection.executescript(f"BEGIN; {_TABLES} {more}; PRAGMA user_version={_FORMAT}; COMMIT;")
        connection.execute("BEGIN IMMEDIATE")
        spec = json.dumps(asdict(category.spec))
        connection.execute("INSERT INTO category VALUES (1, ?, ?, ?, NULL)", (spec, category.birth, LOW_MIN))
        partitions = ((partition,) for partition in range(category.spec.partitions))
        connection.executemany("INSERT INTO partitions VALUES (?, 0, 0)", partitions)
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise translate_sqlite(error, f"{path}: {error}") from error
    finally:
        if connection is not None:
            connection.close()


def upgrade(connection: sqlite3.Connection) -> None:
    """Bring an index of an older format to this one. What format 1 holds was appended at an unknown time:
    long ago.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 1:
        connection.execute("ALTER TABLE batches ADD COLUMN at_ms INTEGER NOT NULL DEFAULT 0")
    if version in _OLD_FORMATS:
        for table in _EVENT_TIME_TABLES:
            connection.execute(table)
        connection.execute("INSERT OR IGNORE INTO appends SELECT partition, first, at_ms FROM batches")
        connection.execute(f"PRAGMA user_version={_FORMAT}")


def is_old(connection: sqlite3.Connection) -> bool:
    """Whether the index has a format that can be brought to this one."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return version in _OLD_FORMATS


def load_category(connection: sqlite3.Connection) -> Category:
    """The category as it was created."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != _FORMAT:
        raise EnvironmentProblem(
            "the log was written by another version of Penstock",
            why=f"its index has format {version}, this version reads format {_FORMAT}",
            fix="run the version that wrote it, or use another folder",
        )
    found = connection.execute("SELECT spec, birth FROM category").fetchone()
    try:
        data = json.loads(found[0])
        data["columns"] = tuple((name, kind) for name, kind in data["columns"])
        return Category(spec=CategorySpec(**data), birth=found[1])
    except (TypeError, ValueError, KeyError) as error:
        raise CorruptData(
            "the index of a category is damaged",
            why=f"the category's spec in its index cannot be read: {error}",
            fix=f"restore its {INDEX} from a backup",
        ) from error


def load_ends(connection: sqlite3.Connection) -> tuple[int, ...]:
    """One past the last record of each partition."""
    return tuple(row[0] for row in connection.execute("SELECT next FROM partitions ORDER BY partition"))


def load_starts(connection: sqlite3.Connection) -> tuple[int, ...]:
    """The first existing offset of each partition."""
    return tuple(row[0] for row in connection.execute("SELECT first FROM partitions ORDER BY partition"))


def load_epoch(connection: sqlite3.Connection, producer: str) -> int | None:
    """The highest epoch seen of a producer."""
    row = connection.execute("SELECT epoch FROM producers WHERE producer = ?", (producer,)).fetchone()
    return None if row is None or row[0] is None else int(row[0])


def raise_epoch(connection: sqlite3.Connection, producer: str, epoch: int) -> None:
    """Store the highest epoch."""
    connection.execute(
        "INSERT INTO producers VALUES (?, ?, NULL)"
        " ON CONFLICT (producer) DO UPDATE SET epoch = excluded.epoch"
        " WHERE epoch IS NULL OR epoch < excluded.epoch",
        (producer, epoch),
    )


def load_sequences(connection: sqlite3.Connection, producer: str) -> dict[int, int]:
    """The dedup marks of a producer, per partition."""
    rows = connection.execute("SELECT partition, last FROM sequences WHERE producer = ?", (producer,))
    return {int(partition): int(last) for partition, last in rows}


def register_segment(connection: sqlite3.Connection, size: int) -> int:
    """Register a file before it is written; either the commit or the cleaner takes this row."""
    cursor = connection.execute("INSERT INTO segments (visible, bytes) VALUES (0, ?)", (size,))
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def insert_inline(connection: sqlite3.Connection, payload: bytes) -> int:
    """Store a small segment in the index itself."""
    cursor = connection.execute(
        "INSERT INTO segments (visible, bytes, payload) VALUES (1, ?, ?)", (len(payload), payload)
    )
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def show_segment(connection: sqlite3.Connection, segment: int) -> bool:
    """Make a written file visible; False if the cleaner has removed it."""
    return (
        connection.execute(
            "UPDATE segments SET visible = 1, seen_ms = NULL WHERE id = ? AND visible = 0", (segment,)
        ).rowcount
        == 1
    )


def drop_segment(connection: sqlite3.Connection, segment: int) -> bool:
    """Delete a pending file's row; False if it is visible or deleted already."""
    return connection.execute("DELETE FROM segments WHERE id = ? AND visible = 0", (segment,)).rowcount == 1


def append(
    connection: sqlite3.Connection, entry: SegmentEntry, *, times: Times, producer: str, last: int
) -> None:
    """Make one run visible and raise the dedup mark. Requires: `entry.first` is the end offset."""
    place = entry.place
    connection.execute(
        "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(entry.partition, entry.first, entry.rows, entry.segment),
            *(place.position, place.length, place.crc, entry.skip, times.min, times.max, times.at_ms),
        ),
    )
    following = entry.first + entry.rows
    connection.execute("UPDATE partitions SET next = ? WHERE partition = ?", (following, entry.partition))
    # To the second; unchanged by compaction, because decisions depend on it.
    connection.execute(
        "INSERT INTO appends SELECT :p, :first, :at_ms WHERE NOT EXISTS (SELECT 1 FROM"
        " (SELECT at_ms FROM appends WHERE partition = :p ORDER BY first DESC LIMIT 1)"
        " WHERE :at_ms BETWEEN at_ms AND at_ms + 999)",
        {"p": entry.partition, "first": entry.first, "at_ms": times.at_ms},
    )
    connection.execute(
        "INSERT OR REPLACE INTO sequences VALUES (?, ?, ?, ?)", (producer, entry.partition, last, following)
    )


def load_entries(connection: sqlite3.Connection, partition: int, start: int, end: int) -> list[SegmentEntry]:
    """The runs with offsets in [start, end), in order."""
    rows = connection.execute(
        "SELECT b.first, b.rows, b.segment, b.position, b.length, b.crc, b.skip, s.payload"
        " FROM batches b JOIN segments s ON s.id = b.segment"
        " WHERE b.partition = :partition AND b.first < :end"
        " AND b.first >= (SELECT max(first) FROM batches WHERE partition = :partition AND first <= :start)"
        " ORDER BY b.first",
        {"partition": partition, "start": start, "end": end},
    )
    return [entry_of(partition, *row) for row in rows]


def entry_of(
    partition: int,
    first: int,
    rows: int,
    segment: int,
    position: int,
    length: int,
    crc: int,
    skip: int,
    payload: bytes | None,
) -> SegmentEntry:
    """A run from the columns of its row, and the bytes of its segment if they are in the index."""
    return SegmentEntry(
        partition=partition,
        first=first,
        rows=rows,
        segment=segment,
        place=SegmentPlace(position=position, length=length, crc=crc),
        skip=skip,
        payload=payload,
    )


def load_lows(connection: sqlite3.Connection) -> dict[str, Millis]:
    """Registered producers and their output lows."""
    return dict(connection.execute("SELECT producer, low FROM producers WHERE low IS NOT NULL"))


def load_watermark(connection: sqlite3.Connection) -> tuple[Millis, Millis | None]:
    """W of the last mark, and when it was made."""
    low, marked_ms = connection.execute("SELECT low, marked_ms FROM category").fetchone()
    return low, marked_ms


def set_low(connection: sqlite3.Connection, producer: str, low: Millis | None) -> None:
    """Set a producer's output low; None unregisters it, but keeps its epoch."""
    connection.execute(
        "INSERT INTO producers VALUES (?, NULL, ?) ON CONFLICT (producer) DO UPDATE SET low = excluded.low",
        (producer, low),
    )


def append_mark(connection: sqlite3.Connection, low: Millis, now_ms: Millis) -> None:
    """Append a mark (W, end offsets), with the ends of this transaction."""
    connection.execute("UPDATE category SET low = ?, marked_ms = ?", (low, now_ms))
    connection.execute("INSERT INTO marks SELECT partition, ?, next, ? FROM partitions", (low, now_ms))


def load_pending(connection: sqlite3.Connection) -> dict[int, Millis | None]:
    """Registered files that are not visible yet, and when the cleaner first saw each."""
    return dict(connection.execute("SELECT id, seen_ms FROM segments WHERE visible = 0"))


def see_pending(connection: sqlite3.Connection, now_ms: Millis) -> None:
    """Start the clock of pending files that the cleaner sees for the first time since the machine's start."""
    connection.execute(
        "UPDATE segments SET seen_ms = :now WHERE visible = 0 AND (seen_ms IS NULL OR seen_ms > :now)",
        {"now": now_ms},
    )


def known_segments(connection: sqlite3.Connection, segments: Iterable[int]) -> Mapping[int, bool]:
    """Which of these segments have a row, and whether they are visible."""
    found = {}
    for segment in segments:
        row = connection.execute("SELECT visible FROM segments WHERE id = ?", (segment,)).fetchone()
        if row is not None:
            found[segment] = bool(row[0])
    return found


SUFFIX = ".arrow"


_STREAM_END = pa.py_buffer(b"\xff\xff\xff\xff\x00\x00\x00\x00")


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPlace:
    """Position and length of one batch's message in its segment, and the CRC-32 of its bytes."""

    position: int
    length: int
    crc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A segment before it is written: its bytes, and the place of each partition's batch."""

    buffers: tuple[pa.Buffer, ...]
    places: Mapping[int, SegmentPlace]
    bytes: int


def encode(schema: pa.Schema, batches: Mapping[int, pa.RecordBatch]) -> Encoded:
    """One message per partition, between a schema and an end marker, so that any Arrow tool reads it."""
    head = schema.serialize()
    buffers, places, position = [head], {}, head.size
    for partition, batch in batches.items():
        message = batch.serialize()
        places[partition] = SegmentPlace(position=position, length=message.size, crc=zlib.crc32(message))
        buffers.append(message)
        position += message.size
    return Encoded(buffers=(*buffers, _STREAM_END), places=places, bytes=position + _STREAM_END.size)


def segment_path(folder: Path, segment: int) -> Path:
    """The path of a segment; ids are never reused, so the name identifies it."""
    return folder / f"{segment:012d}{SUFFIX}"


def write_segment(path: Path, encoded: Encoded, fault: Callable[[str], None]) -> None:
    """Durable when it returns: the bytes and the name. After a failure there is no file."""
    with translated(path):
        try:
            fault("write:before")
            with path.open("xb") as file:
                for buffer in encoded.buffers:
                    file.write(buffer)
                file.flush()
                fault("write:after")
                os.fsync(file.fileno())
            sync_folder(path.parent)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        fault("sync:after")


def read_batch(schema: pa.Schema, place: SegmentPlace, *, path: Path, inline: bytes | None) -> pa.RecordBatch:
    """Read the batch at a place and check its checksum; files are memory-mapped."""
    where = str(path) if inline is None else f"{path.parent.name}/index.db segment {path.stem}"
    message = (
        _map(path, place) if inline is None else pa.py_buffer(inline).slice(place.position, place.length)
    )
    if message.size != place.length or zlib.crc32(message) != place.crc:
        raise _damaged(
            where, f"the {place.length} bytes at {place.position} do not have checksum {place.crc:08x}"
        )
    try:
        return pa.ipc.read_record_batch(pa.ipc.read_message(message), schema)
    except pa.ArrowInvalid as error:
        raise _damaged(where, f"its bytes are as they were written, but no record batch: {error}") from error


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Translate errors of the file system into PenstockErrors."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"the disk is full: {path.name} could not be written",
                why=str(error),
                fix="free some space and repeat the publish; nothing was written",
            ) from error
        raise StoreUnavailable(
            f"{path} could not be read or written",
            why=str(error),
            fix="check the disk and the folder's permissions, then try again",
        ) from error


def _map(path: Path, place: SegmentPlace) -> pa.Buffer:
    with translated(path):
        try:
            bytes_there = path.stat().st_size
        except FileNotFoundError as error:
            raise _damaged(str(path), "the file is gone") from error
        if bytes_there < place.position + place.length:
            raise _damaged(str(path), f"the file was cut off at {bytes_there} bytes")
        with pa.memory_map(str(path), "r") as mapped:
            mapped.seek(place.position)
            return mapped.read_buffer(place.length)


def _damaged(where: str, why: str) -> CorruptData:
    return CorruptData(
        f"segment {where} is damaged",
        why=why,
        fix="restore it from a backup and restart the task; nothing was skipped or guessed",
    )


def load_marks(
    connection: sqlite3.Connection, partition: int, *, above: Millis, up_to: int
) -> tuple[Mark, ...]:
    """Marks of one partition, by low."""
    found = [*_marks(connection, "marks", partition, above, up_to)]
    idle = [*_marks(connection, "idle_marks", partition, above, up_to)]
    return tuple(sorted([*found, *idle], key=lambda mark: mark.low) if idle else found)


def _marks(
    connection: sqlite3.Connection, table: str, partition: int, above: Millis, up_to: int
) -> Iterator[Mark]:
    """Ends ascend with lows, so the search stops at the first end beyond `up_to`."""
    rows = connection.execute(
        f"SELECT low, next FROM {table} WHERE partition = ? AND low > ? ORDER BY low", (partition, above)
    )
    for low, following in rows:
        if following > up_to:
            return
        yield Mark(low=low, end=following, idle=table == "idle_marks")


def load_seen(connection: sqlite3.Connection, spec: CategorySpec) -> tuple[Seen, ...]:
    """The recorded progress of each partition."""
    rows = connection.execute("SELECT partition, low, next, since_ms, noted_ms, follows FROM seen")
    found = {
        partition: Seen(low=low, end=end, since_ms=since_ms, noted_ms=noted_ms, follows=follows)
        for partition, low, end, since_ms, noted_ms, follows in rows
    }
    return tuple(found.get(partition, Seen()) for partition in range(spec.partitions))


def note_seen(connection: sqlite3.Connection, noted: Mapping[int, Seen], marks: Mapping[int, Millis]) -> None:
    """Note partitions, and append the idle marks that are due, at the ends as they are in this
    transaction.
    """
    connection.executemany(
        "INSERT OR REPLACE INTO seen VALUES (?, ?, ?, ?, ?, ?)",
        (
            (partition, one.low, one.end, one.since_ms, one.noted_ms, one.follows)
            for partition, one in noted.items()
        ),
    )
    connection.executemany(
        "INSERT INTO idle_marks SELECT partition, ?, next FROM partitions WHERE partition = ?",
        ((low, partition) for partition, low in marks.items()),
    )


def load_appends(
    connection: sqlite3.Connection, partition: int, start: int, end: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Append times of [start, end): from which offset on each applies."""
    rows = connection.execute(
        "SELECT first, at_ms FROM appends WHERE partition = :p AND first < :end AND first >= coalesce("
        "(SELECT max(first) FROM appends WHERE partition = :p AND first <= :start), 0) ORDER BY first",
        {"p": partition, "start": start, "end": end},
    ).fetchall()
    found = np.array(rows or [(0, 0)], dtype=np.int64)
    return found[:, 0], found[:, 1]


def forget_passed(connection: sqlite3.Connection, partition: int, before: int) -> None:
    """Delete marks and times below an offset, except the last one, which has W at the start."""
    where = {"partition": partition, "before": before}
    for table in ("marks", "idle_marks"):
        connection.execute(
            f"DELETE FROM {table} WHERE partition = :partition AND low <"
            f" (SELECT max(low) FROM {table} WHERE partition = :partition AND next <= :before)",
            where,
        )
    connection.execute(
        "DELETE FROM appends WHERE partition = :partition AND first <"
        " (SELECT max(first) FROM appends WHERE partition = :partition AND first <= :before)",
        where,
    )


def load_percentile(connection: sqlite3.Connection, percent: int) -> Millis:
    """The stored low of a percentile."""
    row = connection.execute("SELECT low FROM percentiles WHERE percent = ?", (percent,)).fetchone()
    return LOW_MIN if row is None else int(row[0])


def keep_percentile(connection: sqlite3.Connection, percent: int, low: Millis) -> None:
    """Store the low of a percentile."""
    connection.execute("INSERT OR REPLACE INTO percentiles VALUES (?, ?)", (percent, low))
