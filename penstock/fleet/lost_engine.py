"""Decides whether the shards of a container whose engine is down move to other containers or wait for it.

None of their tasks runs: a warden registers only after all processes of the last engine are dead, passes no
shard to the next engine before it is ready, and itself releases shards to drop (`watchdog.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from penstock.core.clock import Millis
from penstock.fleet.container_store import ContainerRow, ContainerState
from penstock.fleet.liveness import BRAKE_COUNT, BRAKE_FRACTION, ShardManagerSettings
from penstock.fleet.messages import Heartbeat, ShardState
from penstock.fleet.placement.placement import Refusal
from penstock.fleet.shard_store import ShardRow


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutage:
    """An engine that is down, and what the other containers could do. All times are durations."""

    container: str
    down_ms: Millis
    taker_ms: Millis | None  # uptime of the oldest engine that can take shards; None: there is none
    start_ms: Millis | None  # how long its last outage was; None: none was observed
    move_ms: Millis  # how long moving shards to others takes
    down_count: int  # containers with shards and no engine, this one included
    count: int  # these, and all whose engine is up


@dataclass(frozen=True, slots=True)
class MoveShards:
    """The shards move to other containers."""

    reason: str


@dataclass(frozen=True, slots=True)
class KeepShards:
    """The shards stay with their container."""

    reason: str


def decide_engine(down: EngineOutage, settings: ShardManagerSettings) -> MoveShards | KeepShards:
    """Whether the shards of one container move or stay. Pure."""
    if down.taker_ms is None:
        return KeepShards("no other container can take shards")
    if down.start_ms is not None and max(down.start_ms, down.down_ms) < down.move_ms:
        return KeepShards("its engine restarts faster than its shards could move, by its last outage")
    is_mass = down.down_count >= BRAKE_COUNT and down.down_count > BRAKE_FRACTION * down.count
    # The others came up after this one went down: engines start together, and the first must not get all.
    is_together = down.taker_ms < down.down_ms
    if (is_mass or is_together) and min(down.down_ms, down.taker_ms) < settings.engine_wait_ms:
        what = "many engines are down" if is_mass else "engines start together"
        return KeepShards(f"{what}: shards wait up to {settings.engine_wait_ms} ms for it")
    return MoveShards(f"the engine of {down.container} is down")


def decide_shard(
    row: ShardRow, *, left_ms: Millis | None, down_ms: Millis, settings: ShardManagerSettings
) -> KeepShards | None:
    """Whether one shard stays although its container's shards move; `left_ms`: how long ago it left another
    lost engine, or had to stay with one. Pure.
    """
    if row.is_quarantined:
        return KeepShards(f"shard {row.shard} is quarantined: {row.blame} containers could not release it")
    is_suspect = left_ms is not None and left_ms < settings.engine_suspect_ms
    # This shard may be what crashes engines. One that has not been up since did not run it again.
    if is_suspect and down_ms < settings.engine_suspect_ms:
        return KeepShards(
            "its shards left another lost engine recently: they may be the cause, so they do not move again"
        )
    return None


@dataclass(frozen=True, slots=True)
class ShardsWithoutEngine:
    """The shards to move, and why the others stay."""

    leaving: Mapping[ShardRow, str] = field(default_factory=dict)
    staying: Mapping[str, str] = field(default_factory=dict)  # by container


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    incarnation: str
    is_up: bool
    since_ms: Millis


class EngineTracker:
    """Tracks since when each engine is up or down, by the acknowledged heartbeats."""

    def __init__(self, settings: ShardManagerSettings, *, move_ms: Millis) -> None:
        self._settings, self._move_ms = settings, move_ms
        self._engines: dict[str, _Engine] = {}
        self._starts_ms: dict[str, Millis] = {}  # duration of the last outage
        self._left_ms: dict[int, Millis] = {}  # shards that left a lost engine, or had to stay with another
        self._reported: dict[str, tuple[str, str]] = {}  # container -> (incarnation, why its shards stay)

    def on_heartbeat(self, heartbeat: Heartbeat, now_ms: Millis) -> None:
        """Requires: a heartbeat of the incarnation in the store. A late one does not mark an
        engine as down.
        """
        old = self._engines.get(heartbeat.container)
        is_same = old is not None and old.incarnation == heartbeat.incarnation
        is_up = heartbeat.engine_ready or (old is not None and is_same and old.is_up)
        since_ms = now_ms
        if old is None and is_up:
            since_ms = 0  # it was up before this Shard Manager started
        elif old is not None and old.is_up == is_up and (is_same or not is_up):
            since_ms = old.since_ms  # successive incarnations that never become ready are one outage
        if old is not None and is_up and not old.is_up:
            self._starts_ms[heartbeat.container] = now_ms - old.since_ms
        engine = _Engine(incarnation=heartbeat.incarnation, is_up=is_up, since_ms=since_ms)
        self._engines[heartbeat.container] = engine

    def down(self, containers: Iterable[ContainerRow]) -> frozenset[str]:
        """Containers that send heartbeats but have no engine."""
        return frozenset(
            row.name
            for row in containers
            if row.state is ContainerState.LIVE and not row.known_dead and self._is_known(row, is_up=False)
        )

    def _is_known(self, row: ContainerRow, *, is_up: bool) -> bool:
        engine = self._engines.get(row.name)
        return engine is not None and engine.incarnation == row.incarnation and engine.is_up == is_up

    def check(
        self,
        shards: Iterable[ShardRow],
        containers: Collection[ContainerRow],
        *,
        accepting: Collection[str],
        silent: Collection[str],
        now_ms: Millis,
    ) -> ShardsWithoutEngine:
        """Which shards move now. Requires: the engines of `accepting` are up by their rows."""
        down = self.down(containers)
        if not down:
            return ShardsWithoutEngine()
        mine: dict[str, list[ShardRow]] = {}
        for row in shards:
            if row.container in down and row.container not in silent and row.state is ShardState.OWNED:
                mine.setdefault(row.container, []).append(row)
        up = {row.name: row for row in containers if self._is_known(row, is_up=True)}
        takers_ms = [now_ms - self._engines[name].since_ms for name in accepting if name in up]
        leaving: dict[ShardRow, str] = {}
        staying: dict[str, str] = {}
        for name, rows in sorted(mine.items()):
            down_ms = now_ms - self._engines[name].since_ms
            outage = EngineOutage(
                container=name,
                down_ms=down_ms,
                taker_ms=max(takers_ms, default=None),
                start_ms=self._starts_ms.get(name),
                move_ms=self._move_ms,
                down_count=len(mine),
                count=len(mine) + len(up),
            )
            decision = decide_engine(outage, self._settings)
            for row in rows:
                left_ms = self._left_ms.get(row.shard)
                age_ms = None if left_ms is None else now_ms - left_ms
                stays = decide_shard(row, left_ms=age_ms, down_ms=down_ms, settings=self._settings)
                if isinstance(decision, KeepShards):
                    staying[name] = decision.reason
                elif stays is None:
                    leaving[row] = decision.reason
                else:
                    staying[name] = stays.reason
                if stays is not None and left_ms is not None:
                    self._left_ms[row.shard] = now_ms  # as long as the engine is down, and for a while after
        return ShardsWithoutEngine(leaving, staying)

    def on_leaving(self, shards: Iterable[int], now_ms: Millis) -> None:
        """These shards begin to move away from a container whose engine is down."""
        fresh = {
            n: at_ms
            for n, at_ms in self._left_ms.items()
            if now_ms - at_ms < self._settings.engine_suspect_ms
        }
        self._left_ms = fresh | dict.fromkeys(shards, now_ms)

    def new_reports(
        self, found: ShardsWithoutEngine, refusals: Iterable[Refusal]
    ) -> Iterator[tuple[str, str]]:
        """(container, why shards of it stay), once per incarnation and reason."""
        sources = {row.shard: row.container for row in found.leaving}
        staying = {sources[refusal.shard]: refusal.reason for refusal in refusals} | dict(found.staying)
        for name, reason in staying.items():
            assert name is not None, "a shard that moves away had a container"
            report = (self._engines[name].incarnation, reason)
            if self._reported.get(name) != report:
                self._reported[name] = report
                yield name, reason
