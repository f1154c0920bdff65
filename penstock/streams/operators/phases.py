"""An aggregate in two phases: partial results of each partition, and their sum where the key is.

Pure. A partial result goes out when the low watermark passes the end of its cell, one record per key, and is
merged by the second phase as one of its own blocks would be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.streams.dsl.windows import PARTIAL, WINDOW_START, Spans
from penstock.streams.operators.aggregates import CELL, KEY, Partials
from penstock.streams.operators.windowed import WindowedAggregate, WindowSpec
from penstock.streams.step.watermark import Ints

_BUCKET, _NUMBER = "bucket", "number"


_Line = tuple[int, str, int, int | None]  # cell, key, bucket, number
_Counts = tuple[list[int], list[int | None]]


class _Part(msgspec.Struct, array_like=True):
    """What is known of one key and cell: columns by name, and buckets and numbers of some values."""

    main: dict[str, Any]
    long: dict[str, _Counts]


class PartialAggregate(WindowedAggregate):
    """The first phase: cells as long as the step between windows, each given once, and not finished."""

    def __init__(self, spec: WindowSpec) -> None:
        step = spec.spans.slide_ms or spec.spans.size_ms
        super().__init__(replace(spec, spans=Spans(kind="tumbling", size_ms=step)))

    def _results(self, merged: Partials) -> pa.Table:
        rows = pa.table(
            {
                "_ts": pa.array(merged.cells + self._size - 1),
                "_key": merged.main.column(KEY),
                "_late": pa.array(np.zeros(merged.main.num_rows, dtype=np.bool_)),
                WINDOW_START: merged.main.column(CELL),
                PARTIAL: pa.array(_encoded(merged), pa.binary()),
            }
        )
        return rows.sort_by([("_ts", "ascending"), ("_key", "ascending")])


class CombinedAggregate(WindowedAggregate):
    """The second phase: its records are partial results."""

    def _lifted(self, rows: pa.Table, cells: Ints) -> Partials:
        decode = msgspec.msgpack.Decoder(_Part).decode
        keys = rows.column(KEY).to_pylist()
        parts = [decode(part) for part in rows.column(PARTIAL).to_pylist()]
        names = list(dict.fromkeys(name for part in parts for name in part.main))
        main = {CELL: pa.array(cells), KEY: rows.column(KEY)}
        for name in names:
            column = [part.main.get(name) for part in parts]
            main[name] = pa.array(column, self._aggregates.type_of(name))
        found: dict[str, list[_Line]] = {}
        for cell, key, part in zip(cells.tolist(), keys, parts, strict=True):
            for name, (buckets, numbers) in part.long.items():
                found.setdefault(name, []).extend(
                    (cell, key, bucket, number) for bucket, number in zip(buckets, numbers, strict=True)
                )
        return Partials(main=pa.table(main), long={name: _long(lines) for name, lines in found.items()})


def _encoded(merged: Partials) -> Iterator[bytes]:
    """Each row with what is long of it."""
    long: dict[tuple[int, str], dict[str, _Counts]] = {}
    for name, table in merged.long.items():
        ordered = table.sort_by([(CELL, "ascending"), (KEY, "ascending"), (_BUCKET, "ascending")])
        columns = (ordered.column(part).to_pylist() for part in (CELL, KEY, _BUCKET, _NUMBER))
        for cell, key, bucket, number in zip(*columns, strict=True):
            buckets, numbers = long.setdefault((cell, key), {}).setdefault(name, ([], []))
            buckets.append(bucket)
            numbers.append(number)
    names = [name for name in merged.main.column_names if name not in (CELL, KEY)]
    rows = zip(*(merged.main.column(name).to_pylist() for name in (CELL, KEY, *names)), strict=True)
    encode = msgspec.msgpack.Encoder().encode
    for cell, key, *values in rows:
        main = dict(zip(names, values, strict=True))
        yield encode(_Part(main=main, long=long.get((cell, key), {})))


def _long(lines: list[_Line]) -> pa.Table:
    cells, keys, buckets, numbers = zip(*lines, strict=True)
    columns: Mapping[str, Any] = {CELL: cells, _BUCKET: buckets, _NUMBER: numbers}
    made = {name: pa.array(column, pa.int64()) for name, column in columns.items()}
    return pa.table({CELL: made[CELL], KEY: pa.array(keys, pa.string()), **made})
