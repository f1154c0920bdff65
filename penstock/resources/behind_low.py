"""Records behind a low watermark that nobody flagged as late: told from the totals that tasks report.

An interval counts them for as long as it lives, so a total that grew is news and one that stands is not. A
control plane that begins compares with what its predecessor told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from penstock.core.clock import Millis
from penstock.resources.alarms import Alarm
from penstock.resources.levels import BEHIND_LOW, EVENT_MS, BehindTrouble
from penstock.tasks.messages import TaskReport

_OF_PARTITION = f"{BEHIND_LOW}."  # so a report names the total of each partition that has one


class BehindLow:
    """What one control plane has seen of them. `told`: the alarms there are, asked once."""

    def __init__(self, told: Callable[[], Iterable[Alarm]]) -> None:
        self._told = told
        self._totals: dict[str, dict[str, int]] | None = None  # by job and partition
        self._grown_ms: dict[str, Millis] = {}  # by job: when a total last grew

    def observe(self, reports: Iterable[TaskReport], now_ms: Millis) -> tuple[BehindTrouble, ...]:
        """Jobs whose totals grew within the last minutes."""
        if self._totals is None:
            self._totals = _totals_in(self._told())
        for job, totals in _totals_of(reports).items():
            known = self._totals.setdefault(job, {})
            # Fewer than were known: a new state, which counts from the beginning.
            if any(count != known.get(name, 0) for name, count in totals.items()):
                self._grown_ms[job] = now_ms
            known.update(totals)
        self._grown_ms = {job: at for job, at in self._grown_ms.items() if abs(now_ms - at) < EVENT_MS}
        return tuple(BehindTrouble(job=job, totals=dict(self._totals[job])) for job in sorted(self._grown_ms))


def _totals_of(reports: Iterable[TaskReport]) -> dict[str, dict[str, int]]:
    """Of two that report one partition, an old owner and a new one, the larger total is the newer."""
    found: dict[str, dict[str, int]] = {}
    for report in reports:
        for name, total in report.metrics.items():
            if name.startswith(_OF_PARTITION):
                mine = found.setdefault(report.job, {})
                mine[name] = max(int(total), mine.get(name, 0))
    return found


def _totals_in(alarms: Iterable[Alarm]) -> dict[str, dict[str, int]]:
    return {alarm.job: _counts(alarm.evidence) for alarm in alarms if alarm.key == BEHIND_LOW}


def _counts(evidence: Mapping[str, float | int | str]) -> dict[str, int]:
    return {name: int(count) for name, count in evidence.items() if name.startswith(_OF_PARTITION)}
