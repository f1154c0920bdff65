"""The simulator's core: virtual time, a heap of events, a network, and invariants checked after each event.

All randomness comes from `rng`, so a run can be repeated from its seed; `trace` verifies that. The network
delays, loses, duplicates and reorders messages, and cuts links in one or both directions.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

from penstock.core.clock import Millis
from penstock.core.errors import PenstockError

SimAction = Callable[[], None]
InvariantCheck = Callable[[], str | None]  # None: it holds; otherwise the violation

WALL_START_MS = 1_800_000_000_000
CLOCK_RATE_ERROR = 0.01


class InvariantBroken(AssertionError):
    """An invariant was violated. The message says how to reproduce it."""

    def __init__(self, *, seed: int, name: str, seen: str, now_ms: Millis, events: tuple[str, ...]) -> None:
        tail = "\n  ".join(events)
        super().__init__(f"{name}: {seen}\nat {now_ms} ms; replay with seed {seed}\nlast events:\n  {tail}")
        self.seed, self.name, self.seen, self.now_ms = seed, name, seen, now_ms


_BUGS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    PenstockError,
    RuntimeError,
    TypeError,
    ValueError,
)


class ProcessCrashed(BaseException):
    """Ends the running process at once, as SIGKILL would: no code under test may catch it."""


class Simulation:
    """Virtual time, and the events to come."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng, self.now_ms = seed, Random(seed), 0
        self.evaluated: Counter[str] = Counter()
        self.events_total = 0
        self.current: SimProcess | None = None  # whose code runs: faults hit processes, never the checkers
        self._heap: list[tuple[Millis, float, int, str, SimAction]] = []
        self._checks: list[tuple[str, InvariantCheck]] = []
        self._watchers: list[SimAction] = []
        self._last: deque[str] = deque(maxlen=60)
        self._trace = blake2b(digest_size=16)
        self._n = 0

    @property
    def trace(self) -> str:
        """A hash of all events so far: equal for two runs of one seed."""
        return self._trace.hexdigest()

    def invariant(self, name: str, check: InvariantCheck) -> None:
        """Evaluate `check` after every event from now on."""
        self._checks.append((name, check))

    def watch(self, checker: SimAction) -> None:
        """Call `checker` after every event; it calls `demand` for what it checks."""
        self._watchers.append(checker)

    def at(self, when_ms: Millis, label: str, action: SimAction) -> None:
        """Run `action` at a time; the seed decides the order of events at the same time."""
        self._n += 1
        heapq.heappush(self._heap, (max(when_ms, self.now_ms), self.rng.random(), self._n, label, action))

    def after(self, delay_ms: Millis, label: str, action: SimAction) -> None:
        """Run `action` once, `delay_ms` from now."""
        self.at(self.now_ms + delay_ms, label, action)

    def every(self, interval_ms: Millis, label: str, action: SimAction) -> None:
        """Run `action` periodically."""

        def again() -> None:
            action()
            self.after(interval_ms, label, again)

        self.after(interval_ms, label, again)

    def note(self, what: str) -> None:
        """Add a detail of the current event to the trace."""
        self._last.append(f"{self.now_ms:>9} {what}")
        self._trace.update(f"{self.now_ms}|{what}\n".encode())

    def run(self, until_ms: Millis) -> None:
        """Run all events up to a time."""
        while self._heap and self._heap[0][0] <= until_ms:
            when_ms, _, _, label, action = heapq.heappop(self._heap)
            self.now_ms = when_ms
            self.events_total += 1
            self.note(label)
            self._act(action)
            self.check()
        self.now_ms = max(self.now_ms, until_ms)

    def _act(self, action: SimAction) -> None:
        try:
            action()
        except InvariantBroken:
            raise
        except _BUGS as error:
            # An error of the code under test is reported with its seed, as a violated invariant is.
            self.demand("no code fails", f"{type(error).__name__}: {error}", cause=error)

    def run_inside(self, until_ms: Millis) -> None:
        """Run other events in the middle of an event, as they happen while its process is paused."""
        process, self.current = self.current, None
        try:
            self.run(until_ms)
        finally:
            self.current = process

    def check(self) -> None:
        """Evaluate every invariant now."""
        for name, check in self._checks:
            self.demand(name, check())
        for checker in self._watchers:
            checker()

    def demand(self, name: str, seen: str | None, *, cause: Exception | None = None) -> None:
        """Count one evaluation of an invariant; raise InvariantBroken if it is violated."""
        self.evaluated[name] += 1
        if seen is not None:
            raise InvariantBroken(
                seed=self.seed, name=name, seen=seen, now_ms=self.now_ms, events=tuple(self._last)
            ) from cause


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessClock:
    """One process's clocks: the boot clock runs slightly fast or slow, the wall clock has an offset."""

    sim: Simulation
    rate: float
    boot_offset_ms: Millis
    wall_offset_ms: Millis

    def now_ms(self) -> Millis:
        """The wall clock, with its offset."""
        return WALL_START_MS + self.wall_offset_ms + self.sim.now_ms

    def boot_ms(self) -> Millis:
        """The boot clock, with which leases are measured."""
        return self.boot_offset_ms + int(self.sim.now_ms * self.rate)


