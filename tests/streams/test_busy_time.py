"""Claims about busy time: every batch once, a long one while it runs, and never less than before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.streams.engine.busy_time import BusyTime


def test_each_batch_counts_once():
    busy = BusyTime()
    assert busy.look([(0, 100.0)], is_running=False, at_ms=0) == 100
    assert busy.look([(0, 100.0)], is_running=False, at_ms=1000) == 100
    assert busy.look([(2, 30.0), (1, 20.0), (2, 30.0)], is_running=False, at_ms=2000) == 150
    assert busy.last_seen == 2


def test_a_long_batch_counts_while_it_runs():
    busy = BusyTime()
    busy.look([(0, 100.0)], is_running=True, at_ms=1_000)
    assert busy.look([], is_running=True, at_ms=31_000) == 30_100
    assert busy.look([], is_running=True, at_ms=61_000) == 60_100
    assert busy.look([(1, 60_500.0)], is_running=False, at_ms=62_000) == 60_600


def test_a_new_query_numbers_its_batches_anew():
    busy = BusyTime()
    busy.look([(7, 100.0)], is_running=False, at_ms=0)
    busy.new_query()
    assert busy.look([(0, 50.0)], is_running=False, at_ms=10) == 150


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(-1, 9), st.floats(-1, 1e5))), st.booleans(), st.floats(0, 1e6)
        )
    )
)
def test_it_never_goes_back(looks):
    busy, last = BusyTime(), 0.0
    for ended, is_running, at_ms in looks:
        total = busy.look(ended, is_running=is_running, at_ms=at_ms)
        assert total >= last
        last = total
