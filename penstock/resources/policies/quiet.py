"""Jobs to which nothing is done in a round, as to most: what is remembered and told of them is written in few
transactions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.core.clock import Millis
from penstock.core.errors import PenstockError
from penstock.resources.policies.policy import RaiseAlert
from penstock.resources.policies.ports import AlertSink, Kept, Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
    """A job to which nothing is done."""

    job: str
    kept: Kept | None = None  # None: what is remembered of it stands
    alerts: Mapping[str, tuple[RaiseAlert, ...]] | None = None  # by source that had its say; None: of none


def keep_quiet(
    quiet: Sequence[Quiet], records: Records, alerts: AlertSink, now_ms: Millis
) -> dict[str, PenstockError | None]:
    """Remember and tell; returns the jobs to decide on again: why, or None if others served them."""
    try:
        lost = records.keep([item.kept for item in quiet if item.kept is not None])
        told = {item.job: item.alerts for item in quiet if item.alerts is not None and item.job not in lost}
        alerts.report_all(told, now_ms)
    except PenstockError as error:
        return {item.job: error for item in quiet}
    return dict.fromkeys(lost)
