"""What only a row store behind a network can get wrong."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from penstock.core.errors import (
    CorruptData,
    EnvironmentProblem,
    Fenced,
    IntervalMissing,
    StoreUnavailable,
    VersionMoved,
)
from penstock.streams.bus.log import LOW_MAX, LOW_MIN
from penstock.streams.places import identify_rows
from penstock.streams.rows.postgres import PostgresRows
from penstock.streams.rows.row_store import Changes, IntervalRow, key_after
from tests.contracts.intervals import REF, a_timer, an_outbox_row, commit
from tests.core.test_postgres_store import cutting_proxy
from tests.waiting import LIMIT_S, join


@pytest.fixture
def place(postgres: Any) -> str:
    return str(postgres.new_database())


@pytest.fixture
def rows(place: str) -> PostgresRows:
    found = PostgresRows(place)
    found.create(REF, offsets={"in": 5}, low=LOW_MIN)
    return found


@pytest.fixture
def owned(rows: PostgresRows) -> IntervalRow:
    return rows.acquire(REF, generation=1, shard_epoch=1)


def tables_in(place: str) -> int:
    with psycopg.connect(place) as connection:
        found = connection.execute(
            "SELECT count(*) FROM pg_tables WHERE schemaname = 'penstock_rows'"
        ).fetchone()
    assert found is not None
    return int(found[0])


def test_opening_never_makes_tables(place: str) -> None:
    rows = PostgresRows(place)
    assert not rows.exists(REF)
    for call in (
        lambda: rows.acquire(REF, generation=1, shard_epoch=1),
        lambda: rows.peek(REF),
        lambda: rows.snapshot(REF, token=1, keys=(), timers_up_to=0),
    ):
        with pytest.raises(IntervalMissing):
            call()
    assert tables_in(place) == 0
    rows.create(REF, offsets={"in": 1}, low=0)
    assert PostgresRows(place).peek(REF).offsets == {"in": 1}


def test_tables_made_by_many_at_once_are_made_once(place: str) -> None:
    errors: list[Exception] = []

    def create(partition: int) -> None:
        try:
            PostgresRows(place).create(REF, offsets={f"in{partition}": 1}, low=0)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(error) for error in errors] == []
    assert PostgresRows(place).peek(REF).offsets == {f"in{number}": 1 for number in range(8)}


def test_rows_are_known_again_at_another_address(postgres: Any, rows: PostgresRows, place: str) -> None:
    assert identify_rows(place) == identify_rows(place + "&application_name=other")
    other = postgres.new_database()
    assert identify_rows(other, make=False) == "" and tables_in(other) == 0
    assert identify_rows(place) != identify_rows(other)


def test_a_store_that_was_pickled_sees_the_same_rows(rows: PostgresRows, owned: IntervalRow) -> None:
    assert pickle.loads(pickle.dumps(rows)).peek(REF) == owned


def _commit_in_child(rows: PostgresRows, row: IntervalRow) -> None:
    rows.commit(REF, token=row.token, version=row.version, changes=Changes(states={"child": b"1"}))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_opens_its_own_connection(rows: PostgresRows, owned: IntervalRow) -> None:
    child = multiprocessing.get_context("fork").Process(target=_commit_in_child, args=(rows, owned))
    child.start()
    child.join(LIMIT_S)
    assert child.exitcode == 0
    row = commit(rows, rows.peek(REF), states={"parent": b"2"})
    assert dict(rows.snapshot(REF, token=row.token, keys=["child", "parent"], timers_up_to=0).states) == {
        "child": b"1",
        "parent": b"2",
    }


def test_a_write_that_dies_before_its_commit_leaves_nothing(
    rows: PostgresRows, owned: IntervalRow, place: str
) -> None:
    class Died(BaseException):
        pass

    def die(point: str) -> None:
        if point == "commit":
            raise Died

    with pytest.raises(Died):
        commit(PostgresRows(place, fault=die), owned, states={"k": b"1"}, outbox=(an_outbox_row(),))
    stored = rows.snapshot(REF, token=owned.token, keys=["k"], timers_up_to=LOW_MAX)
    assert (stored.row, stored.states, stored.outbox) == (owned, {}, ())


@pytest.mark.parametrize(
    "damage",
    [
        r"UPDATE penstock_rows.outbox SET payload = '\x00'",
        "UPDATE penstock_rows.outbox SET first_seq = 9",
        r"UPDATE penstock_rows.states SET value = '\x00'",
        "UPDATE penstock_rows.states SET key = 'other'",
        r"UPDATE penstock_rows.timers SET tag = '\xff' WHERE wall = 0",
        "UPDATE penstock_rows.timers SET at_ms = 7",
        "UPDATE penstock_rows.timers SET wall = 1",
        "UPDATE penstock_rows.intervals SET token = 1, input_low = 5",
    ],
)
def test_a_damaged_row_is_found_by_its_checksum(
    rows: PostgresRows, owned: IntervalRow, place: str, damage: str
) -> None:
    timers = (a_timer(), a_timer(tag="wall", wall=True))
    commit(rows, owned, states={"k": b"1"}, timers_set=timers, outbox=(an_outbox_row(),))
    with psycopg.connect(place) as raw:
        raw.execute(damage)
    with pytest.raises(CorruptData, match="damaged"):
        rows.snapshot(REF, token=owned.token, keys=["k", "other"], timers_up_to=LOW_MAX, wall_up_to=LOW_MAX)


def test_rows_of_another_format_are_refused(rows: PostgresRows, place: str) -> None:
    with psycopg.connect(place) as raw:
        raw.execute("UPDATE penstock_rows.place SET format = 99")
    for call in (lambda: PostgresRows(place).peek(REF), lambda: identify_rows(place)):
        with pytest.raises(CorruptData, match="format"):
            call()


def test_numbers_of_any_size_and_large_states_go_through(rows: PostgresRows, owned: IntervalRow) -> None:
    """Arrays are cut by rows and by bytes; their numbers may be small and huge at once."""
    timers = (
        a_timer("a", at_ms=LOW_MIN, hold_ms=LOW_MIN),
        a_timer("b", at_ms=LOW_MAX),
        a_timer("c", at_ms=1),
    )
    states = {f"{number:02d}": bytes([number]) * 3_000_000 for number in range(8)}
    row = commit(rows, owned, states=states, timers_set=timers)
    stored = rows.snapshot(REF, token=row.token, keys=[*states, "none"], timers_up_to=LOW_MAX)
    assert dict(stored.states) == states
    assert stored.timers == (timers[0], timers[2], timers[1])
    row = commit(
        rows, row, states=dict.fromkeys(states), timers_deleted=tuple((t.key, t.tag) for t in timers)
    )
    stored = rows.snapshot(REF, token=row.token, keys=list(states), timers_up_to=LOW_MAX)
    assert (dict(stored.states), stored.timers) == ({}, ())


def test_a_snapshot_is_one_moment_while_another_writes(rows: PostgresRows, owned: IntervalRow) -> None:
    """Every step writes the same number everywhere: a torn read would show two."""
    ended = threading.Event()

    def write() -> None:
        row = owned
        for number in range(1, 150):
            row = commit(rows, row, input_low=number, states={"a": str(number).encode()},
                         timers_set=(a_timer("b", at_ms=number),))  # fmt: skip
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    looks = 0
    while not ended.is_set():
        stored = rows.snapshot(REF, token=owned.token, keys=["a"], timers_up_to=LOW_MAX)
        if stored.states:
            (timer,) = stored.timers
            assert stored.row.input_low == timer.at_ms == int(stored.states["a"])
            looks += 1
    thread.join()
    assert looks > 10


def test_twins_that_commit_at_once_commit_once(rows: PostgresRows, owned: IntervalRow) -> None:
    won, lost = [], []

    def twin(number: int) -> None:
        try:
            won.append(commit(rows, owned, states={"k": str(number).encode()}))
        except VersionMoved:
            lost.append(number)

    threads = [threading.Thread(target=twin, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 5)
    assert rows.peek(REF) == won[0]


def test_who_looks_is_told_of_damaged_rows_and_sees_the_others(
    rows: PostgresRows, owned: IntervalRow, place: str
) -> None:
    row = owned
    commit(rows, row, states={key: key.encode() for key in "abc"}, timers_set=(a_timer(), a_timer("l")))
    with psycopg.connect(place) as raw:
        raw.execute(r"UPDATE penstock_rows.states SET value = '\x00' WHERE key = 'b'")
        raw.execute("UPDATE penstock_rows.timers SET at_ms = 7 WHERE key = 'k'")
    found = rows.scan(REF, start="", limit=10)
    assert [(one.key, one.value) for one in found] == [("a", b"a"), ("b", None), ("c", b"c")]
    assert "'b'" in found[1].damage and "checksum" in found[1].damage
    timers = rows.scan_timers(REF, start=("", ""), limit=10)
    assert [(one.key, one.timer) for one in timers] == [("k", None), ("l", a_timer("l"))]
    assert "'k'" in timers[0].damage


def test_a_page_has_a_bounded_size_however_large_states_are(
    rows: PostgresRows, owned: IntervalRow, place: str
) -> None:
    row = owned
    commit(rows, row, states={f"{n:02d}": b"x" * 2_000_000 for n in range(8)})
    found, start = [], ""
    while page := rows.scan(REF, start=start, limit=1000):
        assert len(page) <= 3
        found += [one.key for one in page]
        start = key_after(page[-1].key)
    assert found == [f"{n:02d}" for n in range(8)]


# Pauses, lost connections, answers that never come.


@pytest.mark.parametrize("where", ["begin", "commit"])
def test_a_worker_paused_inside_its_transaction_does_not_lock_its_successor_out(
    rows: PostgresRows, owned: IntervalRow, place: str, where: str
) -> None:
    """The server ends the transaction of the paused one; when it wakes up it repeats it, and is fenced."""
    paused, wake, outcome = threading.Event(), threading.Event(), []

    def pause(point: str) -> None:
        if point == where and not paused.is_set():
            paused.set()
            wake.wait()

    zombie = PostgresRows(place, fault=pause)

    def work() -> None:
        try:
            outcome.append(commit(zombie, owned, states={"k": b"zombie"}))
        except Fenced as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    paused.wait()
    successor = rows.acquire(REF, generation=1, shard_epoch=2)
    assert thread.is_alive(), "the paused one holds nobody up, and is paused still"
    wake.set()
    thread.join()
    assert isinstance(outcome[0], Fenced)
    assert rows.snapshot(REF, token=successor.token, keys=["k"], timers_up_to=0).states == {}
    assert rows.peek(REF) == successor


def test_a_worker_paused_while_it_sends_does_not_lock_its_successor_out(
    rows: PostgresRows, owned: IntervalRow, place: str
) -> None:
    """Half of a large write is on its way, the rest never comes: the statement's own time limit ends it."""
    with cutting_proxy(place) as proxy:
        slow = PostgresRows(f"{proxy.url}?options=-c%20statement_timeout%3D3s")
        assert slow.peek(REF) == owned
        proxy.stall_at(b"x" * 1000)
        states = {"k": b"x" * 4_000_000}
        thread = threading.Thread(target=_ignoring, args=(lambda: commit(slow, owned, states=states),))
        thread.start()
        assert proxy.stalled.wait(LIMIT_S)
        successor = rows.acquire(REF, generation=1, shard_epoch=2)
        proxy.go_on()
        join(thread)
    assert rows.snapshot(REF, token=successor.token, keys=states, timers_up_to=0).states == {}


