"""The ways of records to one end of a job, as values: from a category, over the steps between. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.streams.graph import Columns, KeyBy, Source, Stateful, Step, Union, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The way of records from the category a job reads, up to the last union or to the job's end."""

    origin: Source | KeyBy | Stateful
    stream: str  # of the origin
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Road:
    """All ways to one end of a job; `common`: what happens to all records, behind the last union."""

    paths: tuple[Path, ...]
    union: str | None  # the last one before the end
    common: tuple[Step, ...]
    kept: Columns
    crossed: tuple[str, ...]  # names of all steps between, for people


def plain_steps(steps: Sequence[Step], behind: int) -> tuple[Step, ...]:
    """Those before the last `behind` ones that do something to a record."""
    return tuple(step for step in steps[: len(steps) - behind] if not isinstance(step, Union | Window))


def without_keys(road: Road, except_for: Step | None = None) -> Road:
    """The same without keys on the way, which nobody uses."""

    def plain(steps: Sequence[Step]) -> tuple[Step, ...]:
        return tuple(step for step in steps if not isinstance(step, KeyBy) or step is except_for)

    paths = tuple(Path(origin=p.origin, stream=p.stream, steps=plain(p.steps)) for p in road.paths)
    return replace(road, paths=paths, common=plain(road.common))
