"""A running count as PySpark's `transformWithState` has it, over rows: what one writes without Penstock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor


class RunningCount(StatefulProcessor):
    """Counts the records of each key; a row for each key and batch."""

    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("n", "n bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        before = self._count.get()[0] if self._count.exists() else 0
        after = before + sum(1 for _ in rows)
        self._count.update((after,))
        yield Row(user=key[0], n=after)

    def close(self) -> None:
        pass
