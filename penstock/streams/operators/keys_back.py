"""The columns of a key, from the key's text: what is grouped by is the text, and each result shows columns.

Pure. A key of one column that is NULL has the text '', so that a text column shows '' and any other NULL.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.streams.bus.log import ARROW_TYPES

_PARTS = msgspec.json.Decoder(list[str | None])


def key_columns_of(keys: pa.Array, columns: Sequence[tuple[str, str]]) -> dict[str, pa.Array]:
    """Each column of the key: name and type as declared."""
    if len(columns) == 1:
        (name, kind) = columns[0]
        if kind != "string":
            keys = pc.if_else(pc.equal(keys, ""), pa.scalar(None, pa.string()), keys)
        return {name: keys.cast(ARROW_TYPES[kind])}
    parts = [_PARTS.decode(key) if key else [None] * len(columns) for key in keys.to_pylist()]
    return {
        name: pa.array([part[place] for part in parts], pa.string()).cast(ARROW_TYPES[kind])
        for place, (name, kind) in enumerate(columns)
    }