def _ignoring(call: Callable[[], object]) -> None:
    with pytest.raises((Fenced, StoreUnavailable)):
        call()


@pytest.mark.parametrize("where", ["cut_before", "cut_after"])
def test_a_commit_without_an_answer_is_written_once(
    rows: PostgresRows, owned: IntervalRow, place: str, where: str
) -> None:
    """Cut off before the server heard of it, or after: the row tells which, and the caller sees no difference."""
    with cutting_proxy(place) as proxy:
        far = PostgresRows(proxy.url)
        row = commit(far, owned, states={"k": b"1"}, outbox=(an_outbox_row(),), counters={"records": 1})
        getattr(proxy, where)(b"COMMIT\x00")
        row = commit(far, row, states={"k": b"2"}, outbox=(an_outbox_row(first=3),), counters={"records": 1})
    stored = rows.snapshot(REF, token=row.token, keys=["k"], timers_up_to=0)
    assert stored.row == row
    assert (row.version, dict(row.counters)) == (owned.version + 2, {"records": 2})
    assert dict(stored.states) == {"k": b"2"}
    assert [out.first_seq for out in stored.outbox] == [1, 3]


@pytest.mark.parametrize("where", ["cut_before", "cut_after"])
def test_an_acquire_without_an_answer_is_asked_again_under_a_token_of_its_own(
    rows: PostgresRows, owned: IntervalRow, place: str, where: str
) -> None:
    with cutting_proxy(place) as proxy:
        far = PostgresRows(proxy.url)
        assert far.peek(REF) == owned
        getattr(proxy, where)(b"COMMIT\x00")
        row = far.acquire(REF, generation=1, shard_epoch=1)
    assert row.token == owned.token + (2 if where == "cut_after" else 1)
    assert rows.peek(REF) == row


