"""Reads frames of metrics for policies, or reports which metrics lack which minutes (I20).

A query names metrics, a range, and the share that may be missing. If metrics are stale or have more gaps than
allowed, or the newest minute is missing, there is no frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, CorruptData
from penstock.core.text import did_you_mean
from penstock.scaling.metrics.frames import METRICS, MINUTE_MS, Frame, NoFrame
from penstock.scaling.metrics.minutes import DAY, UNKNOWN, Codes, bits_of, decode
from penstock.scaling.metrics.store import KEEP_DAYS, MetricStore
from penstock.scaling.scaler.load import COST_METRICS
from penstock.scaling.scaler.pattern import History
from penstock.scaling.scaler.window import METRICS_OPTIONAL, METRICS_REQUIRED

MINUTES_MAX = KEEP_DAYS * DAY
# A minute is written some seconds after it has ended.
STALE_MINUTES = 2
# Clocks of two instances differ a little; minutes further ahead were recorded with a wrong clock.
AHEAD_MINUTES = 1
RUNS_SHOWN_MAX = 3
_POINTS_AT_ONCE = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricQuery:
    """A query for the newest minutes of some metrics."""

    metrics: tuple[str, ...]
    minutes: int
    missing_max: float = 0.0  # share of the minutes that may be missing, for each metric
    optional: tuple[str, ...] = ()  # metrics that may have any gaps

    def __post_init__(self) -> None:
        for name in self.all:
            if name not in METRICS:
                raise ConfigError(
                    f"there is no metric {name[:100]!r}",
                    why=f"the metrics are {', '.join(METRICS)}",
                    fix=did_you_mean(name, METRICS, otherwise="name one of these"),
                )
        if not self.metrics or len(set(self.all)) < len(self.all):
            raise ConfigError(
                "the query names no metric, or one of them twice",
                why="each metric has one row in the result",
                fix="name each metric that you need once",
            )
        if not 1 <= self.minutes <= MINUTES_MAX:
            raise ConfigError(
                f"a range of {self.minutes} minutes is not available",
                why=f"metrics are stored for {KEEP_DAYS} days, {MINUTES_MAX} minutes",
                fix=f"use a range from 1 to {MINUTES_MAX} minutes",
            )

    @property
    def all(self) -> tuple[str, ...]:
        """All metrics of the query, in order."""
        return self.metrics + self.optional


class Retriever:
    """Answers queries with a frame, or with the reason why there is none."""

    def __init__(self, store: MetricStore) -> None:
        self._store = store

    def frame(self, job: str, wanted: MetricQuery, *, now_ms: Millis) -> Frame | NoFrame:
        """The frame of one job."""
        return self.frames([job], wanted, now_ms=now_ms)[job]

    def frames(
        self, jobs: Sequence[str], wanted: MetricQuery, *, now_ms: Millis
    ) -> dict[str, Frame | NoFrame]:
        """The frames of many jobs in one read."""
        newest, now = self._store.recent.newest, now_ms // MINUTE_MS
        last = min(newest, now - 1)
        reason = _unusable(newest, now)
        if reason:
            return {job: NoFrame(job=job, reason=reason, metrics=wanted.metrics) for job in jobs}
        at_once = max(1, _POINTS_AT_ONCE // (wanted.minutes * len(wanted.all)))
        found: dict[str, Frame | NoFrame] = {}
        for begin in range(0, len(jobs), at_once):
            some, first = jobs[begin : begin + at_once], last - wanted.minutes + 1
            try:
                found |= self._some(some, wanted, first)
            except CorruptData:
                for job in some:  # one by one, so that damaged data of one job does not affect others
                    found[job] = self._one(job, wanted, first)
        return found

    def _one(self, job: str, wanted: MetricQuery, first: int) -> Frame | NoFrame:
        try:
            return self._some([job], wanted, first)[job]
        except CorruptData as error:
            return NoFrame(job=job, reason=f"{error.what}: {error.why}", metrics=wanted.metrics)

    def _some(self, jobs: Sequence[str], wanted: MetricQuery, first: int) -> dict[str, Frame | NoFrame]:
        codes = self._store.codes(jobs, wanted.all, first, wanted.minutes)
        is_missing = codes[:, : len(wanted.metrics)] == UNKNOWN
        missing = is_missing.sum(axis=2)
        allowed = wanted.missing_max * wanted.minutes
        is_refused = ((missing > allowed) | is_missing[:, :, -1]).any(axis=1)
        values = decode(codes, bits_of(wanted.all)[:, None])
        return {
            job: self._refusal(job, wanted, first, is_missing[place])
            if is_refused[place]
            else Frame(job=job, first_minute=first, values=dict(zip(wanted.all, values[place], strict=True)))
            for place, job in enumerate(jobs)
        }

    def _refusal(self, job: str, wanted: MetricQuery, first: int, is_missing: NDArray[np.bool_]) -> NoFrame:
        if not self._store.knows(job):
            return NoFrame(job=job, reason="it has no metrics yet", metrics=wanted.metrics)
        allowed = wanted.missing_max * wanted.minutes
        blamed: dict[str, list[str]] = {}
        for name, holes in zip(wanted.metrics, is_missing, strict=True):
            count = int(holes.sum())
            if count > allowed or holes[-1]:
                gaps = f"in {count} of {wanted.minutes} minutes ({_runs(holes, first)})"
                blamed.setdefault(gaps, []).append(name)
        return NoFrame(
            job=job,
            reason="; ".join(f"{', '.join(names)} missing {gaps}" for gaps, names in blamed.items()),
            metrics=tuple(name for names in blamed.values() for name in names),
        )


def history(store: MetricStore, job: str, metrics: Sequence[str], minutes: int, *, now_ms: Millis) -> Frame:
    """All stored minutes up to the last ended one, with gaps as NaN."""
    wanted = MetricQuery(metrics=tuple(metrics), minutes=minutes)
    first = now_ms // MINUTE_MS - minutes
    codes: Codes = store.codes([job], wanted.metrics, first, minutes)
    values = decode(codes, bits_of(wanted.metrics)[:, None])[0]
    found: Mapping[str, NDArray[np.float64]] = dict(zip(wanted.metrics, values, strict=True))
    return Frame(job=job, first_minute=first, values=found)


def _unusable(newest: int, now: int) -> str:
    """Why no metrics can be used now; "" if they can."""
    if newest < 0:
        return "no metrics were recorded yet"
    if newest - now > AHEAD_MINUTES:
        ahead = f"{newest - now} min ahead: the clock was set back"
        return f"the newest minute recorded is {_clock(newest)}, {ahead}"
    if now - newest > STALE_MINUTES:
        return f"the newest minute recorded is {_clock(newest)}, {now - newest} min ago"
    return ""


def _runs(holes: NDArray[np.bool_], first: int) -> str:
    """The missing minutes as text, newest first."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], holes, [False]])))
    runs = [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)][::-1]
    shown = [
        _clock(first + begin) if end - begin == 1 else f"{_clock(first + begin)} to {_clock(first + end - 1)}"
        for begin, end in runs[:RUNS_SHOWN_MAX]
    ]
    rest = len(runs) - len(shown)
    return ", ".join(shown) + (f" and {rest} more ranges" if rest else "")


