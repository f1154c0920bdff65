"""What the Job Service answers: plain values that a repeated request gets again. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.jobs.job_view import JobView


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A provisioner layer was written."""

    version: int  # the job's expected version now
    created: bool  # whether the job began a life with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A pipeline was submitted: of each job its expected version now, and what was done to it."""

    jobs: Mapping[str, int]
    done: Mapping[str, str]  # created | updated | unchanged | reset | stopped

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Submitted:
        """From a kept answer. Earlier releases kept the versions alone."""
        if set(answer) == {"jobs", "done"}:
            return cls(jobs=answer["jobs"], done=answer["done"])
        return cls(jobs=answer, done={})


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSet:
    """A job was asked to run, pause or stop."""

    version: int
    layer: str  # which was written
    effective: str  # what the merge says now: a higher layer may hold another state


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some jobs by name, and where the next page begins (None: this was the last)."""

    items: tuple[JobView, ...]
    next: str | None

    def __iter__(self) -> Iterator[JobView]:
        return iter(self.items)
