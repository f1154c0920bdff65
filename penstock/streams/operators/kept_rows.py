"""Rows that an operator keeps per key, as the state's bytes and back. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from penstock.core.errors import StateMismatch


def decode_rows(states: Mapping[str, bytes], schema: pa.Schema, *, job: str, operator: str) -> pa.Table:
    """All rows kept under these keys, key by key; the schema's first column is the key.

    StateMismatch: another plan wrote them.
    """
    names = schema.names
    rows: list[tuple[Any, ...]] = []
    for key, data in sorted(states.items()):
        try:
            found = msgspec.msgpack.decode(data, type=list[list[Any]])
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise _mismatch(key, job, operator, str(error)) from error
        if any(len(row) != len(names) - 1 for row in found):
            raise _mismatch(key, job, operator, "it has other columns")
        rows += [(key, *row) for row in found]
    columns: Iterable[Sequence[Any]] = zip(*rows, strict=True) if rows else [()] * len(names)
    try:
        arrays = [pa.array(column, schema.field(number).type) for number, column in enumerate(columns)]
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise _mismatch(min(states), job, operator, str(error)) from error
    return pa.Table.from_arrays(arrays, schema=schema)


def _mismatch(key: str, job: str, operator: str, why: str) -> StateMismatch:
    return StateMismatch(
        f"the state of key {key!r} of job {job!r} does not fit its {operator}",
        why=why,
        fix="reset the job's state: another plan wrote it",
    )
