"""The Shard Manager: liveness, placement and moves. The store decides who owns a shard; replies report it.

Synchronous: heartbeats are answered under one lock, `tick(now_ms)` is one round. `now_ms` is the boot clock;
`wall_of` converts it to wall-clock time.
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
CANARY = "shard-manager.canary"  # the container name in the Shard Manager's heartbeats to itself


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
        settings: ShardManagerSettings | None = None,
        send_canary: Callable[[Heartbeat], None] | None = None,
        wall_of: Callable[[Millis], Millis] = lambda now_ms: now_ms,
        bars: Callable[[Millis], Bars] = lambda at_ms: {},
    ) -> None:
        """`send_canary` delivers a heartbeat to `on_heartbeat` by the path of containers' heartbeats, without
        blocking; `bars(at_ms)`: the bars in force.
        """
        super().__init__(store, term=term, wall_of=wall_of)
        self._profile, self._shard_count = profile, shard_count
        self._list_version, self._reserved_loads, self._settings = (
            list_version,
            reserved_loads,
            settings or ShardManagerSettings(),
        )
        self._send_canary = send_canary
        self._inbox: deque[tuple[Heartbeat, Millis]] = deque()  # received, not yet passed to `Liveness`
        self._liveness = Liveness(profile)
        self._renewals: dict[str, int] = {}  # of each lease row when it was last read
        self._unacked = UnackedShards()
        self._engines = EngineTracker(self._settings, move_ms=3 * profile.heartbeat_ms)
        self._canary_sequence, self._canary_ms = 0, -profile.heartbeat_ms
        self._balanced_ms: Millis = 0
        self._balanced_on: tuple[object, ...] = ()
        self._loads: Mapping[int, Vector] = {}
        self._read_bars = bars
        self._bars: Bars = {}
        self._measured: dict[int, ShardLoad] = {}  # by the containers that own the shards
        self._refused = ""
        self._short: tuple[str, ...] = ()
        self._is_begun = False

    # -- requests of containers and their hosts ---------------------------------------------------------

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
        """Register an incarnation. `folder_id` proves that the container is the one that was here before."""
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

    def on_arrival(self, heartbeat: Heartbeat, now_ms: Millis) -> None:
        """A heartbeat was received; it is answered later. Takes no lock: a running round must count it as
        received although its answer waits for that round.
        """
        self._inbox.append((heartbeat, now_ms))

    def on_heartbeat(self, heartbeat: Heartbeat, now_ms: Millis) -> HeartbeatReply:
        """Answer one heartbeat with the container's full assignment."""
        self.on_arrival(heartbeat, now_ms)
        if heartbeat.container != CANARY:
            return self.answer_heartbeats((heartbeat,), now_ms)[0]
        with self._lock:
            self._process_inbox()
        ok, sequence = HeartbeatVerdict.OK, heartbeat.sequence
        return HeartbeatReply(verdict=ok, term=self.term, sequence=sequence, assignment_version=0)

    def answer_heartbeats(self, heartbeats: Sequence[Heartbeat], now_ms: Millis) -> list[HeartbeatReply]:
        """Answer received heartbeats, each with its container's full assignment, in one transaction."""
        with self._lock:
            self._begin(now_ms)
            self._process_inbox()
            outcomes = self._store.heartbeats(heartbeats, term=self.term, at_ms=self._wall_of(now_ms))
            version = self._list_version()
            pairs = zip(heartbeats, outcomes, strict=True)
            return [self._reply(heartbeat, outcome, version, now_ms) for heartbeat, outcome in pairs]

    def _reply(
        self, heartbeat: Heartbeat, outcome: HeartbeatOutcome, list_version: int, now_ms: Millis
    ) -> HeartbeatReply:
        assignment = outcome.assignment
        if outcome.verdict is HeartbeatVerdict.OK:
            self._renewals[heartbeat.container] = outcome.renewals
            self._unacked.on_heartbeat(heartbeat, assignment.shards, now_ms)
            self._engines.on_heartbeat(heartbeat, now_ms)
            mine = {entry.shard for entry in assignment.shards}
            self._measured |= {load.shard: load for load in heartbeat.loads if load.shard in mine}
        return HeartbeatReply(
            verdict=outcome.verdict,
            term=self.term,
            sequence=heartbeat.sequence,
            assignment_version=assignment.version,
            shards=assignment.shards,
            shard_count=self._shard_count,
            list_version=list_version,
            restarts=self._restarts.on_heartbeat(heartbeat),
            reason=outcome.reason,
        )

    def on_container_dead(self, container: str, incarnation: str, now_ms: Millis) -> bool:
        """Its host observed the exit of all its processes: fail it over at once. False: another
        incarnation.
        """
        with self._lock:
            self._begin(now_ms)
            at_ms = self._wall_of(now_ms)
            if not self._store.mark_dead(container, incarnation, term=self.term, at_ms=at_ms):
                return False
            self._liveness.on_dead(container, incarnation)
            reason = "its exit was observed"
            action = FailOver(container=container, incarnation=incarnation, known_dead=True, reason=reason)
            self._fail_over(action, now_ms, TickReport())
            return True

    # -- requests of operators --------------------------------------------------------------------------

    def move(
        self, shard: int, target: str, now_ms: Millis, *, reason: str = "requested", actor: str = ROLE
    ) -> None:
        """Begin to move one shard on request; does nothing if it is there or moving there already."""
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
        """A shard's load, and what the next placement round would do with it; changes nothing."""
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
        """One round: check deadlines, fail over, place shards without an owner, balance when it is due."""
        report = TickReport()
        with self._lock:
            self._begin(now_ms)
            self._process_inbox()
            snapshot = self._store.read()
            for row in snapshot[1]:
                self._watch(row, now_ms)
            for action in self._liveness.on_time(now_ms).actions:
                if isinstance(action, FailOver):
                    self._fail_over(action, now_ms, report)
                else:
                    report.alerts.append(action)
                    self._note("alert", action.kind, "alert", action.reason, now_ms)
            self._loads, self._bars = self._read_placement_input(now_ms)
            if report.failed_over:
                snapshot = self._store.read()
            if any(row.container is None for row in snapshot[0]):
                plan = self._plan(Mode.EMERGENCY, now_ms)
                self._rearrange(plan, now_ms, report, snapshot=snapshot)
            self._handle_lost_engines(snapshot, now_ms, report)
            self._handle_slow_acknowledgements(snapshot, now_ms, report)
            self._balance(snapshot, now_ms, report)
            self._send_own_heartbeat(now_ms)
        return report

    def _begin(self, now_ms: Millis) -> None:
        """Take over once: every container in the store gets a full fail-over interval from now."""
        if self._is_begun:
            return
        self._store.ensure_shards(self._shard_count, term=self.term)
        for row in self._store.containers():
            self._watch(row, now_ms)
        self._balanced_ms = now_ms
        self._is_begun = True

    def _watch(self, row: ContainerRow, now_ms: Millis) -> None:
        """Update `Liveness` from the store: a write that seemed to fail may have been committed."""
        if row.state is ContainerState.GONE:
            return
        if not self._liveness.is_watching(row.name, row.incarnation):
            self._liveness.on_registered(row.name, row.incarnation, now_ms)
            self._renewals[row.name] = row.renewals
        if row.state is ContainerState.WITHHELD:
            self._liveness.on_withheld(row.name)
        if row.known_dead:
            self._liveness.on_dead(row.name, row.incarnation)

    def _process_inbox(self) -> None:
        while self._inbox:
            heartbeat, received_ms = self._inbox.popleft()
            if heartbeat.container == CANARY:
                self._liveness.on_canary(heartbeat.sequence)
            else:
                self._liveness.on_heartbeat(heartbeat.container, heartbeat.incarnation, received_ms)

    def _send_own_heartbeat(self, now_ms: Millis) -> None:
        if now_ms - self._canary_ms < self._profile.heartbeat_ms:
            return
        self._canary_sequence, self._canary_ms = self._canary_sequence + 1, now_ms
        self._liveness.on_canary_sent(self._canary_sequence, now_ms)
        heartbeat = Heartbeat(container=CANARY, incarnation=str(self.term), sequence=self._canary_sequence)
        if self._send_canary is None:
            self._inbox.append((heartbeat, now_ms))
        else:
            self._send_canary(heartbeat)

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
            # The container is alive and reaches the store: it gets a full interval from now.
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
        """Containers that may get shards: live, recently heard, engine ready, neither cordoned
        nor draining.
        """
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
                settings=self._settings,
                bars=self._bars,
            )

        return plan

    def _rearrange(
        self,
        plan: MovePlanner,
        now_ms: Millis,
        report: TickReport,
        actor: str = ROLE,
        snapshot: FleetSnapshot | None = None,
    ) -> Placement:
        """Begin the moves of a plan. With a `snapshot`, a plan without moves on it needs no transaction; any
        other is computed again inside the transaction.
        """
        placement = None if snapshot is None else plan(*snapshot)
        if placement is None or placement.moves:
            at_ms = self._wall_of(now_ms)
            placement = self._store.rearrange(plan, term=self.term, at_ms=at_ms, actor=actor)
        report.moves.extend(placement.moves)
        refusals = placement.refusals
        refused = f"{len(refusals)} shards cannot move: {refusals[0].reason}" if refusals else ""
        if refused and refused != self._refused:  # once per occurrence, not once per round
            self._note("placement", "shards", "refused", refused, now_ms)
        self._refused = refused
        if placement.shortages and placement.shortages != self._short:
            self._note("capacity", "fleet", "more capacity is needed", "; ".join(placement.shortages), now_ms)
        self._short = placement.shortages
        return placement

    def _balance(self, snapshot: FleetSnapshot, now_ms: Millis, report: TickReport) -> None:
        shards, containers = snapshot
        draining = {row.name for row in containers if row.draining}
        is_draining = any(row.container in draining and row.state is ShardState.OWNED for row in shards)
        if not is_draining and any(row.state is ShardState.DROPPING for row in shards):
            # A moving shard counts at both ends: balancing on such loads would never end.
            return
        basis = (
            tuple(sorted(self._loads.items())),
            frozenset(self._bars),
            self._accepting(containers, now_ms),
        )
        is_soon = is_draining or basis != self._balanced_on
        wait_ms = self._settings.balance_soon_ms if is_soon else self._settings.balance_ms
        if now_ms - self._balanced_ms < min(wait_ms, self._settings.balance_ms):
            return
        plan = self._plan(Mode.PERIODIC, now_ms)
        placement = self._rearrange(plan, now_ms, report, snapshot=snapshot)
        self._balanced_ms = now_ms
        # More moves may be needed: one round begins only a few.
        self._balanced_on = () if placement.moves else basis

    def _read_placement_input(self, now_ms: Millis) -> tuple[Mapping[int, Vector], Bars]:
        try:
            loads = combine_loads(self._reserved_loads(), self._measured)
            return loads, self._read_bars(self._wall_of(now_ms))
        except StoreUnavailable:
            return self._loads, self._bars  # the job store is unavailable: use the last values

    # -- shards that their container does not run or does not release ------------------------------------

    def _handle_lost_engines(self, snapshot: FleetSnapshot, now_ms: Millis, report: TickReport) -> None:
        shards, containers = snapshot
        found = self._engines.check(
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
        for container, reason in self._engines.new_reports(found, placement.refusals):
            self._note("placement", container, "keeps shards without an engine", reason, now_ms)

    def _handle_slow_acknowledgements(
        self, snapshot: FleetSnapshot, now_ms: Millis, report: TickReport
    ) -> None:
        shards, containers = snapshot
        silent = self._liveness.silent(now_ms, 3 * self._profile.heartbeat_ms)
        incarnations = {row.name: row.incarnation for row in containers}
        for row, name, waited_ms in self._unacked.waited(shards, silent, now_ms):
            if row.state is ShardState.OWNED and waited_ms >= self._settings.add_timeout_ms:
                reason = f"{name} did not acknowledge it within {waited_ms} ms"
                accepting = partial(self._accepting, now_ms=now_ms)
                taken = plan_take_back(row, accepting, self._loads, reason, self._bars)
                self._rearrange(taken, now_ms, report)
            elif row.state is ShardState.DROPPING and waited_ms >= self._settings.drop_timeout_ms:
                reason = f"shard {row.shard} was not released within {waited_ms} ms"
                incarnation, at_ms = incarnations[name], self._wall_of(now_ms)
                if self._store.withhold(
                    name, incarnation, shard=row.shard, term=self.term, at_ms=at_ms, reason=reason
                ):
                    self._liveness.on_withheld(name)


class UnackedShards:
    """Shards assigned to containers but not yet acknowledged: since when, and under which epoch."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[int, Millis]] = {}  # shard -> (epoch, first reported)

    def on_heartbeat(self, heartbeat: Heartbeat, given: Iterable[ShardEntry], now_ms: Millis) -> None:
        """A heartbeat acknowledges some shards; its reply assigns those of `given`.

        Shards do not count while the engine is not ready: it cannot acknowledge them yet.
        """
        acked = set(heartbeat.acked)
        for entry in given:
            if entry in acked or not heartbeat.engine_ready:
                self._since.pop(entry.shard, None)
            elif self._since.get(entry.shard, (0, 0))[0] != entry.epoch:
                self._since[entry.shard] = (entry.epoch, now_ms)

    def waited(
        self, shards: Iterable[ShardRow], silent: Collection[str], now_ms: Millis
    ) -> Iterator[tuple[ShardRow, str, Millis]]:
        """(shard, its container, how long the acknowledgement has been missing).

        Silent containers are left out: `Liveness` decides about them.
        """
        for row in shards:
            epoch, since_ms = self._since.get(row.shard, (0, now_ms))
            if row.container is not None and row.container not in silent and row.epoch == epoch:
                yield row, row.container, now_ms - since_ms
