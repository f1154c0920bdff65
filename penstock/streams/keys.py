"""Keys of records as text, and their partitions. Both must never change. Pure.

The text of a key of one column is the text of the value. NULL has the text `[null]`, so that it differs from
''; a value that is this text, or this text with more opening brackets, gets one more bracket in front. The
text of a key of several columns is a JSON array of their texts, with null for NULL.
"""

from __future__ import annotations

import zlib

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

NULL_KEY = "[null]"
_AFTER_BRACKETS = "null]"
_PARTS = msgspec.json.Decoder(list[str | None])


def key_texts(values: pa.Array) -> pa.Array:
    """The key text of each value, for a key of one expression; never null."""
    bracketed = _is_bracketed(values)
    if bracketed is not None:
        escaped = pc.binary_join_element_wise("[", values, "")
        values = pc.if_else(bracketed, escaped, values)
    return pc.fill_null(values, NULL_KEY)


def key_sql(text: str) -> str:
    """`key_texts` as Spark SQL, for a string expression."""
    return rf"coalesce(regexp_replace({text}, '^(\\[+null\\])\\z', '[$1'), '{NULL_KEY}')"


def key_values(texts: pa.Array) -> pa.Array:
    """The values from the texts of a key of one column."""
    bracketed = _is_bracketed(texts)
    if bracketed is None:
        return texts
    values = pc.if_else(pc.equal(texts, NULL_KEY), pa.scalar(None, pa.string()), texts)
    return pc.if_else(bracketed, pc.utf8_slice_codeunits(values, 1), values)


def key_parts(text: str, count: int) -> list[str | None]:
    """The texts of the columns of a key of several columns; for an empty key all NULL."""
    return _PARTS.decode(text) if text else [None] * count


def has_null_part(texts: pa.Array, count: int) -> npt.NDArray[np.bool_]:
    """Which of these keys of `count` columns contain NULL: such a key is not equal to any key."""
    if count == 1:
        found = pc.equal(texts, NULL_KEY)
    else:
        found = pc.match_substring(texts, "null")
        if pc.any(found).as_py():
            flags = [None in key_parts(text, count) for text in texts.filter(found).to_pylist()]
            found = pc.replace_with_mask(found, found, pa.array(flags, pa.bool_()))
    return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.bool_)


def _is_bracketed(texts: pa.Array) -> pa.Array | None:
    """Which of these are `null]` after one or more opening brackets; None if none is."""
    ends = pc.ends_with(texts, _AFTER_BRACKETS)
    if not pc.any(ends).as_py():
        return None
    bare = pc.equal(pc.utf8_ltrim(texts, "["), _AFTER_BRACKETS)
    return pc.and_(bare, pc.starts_with(texts, "["))


def partition_of(key: str, partitions: int) -> int:
    """CRC-32 of the key's UTF-8 bytes."""
    return zlib.crc32(key.encode()) % partitions


def partitions_of(keys: pa.Array, partitions: int) -> npt.NDArray[np.int64]:
    """`partition_of` for a column; each distinct key is hashed once. A null key counts as the empty key."""
    encoded = pc.dictionary_encode(pc.fill_null(keys.cast(pa.string()), ""))
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    by_key = np.array(
        [partition_of(key, partitions) for key in encoded.dictionary.to_pylist()], dtype=np.int64
    )
    indices = encoded.indices.to_numpy(zero_copy_only=False)
    return by_key[indices] if len(by_key) else np.empty(0, dtype=np.int64)
