"""The columns of a key, from the key's text: what is grouped by is the text, and each result shows columns.

Pure. Before NULL had a text of its own it had that of '': so a number or boolean shows NULL for '' too.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from penstock.streams.bus.log import ARROW_TYPES
from penstock.streams.keys import key_parts, key_values


def key_columns_of(keys: pa.Array, columns: Sequence[tuple[str, str]]) -> dict[str, pa.Array]:
    """Each column of the key: name and type as declared."""
    if len(columns) == 1:
        (name, kind) = columns[0]
        keys = key_values(keys)
        if kind != "string":
            keys = pc.if_else(pc.equal(keys, ""), pa.scalar(None, pa.string()), keys)
        return {name: keys.cast(ARROW_TYPES[kind])}
    parts = [key_parts(key, len(columns)) for key in keys.to_pylist()]
    return {
        name: pa.array([part[place] for part in parts], pa.string()).cast(ARROW_TYPES[kind])
        for place, (name, kind) in enumerate(columns)
    }
