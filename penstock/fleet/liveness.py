"""Failure detection of containers (Turbine IV-C): heartbeats in, fail-overs with their reasons out.

After a start or pause of the control plane, or a late canary, every container gets one full interval, because
the missing heartbeats may be our own fault. When many containers fall silent together, each gets one more.
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
    """Give this incarnation's shards to others. Returned by every `on_time` until `on_gone` is called."""

    container: str
    incarnation: str
    known_dead: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A condition that operators should know of; raised once per occurrence."""

    kind: str
    reason: str


@dataclass(slots=True)
class _Watched:
    incarnation: str
    seen_ms: Millis  # when a heartbeat was received, or its renewed row was read; on our clock
    heard_ms: Millis  # when a heartbeat was received
    known_dead: bool = False
    withheld: bool = False  # silent because we do not acknowledge: no evidence about our network
    unheard: bool = False  # registered after another incarnation and sent no heartbeat yet: it runs no tasks


@dataclass(slots=True)
class Liveness:
    """Declares a container dead once it has been silent for the fail-over interval, or was seen to exit."""

    profile: Profile
    _watched: dict[str, _Watched] = field(default_factory=dict)
    # Silent containers that were failed over recently
    _lost_ms: dict[str, Millis] = field(default_factory=dict)
    _time_ms: Millis | None = None  # of the last `on_time`
    _fair_from_ms: Millis = 0  # missing heartbeats before this time may be our own fault
    _canaries_ms: dict[int, Millis] = field(default_factory=dict)  # sent, not yet received
    _is_late: bool = False
    _is_braking: bool = False

    @property
    def stall_ms(self) -> Millis:
        """After a gap this long on our own side, missing heartbeats prove nothing."""
        return self.profile.deadline_ms // 2

    def on_registered(self, container: str, incarnation: str, now_ms: Millis) -> None:
        """Watch a new incarnation, or one found in the store when this Shard Manager takes over.

        Successive incarnations without a heartbeat share one interval: a container that receives no replies
        registers again and again, and would otherwise keep shards that it cannot run.
        """
        old = self._watched.get(container)
        seen_ms = old.seen_ms if old is not None and old.unheard else now_ms
        self._watched[container] = _Watched(incarnation, seen_ms, seen_ms, unheard=old is not None)

    def is_watching(self, container: str, incarnation: str) -> bool:
        """Whether this incarnation is watched."""
        watched = self._watched.get(container)
        return watched is not None and watched.incarnation == incarnation

    def on_heartbeat(self, container: str, incarnation: str, now_ms: Millis) -> None:
        """A heartbeat was received. Does not check deadlines: more heartbeats may be queued."""
        self._note_life(container, incarnation, now_ms, is_heard=True)

    def on_renewed(self, container: str, incarnation: str, now_ms: Millis) -> None:
        """Its row in the store was renewed: it is alive but cannot reach us, which counts for the brake."""
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
        """Its exit was observed: it can be failed over at once."""
        watched = self._watched.get(container)
        if watched is not None and watched.incarnation == incarnation:
            watched.known_dead = True

    def on_withheld(self, container: str) -> None:
        """Its heartbeats are no longer acknowledged, on purpose."""
        if container in self._watched:
            self._watched[container].withheld = True

    def on_gone(self, container: str, now_ms: Millis) -> None:
        """Its fail-over was committed to the store."""
        watched = self._watched.pop(container, None)
        if watched is not None and not (watched.known_dead or watched.withheld):
            self._lost_ms[container] = now_ms

    def on_canary_sent(self, sequence: int, now_ms: Millis) -> None:
        """Our own heartbeat entered the queue of all heartbeats."""
        self._canaries_ms[sequence] = now_ms

    def on_canary(self, sequence: int) -> None:
        """It left the queue, and with it every heartbeat that was queued before it."""
        self._canaries_ms = {n: sent_ms for n, sent_ms in self._canaries_ms.items() if n > sequence}

    def on_time(self, now_ms: Millis) -> Step[FailOver | Alert]:
        """Decide alerts and fail-overs. Requires: all queued heartbeats were processed."""
        alerts = [*self._check_own_delays(now_ms)]
        if not self._is_late:
            alerts += self._brake(now_ms)
        due = [name for name in self._silent(now_ms, self.profile.failover_ms) if not self._is_late]
        if self._is_braking:
            long = frozenset(self._silent(now_ms, self.profile.deadline_ms + self.profile.failover_ms))
            due = [name for name in due if name in long or self._watched[name].withheld]
        dead = sorted(name for name, watched in self._watched.items() if watched.known_dead)
        failovers = [self._fail_over(name, "its exit was observed") for name in dead]
        failovers += [self._fail_over(name, f"silent for {self._silence(name, now_ms)} ms") for name in due]
        return Step(actions=(*alerts, *failovers), wake_at_ms=self._wake_at_ms(now_ms))

    def silent(self, now_ms: Millis, silence_ms: Millis) -> frozenset[str]:
        """Containers without a heartbeat for this time: they get no new shards."""
        return frozenset(
            name for name, watched in self._watched.items() if now_ms - watched.seen_ms >= silence_ms
        )

    def _check_own_delays(self, now_ms: Millis) -> Iterator[Alert]:
        if self._time_ms is None or now_ms - self._time_ms > self.stall_ms:
            self._fair_from_ms = now_ms
            # Canaries sent before our own pause prove nothing about the queue.
            self._canaries_ms = {}
        self._time_ms = now_ms
        is_late = any(now_ms - sent_ms > self.stall_ms for sent_ms in self._canaries_ms.values())
        if is_late and not self._is_late:
            yield Alert(
                kind="canary_late",
                reason=f"the canary heartbeat is over {self.stall_ms} ms late: fail-overs are suspended",
            )
        if self._is_late:
            self._fair_from_ms = now_ms
        self._is_late = is_late

    def _brake(self, now_ms: Millis) -> Iterator[Alert]:
        """While many are silent, wait one interval after each deadline, at which the container stopped
        itself.

        Grace, hold and fail-over together stay within two intervals (I4).
        """
        interval_ms = self.profile.failover_ms
        self._lost_ms = {name: at_ms for name, at_ms in self._lost_ms.items() if now_ms - at_ms < interval_ms}
        alive = {name: watched for name, watched in self._watched.items() if not watched.known_dead}
        # A container that was failed over and came back counts, and so does one that only renews its row in
        # the store: both suggest that the fault is on our side.
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
            reason = f"{count} of {total} containers fell silent: fail-overs wait {interval_ms} ms"
            yield Alert(kind="brake", reason=reason)

    def _silence(self, name: str, now_ms: Millis) -> Millis:
        return now_ms - max(self._watched[name].seen_ms, self._fair_from_ms)

    def _silent(self, now_ms: Millis, silence_ms: Millis) -> list[str]:
        watched = sorted(name for name, watched in self._watched.items() if not watched.known_dead)
        return [name for name in watched if self._silence(name, now_ms) >= silence_ms]

    def _fail_over(self, name: str, reason: str) -> FailOver:
        watched = self._watched[name]
        if watched.withheld:
            reason = f"{reason}; its heartbeats were not acknowledged on purpose"
        return FailOver(
            container=name, incarnation=watched.incarnation, known_dead=watched.known_dead, reason=reason
        )

    def _wake_at_ms(self, now_ms: Millis) -> Millis | None:
        ends = [max(w.seen_ms, self._fair_from_ms) + self.profile.failover_ms for w in self._watched.values()]
        return max(now_ms, min(ends)) if ends else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardManagerSettings:
    """Timeouts and limits of the Shard Manager."""

    balance_ms: Millis = 30 * 60_000
    # After the task list or the set of containers changed, or with moves still to do
    balance_soon_ms: Millis = 5_000
    moves_max: int = 8  # in progress at once; in a large fleet one for every ten containers
    # An assigned shard is not acknowledged in time: it goes to another container
    add_timeout_ms: Millis = 15_000
    drop_timeout_ms: Millis = 60_000  # a shard to drop is not released in time: the container's lease expires
    engine_wait_ms: Millis = 60_000  # for engines that start together, before others get their shards
    engine_suspect_ms: Millis = 120_000  # how long a shard that left a lost engine stays with the next one

    def moves_of(self, containers: int) -> int:
        """How many shards of a fleet of this size may be moving at once."""
        return max(self.moves_max, containers // 10)


@dataclass(slots=True)
class TickReport:
    """What one round of the Shard Manager did."""

    failed_over: list[str] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
