"""How many moves happen now: budgets per round, container and job. Pure.

Every step of the search asks before it moves something, so that what is left out was the least useful and
what is done never depends on a move that did not happen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.tasks.placement_problem import NOBODY, Problem, Rules

Step = tuple[int, int]  # (shard, the container it goes to)


class Budget:
    """Counts moves away from the present. Shards that nobody owns are free, and so is the way home."""

    def __init__(self, problem: Problem, rules: Rules) -> None:
        self._homes, self._rules = problem.owners, rules
        self._moved: dict[int, int] = {}
        self._containers, self._jobs = Counter[int](), Counter[int]()
        self._jobs_of: dict[int, list[int]] = {}
        limits = (rules.moves_max, rules.container_moves_max, rules.job_moves_max)
        self.is_limited = any(limit is not None for limit in limits)
        if rules.job_moves_max is not None:
            for shard, job in zip(problem.job_shards.tolist(), problem.job_ids.tolist(), strict=True):
                self._jobs_of.setdefault(shard, []).append(job)

    @property
    def left(self) -> int | None:
        """How many more moves this round may have; None: any number."""
        most = self._rules.moves_max
        return None if most is None else max(0, most - len(self._moved))

    @property
    def is_spent(self) -> bool:
        """Whether nothing more may move."""
        return self.left == 0

    def take(self, steps: Sequence[Step]) -> bool:
        """Count steps that belong together: all of them or, where a budget forbids one, none."""
        if not self.is_limited:
            return True
        total, containers, jobs = 0, Counter[int](), Counter[int]()
        for shard, target in steps:
            home, before = int(self._homes[shard]), self._moved.get(shard)
            if home == NOBODY:
                continue
            for end, change in ((before, -1), (target if target != home else None, 1)):
                if end is not None:
                    total += change
                    containers[home] += change
                    containers[end] += change
                    jobs.update(dict.fromkeys(self._jobs_of.get(shard, ()), change))
        if total > 0 and self._rules.moves_max is not None and total > (self.left or 0):
            return False
        if _exceeds(self._containers, containers, self._rules.container_moves_max):
            return False
        if _exceeds(self._jobs, jobs, self._rules.job_moves_max):
            return False
        self._containers.update(containers)
        self._jobs.update(jobs)
        for shard, target in steps:
            home = int(self._homes[shard])
            if target == home:
                self._moved.pop(shard, None)
            elif home != NOBODY:
                self._moved[shard] = target
        return True


def _exceeds(counted: Counter[int], more: Counter[int], limit: int | None) -> bool:
    return limit is not None and any(
        change > 0 and counted[key] + change > limit for key, change in more.items()
    )
