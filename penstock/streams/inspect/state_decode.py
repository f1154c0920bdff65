"""State as people read it: typed by the job's plan (`plan.computation`); what nobody can read is bytes.

Pure. Every value comes back as plain JSON: bytes as {"hex", "bytes"}, numbers that JSON does not have and
keys of maps as text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from penstock.streams.bus.log import LOW_MIN
from penstock.streams.dsl.windows import RANK, Firing
from penstock.streams.operators.aggregates import KEY
from penstock.streams.operators.blocks import INDEX, table_of
from penstock.streams.rows.row_store import PREFIX, is_of_ids

_IN_BLOCKS = ("aggregate", "partial", "combine")
_SIDES = ("left", "right")
_Sessions = tuple[list[str], list[list[Any]], dict[str, Any]]


def is_in_blocks(computation: Mapping[str, Any]) -> bool:
    """True if its rows are blocks of many keys, as windows other than sessions have them."""
    window = computation.get("window") or {}
    return computation.get("operator") in _IN_BLOCKS and window.get("kind") != "session"


def decode_state(
    computation: Mapping[str, Any], name: str, value: bytes, columns: Sequence[str] = ()
) -> dict[str, Any]:
    """{"state": …}, and with `problem` if it is not what the plan says: then the state is its bytes.

    `columns`: of what the job produces, for operators that keep records as they give them.
    """
    if is_of_ids(name):
        return {"state": {"record_ids": name.removeprefix(PREFIX)}}
    try:
        if is_in_blocks(computation):
            return {"state": _block_summary(name, value)}
        return {"state": shown(_decoded(computation, value, columns))}
    except (msgspec.MsgspecError, pa.ArrowException, ValueError, TypeError, LookupError) as error:
        return {"state": shown(value), "problem": f"it is not what the job's plan says: {error}"}


def decode_block(name: str, value: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each key in a block: what the block has of it. ValueError and the like if it is none."""
    if name == INDEX:
        return
    cell, fired, *_ = name.split(":")
    tables = {part: table_of(data) for part, data in _parts(value).items()}
    long: dict[str, dict[str, list[Any]]] = {}
    for part, table in tables.items():
        for row in table.to_pylist() if part else ():
            long.setdefault(str(row.pop(KEY)), {}).setdefault(part, []).append(row)
    for row in tables[""].to_pylist():
        key = str(row.pop(KEY))
        found = {"window_cell": int(cell), "fired": fired == "1", **row, **long.get(key, {})}
        yield key, shown(found)


def shown(value: Any) -> Any:
    """A value as JSON can say it."""
    if isinstance(value, bytes | bytearray | memoryview):
        return {"hex": bytes(value).hex(), "bytes": len(value)}
    if isinstance(value, Mapping):
        return {str(key): shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [shown(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, msgspec.msgpack.Ext):
        data = bytes(value.data)
        return {"hex": data.hex(), "bytes": len(data), "extension": value.code}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _decoded(computation: Mapping[str, Any], value: bytes, columns: Sequence[str]) -> Any:
    operator = computation.get("operator")
    if operator == "join":
        return {"waiting": [_joined(computation, row) for row in _listed(value)]}
    if operator == "aggregate":
        if Firing(**computation.get("firing") or {}).is_plain:
            return _sessions(msgspec.msgpack.decode(value, type=_Sessions))
        new, given = msgspec.msgpack.decode(value, type=tuple[_Sessions, _Sessions])
        return {"new": _sessions(new), "given": _sessions(given)}
    if operator == "dedup":
        until, rows = msgspec.msgpack.decode(value, type=tuple[int, list[list[Any]]])
        waiting = [{"ts": ts, "record": dict(zip(columns, own, strict=True))} for ts, *own in rows]
        return {"given_until": None if until == LOW_MIN else until, "waiting": waiting}
    if operator == "top":
        names = [name for name in columns if name != RANK]
        rows = msgspec.msgpack.decode(value, type=list[list[Any]])
        return {"top": [{RANK: n, **dict(zip(names, row, strict=True))} for n, row in enumerate(rows, 1)]}
    if computation.get("vectorised"):
        names, values = list(computation.get("state") or {}), _listed(value)
        missing = len(names) - len(values)  # columns that were added since
        return dict(zip(names, [*values, *([None] * missing)], strict=True))
    return msgspec.msgpack.decode(value, type=dict[str, Any])


def _sessions(stored: _Sessions) -> dict[str, Any]:
    names, rows, long = stored
    return {"sessions": [dict(zip(names, row, strict=True)) for row in rows], **long}


def _joined(computation: Mapping[str, Any], row: Any) -> dict[str, Any]:
    ts, side, matched, *values = row
    left, right = ([name for name, _ in columns] for columns in computation["columns"])
    own = dict(zip(left, values[: len(left)], strict=True))
    other = dict(zip(right, values[len(left) :], strict=True))
    return {"side": _SIDES[side], "ts": ts, "matched": matched, "record": other if side else own}


def _listed(value: bytes) -> list[Any]:
    return msgspec.msgpack.decode(value, type=list[Any])


def _parts(value: bytes) -> dict[str, bytes]:
    return msgspec.msgpack.decode(value, type=dict[str, bytes])


def _block_summary(name: str, value: bytes) -> dict[str, Any]:
    if name == INDEX:
        return {"blocks": len(_listed(value))}
    cell, fired, level, version = (int(part) for part in name.split(":"))
    keys = table_of(_parts(value)[""]).num_rows
    return {"window_cell": cell, "fired": bool(fired), "level": level, "of_version": version, "keys": keys}
