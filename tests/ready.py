"""Places for tests that are ready at once: temporary files in memory, and a store that has its tables.

To make the tables by all steps anew takes a tenth of a second.
`tests/core/test_migrate_store.py` and whatever starts `penstock up` make them by the steps.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest

ROOM_BYTES = 8 * 2**30


def memory_folder() -> str | None:
    """Where temporary files need no disk, if there is room. Tests sync thousands of times, which takes a disk a
    millisecond or more; what they show is that data survives the death of a process, not a power failure.
    """
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > ROOM_BYTES else None


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
    from penstock.db.database import Database

    with tempfile.TemporaryDirectory(prefix="store-") as folder:
        path = Path(folder) / "store.db"
        Database(path).close()
        assert [each.name for each in path.parent.iterdir()] == [path.name], "a log was left beside it"
        return path.read_bytes()
