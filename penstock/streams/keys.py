"""Which partition a key belongs to: the same on every machine, for ever. Pure."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc


def partition_of(key: str, partitions: int) -> int:
    """CRC-32 of the key's UTF-8 bytes."""
    return zlib.crc32(key.encode()) % partitions


def partitions_of(keys: pa.Array, partitions: int) -> npt.NDArray[np.int64]:
    """`partition_of` for a column; each distinct key is hashed once. A null key counts as the empty one."""
    encoded = pc.dictionary_encode(pc.fill_null(keys.cast(pa.string()), ""))
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    by_key = np.array(
        [partition_of(key, partitions) for key in encoded.dictionary.to_pylist()], dtype=np.int64
    )
    indices = encoded.indices.to_numpy(zero_copy_only=False)
    return by_key[indices] if len(by_key) else np.empty(0, dtype=np.int64)
