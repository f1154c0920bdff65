"""PostgreSQL under the control plane: refused when it could forget, one writer at a time, open outcomes named."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psycopg
import pytest
import sqlalchemy as sa

from penstock.core.errors import DiskFull, EnvironmentProblem, OutcomeUnknown, StoreUnavailable
from penstock.db.database import Database, current_value, next_value
from penstock.db.server_checks import MUST_BE_ON, translate_postgres
from tests.postgres import PostgresServer, postgres_server
from tests.waiting import LIMIT_S, until


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server that may be badly treated, without all the databases of other tests."""
    with postgres_server() as server:
        yield server


def value_of(database: Database) -> int:
    with database.reading() as connection:
        return current_value(connection, "a")


def advance(database: Database) -> int:
    with database.transaction() as connection:
        return next_value(connection, "a")


@contextmanager
def setting(postgres, name: str, value: str) -> Iterator[None]:
    """Change a setting of the whole server for a while."""
    postgres.execute(f"ALTER SYSTEM SET {name} = {value}")
    postgres.execute("SELECT pg_reload_conf()")
    try:
        yield
    finally:
        postgres.execute(f"ALTER SYSTEM RESET {name}")
        postgres.execute("SELECT pg_reload_conf()")


def wait_for_setting(url: str, name: str, value: str) -> None:
    """A reload reaches the server's processes a moment later."""

    def is_so() -> bool:
        with psycopg.connect(url) as connection:
            return connection.execute(f"SHOW {name}").fetchone()[0] == value

    until(is_so, f"{name} to become {value}")


@pytest.mark.parametrize("name", MUST_BE_ON)
def test_a_server_that_could_forget_is_refused(own_server, name):
    url = own_server.new_database()
    with setting(own_server, name, "off"):
        wait_for_setting(url, name, "off")
        with pytest.raises(EnvironmentProblem) as caught:
            Database(url)
        assert f"{name} is off" in caught.value.why and caught.value.fix
    wait_for_setting(url, name, "on")
    Database(url).close()


def test_a_role_that_switched_it_off_for_itself_is_refused(postgres):
    url = postgres.new_database()
    with pytest.raises(EnvironmentProblem, match="may lose"):
        Database(url + "&options=-csynchronous_commit%3Doff")


@pytest.mark.parametrize(
    "url", ["mysql://host/x", "postgres", "http://u:secret@host/", "postgresql://u:secret@:not a port/x"]
)
def test_what_is_no_url_of_postgresql_is_refused_without_showing_it(url):
    with pytest.raises(EnvironmentProblem) as caught:
        Database(url)
    assert "secret" not in str(caught.value)


def test_a_server_that_is_not_there_is_named_without_its_password():
    with pytest.raises(StoreUnavailable) as caught:
        Database("postgresql://u:secret@127.0.0.1:1/x")
    assert "secret" not in str(caught.value)


def test_a_writer_waits_for_the_other_and_a_reader_for_nobody(postgres):
    url = postgres.new_database()
    one, two = Database(url), Database(url)
    entered, done = threading.Event(), []

    def write() -> None:
        entered.set()
        done.append(advance(two))

    with one.transaction() as connection:
        assert next_value(connection, "a") == 1
        thread = threading.Thread(target=write)
        thread.start()
        entered.wait()
        assert value_of(two) == 0
        assert done == []
    thread.join()
    assert done == [2]
    one.close()
    two.close()


def test_a_read_sees_one_moment(postgres):
    database = Database(postgres.new_database())
    with database.reading() as connection:
        before = current_value(connection, "a")
        advance(database)
        assert current_value(connection, "a") == before
    assert value_of(database) == 1
    database.close()


def test_a_read_may_not_write(place):
    database = Database(place) if place is not None else None
    if database is None:
        pytest.skip("memory has one connection for both")
    with pytest.raises(StoreUnavailable), database.reading() as connection:
        next_value(connection, "a")
    assert value_of(database) == 0
    database.close()


def test_an_answer_lost_in_the_commit_leaves_the_outcome_open_and_one_lost_before_does_not(postgres):
    """Plan: a proxy in front of the server cuts the line, once after passing COMMIT on, once before it."""
    url = postgres.new_database()
    with cutting_proxy(url) as proxy:
        database, direct = Database(proxy.url), Database(url)
        assert advance(database) == 1
        proxy.cut_after(b"COMMIT\x00")
        with pytest.raises(OutcomeUnknown) as caught:
            advance(database)
        assert "idempotency key" in caught.value.fix
        assert value_of(direct) == 2  # it was written: nobody could know
        proxy.cut_before(b"INSERT INTO counters")
        with pytest.raises(StoreUnavailable) as caught:
            advance(database)
        assert not isinstance(caught.value, OutcomeUnknown)
        assert value_of(direct) == 2
        assert advance(database) == 3  # and the next one finds a new connection
        database.close()
        direct.close()


def test_a_writer_that_stands_still_does_not_keep_the_lock(postgres):
    """Plan: a session stops inside its write transaction; with a short limit the server ends it."""
    url = postgres.new_database()
    stuck, other = Database(url), Database(url)
    with pytest.raises(StoreUnavailable), stuck.transaction() as connection:
        connection.exec_driver_sql("SET idle_in_transaction_session_timeout = '200ms'")
        next_value(connection, "a")
        assert advance(other) == 1  # waits until the stuck one is ended
        next_value(connection, "a")
    assert value_of(other) == 1
    stuck.close()
    other.close()


