"""Which containers are dead (Turbine IV-C). A passive machine: beats in, fail-overs out, a reason with each.

It suspects itself first: after its own start, pause or a late canary every container gets one full interval,
and when many fall silent together each gets one interval more: the fault is then likely on our side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.core.clock import Millis, Step
from penstock.fleet.messages import Profile
from penstock.fleet.placement.placement import Move

BRAKE_COUNT = 3
BRAKE_FRACTION = 0.30


@dataclass(frozen=True, slots=True, kw_only=True)
class FailOver:
    """Take this incarnation's shards away. Repeated at every `on_time` until `on_gone`."""

    container: str
    incarnation: str
    known_dead: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Somebody should know; said once per occasion."""

    kind: str
    reason: str


@dataclass(slots=True)
class _Watched:
    incarnation: str
    seen_ms: Millis  # a beat by receipt, or a look at its renewed row; on our clock
    heard_ms: Millis  # a beat by receipt
    known_dead: bool = False
    withheld: bool = False  # silent because we do not answer: says nothing about our network
    unheard: bool = False  # registered after another life, and has not beaten since: it runs nothing yet


@dataclass(slots=True)
class Liveness:
    """Declares a container dead once it has been silent for the fail-over interval, or was seen to exit."""

    profile: Profile
    _watched: dict[str, _Watched] = field(default_factory=dict)
    _lost_ms: dict[str, Millis] = field(default_factory=dict)  # silent ones failed over a short while ago
    _time_ms: Millis | None = None  # of the last `on_time`
    _fair_from_ms: Millis = 0  # silence before this moment may be our own fault
    _canaries_ms: dict[int, Millis] = field(default_factory=dict)  # sent, not yet back
    _is_late: bool = False
    _is_braking: bool = False

    @property
    def stall_ms(self) -> Millis:
        """A gap this long on our own side makes every silence doubtful."""
        return self.profile.deadline_ms // 2

    def on_registered(self, container: str, incarnation: str, now_ms: Millis) -> None:
        """A new incarnation, or one found in the store at take-over.

        Lives that follow each other and never beat have one interval together: a container that hears no
        answers registers again and again, and would keep shards that it cannot run.
        """
        old = self._watched.get(container)
        seen_ms = old.seen_ms if old is not None and old.unheard else now_ms
        self._watched[container] = _Watched(incarnation, seen_ms, seen_ms, unheard=old is not None)

    def is_watching(self, container: str, incarnation: str) -> bool:
        """Whether the silence of this incarnation would be noticed."""
        watched = self._watched.get(container)
        return watched is not None and watched.incarnation == incarnation

    def on_beat(self, container: str, incarnation: str, now_ms: Millis) -> None:
        """A beat was received. Never looks at the time: more may be queued."""
        self._note_life(container, incarnation, now_ms, is_heard=True)

    def on_renewed(self, container: str, incarnation: str, now_ms: Millis) -> None:
        """Its row in the store was renewed: it lives, and does not reach us, which the brake counts."""
        self._note_life(container, incarnation, now_ms, is_heard=False)

    def _note_life(self, container: str, incarnation: str, now_ms: Millis, *, is_heard: bool) -> None:
        watched = self._watched.get(container)
        if watched is None or watched.incarnation != incarnation or watched.withheld:
            return
        watched.seen_ms = max(watched.seen_ms, now_ms)
        watched.unheard = False
        if is_heard:
            watched.heard_ms = max(watched.heard_ms, now_ms)

    def on_dead(self, container: str, incarnation: str) -> None:
        """Its exit was seen: nothing of it is alive, no waiting."""
        watched = self._watched.get(container)
        if watched is not None and watched.incarnation == incarnation:
            watched.known_dead = True

    def on_withheld(self, container: str) -> None:
        """Its beats are no longer acknowledged, on purpose."""
        if container in self._watched:
            self._watched[container].withheld = True

    def on_gone(self, container: str, now_ms: Millis) -> None:
        """The fail-over is in the store."""
        watched = self._watched.pop(container, None)
        if watched is not None and not (watched.known_dead or watched.withheld):
            self._lost_ms[container] = now_ms

    def on_canary_sent(self, sequence: int, now_ms: Millis) -> None:
        """Our own beat went into the queue that all beats go through."""
        self._canaries_ms[sequence] = now_ms

    def on_canary(self, sequence: int) -> None:
        """It came out, and with it every beat that was queued before it."""
        self._canaries_ms = {n: sent_ms for n, sent_ms in self._canaries_ms.items() if n > sequence}

    def on_time(self, now_ms: Millis) -> Step[FailOver | Alert]:
        """Requires: all queued beats are in."""
        alerts = [*self._look_at_ourselves(now_ms)]
        if not self._is_late:
            alerts += self._brake(now_ms)
        due = [name for name in self._silent(now_ms, self.profile.failover_ms) if not self._is_late]
        if self._is_braking:
            long = frozenset(self._silent(now_ms, self.profile.deadline_ms + self.profile.failover_ms))
            due = [name for name in due if name in long or self._watched[name].withheld]
        dead = sorted(name for name, watched in self._watched.items() if watched.known_dead)
        failovers = [self._fail_over(name, "its exit was seen") for name in dead]
        failovers += [self._fail_over(name, f"silent for {self._silence(name, now_ms)} ms") for name in due]
        return Step(actions=(*alerts, *failovers), wake_at_ms=self._wake_at_ms(now_ms))

    def silent(self, now_ms: Millis, silence_ms: Millis) -> frozenset[str]:
        """Containers not heard for so long: no place for new shards."""
        return frozenset(
            name for name, watched in self._watched.items() if now_ms - watched.seen_ms >= silence_ms
        )

    def _look_at_ourselves(self, now_ms: Millis) -> Iterator[Alert]:
        if self._time_ms is None or now_ms - self._time_ms > self.stall_ms:
            self._fair_from_ms = now_ms
            # Canaries sent before a pause of ours prove nothing about the queue.
            self._canaries_ms = {}
        self._time_ms = now_ms
        is_late = any(now_ms - sent_ms > self.stall_ms for sent_ms in self._canaries_ms.values())
        if is_late and not self._is_late:
            yield Alert(
                kind="canary_late",
                reason=f"our own beat is late by over {self.stall_ms} ms: nobody fails over",
            )
        if self._is_late:
            self._fair_from_ms = now_ms
        self._is_late = is_late

    def _brake(self, now_ms: Millis) -> Iterator[Alert]:
        """While many are silent, each has one interval from its deadline on, where it has stopped itself.

        So grace, hold and fail-over together stay within two intervals (I4).
        """
        interval_ms = self.profile.failover_ms
        self._lost_ms = {name: at_ms for name, at_ms in self._lost_ms.items() if now_ms - at_ms < interval_ms}
        alive = {name: watched for name, watched in self._watched.items() if not watched.known_dead}
        # One that was given up and came back was silent too, and one that lives on by its row in the store
        # still is: signs that the fault is on our side.
        lost = self._lost_ms.keys() | {
            name
            for name, watched in alive.items()
            if not watched.withheld
            and now_ms - max(watched.heard_ms, self._fair_from_ms) >= self.profile.deadline_ms
        }
        count, total = len(lost), len(alive.keys() | lost)
        was_braking = self._is_braking
        self._is_braking = count >= BRAKE_COUNT and count > BRAKE_FRACTION * total
        if self._is_braking and not was_braking:
            reason = f"{count} of {total} containers fell silent: hold for {interval_ms} ms"
            yield Alert(kind="brake", reason=reason)

    def _silence(self, name: str, now_ms: Millis) -> Millis:
        return now_ms - max(self._watched[name].seen_ms, self._fair_from_ms)

    def _silent(self, now_ms: Millis, silence_ms: Millis) -> list[str]:
        watched = sorted(name for name, watched in self._watched.items() if not watched.known_dead)
        return [name for name in watched if self._silence(name, now_ms) >= silence_ms]

    def _fail_over(self, name: str, reason: str) -> FailOver:
        watched = self._watched[name]
        if watched.withheld:
            reason = f"{reason}, unanswered on purpose"
        return FailOver(
            container=name, incarnation=watched.incarnation, known_dead=watched.known_dead, reason=reason
        )

    def _wake_at_ms(self, now_ms: Millis) -> Millis | None:
        ends = [max(w.seen_ms, self._fair_from_ms) + self.profile.failover_ms for w in self._watched.values()]
        return max(now_ms, min(ends)) if ends else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardManagerSettings:
    """How patient and how busy a Shard Manager is."""

    balance_ms: Millis = 30 * 60_000
    balance_soon_ms: Millis = (
        5_000  # after the task list or the set of containers changed, or with moves left to do
    )
    moves_max: int = 8  # under way at once; in a large fleet one for every ten containers
    add_timeout_ms: Millis = 15_000  # told, heard from, and yet not recorded: the shard is taken back
    drop_timeout_ms: Millis = 60_000  # told, heard from, and yet not reaped: the container's lease runs out
    engine_wait_ms: Millis = 60_000  # for engines that start together, before others take their shards
    engine_suspect_ms: Millis = 120_000  # a shard that left a lost engine stays with the next one so long

    def moves_of(self, containers: int) -> int:
        """How many shards of a fleet of that size may be on their way at once."""
        return max(self.moves_max, containers // 10)


@dataclass(slots=True)
class TickReport:
    """What one round did."""

    failed_over: list[str] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