def draw_clock(sim: Simulation) -> ProcessClock:
    """A clock with a rate within 1 %."""
    return ProcessClock(
        sim=sim,
        rate=1 + sim.rng.uniform(-CLOCK_RATE_ERROR, CLOCK_RATE_ERROR),
        boot_offset_ms=sim.rng.randrange(10**9),
        wall_offset_ms=sim.rng.randrange(-3_600_000, 3_600_000),
    )


@dataclass(slots=True)
class SimProcess:
    """A process: runs events while it is up, queues them while it is paused, drops them once it is dead.

    After a pause the queued events run first and in order: it acts on stale data before it reads the clock.
    """

    sim: Simulation
    name: str
    clock: ProcessClock
    is_alive: bool = True
    is_paused: bool = False
    is_inside: bool = False  # paused inside an event: only the caller that paused it can resume it
    resumed_ms: Millis = -(10**12)  # the end of the last pause
    on_death: list[SimAction] = field(default_factory=list)
    _queued: list[tuple[str, SimAction]] = field(default_factory=list)

    def run(self, label: str, action: SimAction) -> None:
        """Run `action` in this process now, or when it resumes, or never."""
        if not self.is_alive:
            return
        if self.is_paused:
            self._queued.append((label, action))
            return
        caller, self.sim.current = self.sim.current, self
        try:
            action()
        except ProcessCrashed:
            self.kill()
        finally:
            self.sim.current = caller

    def after(self, delay_ms: Millis, label: str, action: SimAction) -> None:
        """Run `action` in this process, `delay_ms` of its own clock from now."""
        delay_ms = max(0, round(delay_ms / self.clock.rate))
        label = f"{self.name}: {label}"
        self.sim.after(delay_ms, label, lambda: self.run(label, action))

    def every(self, interval_ms: Millis, label: str, action: SimAction) -> None:
        """Run `action` in this process periodically, as a loop with a sleep does."""

        def again() -> None:
            # Schedule the next round first: this one may raise.
            self.after(interval_ms, label, again)
            action()

        self.after(self.sim.rng.randrange(1, interval_ms + 1), label, again)

    def pause(self) -> None:
        """Stop running, as SIGSTOP does."""
        if self.is_alive and not self.is_paused:
            self.is_paused = True
            self.sim.note(f"{self.name} pauses")

    def resume(self) -> None:
        """Continue after a pause: events that were due in the meantime run now."""
        if not self.is_paused or self.is_inside:
            return
        self.is_paused, self.resumed_ms = False, self.sim.now_ms
        self.sim.note(f"{self.name} resumes with {len(self._queued)} queued events")
        queued, self._queued = self._queued, []
        for position, (label, action) in enumerate(queued):
            self.run(label, action)
            self.sim.check()
            if self.is_paused:  # one of the events paused it again
                self._queued = queued[position + 1 :] + self._queued
                return

    def kill(self) -> None:
        """End the process. Its memory is lost."""
        if not self.is_alive:
            return
        self.is_alive, self.is_paused = False, False
        self._queued.clear()
        self.sim.note(f"{self.name} dies")
        for action in self.on_death:
            action()


