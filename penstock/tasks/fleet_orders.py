"""What people ask of a Shard Manager and needs no placement: marks on containers, releases, restarts."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.core.clock import Millis
from penstock.tasks.fleet_view import FleetView
from penstock.tasks.restart_orders import RestartOrders, container_of
from penstock.tasks.shard_orders import no_container, no_shard
from penstock.tasks.shard_store import ROLE, ShardStore


class FleetOrders(FleetView):
    """Orders, written under the term of the one who takes them."""

    def __init__(self, store: ShardStore, *, term: int, wall_of: Callable[[Millis], Millis]) -> None:
        super().__init__(store)
        self.term, self._wall_of, self._lock = term, wall_of, threading.RLock()
        self._restarts = RestartOrders(term)

    def cordon(self, container: str, now_ms: Millis, *, reason: str = "asked to", actor: str = ROLE) -> None:
        """Give a container no new shards; it keeps what it has."""
        self._mark(container, True, False, now_ms, reason, actor)

    def drain(self, container: str, now_ms: Millis, *, reason: str = "asked to", actor: str = ROLE) -> None:
        """Move everything away from a container, a few shards at a time, and give it nothing new."""
        self._mark(container, True, True, now_ms, reason, actor)

    def uncordon(
        self, container: str, now_ms: Millis, *, reason: str = "asked to", actor: str = ROLE
    ) -> None:
        """Take a container back."""
        self._mark(container, False, False, now_ms, reason, actor)

    def _mark(
        self, container: str, cordoned: bool, draining: bool, now_ms: Millis, reason: str, actor: str
    ) -> None:
        with self._lock:
            if not self._store.cordon(
                container,
                cordoned=cordoned,
                draining=draining,
                reason=reason,
                actor=actor,
                term=self.term,
                at_ms=self._wall_of(now_ms),
            ):
                raise no_container(container, self._store.containers())

    def release(self, shard: int, now_ms: Millis, *, reason: str = "asked to", actor: str = ROLE) -> None:
        """Let a quarantined shard be placed again."""
        with self._lock:
            at_ms = self._wall_of(now_ms)
            if not self._store.forgive(shard, term=self.term, at_ms=at_ms, reason=reason, actor=actor):
                raise no_shard(shard)

    def restart(self, task_id: str, now_ms: Millis, *, reason: str, actor: str = ROLE) -> str:
        """Ask for one task to be ended and started again where it is; returns where that is."""
        with self._lock:
            row = container_of(task_id, self._store.containers())
            self._restarts.ask(task_id, row.name, row.incarnation)
            at_ms, decision = self._wall_of(now_ms), f"restart on {row.name}"
            self._store.note("task", task_id, decision, reason, at_ms=at_ms, actor=actor)
            return row.name
