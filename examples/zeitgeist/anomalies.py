"""Zeitgeist as in MillWheel, section 2: which queries are asked far more, or far less, often than expected?

Three computations: the window counter of pipeline.py, a model calculator that learns how often a query is
asked per second, and a detector that compares the two. Reads the category `queries` (queries.json), writes
`anomalies`. reference.py computes the same in another way; the test compares them.
"""

from __future__ import annotations

from pipeline import CountPerSecond

from penstock import Computation, Context, MapState, Pipeline, Record, Timer, Value

WEIGHT = 0.25  # of the newest second in the mean
GAP_MAX = 60  # seconds of silence that are learnt from; longer ones start anew
TRAINED = 5  # seconds before a model is believed
SPIKE, DIP = 3.0, 1 / 3  # times what is expected
NOISE = 3.0  # searches per second that mean nothing


class ModelCalculator(Computation):
    """Learns the mean count per second of one query, and says what it expects of the next second."""

    inputs = {"in": {"query": "string", "second": "bigint", "count": "bigint"}}
    outputs = {"out": {"query": "string", "second": "bigint", "expected": "double"}}
    mean = Value(float)
    last = Value(int | None)  # the second it has seen last
    trained = Value(int)

    def process_record(self, record: Record, ctx: Context) -> None:
        """One second is counted; those in between were silent."""
        state, second, count = ctx.state, record["second"], record["count"]
        if state.last is not None and second - state.last > GAP_MAX:
            state.last, state.trained = None, 0
        if state.last is None:
            state.mean = float(count)
        else:
            for seen in [*[0] * (second - state.last - 1), count]:
                state.mean += WEIGHT * (seen - state.mean)
        state.trained += 1 if state.last is None else second - state.last
        state.last = second
        if state.trained >= TRAINED:
            ctx.produce({"query": ctx.key, "second": second + 1, "expected": state.mean})


class SpikeDipDetector(Computation):
    """Compares what was counted with what was expected, once nothing of either can come any more."""

    inputs = {
        "counts": {"second": "bigint", "count": "bigint"},
        "models": {"second": "bigint", "expected": "double"},
    }
    outputs = {
        "out": {
            "query": "string",
            "second": "bigint",
            "kind": "string",
            "count": "bigint",
            "expected": "double",
        }
    }
    counts = MapState(int, int)
    models = MapState(int, float)

    def process_record(self, record: Record, ctx: Context) -> None:
        """Keep it until its second is decided."""
        second = record["second"]
        if record.stream == "counts":
            ctx.state.counts[second] = record["count"]
        else:
            ctx.state.models[second] = record["expected"]
        ctx.set_timer(str(second), (second + 2) * 1000)

    def process_timer(self, timer: Timer, ctx: Context) -> None:
        """A second without a count was silent; one without a model is not judged."""
        second = int(timer.tag)
        count, expected = ctx.state.counts.pop(second, 0), ctx.state.models.pop(second, None)
        if expected is None or abs(count - expected) <= NOISE:
            return
        kind = "spike" if count > SPIKE * expected else "dip" if count < DIP * expected else ""
        if kind:
            values = {"query": ctx.key, "second": second, "kind": kind, "count": count, "expected": expected}
            ctx.produce(values)


p = Pipeline("anomalies", partitions=6)
asked = p.source("queries").filter("length(query) > 0 AND lang <> 'robot'").select("lower(query) AS query")
counted = asked.key_by("query", name="by_query").process(CountPerSecond, name="window_counter")
counts = counted.key_by("query", name="counts_by_query")
models = counts.process(ModelCalculator, name="model_calculator")
found = p.process(
    SpikeDipDetector,
    counts=counts,
    models=models.key_by("query", name="models_by_query"),
    name="spike_dip_detector",
)
found.sink("anomalies")
