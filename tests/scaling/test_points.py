"""Claims about how numbers of minutes are kept: to a share of themselves, unknown apart from zero."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import CorruptData
from penstock.scaling.metrics.frames import METRICS
from penstock.scaling.metrics.minutes import (
    DAY,
    bits_of,
    decode,
    encode,
    pack,
    pack_minute,
    unpack,
    unpack_minute,
)

COARSE, FINE = bits_of(["cpu"]), bits_of(["task_count"])
codes = st.integers(0, 2**16 - 1)


@given(st.lists(st.floats(min_value=0, max_value=1e15), min_size=1))
def test_a_number_is_kept_to_a_share_of_itself(values):
    given_ = np.array(values)
    for bits, share in ((COARSE, 1 / 256), (FINE, 1 / 1024)):
        kept = decode(encode(given_, bits), bits)
        assert (np.abs(kept - given_) <= np.maximum(given_ * share, 1e-9)).all()
        assert np.array_equal(decode(encode(kept, bits), bits), kept)  # and no further from it the next time


def test_counts_are_kept_exactly():
    counts = np.arange(1025.0)
    assert np.array_equal(decode(encode(counts, FINE), FINE), counts)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0, -1e-9])
def test_what_is_no_number_is_unknown_and_not_zero(value):
    assert np.isnan(decode(encode(np.array([value, 0.0]), COARSE), COARSE)).tolist() == [True, False]
    assert decode(encode(np.array([0.0, -0.0]), COARSE), COARSE).tolist() == [0.0, 0.0]


def test_a_number_too_large_is_the_largest():
    for bits in (COARSE, FINE):
        kept = decode(encode(np.array([1e300, 1e38]), bits), bits)
        assert np.isfinite(kept).all() and (kept > 1e28).all()


@given(st.lists(codes, min_size=3, max_size=50))
def test_packed_codes_come_back(items):
    one, same = np.array(items, np.uint16), np.full(len(items), items[0], np.uint16)
    found = unpack([pack(one), pack(same)], len(items))
    assert np.array_equal(found[0], one) and np.array_equal(found[1], same)


@given(st.data())
def test_a_minute_of_several_jobs_comes_back(data):
    slots = data.draw(st.lists(st.integers(0, 127), unique=True, min_size=1, max_size=8))
    columns = list(range(data.draw(st.integers(1, len(METRICS)))))
    table = np.array([[data.draw(codes) for _ in columns] for _ in slots], np.uint16)
    found_slots, found_columns, found = unpack_minute(pack_minute(slots, columns, table))
    assert (found_slots.tolist(), found_columns.tolist()) == (slots, columns)
    assert np.array_equal(found, table)


@pytest.mark.parametrize(
    "damaged", [b"", b"\x00", b"\x01", b"\x01garbage", b"\x07" + pack(np.arange(9, dtype=np.uint16))[1:]]
)
def test_damage_is_told(damaged):
    with pytest.raises(CorruptData):
        unpack([damaged], 9)
    with pytest.raises(CorruptData):
        unpack([pack(np.arange(10, dtype=np.uint16))], 9)
    with pytest.raises(CorruptData):
        unpack_minute(damaged)


def test_a_day_of_a_quiet_metric_takes_nothing():
    assert len(pack(np.ones(DAY, np.uint16))) == 3