@dataclass(slots=True)
class NetworkConditions:
    """The network's current faults. The default has none."""

    loss: float = 0.0
    doubled: float = 0.0
    late: float = 0.0  # the share of messages that take up to `late_ms`, so that others overtake them
    late_ms: Millis = 0
    delay_ms: Millis = 5


@dataclass(slots=True)
class Network:
    """Carries messages between named endpoints. A late message is still delivered."""

    sim: Simulation
    conditions: NetworkConditions = field(default_factory=NetworkConditions)
    met: Counter[str] = field(default_factory=Counter)  # messages by outcome
    last_due_ms: Millis = 0  # when the last message in flight arrives
    _cut: set[tuple[str, str]] = field(default_factory=set)
    _restored_ms: dict[tuple[str, str], Millis] = field(default_factory=dict)
    _slow_ms: dict[tuple[str, str], Millis] = field(default_factory=dict)

    def cut(self, source: str, target: str) -> None:
        """Lose all messages from `source` to `target` from now on. The other direction is a separate link."""
        self._cut.add((source, target))
        self.sim.note(f"link {source} -> {target} is cut")

    def restore(self, source: str, target: str) -> None:
        """Undo `cut`."""
        if (source, target) in self._cut:
            self._restored_ms[source, target] = self.sim.now_ms
        self._cut.discard((source, target))
        self.sim.note(f"link {source} -> {target} is restored")

    def is_cut(self, source: str, target: str) -> bool:
        """Whether the link is cut."""
        return (source, target) in self._cut

    def was_cut(self, source: str, target: str, within_ms: Millis) -> bool:
        """Whether the link is cut, or was within the last `within_ms`."""
        restored_ms = self._restored_ms.get((source, target), -(10**12))
        return self.is_cut(source, target) or restored_ms > self.sim.now_ms - within_ms

    def slow(self, source: str, target: str, delay_ms: Millis) -> None:
        """Delay all messages from `source` to `target` by this much; 0 ends it."""
        self._slow_ms[source, target] = delay_ms
        self.sim.note(f"link {source} -> {target} takes {delay_ms} ms longer")

    def heal(self) -> None:
        """End all faults of the network. Messages in flight still arrive late."""
        for link in sorted(self._cut):
            self.restore(*link)
        self._slow_ms.clear()
        self.conditions = NetworkConditions()
        self.sim.note("network heals")

    def send(self, source: str, target: str, label: str, deliver: SimAction) -> None:
        """Send one message. `deliver` is called zero, one or two times, after a delay."""
        self.met["sent"] += 1
        if (source, target) in self._cut:
            self.met["cut off"] += 1
            return
        rng, conditions = self.sim.rng, self.conditions
        if rng.random() < conditions.loss:
            self.met["lost"] += 1
            return
        copies = 1
        if rng.random() < conditions.doubled:
            self.met["doubled"] += 1
            copies = 2
        for _ in range(copies):
            delay_ms = 1 + rng.randrange(conditions.delay_ms) + self._slow_ms.get((source, target), 0)
            if rng.random() < conditions.late:
                self.met["late"] += 1
                delay_ms += rng.randrange(conditions.late_ms)
            self.last_due_ms = max(self.last_due_ms, self.sim.now_ms + delay_ms)
            self.sim.after(delay_ms, label, deliver)
