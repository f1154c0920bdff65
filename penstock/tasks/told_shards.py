"""Shards that a container was told of and has not acknowledged yet. Time is an argument."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from penstock.core.clock import Millis
from penstock.tasks.messages import Heartbeat, ShardEntry
from penstock.tasks.shard_rows_store import ShardRow


class ToldShards:
    """Since when each of them is waited for, under which epoch."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[int, Millis]] = {}  # shard -> (epoch, first told)

    def on_beat(self, beat: Heartbeat, told: Iterable[ShardEntry], now_ms: Millis) -> None:
        """A beat acknowledges some, and is answered with what is `told`.

        Before its engine is ready nobody can record anything, and no shard is to blame for that.
        """
        acked = set(beat.acked)
        for entry in told:
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
