"""What does a message meet on its way? Delay, loss, doubling, overtaking, links cut one way or both."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from penstock.core.clock import Millis
from penstock.sim.simulation import Action, Simulation


@dataclass(slots=True)
class Weather:
    """How the network behaves at the moment. The default is a good day."""

    loss: float = 0.0
    doubled: float = 0.0
    late: float = 0.0  # the share of messages that take up to `late_ms`: these get overtaken
    late_ms: Millis = 0
    delay_ms: Millis = 5


@dataclass(slots=True)
class Network:
    """Carries messages between named places. A late message is delivered as it is: nobody recalls it."""

    sim: Simulation
    weather: Weather = field(default_factory=Weather)
    met: Counter[str] = field(default_factory=Counter)  # what happened to messages, by kind
    last_due_ms: Millis = 0  # when the last message that is under way arrives
    _cut: set[tuple[str, str]] = field(default_factory=set)
    _mended_ms: dict[tuple[str, str], Millis] = field(default_factory=dict)
    _slow_ms: dict[tuple[str, str], Millis] = field(default_factory=dict)

    def cut(self, source: str, target: str) -> None:
        """Lose everything sent from `source` to `target` from now on. The other direction is another link."""
        self._cut.add((source, target))
        self.sim.note(f"link {source} -> {target} is cut")

    def mend(self, source: str, target: str) -> None:
        """Undo `cut`."""
        if (source, target) in self._cut:
            self._mended_ms[source, target] = self.sim.now_ms
        self._cut.discard((source, target))
        self.sim.note(f"link {source} -> {target} is mended")

    def is_cut(self, source: str, target: str) -> bool:
        """Whether what is sent now is lost."""
        return (source, target) in self._cut

    def was_cut(self, source: str, target: str, within_ms: Millis) -> bool:
        """Whether it is, or was until a short while ago."""
        mended_ms = self._mended_ms.get((source, target), -(10**12))
        return self.is_cut(source, target) or mended_ms > self.sim.now_ms - within_ms

    def slow(self, source: str, target: str, delay_ms: Millis) -> None:
        """Everything sent from `source` to `target` takes this much longer, until it is set to 0 again."""
        self._slow_ms[source, target] = delay_ms
        self.sim.note(f"link {source} -> {target} takes {delay_ms} ms longer")

    def heal(self) -> None:
        """A good day from now on. What is already under way still arrives late."""
        for link in sorted(self._cut):
            self.mend(*link)
        self._slow_ms.clear()
        self.weather = Weather()
        self.sim.note("network heals")

    def send(self, source: str, target: str, label: str, deliver: Action) -> None:
        """Carry one message. `deliver` runs never, once or twice, now or later."""
        self.met["sent"] += 1
        if (source, target) in self._cut:
            self.met["cut off"] += 1
            return
        rng, weather = self.sim.rng, self.weather
        if rng.random() < weather.loss:
            self.met["lost"] += 1
            return
        copies = 1
        if rng.random() < weather.doubled:
            self.met["doubled"] += 1
            copies = 2
        for _ in range(copies):
            delay_ms = 1 + rng.randrange(weather.delay_ms) + self._slow_ms.get((source, target), 0)
            if rng.random() < weather.late:
                self.met["late"] += 1
                delay_ms += rng.randrange(weather.late_ms)
            self.last_due_ms = max(self.last_due_ms, self.sim.now_ms + delay_ms)
            self.sim.after(delay_ms, label, deliver)