def test_connections_that_died_with_the_server_are_replaced(postgres):
    """Plan: every connection of the pool is ended from outside, as a restart of the server does."""
    url = postgres.new_database()
    database = Database(url)
    advance(database)
    name = sa.make_url(url).database
    postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
    assert advance(database) == 2
    assert value_of(database) == 2
    database.close()


@pytest.mark.parametrize(
    ("error", "committing", "kind"),
    [
        (psycopg.errors.DiskFull("no space"), False, DiskFull),
        (psycopg.errors.LockNotAvailable("waited"), False, StoreUnavailable),
        (psycopg.OperationalError("server closed the connection"), True, OutcomeUnknown),
        (psycopg.errors.AdminShutdown("terminating"), True, OutcomeUnknown),
        (psycopg.OperationalError("server closed the connection"), False, StoreUnavailable),
        (psycopg.errors.UniqueViolation("twice"), True, StoreUnavailable),
        (psycopg.errors.UndefinedTable("none"), False, StoreUnavailable),
    ],
)
def test_every_failure_of_postgresql_has_our_name_and_three_parts(error, committing, kind):
    translated = translate_postgres(error, "as it says", committing=committing)
    assert type(translated) is kind
    assert translated.what and translated.why == "as it says" and translated.fix


def test_a_killed_server_process_loses_nothing_acknowledged(own_server):
    """Plan: kill -9 the backend of a writer that has committed; the server restarts all, and the row is there."""
    url = own_server.new_database()
    database = Database(url)
    advance(database)
    with psycopg.connect(url) as connection:
        victim = connection.info.backend_pid
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")

    def is_back() -> bool:
        with suppress(StoreUnavailable):
            assert value_of(database) == 1
            return True
        return False

    until(is_back, "the server to come back")
    assert advance(database) == 2
    database.close()


def test_what_a_server_connection_forgets_between_transactions_is_not_missed(postgres):
    """Plan: as behind a pooler, where the next transaction may have another server connection."""
    database = Database(postgres.new_database())
    for number in range(1, 12):
        with database.transaction() as connection:
            assert next_value(connection, "a") == number
            connection.exec_driver_sql("DEALLOCATE ALL")
    with database.reading() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM pg_prepared_statements").scalar() == 0
    database.close()


def test_threads_that_come_and_go_leave_no_connections(postgres):
    database = Database(postgres.new_database())

    def look() -> None:
        with database.reading() as connection:
            current_value(connection, "a")

    for _ in range(150):  # more than a server lets in
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    look()
    database.close()


class CuttingProxy:
    """Passes bytes between a client and the server's socket file, and cuts the line where it is told to."""

    def __init__(self, target: str) -> None:
        self._target, self._before, self._after, self._stall = target, b"", b"", b""
        self.stalled, self._go, self._is_open = threading.Event(), threading.Event(), threading.Event()
        self._is_open.set()
        self.on_cut: Callable[[], object] = lambda: None  # nobody connects again before it is done
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = ""
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_before(self, text: bytes) -> None:
        self._before = text

    def cut_after(self, text: bytes) -> None:
        self._after = text

    def stall_at(self, text: bytes) -> None:
        self._stall = text

    def go_on(self) -> None:
        self._go.set()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._is_open.wait()
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._target)
            threading.Thread(target=self._to_server, args=(client, server), daemon=True).start()
            threading.Thread(target=self._to_client, args=(server, client), daemon=True).start()

    def _to_server(self, client: socket.socket, server: socket.socket) -> None:
        with client, server:
            while data := _received(client):
                if self._before and self._before in data:
                    self._before = b""
                    self._is_open.clear()
                    break
                if self._stall and self._stall in data:
                    self._stall = b""
                    self.stalled.set()
                    self._go.wait()
                if self._after and self._after in data:
                    self._after = b""
                    # No answer gets back. The thread of the other direction may close both meanwhile.
                    client.shutdown(socket.SHUT_RDWR)
                    with suppress(OSError):
                        server.sendall(data)
                        server.settimeout(LIMIT_S)
                        _received(server)
                    break
                try:
                    server.sendall(data)
                except OSError:
                    break
            for end in (client, server):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)  # a close alone would not wake who still reads there
        if not self._is_open.is_set():
            self.on_cut()
            self._is_open.set()

    def _to_client(self, server: socket.socket, client: socket.socket) -> None:
        with client, server:
            while data := _received(server):
                try:
                    client.sendall(data)
                except OSError:
                    return


def _received(source: socket.socket) -> bytes:
    try:
        return source.recv(65536)
    except OSError:
        return b""


@contextmanager
def cutting_proxy(url: str) -> Iterator[CuttingProxy]:
    parsed = sa.make_url(url)
    folder = str(parsed.query["host"])
    proxy = CuttingProxy(f"{folder}/.s.PGSQL.5432")
    proxy.url = f"postgresql://{parsed.username}@127.0.0.1:{proxy.port}/{parsed.database}"
    try:
        yield proxy
    finally:
        proxy.close()
