"""Zeitgeist: how often was each query asked in each second?

Reads the category `queries` (JSON objects with query, lang and ts, the event time in milliseconds; described
in queries.json). Robots and empty queries are dropped. A second is reported once the low watermark has passed
its end.
"""

from __future__ import annotations

from penstock import Computation, Context, Pipeline, Record, Timer, Value


class CountPerSecond(Computation):
    """Counts one query; reports a second when no more of its records can come."""

    outputs = {"out": {"query": "string", "second": "bigint", "count": "bigint"}}
    late = "drop"
    counts = Value(dict[int, int])  # second -> how often so far

    def process_record(self, record: Record, ctx: Context) -> None:
        """Add the record to its second, and be called when that is over."""
        second = record.ts // 1000
        ctx.state.counts[second] = ctx.state.counts.get(second, 0) + 1
        ctx.set_timer(str(second), (second + 1) * 1000)

    def process_timer(self, timer: Timer, ctx: Context) -> None:
        """Report the second that is over."""
        second = int(timer.tag)
        ctx.produce({"query": ctx.key, "second": second, "count": ctx.state.counts.pop(second)})


p = Pipeline("zeitgeist", partitions=6)
(
    p.source("queries")
    .filter("length(trim(query)) > 0 AND lang <> 'robot'")
    .select("lower(trim(query)) AS query")
    .key_by("query", name="by_query")
    .process(CountPerSecond, name="count_per_second")
    .sink("query_counts")
)
