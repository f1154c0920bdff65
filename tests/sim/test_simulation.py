"""The kernel: time, ties, traces, processes."""

from __future__ import annotations

import pytest

from penstock.sim.simulation import InvariantBroken, ProcessCrashed, SimProcess, Simulation, draw_clock


def a_process(sim: Simulation, name: str = "p") -> SimProcess:
    return SimProcess(sim=sim, name=name, clock=draw_clock(sim))


def a_busy_run(seed: int) -> tuple[str, list[str]]:
    sim, seen = Simulation(seed), list[str]()
    for name in "abc":
        process = a_process(sim, name)
        process.every(100, "beat", lambda name=name: seen.append(name))
        sim.after(sim.rng.randrange(1_000), "pause", process.pause)
        sim.after(sim.rng.randrange(1_000, 3_000), "resume", process.resume)
    sim.run(5_000)
    return sim.trace, seen


def test_the_same_seed_gives_the_same_trace():
    assert a_busy_run(7) == a_busy_run(7)


def test_another_seed_gives_another_trace():
    assert len({a_busy_run(seed)[0] for seed in range(10)}) == 10


def test_ties_are_broken_by_the_seed():
    def order(seed: int) -> str:
        sim, seen = Simulation(seed), list[str]()
        for name in "abcd":
            sim.at(10, name, lambda name=name: seen.append(name))
        sim.run(10)
        return "".join(seen)

    assert len({order(seed) for seed in range(20)}) > 5


def test_a_broken_invariant_tells_the_seed_and_the_last_events():
    sim, beats = Simulation(4711), list[int]()
    sim.every(10, "beat", lambda: beats.append(sim.now_ms))
    sim.invariant("at most three beats", lambda: f"{len(beats)} beats" if len(beats) > 3 else None)
    with pytest.raises(InvariantBroken) as caught:
        sim.run(1_000)
    assert "replay with seed 4711" in str(caught.value)
    assert "at most three beats: 4 beats" in str(caught.value)
    assert "40 beat" in str(caught.value)
    assert caught.value.now_ms == 40


def test_invariants_are_counted():
    sim = Simulation(1)
    sim.invariant("nothing", lambda: None)
    sim.every(10, "beat", lambda: None)
    sim.run(100)
    assert sim.evaluated == {"nothing": 10}


def test_a_paused_process_acts_on_what_it_knew_before_it_sees_the_time():
    """It was due at 100, is paused over it, and must do it at the resume, before anything later."""
    sim, seen = Simulation(3), list[tuple[str, int]]()
    process = a_process(sim)
    process.after(100, "write", lambda: seen.append(("write", sim.now_ms)))
    process.after(200, "look at the clock", lambda: seen.append(("look", sim.now_ms)))
    sim.at(50, "pause", process.pause)
    sim.at(9_000, "resume", process.resume)
    sim.run(10_000)
    assert seen == [("write", 9_000), ("look", 9_000)]


def test_a_dead_process_does_nothing_more():
    sim, seen = Simulation(3), list[int]()
    process = a_process(sim)
    process.every(10, "beat", lambda: seen.append(sim.now_ms))
    sim.at(55, "kill", process.kill)
    sim.run(1_000)
    assert seen and max(seen) <= 55


def test_a_crash_inside_an_event_ends_the_process_and_nothing_else():
    sim, dead, seen = Simulation(3), list[str](), list[int]()

    def crash() -> None:
        raise ProcessCrashed

    process, other = a_process(sim, "p"), a_process(sim, "other")
    process.on_death.append(lambda: dead.append("p"))
    process.after(10, "crash", crash)
    process.after(20, "never", lambda: seen.append(-1))
    other.after(30, "goes on", lambda: seen.append(30))
    sim.run(100)
    assert dead == ["p"] and seen == [30]


def test_clock_rates_stay_within_one_percent():
    for seed in range(50):
        sim = Simulation(seed)
        clock = draw_clock(sim)
        start = clock.boot_ms()
        sim.run(1_000_000)
        assert 989_000 <= clock.boot_ms() - start <= 1_011_000


def test_an_error_in_the_code_under_test_tells_the_seed_too():
    sim = Simulation(4712)

    def fail() -> None:
        assert not sim.seed, "the code's own assertion"

    a_process(sim).after(10, "fail", fail)
    with pytest.raises(InvariantBroken, match="replay with seed 4712") as caught:
        sim.run(100)
    assert caught.value.name == "no code fails" and "own assertion" in caught.value.seen
    assert isinstance(caught.value.__cause__, AssertionError)