def _clock(minute: int) -> str:
    return datetime.fromtimestamp(minute * 60, UTC).strftime("%m-%d %H:%M UTC")


# This metric is always recorded for a job with tasks. Decisions handle other missing metrics themselves: a
# job whose tasks run out of memory has no rates, and still gets more memory.
_SURE = "task_count"
_REST = tuple(name for name in (*METRICS_REQUIRED, *METRICS_OPTIONAL) if name != _SURE)


class ScalerMinutes:
    """The `Minutes` of the auto scaler."""

    def __init__(self, store: MetricStore) -> None:
        self._store, self._retriever = store, Retriever(store)

    def newest(self) -> int:
        """The newest minute recorded; -1: none."""
        return self._store.recent.newest

    def frames(self, jobs: Sequence[str], minutes: int, *, now_ms: Millis) -> Mapping[str, Frame | NoFrame]:
        """The newest minutes of many jobs; minutes before a job's start are NaN."""
        wanted = MetricQuery(
            metrics=(_SURE,), optional=(*_REST, "output_rate"), minutes=minutes, missing_max=1.0
        )
        return self._retriever.frames(jobs, wanted, now_ms=now_ms)

    def history(self, job: str, *, now_ms: Millis) -> History | NoFrame:
        """The last 14 days of a job's input, and the last day of its cost metrics."""
        try:
            found = history(self._store, job, ("ingest_rate", "key_count"), KEEP_DAYS * DAY, now_ms=now_ms)
            last_day = history(self._store, job, COST_METRICS, DAY, now_ms=now_ms)
        except CorruptData as error:
            return NoFrame(job=job, reason=f"{error.what}: {error.why}")
        return History(
            first_minute=found.first_minute,
            input_rate=found.values["ingest_rate"],
            key_count=found.values["key_count"],
            last_day=last_day.values,
        )
