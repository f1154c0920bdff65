"""Each test is a table of (time, event); `beats` keeps the named containers alive up to a time."""

from __future__ import annotations

from penstock.fleet.liveness import Alert, FailOver, Liveness
from penstock.fleet.messages import FAST

S = 1_000


class Watch:
    """A Liveness with a running clock: one `on_time` a second, a canary with each."""

    def __init__(self, *names: str) -> None:
        self.machine, self.now_ms, self.canary = Liveness(FAST), 0, 0
        self.dead: dict[str, int] = {}
        self.alerts: list[tuple[int, str]] = []
        self.machine.on_time(0)
        for name in names:
            self.machine.on_registered(name, "i1", 0)

    def until(self, end_ms: int, beats: tuple[str, ...] = (), *, canary_works: bool = True) -> None:
        while self.now_ms < end_ms:
            self.now_ms += S
            for name in beats:
                self.machine.on_heartbeat(name, "i1", self.now_ms)
            if canary_works:
                self.machine.on_canary(self.canary)
            self._look()
            self.canary += 1
            self.machine.on_canary_sent(self.canary, self.now_ms)

    def pause_until(self, end_ms: int) -> None:
        self.now_ms = end_ms
        self._look()

    def _look(self) -> None:
        for action in self.machine.on_time(self.now_ms).actions:
            if isinstance(action, FailOver):
                self.dead.setdefault(action.container, self.now_ms)
                self.machine.on_gone(action.container, self.now_ms)
            else:
                assert isinstance(action, Alert)
                self.alerts.append((self.now_ms, action.kind))


def test_a_silent_container_fails_over_after_the_full_interval():
    watch = Watch("c1", "c2")
    watch.until(20 * S, beats=("c1", "c2"))
    watch.until(60 * S, beats=("c2",))
    assert watch.dead == {"c1": 32 * S}


def test_a_container_that_never_beat_fails_over_too():
    watch = Watch("c1", "c2")
    watch.until(30 * S, beats=("c2",))
    assert watch.dead == {"c1": 12 * S}


def test_lives_that_register_and_never_beat_have_one_interval_together():
    """Its answers are lost: it hears of no registration, and tries again with a new life every three seconds."""
    watch = Watch("c1", "c2")
    watch.until(20 * S, beats=("c1", "c2"))
    for life in range(2, 20):
        if "c1" not in watch.dead:
            watch.machine.on_registered("c1", f"i{life}", watch.now_ms)
        watch.until(watch.now_ms + 3 * S, beats=("c2",))
    assert watch.dead == {"c1": 32 * S}


def test_a_life_that_beats_gives_the_next_one_a_full_interval():
    watch = Watch("c1", "c2")
    for number in range(8):
        watch.machine.on_registered("c1", f"i{number}", watch.now_ms)
        watch.machine.on_heartbeat("c1", f"i{number}", watch.now_ms)
        watch.until(watch.now_ms + 10 * S, beats=("c2",))
    assert watch.dead == {}


def test_a_beat_of_an_older_life_does_not_count():
    watch = Watch("c1")
    watch.machine.on_registered("c1", "i2", 0)
    watch.until(30 * S, beats=("c1",))
    assert watch.dead == {"c1": 12 * S}


def test_a_fail_over_is_asked_for_again_until_it_is_done():
    machine = Liveness(FAST)
    machine.on_registered("c1", "i1", 0)
    for now_ms in range(0, 12 * S, S):
        assert machine.on_time(now_ms).actions == ()
    first = machine.on_time(12 * S).actions
    assert [action.container for action in first] == ["c1"]
    assert [action.container for action in machine.on_time(13 * S).actions] == ["c1"]
    machine.on_gone("c1", 13 * S)
    assert machine.on_time(14 * S).actions == ()


def test_an_exit_that_was_seen_needs_no_waiting_not_even_while_the_canary_is_late():
    watch = Watch("c1", "c2")
    watch.until(10 * S, beats=("c1", "c2"), canary_works=False)
    watch.machine.on_dead("c1", "i1")
    watch.until(11 * S, beats=("c2",), canary_works=False)
    assert watch.dead == {"c1": 11 * S}


def test_after_a_pause_of_ours_every_container_gets_a_full_interval():
    watch = Watch("c1", "c2")
    watch.until(20 * S, beats=("c1", "c2"))
    watch.pause_until(60 * S)
    assert watch.dead == {}
    watch.until(71 * S, beats=("c2",))
    assert watch.dead == {}
    watch.until(80 * S, beats=("c2",))
    assert watch.dead == {"c1": 72 * S}


