"""The minutes that the scaler looks at, from the metrics store: whatever of them is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.core.clock import Millis
from penstock.core.errors import CorruptData
from penstock.resources.frames import Frame, NoFrame
from penstock.resources.metric_store import KEEP_DAYS, MetricStore
from penstock.resources.points import DAY
from penstock.resources.retriever import Retriever, Wanted, history
from penstock.resources.scaler.pattern import History
from penstock.resources.scaler.pattern_rate import COST_METRICS
from penstock.resources.scaler.window import METRICS_OPTIONAL, METRICS_REQUIRED

# Of a job with tasks this is always recorded. What else is missing is for the decision to say: a job whose
# tasks end above their memory has no rates, and gets more all the same.
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
        """The newest minutes of many jobs; those before a job began are unknown."""
        wanted = Wanted(metrics=(_SURE,), optional=(*_REST, "output_rate"), minutes=minutes, missing_max=1.0)
        return self._retriever.frames(jobs, wanted, now_ms=now_ms)

    def history(self, job: str, *, now_ms: Millis) -> History | NoFrame:
        """The last 14 days of a job's input, and the last day of what it cost."""
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
