"""What messages meet on their way."""

from __future__ import annotations

from penstock.sim.simulation import Network, NetworkConditions, Simulation


def deliveries(conditions: NetworkConditions, seed: int = 5, count: int = 1_000) -> list[int]:
    sim, got = Simulation(seed), list[int]()
    network = Network(sim=sim, conditions=conditions)
    for number in range(count):
        sim.at(number, "send", lambda number=number: network.send("a", "b", "m", lambda: got.append(number)))
    sim.run(100_000)
    return got


def test_a_good_day_delivers_everything_once():
    assert sorted(deliveries(NetworkConditions())) == list(range(1_000))


def test_loss_loses_and_doubling_doubles():
    assert 600 < len(deliveries(NetworkConditions(loss=0.3))) < 800
    doubled = deliveries(NetworkConditions(doubled=0.2))
    assert set(doubled) == set(range(1_000)) and 1_100 < len(doubled) < 1_300


def test_late_messages_are_overtaken():
    got = deliveries(NetworkConditions(late=0.1, late_ms=5_000))
    assert sorted(got) == list(range(1_000)) and got != sorted(got)


def test_a_cut_link_is_cut_in_one_direction():
    sim, got = Simulation(5), list[str]()
    network = Network(sim=sim)
    network.cut("a", "b")
    network.send("a", "b", "m", lambda: got.append("a to b"))
    network.send("b", "a", "m", lambda: got.append("b to a"))
    sim.run(1_000)
    network.restore("a", "b")
    network.send("a", "b", "m", lambda: got.append("mended"))
    sim.run(2_000)
    assert got == ["b to a", "mended"]
