"""Which partitions are idle and what they follow: a function of what was noted, and of the time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.streams.bus.idle import decide_idle, due_marks
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, Seen

AFTER_MS = 10_000


def note(
    seen: list[Seen], ends: list[int], now_ms: int, last: int = LOW_MIN, **observed: int
) -> dict[int, int]:
    """Note into `seen`; returns the marks that are due. `p1=50`: partition 1's readers are at 50."""
    said = {int(name[1:]): low for name, low in observed.items()}
    noted = decide_idle(seen, ends, observed=said, idle_after_ms=AFTER_MS, now_ms=now_ms, last=last)
    marks = due_marks(seen, noted)
    for partition, one in noted.items():
        seen[partition] = one
    return marks


def test_an_idle_partition_follows_the_slowest_that_grows():
    seen = [Seen(), Seen(), Seen()]
    assert note(seen, [5, 5, 0], 0, p0=100, p1=80) == {}
    assert note(seen, [6, 6, 0], 9_999, p0=200, p1=150) == {}
    assert note(seen, [7, 7, 0], 11_000, p0=300, p1=250) == {2: 250}
    assert note(seen, [8, 8, 0], 12_000, p0=400, p1=390) == {2: 390}


def test_who_speaks_again_follows_no_longer():
    seen = [Seen(), Seen()]
    note(seen, [5, 0], 0, p0=100)
    assert note(seen, [6, 0], 10_000, p0=200) == {1: 200}
    assert note(seen, [7, 1], 11_000, p0=300) == {}
    assert note(seen, [8, 1], 20_000, p0=400) == {}
    assert note(seen, [9, 1], 21_000, p0=500) == {1: 500}


def test_who_spoke_again_does_not_pull_others_below_what_it_followed():
    seen = [Seen(), Seen(), Seen()]
    note(seen, [5, 0, 0], 0, p0=100)
    assert note(seen, [6, 0, 0], 10_000, p0=200) == {1: 200, 2: 200}
    assert note(seen, [7, 1, 0], 11_000, p0=300, p1=50) == {}  # partition 1 stands at 200, and so does 2
    assert seen[2].follows == 200


def test_if_all_are_idle_nothing_tells_the_time():
    seen = [Seen(), Seen()]
    note(seen, [5, 0], 0, p0=100)
    assert note(seen, [5, 0], 50_000, p0=900) == {}


def test_a_partition_that_nobody_reads_holds_the_others():
    seen = [Seen(), Seen(), Seen()]
    note(seen, [5, 5, 0], 0, p0=100)
    assert note(seen, [6, 6, 0], 60_000, p0=200) == {}


def test_after_the_end_nothing_is_followed():
    seen = [Seen(), Seen()]
    note(seen, [5, 0], 0, p0=100)
    assert note(seen, [6, 0], 60_000, last=LOW_MAX, p0=200) == {}


def test_off_means_that_nothing_is_even_noted():
    assert decide_idle([Seen()], [5], observed={0: 9}, idle_after_ms=0, now_ms=10**9) == {}


def test_what_is_seen_is_noted_ten_times_in_the_interval_at_most():
    seen = [Seen(), Seen()]
    written = 0
    for step in range(100):
        noted = decide_idle(seen, [step, 0], observed={0: step}, idle_after_ms=AFTER_MS, now_ms=step * 100)
        written += 0 in noted
        for partition, one in noted.items():
            seen[partition] = one
    assert written == 10


def test_a_clock_that_was_set_back_only_delays():
    seen = [Seen(), Seen()]
    note(seen, [5, 0], 10**9, p0=100)
    assert note(seen, [6, 0], 5, p0=200) == {}
    assert note(seen, [7, 0], 10_005, p0=300) == {1: 300}


_steps = st.lists(
    st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 500), st.integers(1, 8_000)), max_size=40
)


@given(_steps)
def test_marks_only_rise_and_never_pass_the_slowest_that_grew(steps: list[tuple[int, bool, int, int]]):
    seen, ends, now_ms, lows = [Seen()] * 3, [0, 0, 0], 0, [LOW_MIN] * 3
    followed = [LOW_MIN] * 3
    for partition, grows, low, pause in steps:
        now_ms += pause
        ends[partition] += grows
        lows[partition] = max(lows[partition], low)
        reached = [max(a, b) for a, b in zip(lows, followed, strict=True)]
        for number, mark in note(seen, ends, now_ms, **{f"p{partition}": low}).items():
            assert mark > followed[number]
            assert mark <= max(reached[other] for other in range(3) if other != number)
            followed[number] = mark
