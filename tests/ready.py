"""A SQLite store that is ready at once: to make its tables by all steps anew takes a tenth of a second.

`tests/core/test_migrate_store.py` and whatever starts `penstock up` make them by the steps.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest


def new_place(store: str, request: pytest.FixtureRequest, folder: Path) -> Path | str | None:
    """What `Database` takes, with all tables and no rows: in `memory`, on `sqlite` or on `postgres`."""
    if store == "memory":
        return None
    if store == "sqlite":
        return ready_file(folder / "store.db")
    return str(request.getfixturevalue("postgres").new_database())


def ready_folder(folder: Path) -> Path:
    """A folder of a control plane with such a store in it."""
    ready_file(folder / "store.db")
    return folder


def ready_file(path: Path) -> Path:
    """A file with all tables and no rows, as the first `Database(path)` would leave it, unless there is one."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_migrated())
    return path


@cache
def _migrated() -> bytes:
    # Imported here: collecting tests need not know the stores.
    import penstock.app  # noqa: F401  (imports every store)
    from penstock.core.sql_store import Database

    with tempfile.TemporaryDirectory(prefix="store-") as folder:
        path = Path(folder) / "store.db"
        Database(path).close()
        assert [each.name for each in path.parent.iterdir()] == [path.name], "a log was left beside it"
        return path.read_bytes()
