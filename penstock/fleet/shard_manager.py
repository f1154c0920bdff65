"""Drives placement, liveness and movement: who owns which shard, decided in the store before it is told.

Synchronous: beats are answered under one lock, `tick(now_ms)` is one round. `now_ms` is the boot clock;
`wall_of` turns it into a time for people.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

from penstock.core.clock import Millis
from penstock.core.errors import StoreUnavailable
from penstock.fleet.container_store import ContainerRow, ContainerState
from penstock.fleet.exclusions import Bars
from penstock.fleet.liveness import FailOver, Liveness, ShardManagerSettings, TickReport
from penstock.fleet.lost_engine import EngineTracker
from penstock.fleet.messages import (
    Heartbeat,
    HeartbeatReply,
    HeartbeatVerdict,
    Profile,
    RegisterReply,
    ShardEntry,
    ShardLoad,
    ShardState,
)
from penstock.fleet.orders import (
    FleetOrders,
    check_move,
    no_shard,
    plan_give_away,
    plan_moves,
    plan_take_back,
)
from penstock.fleet.placement.placement import Mode, Move, Placement, Refusal
from penstock.fleet.shard_load import SHARD_COUNT, Vector, combine_loads
from penstock.fleet.shard_store import (
    ROLE,
    FailedOver,
    HeartbeatOutcome,
    MovePlanner,
    Renewed,
    ShardRow,
    ShardStore,
)

__all__ = ["CANARY", "ShardManager", "ShardManagerSettings", "TickReport"]

FleetSnapshot = tuple[tuple[ShardRow, ...], tuple[ContainerRow, ...]]
CANARY = "shard-manager.canary"  # the name under which the Shard Manager beats to itself


class ShardManager(FleetOrders):
    """The one active Shard Manager of its term."""

    def __init__(
        self,
        store: ShardStore,
        *,
        profile: Profile,
        term: int,
        list_version: Callable[[], int],
        reserved_loads: Callable[[], Mapping[int, tuple[int, Vector]]],
        shard_count: int = SHARD_COUNT,
        pace: ShardManagerSettings | None = None,
        send_canary: Callable[[Heartbeat], None] | None = None,
        wall_of: Callable[[Millis], Millis] = lambda now_ms: now_ms,
        bars: Callable[[Millis], Bars] = lambda at_ms: {},
    ) -> None:
        """`send_canary` brings the beat to `on_heartbeat` as containers' beats come, without blocking;
        `bars(at_ms)` says where which shards should not be.
        """
        super().__init__(store, term=term, wall_of=wall_of)
        self._profile, self._shard_count = profile, shard_count
        self._list_version, self._reserved_loads, self._pace = (
            list_version,
            reserved_loads,
            pace or ShardManagerSettings(),
        )
        self._send_canary = send_canary
        self._inbox: deque[tuple[Heartbeat, Millis]] = deque()  # received, not yet counted as a sign of life
        self._liveness = Liveness(profile)
        self._renewals: dict[str, int] = {}  # of each lease row when it was last looked at
        self._unacked = UnackedShards()
        self._engines = EngineTracker(self._pace, move_ms=3 * profile.heartbeat_ms)
        self._canary_sequence, self._canary_ms = 0, -profile.heartbeat_ms
        self._balanced_ms: Millis = 0
        self._balanced_on: tuple[object, ...] = ()
        self._loads: Mapping[int, Vector] = {}
        self._read_bars = bars
        self._bars: Bars = {}
        self._measured: dict[int, ShardLoad] = {}  # by the containers that have the shards
        self._refused = ""
        self._short: tuple[str, ...] = ()
        self._is_begun = False

    # -- what containers and their hosts say ------------------------------------------------------------

    def register(
        self,
        container: str,
        incarnation: str,
        *,
        folder_id: str,
        now_ms: Millis,
        host: str = "",
        pid: int = 0,
    ) -> RegisterReply:
        """Begin an incarnation. `folder_id` is the folder whose lock the caller holds: it proves a return."""
        with self._lock:
            self._begin(now_ms)
            row, assignment = self._store.register(
                container,
                incarnation,
                folder_id=folder_id,
                host=host,
                pid=pid,
                term=self.term,
                at_ms=self._wall_of(now_ms),
            )
            self._watch(row, now_ms)
            kept = tuple(entry.shard for entry in assignment.shards)
            return RegisterReply(term=self.term, assignment_version=assignment.version, kept=kept)

    def on_arrival(self, beat: Heartbeat, now_ms: Millis) -> None:
        """A beat is here, and will be answered. One that waits for a round to end has arrived, and that round
        must know it: this takes no lock.
        """
        self._inbox.append((beat, now_ms))

    def on_heartbeat(self, beat: Heartbeat, now_ms: Millis) -> HeartbeatReply:
        """Answer one beat with the container's whole assignment."""
        self.on_arrival(beat, now_ms)
        if beat.container != CANARY:
            return self.answer_beats((beat,), now_ms)[0]
        with self._lock:
            self._drain()
        ok, sequence = HeartbeatVerdict.OK, beat.sequence
        return HeartbeatReply(verdict=ok, term=self.term, sequence=sequence, assignment_version=0)

    def answer_beats(self, beats: Sequence[Heartbeat], now_ms: Millis) -> list[HeartbeatReply]:
        """Answer beats that arrived, each with its container's whole assignment: one write for all."""
        with self._lock:
            self._begin(now_ms)
            self._drain()
            outcomes = self._store.beats(beats, term=self.term, at_ms=self._wall_of(now_ms))
            version = self._list_version()
            pairs = zip(beats, outcomes, strict=True)
            return [self._reply(beat, outcome, version, now_ms) for beat, outcome in pairs]

    def _reply(
        self, beat: Heartbeat, outcome: HeartbeatOutcome, list_version: int, now_ms: Millis
    ) -> HeartbeatReply:
        assignment = outcome.assignment
        if outcome.verdict is HeartbeatVerdict.OK:
            self._renewals[beat.container] = outcome.renewals
            self._unacked.on_beat(beat, assignment.shards, now_ms)
            self._engines.on_beat(beat, now_ms)
            mine = {entry.shard for entry in assignment.shards}
            self._measured |= {load.shard: load for load in beat.loads if load.shard in mine}
        return HeartbeatReply(
            verdict=outcome.verdict,
            term=self.term,
            sequence=beat.sequence,
            assignment_version=assignment.version,
            shards=assignment.shards,
            shard_count=self._shard_count,
            list_version=list_version,
            restarts=self._restarts.on_beat(beat),
            reason=outcome.reason,
        )

    def on_container_dead(self, container: str, incarnation: str, now_ms: Millis) -> bool:
        """Its host saw it exit with all its processes: fail it over at once. False: not this incarnation."""
        with self._lock:
            self._begin(now_ms)
            at_ms = self._wall_of(now_ms)
            if not self._store.mark_dead(container, incarnation, term=self.term, at_ms=at_ms):
                return False
            self._liveness.on_dead(container, incarnation)
            reason = "its exit was seen"
            action = FailOver(container=container, incarnation=incarnation, known_dead=True, reason=reason)
            self._fail_over(action, now_ms, TickReport())
            return True

    # -- what people ask for ----------------------------------------------------------------------------

    def move(
        self, shard: int, target: str, now_ms: Millis, *, reason: str = "asked to", actor: str = ROLE
    ) -> None:
        """Begin to move one shard, because somebody wants it there; nothing if it is, or on its way."""
        with self._lock:
            self._begin(now_ms)

            def plan(shards: tuple[ShardRow, ...], containers: tuple[ContainerRow, ...]) -> Placement:
                row = next((row for row in shards if row.shard == shard), None)
                accepting = self._accepting(containers, now_ms)
                if not check_move(row, shard, target, containers, accepting, self._bars):
                    return Placement()
                assert row is not None
                move = Move(shard=shard, source=row.container, target=target, reason=reason)
                return Placement(moves=(move,))

            self._rearrange(plan, now_ms, TickReport(), actor)

    def outlook(self, shard: int, now_ms: Millis) -> tuple[Vector, Move | Refusal | None]:
        """What a shard counts as, and what the next look at placement would do with it; changes nothing."""
        with self._lock:
            self._begin(now_ms)
            shards, containers = self._store.read()
            row = next((row for row in shards if row.shard == shard), None)
            if row is None:
                raise no_shard(shard)
            mode = Mode.EMERGENCY if row.container is None else Mode.PERIODIC
            placement = self._plan(mode, now_ms)(shards, containers)
            found: tuple[Move | Refusal, ...] = (*placement.moves, *placement.refusals)
            return self._loads.get(shard, ()), next((item for item in found if item.shard == shard), None)

    # -- one round --------------------------------------------------------------------------------------

    def tick(self, now_ms: Millis) -> TickReport:
        """Look at the time, fail over, place what nobody owns, balance when it is due."""
        report = TickReport()
        with self._lock:
            self._begin(now_ms)
            self._drain()
            seen = self._store.read()
            for row in seen[1]:
                self._watch(row, now_ms)
            for action in self._liveness.on_time(now_ms).actions:
                if isinstance(action, FailOver):
                    self._fail_over(action, now_ms, report)
                else:
                    report.alerts.append(action)
                    self._note("alert", action.kind, "alert", action.reason, now_ms)
            self._loads, self._bars = self._read_wishes(now_ms)
            if report.failed_over:
                seen = self._store.read()
            if any(row.container is None for row in seen[0]):
                plan = self._plan(Mode.EMERGENCY, now_ms)
                self._rearrange(plan, now_ms, report, seen=seen)
            self._answer_lost_engines(seen, now_ms, report)
            self._answer_slowness(seen, now_ms, report)
            self._balance(seen, now_ms, report)
            self._beat_to_myself(now_ms)
        return report

    def _begin(self, now_ms: Millis) -> None:
        """Take over: every container in the store gets a full interval from now."""
        if self._is_begun:
            return
        self._store.ensure_shards(self._shard_count, term=self.term)
        for row in self._store.containers():
            self._watch(row, now_ms)
        self._balanced_ms = now_ms
        self._is_begun = True

    def _watch(self, row: ContainerRow, now_ms: Millis) -> None:
        """Let liveness know what the store knows: a write that seemed to fail may have happened."""
        if row.state is ContainerState.GONE:
            return
        if not self._liveness.is_watching(row.name, row.incarnation):
            self._liveness.on_registered(row.name, row.incarnation, now_ms)
            self._renewals[row.name] = row.renewals
        if row.state is ContainerState.WITHHELD:
            self._liveness.on_withheld(row.name)
        if row.known_dead:
            self._liveness.on_dead(row.name, row.incarnation)

    def _drain(self) -> None:
        while self._inbox:
            beat, received_ms = self._inbox.popleft()
            if beat.container == CANARY:
                self._liveness.on_canary(beat.sequence)
            else:
                self._liveness.on_beat(beat.container, beat.incarnation, received_ms)

    def _beat_to_myself(self, now_ms: Millis) -> None:
        if now_ms - self._canary_ms < self._profile.heartbeat_ms:
            return
        self._canary_sequence, self._canary_ms = self._canary_sequence + 1, now_ms
        self._liveness.on_canary_sent(self._canary_sequence, now_ms)
        beat = Heartbeat(container=CANARY, incarnation=str(self.term), sequence=self._canary_sequence)
        if self._send_canary is None:
            self._inbox.append((beat, now_ms))
        else:
            self._send_canary(beat)

    def _fail_over(self, action: FailOver, now_ms: Millis, report: TickReport) -> None:
        outcome = self._store.fail_over(
            action.container,
            action.incarnation,
            renewals=None if action.known_dead else self._renewals[action.container],
            plan=self._plan(Mode.EMERGENCY, now_ms),
            term=self.term,
            at_ms=self._wall_of(now_ms),
            reason=action.reason,
        )
        if isinstance(outcome, Renewed):
            # Somebody at the other end is alive and reaches the store: a full interval from this look on.
            self._renewals[action.container] = outcome.renewals
            self._liveness.on_renewed(action.container, action.incarnation, now_ms)
            return
        self._liveness.on_gone(action.container, now_ms)
        if isinstance(outcome, FailedOver):
            report.failed_over.append(action.container)
            report.moves.extend(outcome.placement.moves)

    def _note(self, kind: str, subject: str, decision: str, reason: str, now_ms: Millis) -> None:
        self._store.note(kind, subject, decision, reason, at_ms=self._wall_of(now_ms))

    # -- placement --------------------------------------------------------------------------------------

    def _accepting(self, containers: tuple[ContainerRow, ...], now_ms: Millis) -> tuple[str, ...]:
        """Where shards may go: heard of lately, ready, and not on the way out."""
        silent = self._liveness.silent(now_ms, 3 * self._profile.heartbeat_ms)
        return tuple(
            row.name
            for row in containers
            if row.state is ContainerState.LIVE
            and row.engine_ready
            and not (row.known_dead or row.cordoned or row.draining or row.name in silent)
        )

    def _plan(self, mode: Mode, now_ms: Millis) -> MovePlanner:
        def plan(shards: tuple[ShardRow, ...], containers: tuple[ContainerRow, ...]) -> Placement:
            return plan_moves(
                shards,
                containers,
                accepting=self._accepting(containers, now_ms),
                loads=self._loads,
                mode=mode,
                pace=self._pace,
                bars=self._bars,
            )

        return plan

    def _rearrange(
        self,
        plan: MovePlanner,
        now_ms: Millis,
        report: TickReport,
        actor: str = ROLE,
        seen: FleetSnapshot | None = None,
    ) -> Placement:
        """`seen`: what was just read. A plan that moves nothing there needs no transaction; one that does is
        made again inside it.
        """
        placement = None if seen is None else plan(*seen)
        if placement is None or placement.moves:
            at_ms = self._wall_of(now_ms)
            placement = self._store.rearrange(plan, term=self.term, at_ms=at_ms, actor=actor)
        report.moves.extend(placement.moves)
        stuck = placement.refusals
        refused = f"{len(stuck)} shards stay: {stuck[0].reason}" if stuck else ""
        if refused and refused != self._refused:  # once per occasion, not once per round
            self._note("placement", "shards", "refused", refused, now_ms)
        self._refused = refused
        if placement.shortages and placement.shortages != self._short:
            self._note("capacity", "fleet", "more capacity is needed", "; ".join(placement.shortages), now_ms)
        self._short = placement.shortages
        return placement

    def _balance(self, seen: FleetSnapshot, now_ms: Millis, report: TickReport) -> None:
        shards, containers = seen
        draining = {row.name for row in containers if row.draining}
        is_draining = any(row.container in draining and row.state is ShardState.OWNED for row in shards)
        if not is_draining and any(row.state is ShardState.DROPPING for row in shards):
            # A shard on its way counts at both ends: balancing against that picture would go on for ever.
            return
        basis = (
            tuple(sorted(self._loads.items())),
            frozenset(self._bars),
            self._accepting(containers, now_ms),
        )
        is_soon = is_draining or basis != self._balanced_on
        wait_ms = self._pace.balance_soon_ms if is_soon else self._pace.balance_ms
        if now_ms - self._balanced_ms < min(wait_ms, self._pace.balance_ms):
            return
        plan = self._plan(Mode.PERIODIC, now_ms)
        placement = self._rearrange(plan, now_ms, report, seen=seen)
        self._balanced_ms = now_ms
        # Moves begun now may not be all that is needed: the budget is small on purpose.
        self._balanced_on = () if placement.moves else basis

    def _read_wishes(self, now_ms: Millis) -> tuple[Mapping[int, Vector], Bars]:
        try:
            loads = combine_loads(self._reserved_loads(), self._measured)
            return loads, self._read_bars(self._wall_of(now_ms))
        except StoreUnavailable:
            return self._loads, self._bars  # the job layer is away: balance on what was known

    # -- shards that their container does not run, or does not let go ------------------------------------

    def _answer_lost_engines(self, seen: FleetSnapshot, now_ms: Millis, report: TickReport) -> None:
        shards, containers = seen
        found = self._engines.look(
            shards,
            containers,
            accepting=self._accepting(containers, now_ms),
            silent=self._liveness.silent(now_ms, 3 * self._profile.heartbeat_ms),
            now_ms=now_ms,
        )
        accepting = partial(self._accepting, now_ms=now_ms)
        plan = plan_give_away(found.leaving, accepting, self._loads, self._bars)
        placement = plan(shards, containers)
        if placement.moves:
            self._engines.on_leaving((move.shard for move in placement.moves), now_ms)
            self._rearrange(plan, now_ms, report)
        for container, reason in self._engines.news(found, placement.refusals):
            self._note("placement", container, "keeps shards without an engine", reason, now_ms)

    def _answer_slowness(self, seen: FleetSnapshot, now_ms: Millis, report: TickReport) -> None:
        shards, containers = seen
        silent = self._liveness.silent(now_ms, 3 * self._profile.heartbeat_ms)
        incarnations = {row.name: row.incarnation for row in containers}
        for row, name, waited_ms in self._unacked.waited(shards, silent, now_ms):
            if row.state is ShardState.OWNED and waited_ms >= self._pace.add_timeout_ms:
                reason = f"{name} did not record it for {waited_ms} ms"
                accepting = partial(self._accepting, now_ms=now_ms)
                taken = plan_take_back(row, accepting, self._loads, reason, self._bars)
                self._rearrange(taken, now_ms, report)
            elif row.state is ShardState.DROPPING and waited_ms >= self._pace.drop_timeout_ms:
                reason = f"shard {row.shard} was not dropped for {waited_ms} ms"
                life, at_ms = incarnations[name], self._wall_of(now_ms)
                if self._store.withhold(
                    name, life, shard=row.shard, term=self.term, at_ms=at_ms, reason=reason
                ):
                    self._liveness.on_withheld(name)


class UnackedShards:
    """Shards that a container was given and has not acknowledged: since when, and under which epoch."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[int, Millis]] = {}  # shard -> (epoch, first reported)

    def on_beat(self, beat: Heartbeat, given: Iterable[ShardEntry], now_ms: Millis) -> None:
        """A beat acknowledges some, and is answered with what is `given`.

        Before its engine is ready nobody can record anything, and no shard is to blame for that.
        """
        acked = set(beat.acked)
        for entry in given:
            if entry in acked or not beat.engine_ready:
                self._since.pop(entry.shard, None)
            elif self._since.get(entry.shard, (0, 0))[0] != entry.epoch:
                self._since[entry.shard] = (entry.epoch, now_ms)

    def waited(
        self, shards: Iterable[ShardRow], silent: Collection[str], now_ms: Millis
    ) -> Iterator[tuple[ShardRow, str, Millis]]:
        """(shard, its container, for how long it is waited for).

        A silent container is slow at everything: that is for liveness to judge.
        """
        for row in shards:
            epoch, since_ms = self._since.get(row.shard, (0, now_ms))
            if row.container is not None and row.container not in silent and row.epoch == epoch:
                yield row, row.container, now_ms - since_ms
