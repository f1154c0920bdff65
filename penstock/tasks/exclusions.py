"""Which containers a job's tasks are kept away from, and what that means for shards. Pure.

A shard has tasks of many jobs and moves as a whole: one with a task that is kept away from a container
neither goes there nor stays there. That is a wish, not a wall: a shard that can go nowhere else goes there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from penstock.core.clock import Millis

LONGEST_MS: Millis = 7 * 86_400_000

Bars = Mapping[tuple[int, str], str]  # (shard, container) -> why it should not be there


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """No task of the job, or not this task, on a container until then."""

    subject: str  # a job, or a task as `job/index`
    birth: str  # of the job: another life of its name is not meant
    container: str
    until_ms: Millis
    reason: str = ""

    @property
    def job(self) -> str:
        return self.subject.partition("/")[0]


def bars_of(exclusions: Iterable[Exclusion], shards_of: Callable[[str, str], Collection[int]]) -> Bars:
    """What exclusions mean for shards. `shards_of(subject, birth)`: the shards of its tasks."""
    found: dict[tuple[int, str], str] = {}
    for exclusion in exclusions:
        for shard in shards_of(exclusion.subject, exclusion.birth):
            why = f"{exclusion.subject} is kept away from {exclusion.container}"
            found.setdefault((shard, exclusion.container), why)
    return found


def bars_in_force(bars: Bars, accepting: Collection[str]) -> Bars:
    """Without those of shards that could go nowhere else."""
    shards = {shard for shard, _ in bars}
    stuck = {shard for shard in shards if all((shard, name) in bars for name in accepting)}
    return {key: why for key, why in bars.items() if key[0] not in stuck}
