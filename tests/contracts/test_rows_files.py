"""What only a row store of files can get wrong."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.core.errors import CorruptData, DiskFull, IntervalError, IntervalMissing
from penstock.streams.bus.log import LOW_MAX, LOW_MIN
from penstock.streams.rows.row_store import Changes, IntervalRow, key_after
from penstock.streams.rows.sqlite import TABLES, SqliteRows
from tests.contracts.intervals import REF, a_timer, an_outbox_row, commit
from tests.waiting import LIMIT_S


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "rows"


@pytest.fixture
def files(folder: Path) -> SqliteRows:
    rows = SqliteRows(folder)
    rows.create(REF, offsets={"in": 5}, low=LOW_MIN)
    return rows


def _file(folder: Path) -> Path:
    return folder / "j1" / "p00003-i1.db"


def test_opening_never_creates_a_file(folder: Path) -> None:
    rows = SqliteRows(folder)
    assert not rows.exists(REF)
    with pytest.raises(IntervalMissing):
        rows.acquire(REF, generation=1, shard_epoch=1)
    assert not folder.exists()


@pytest.mark.parametrize("point", ["begin", "commit"])
def test_a_creation_that_was_cut_off_counts_as_absent_and_can_be_repeated(folder: Path, point: str) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from penstock.streams.rows.row_store import IntervalRef\n"
        "from penstock.streams.rows.sqlite import SqliteRows\n"
        "die = lambda at: os.kill(os.getpid(), signal.SIGKILL) if at == sys.argv[2] else None\n"
        "ref = IntervalRef(job='z.count', job_birth='j1', partition=3, birth='i1')\n"
        "SqliteRows(Path(sys.argv[1]), fault=die).create(ref, offsets={'in': 1}, low=0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder), point], check=False)
    assert done.returncode == -9
    rows = SqliteRows(folder)
    assert _file(folder).exists()
    assert not rows.exists(REF)
    with pytest.raises(IntervalMissing):
        rows.peek(REF)
    rows.create(REF, offsets={"in": 5}, low=LOW_MIN)
    assert rows.peek(REF).offsets == {"in": 5}


def test_a_store_that_was_pickled_sees_the_same_rows(files: SqliteRows) -> None:
    row = files.acquire(REF, generation=1, shard_epoch=1)
    assert pickle.loads(pickle.dumps(files)).peek(REF) == row


def _commit_in_child(rows: SqliteRows, row: IntervalRow) -> None:
    rows.commit(REF, token=row.token, version=row.version, changes=Changes(states={"child": b"1"}))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_opens_its_own_connection(files: SqliteRows) -> None:
    row = files.acquire(REF, generation=1, shard_epoch=1)  # the parent's connection is open now
    child = multiprocessing.get_context("fork").Process(target=_commit_in_child, args=(files, row))
    child.start()
    child.join(LIMIT_S)
    assert child.exitcode == 0
    row = commit(files, files.peek(REF), states={"parent": b"2"})
    assert dict(files.snapshot(REF, token=row.token, keys=["child", "parent"], timers_up_to=0).states) == {
        "child": b"1",
        "parent": b"2",
    }


def test_a_write_that_dies_before_its_commit_leaves_nothing(files: SqliteRows, folder: Path) -> None:
    row = files.acquire(REF, generation=1, shard_epoch=1)

    class Died(BaseException):
        pass

    def die(point: str) -> None:
        if point == "commit":
            raise Died

    with pytest.raises(Died):
        commit(SqliteRows(folder, fault=die), row, states={"k": b"1"}, outbox=(an_outbox_row(),))
    stored = files.snapshot(REF, token=row.token, keys=["k"], timers_up_to=LOW_MAX)
    assert (stored.row, stored.states, stored.outbox) == (row, {}, ())


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE outbox SET payload = x'00'",
        "UPDATE outbox SET first_seq = 9",
        "UPDATE states SET value = x'00'",
        "UPDATE states SET key = 'other'",
        "UPDATE timers SET at_ms = 7",
        "UPDATE timers SET wall = 1",
        "UPDATE timers SET wall = 0, at_ms = 1000 WHERE tag = 'wall'",
        "UPDATE interval SET token = 1, input_low = 5",
    ],
)
def test_a_damaged_row_is_found_by_its_checksum(files: SqliteRows, folder: Path, damage: str) -> None:
    row = files.acquire(REF, generation=1, shard_epoch=1)
    timers = (a_timer(), a_timer(tag="wall", wall=True))
    commit(files, row, states={"k": b"1"}, timers_set=timers, outbox=(an_outbox_row(),))
    raw = sqlite3.connect(_file(folder))
    raw.execute(damage)
    raw.commit()
    raw.close()
    with pytest.raises(CorruptData, match="damaged"):
        files.snapshot(REF, token=row.token, keys=["k", "other"], timers_up_to=LOW_MAX, wall_up_to=LOW_MAX)


def test_a_full_disk_is_named_and_nothing_is_half_written(files: SqliteRows) -> None:
    row = files.acquire(REF, generation=1, shard_epoch=1)
    connection = files._files.open(_file(files._folder))
    assert connection is not None
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(DiskFull):
        commit(files, row, states={f"key {n}": os.urandom(500) for n in range(1000)})
    assert files.peek(REF) == row
    assert commit(files, row, states={"k": b"1"}).version == row.version + 1


def test_a_birth_id_cannot_leave_the_folder(files: SqliteRows) -> None:
    with pytest.raises(IntervalError, match="birth id"):
        files.create(replace(REF, job_birth="../outside"), offsets={}, low=0)


def test_a_file_that_was_replaced_is_opened_anew(files: SqliteRows, folder: Path) -> None:
    """A kept connection to a removed file would write into nothing."""
    files.acquire(REF, generation=1, shard_epoch=1)
    (folder / "j1").rename(folder / "gone")
    with pytest.raises(IntervalMissing):
        files.peek(REF)
    files.create(REF, offsets={"in": 8}, low=0)
    assert files.peek(REF).offsets == {"in": 8}


FIRST_FORMAT = (
    "DROP INDEX timers_due",
    "DROP INDEX timers_wall",
    "DROP INDEX timers_hold",
    "ALTER TABLE timers DROP COLUMN wall",
    "CREATE INDEX timers_due ON timers (at_ms, key, tag)",
    "CREATE INDEX timers_hold ON timers (hold_ms) WHERE late = 0",
    "PRAGMA user_version = 1",
)


@pytest.fixture
def first_format(files: SqliteRows, folder: Path) -> tuple[Path, IntervalRow]:
    """A file as the first version wrote it."""
    row = files.acquire(REF, generation=1, shard_epoch=1)
    row = commit(files, row, states={"k": b"1"}, timers_set=(a_timer(), a_timer("l", late=True)))
    raw = sqlite3.connect(_file(folder))
    for statement in FIRST_FORMAT:
        raw.execute(statement)
    raw.commit()
    raw.close()
    return folder, row


@pytest.mark.parametrize("first", ["open", "create"])
def test_a_file_of_the_first_format_opens_with_all_it_had(
    first_format: tuple[Path, IntervalRow], first: str
) -> None:
    folder, row = first_format
    rows = SqliteRows(folder)
    if first == "create":
        rows.create(REF, offsets={"in": 5}, low=LOW_MIN)
    stored = rows.snapshot(REF, token=row.token, keys=["k"], timers_up_to=LOW_MAX)
    assert (stored.row, dict(stored.states)) == (row, {"k": b"1"})
    assert stored.timers == (a_timer(), a_timer("l", late=True))
    row = commit(rows, row, timers_set=(a_timer(tag="w", wall=True),))
    again = SqliteRows(folder).snapshot(
        REF, token=row.token, keys=(), timers_up_to=LOW_MIN, wall_up_to=LOW_MAX
    )
    assert again.timers == (a_timer(tag="w", wall=True),)
    raw = sqlite3.connect(_file(folder))
    made = raw.execute("SELECT sql FROM sqlite_schema WHERE name LIKE 'timers_%' ORDER BY name").fetchall()
    assert [index for (index,) in made] == [sql for sql in sorted(TABLES) if sql.startswith("CREATE INDEX")]
    raw.close()


def test_a_file_whose_new_format_was_cut_off_is_still_of_the_first(
    first_format: tuple[Path, IntervalRow],
) -> None:
    """Killed between the statements: the next one to open it does all of it."""
    folder, row = first_format
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from penstock.streams.rows import sqlite\n"
        "path, kill = Path(sys.argv[1]), f'PRAGMA user_version={sqlite.FORMAT}'\n"
        "connection = sqlite._connect(path, 'rw')\n"
        "die = lambda said: os.kill(os.getpid(), signal.SIGKILL) if said == kill else None\n"
        "connection.set_trace_callback(die)\n"
        "connection.execute('BEGIN IMMEDIATE')\n"
        "sqlite.migrate(connection)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(_file(folder))], check=False)
    assert done.returncode == -9
    stored = SqliteRows(folder).snapshot(REF, token=row.token, keys=["k"], timers_up_to=LOW_MAX)
    assert (stored.row, stored.timers) == (row, (a_timer(), a_timer("l", late=True)))


def test_a_file_of_a_later_format_is_refused(files: SqliteRows, folder: Path) -> None:
    raw = sqlite3.connect(_file(folder))
    raw.execute("PRAGMA user_version = 99")
    raw.close()
    for call in (
        lambda: SqliteRows(folder).peek(REF),
        lambda: SqliteRows(folder).create(REF, offsets={}, low=0),
    ):
        with pytest.raises(CorruptData, match="format"):
            call()


def test_who_looks_is_told_of_damaged_rows_and_sees_the_others(files: SqliteRows, folder: Path) -> None:
    row, rows = files.acquire(REF, generation=1, shard_epoch=1), files
    commit(rows, row, states={key: key.encode() for key in "abc"}, timers_set=(a_timer(), a_timer("l")))
    raw = sqlite3.connect(_file(folder))
    raw.execute("UPDATE states SET value = x'00' WHERE key = 'b'")
    raw.execute("UPDATE timers SET at_ms = 7 WHERE key = 'k'")
    raw.commit()
    raw.close()
    found = rows.scan(REF, start="", limit=10)
    assert [(one.key, one.value) for one in found] == [("a", b"a"), ("b", None), ("c", b"c")]
    assert "'b'" in found[1].damage and "checksum" in found[1].damage
    timers = rows.scan_timers(REF, start=("", ""), limit=10)
    assert [(one.key, one.timer) for one in timers] == [("k", None), ("l", a_timer("l"))]
    assert "'k'" in timers[0].damage


def test_a_page_has_a_bounded_size_however_large_states_are(files: SqliteRows, folder: Path) -> None:
    row, rows = files.acquire(REF, generation=1, shard_epoch=1), files
    commit(rows, row, states={f"{n:02d}": b"x" * 2_000_000 for n in range(8)})
    found, start = [], ""
    while page := rows.scan(REF, start=start, limit=1000):
        assert len(page) <= 3
        found += [one.key for one in page]
        start = key_after(page[-1].key)
    assert found == [f"{n:02d}" for n in range(8)]