def test_a_commit_without_an_answer_is_fenced_if_another_came_meanwhile(
    rows: PostgresRows, owned: IntervalRow, place: str
) -> None:
    successor: list[IntervalRow] = []
    with cutting_proxy(place) as proxy:
        far = PostgresRows(proxy.url)
        assert far.peek(REF) == owned
        proxy.on_cut = lambda: successor.append(rows.acquire(REF, generation=1, shard_epoch=2))
        proxy.cut_before(b"COMMIT\x00")
        with pytest.raises(Fenced):
            commit(far, owned, states={"k": b"1"})
    stored = rows.snapshot(REF, token=successor[0].token, keys=["k"], timers_up_to=0)
    assert (stored.row, dict(stored.states)) == (successor[0], {})


def test_connections_that_died_with_the_server_are_replaced(
    postgres: Any, rows: PostgresRows, owned: IntervalRow, place: str
) -> None:
    name = psycopg.conninfo.conninfo_to_dict(place)["dbname"]
    for call in (lambda: rows.peek(REF), lambda: commit(rows, rows.peek(REF), states={"k": b"1"})):
        postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
        call()
    assert rows.peek(REF).version == owned.version + 1


def test_a_server_that_may_forget_is_refused(place: str) -> None:
    rows = PostgresRows(place + "&options=-csynchronous_commit%3Doff")
    for call in (lambda: rows.exists(REF), lambda: rows.create(REF, offsets={}, low=0)):
        with pytest.raises(EnvironmentProblem, match="may lose"):
            call()


@pytest.mark.parametrize("url", ["postgresql://u:secret@:not a port/x", "mysql://u:secret@host/x"])
def test_what_is_no_url_of_postgresql_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        PostgresRows(url)
    assert "secret" not in str(caught.value)


def test_a_server_that_is_not_there_is_named_without_its_password() -> None:
    rows = PostgresRows("postgresql://u:secret@127.0.0.1:1/x")
    for call in (lambda: rows.peek(REF), lambda: rows.acquire(REF, generation=1, shard_epoch=1)):
        with pytest.raises(StoreUnavailable) as caught:
            call()
        assert "secret" not in str(caught.value)
        assert REF.job in caught.value.why