def test_while_the_canary_is_late_nobody_fails_over_and_somebody_hears_of_it():
    watch = Watch("c1", "c2")
    watch.until(20 * S, beats=("c1", "c2"))
    watch.until(60 * S, canary_works=False)
    assert watch.dead == {} and [kind for _, kind in watch.alerts] == ["canary_late"]
    watch.until(90 * S, beats=("c2",))
    # The canary came back at 61 s; c1 had a full interval from then on.
    assert watch.dead == {"c1": 73 * S}


def test_when_many_fall_silent_together_it_holds_one_interval_more_and_alerts_once():
    names = tuple(f"c{n}" for n in range(6))
    watch = Watch(*names)
    watch.until(20 * S, beats=names)
    watch.until(39 * S, beats=names[3:])
    # Past their deadline at 28 s they have stopped themselves: from there one interval.
    assert watch.dead == {} and watch.alerts == [(28 * S, "brake")]
    watch.until(60 * S, beats=names[3:])
    assert watch.dead == dict.fromkeys(names[:3], 40 * S)
    assert len(watch.alerts) == 1


def test_containers_that_return_during_the_brake_are_not_touched():
    names = tuple(f"c{n}" for n in range(6))
    watch = Watch(*names)
    watch.until(20 * S, beats=names)
    watch.until(39 * S, beats=names[3:])
    watch.until(80 * S, beats=names)
    assert watch.dead == {}


def test_grace_after_a_pause_and_the_brake_together_stay_within_two_intervals():
    names = tuple(f"c{n}" for n in range(6))
    watch = Watch(*names)
    watch.until(20 * S, beats=names)
    watch.pause_until(60 * S)
    watch.until(90 * S, beats=names[3:])
    # From 60 s on: 8 s of grace until the brake, 12 s of hold.
    assert watch.alerts == [(68 * S, "brake")]
    assert watch.dead == dict.fromkeys(names[:3], 80 * S)


def test_silence_spread_over_one_interval_still_brakes():
    names = tuple(f"c{n}" for n in range(6))
    watch = Watch(*names)
    watch.until(20 * S, beats=names)
    watch.until(24 * S, beats=names[1:])
    watch.until(28 * S, beats=names[2:])
    watch.until(60 * S, beats=names[3:])
    # c0 went alone; when c1 is due at 36 s, c2 is past its deadline: the third within one interval.
    # c0 is forgotten at 44 s, and two alone do not brake.
    assert watch.alerts == [(36 * S, "brake")]
    assert watch.dead == {"c0": 32 * S, "c1": 44 * S, "c2": 44 * S}


def test_a_container_that_falls_silent_during_the_brake_has_its_own_interval():
    names = tuple(f"c{n}" for n in range(6))
    watch = Watch(*names)
    watch.until(20 * S, beats=names)
    watch.until(31 * S, beats=names[3:])
    watch.until(80 * S, beats=names[4:])
    assert watch.dead == {**dict.fromkeys(names[:3], 40 * S), "c3": 51 * S}


def test_containers_that_live_by_their_rows_only_count_for_the_brake():
    """Half of the fleet reaches the store and not us: the fault is likely ours, also for one that is silent."""
    names = tuple(f"c{n}" for n in range(6))
    watch = Watch(*names)
    watch.until(20 * S, beats=names)
    for _ in range(6):
        watch.until(watch.now_ms + 5 * S, beats=names[3:])
        for name in names[:2]:
            watch.machine.on_renewed(name, "i1", watch.now_ms)
    assert watch.alerts == [(28 * S, "brake")]
    # One interval from its deadline on; those whose rows are renewed are not touched, and heard again ...
    assert watch.dead == {"c2": 40 * S}
    watch.until(54 * S, beats=names)
    watch.until(80 * S, beats=names[:1] + names[2:])
    assert watch.dead == {"c2": 40 * S, "c1": 66 * S}  # ... they brake nobody any more


def test_few_or_known_dead_containers_do_not_brake():
    names = tuple(f"c{n}" for n in range(20))
    watch = Watch(*names)
    watch.until(20 * S, beats=names)
    watch.until(32 * S, beats=names[5:])  # 25 %
    assert sorted(watch.dead) == ["c0", "c1", "c2", "c3", "c4"] and watch.alerts == []
    small = Watch("c1", "c2", "c3")
    for name in ("c1", "c2", "c3"):
        small.machine.on_dead(name, "i1")
    small.until(1 * S)
    assert sorted(small.dead) == ["c1", "c2", "c3"] and small.alerts == []


def test_a_container_left_unanswered_on_purpose_fails_over_by_its_silence_and_does_not_brake():
    watch = Watch("c1", "c2", "c3")
    watch.until(20 * S, beats=("c1", "c2", "c3"))
    watch.machine.on_withheld("c1")
    watch.until(40 * S, beats=("c1", "c2", "c3"))
    assert watch.dead == {"c1": 32 * S}
