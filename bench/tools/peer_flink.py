"""The peer's side of `bench.stateful`, part 3, on PyFlink: run by its own interpreter.

Reads `<FOLDER>/*.csv` (user,ts) with Flink's own reader; keyed state, an event-time timer per key and window,
checkpoints every second, results thrown away.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from pyflink.common import Configuration, Row, Types
from pyflink.datastream import KeyedProcessFunction, RuntimeContext, StreamExecutionEnvironment
from pyflink.datastream.state import MapStateDescriptor
from pyflink.table import DataTypes, Schema, StreamTableEnvironment

WINDOW_MS = 10_000
SETTINGS = {
    "restart-strategy.type": "none",  # a fault is told, not repeated
    "python.state.cache-size": "100000",  # keys that a worker keeps: all of them
    "python.map-state.read-cache-size": "100000",
    "python.map-state.write-cache-size": "100000",
}


class PerWindow(KeyedProcessFunction):
    """Counts one user's records per window; reports a window once the watermark has passed its end."""

    def open(self, runtime_context: RuntimeContext) -> None:
        self._counts = runtime_context.get_map_state(MapStateDescriptor("n", Types.LONG(), Types.LONG()))

    def process_element(self, value: Any, ctx: KeyedProcessFunction.Context) -> None:
        window = value[1] // WINDOW_MS
        self._counts.put(window, (self._counts.get(window) or 0) + 1)
        ctx.timer_service().register_event_time_timer((window + 1) * WINDOW_MS - 1)

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext) -> Iterator[Any]:
        window = timestamp // WINDOW_MS
        count = self._counts.get(window)
        self._counts.remove(window)
        yield Row(user=ctx.get_current_key(), w=window, n=count)


def main() -> None:
    settings = Configuration()
    for name, value in SETTINGS.items():
        settings.set_string(name, value)
    env = StreamExecutionEnvironment.get_execution_environment(settings)
    env.set_parallelism(2)
    env.enable_checkpointing(1000)
    tables = StreamTableEnvironment.create(env)
    tables.execute_sql(
        "CREATE TABLE records (`user` STRING, ts BIGINT, happened AS TO_TIMESTAMP_LTZ(ts, 3),"
        " WATERMARK FOR happened AS happened - INTERVAL '1' SECOND)"
        f" WITH ('connector' = 'filesystem', 'path' = '{os.environ['FOLDER']}', 'format' = 'csv')"
    )
    tables.execute_sql(
        "CREATE TABLE nothing (`user` STRING, w BIGINT, n BIGINT) WITH ('connector' = 'blackhole')"
    )
    records = tables.to_data_stream(tables.from_path("records"))
    made = Types.ROW_NAMED(["user", "w", "n"], [Types.STRING(), Types.LONG(), Types.LONG()])
    counted = records.key_by(lambda row: row[0], key_type=Types.STRING()).process(PerWindow(), made)
    schema = Schema.new_builder()
    for name, kind in (("user", DataTypes.STRING()), ("w", DataTypes.BIGINT()), ("n", DataTypes.BIGINT())):
        schema.column(name, kind)
    tables.from_data_stream(counted, schema.build()).execute_insert("nothing").wait()


main()
