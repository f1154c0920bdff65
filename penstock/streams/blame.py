"""Whatever user code raises becomes a ComputationFailed that says for whom it ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from penstock.core.errors import ComputationFailed, PenstockError, StateMismatch


class Place(NamedTuple):
    """What user code was called for."""

    job: str
    name: str
    key: str = ""
    offset: int | None = None


@contextmanager
def blaming(where: Callable[[], Place]) -> Iterator[None]:
    """Run user code in it. Interrupts, and errors of the rows, which say all already, go through."""
    try:
        yield
    except StateMismatch:
        raise
    except ComputationFailed as error:
        place = where()
        error.what = f"{error.what} (job {place.job!r}, {place.name})"
        error.job, error.key, error.offset = place.job, place.key, place.offset
        raise
    except Exception as error:  # user code may raise anything
        place = where()
        raise ComputationFailed(
            f"user code failed: job {place.job!r}, {place.name}",
            why=error.what if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}",
            fix=(error.fix if isinstance(error, PenstockError) else "")
            or "correct the computation and release a new version; the records come again",
            job=place.job,
            key=place.key,
            offset=place.offset,
        ) from error
