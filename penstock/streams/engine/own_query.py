"""A user's own streaming query, as it is: one task, a lease before its start, a checkpoint that lasts.

Nothing fences what such a query writes. So two must never run: the lease is a lock that dies with its
process, and the interval's token. A successor works on a copy of the checkpoint under a path of its own,
which its predecessor, should it wake once more, does not know.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.core.errors import ConfigError, CorruptData, EnvironmentProblem, Fenced, PipelineError, Refused
from penstock.streams.packages import load_entry
from penstock.streams.rows.row_store import Changes, IntervalRef, RowStore

STATE_SETTINGS = {
    "stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    "stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "stateStore.checkpointFormatVersion": "2",
    "minBatchesToRetain": "10",
}
POINTER = "checkpoint"  # in the interval's offsets: which copy counts


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnQuery:
    """What a task of kind `spark` is told."""

    task_id: str
    ref: IntervalRef
    generation: int
    shard_epoch: int
    package_folder: Path
    package_entry: str
    package_hash: str
    function: str
    arguments: Mapping[str, str]


class QueryLease:
    """The right to run one query. Taken before its start, given back when it has ended."""

    def __init__(self, query: OwnQuery, rows: RowStore, root: Path, *, mounted: Path | None = None) -> None:
        """`mounted`: a folder that must be there already, since another machine has what it holds."""
        self._query, self._rows, self._root, self._mounted = query, rows, root, mounted
        self.token = 0

    @contextlib.contextmanager
    def held(self) -> Iterator[Path]:
        """Hold it; gives the path of the checkpoint. Refused while another runs, Fenced if one is newer."""
        if self._mounted is not None and not self._mounted.is_dir():
            raise EnvironmentProblem(
                f"{self._query.task_id} cannot reach its checkpoint",
                why=f"there is no folder {self._mounted} on this machine",
                fix="mount it here as on the others; the task is tried again",
            )
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / "lease").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Refused(
                    f"{self._query.task_id} runs already",
                    why="another process holds its lease; two would write everything twice",
                    fix="nothing: it is tried again, and starts when the other one has ended",
                ) from error
            yield self._own_checkpoint()

    def check(self) -> None:
        """Fenced if a successor has taken the interval."""
        found = self._rows.peek(self._query.ref).token
        if found != self.token:
            raise Fenced(
                f"{self._query.task_id} has a new owner",
                why=f"token {self.token} was followed by {found}",
                fix="nothing: the successor goes on",
            )

    def _own_checkpoint(self) -> Path:
        """A copy of the last one under a new name, then the pointer: until then the old one counts."""
        query = self._query
        row = self._rows.acquire(query.ref, generation=query.generation, shard_epoch=query.shard_epoch)
        self.token = row.token
        last, mine = row.offsets.get(POINTER, 0), self._root / str(row.token)
        if last and not (self._root / str(last)).is_dir():
            raise CorruptData(
                f"the checkpoint of {query.task_id} is not there",
                why=f"its place says copy {last}, and {self._root} has none of that number",
                fix="bring the folder back (is the storage mounted?); to read everything anew and "
                "without state, set a larger `lineage`",
            )
        if not last:
            mine.mkdir(exist_ok=True)  # so that one that is missing later is known to be lost
        else:
            unfinished = self._root / f".{row.token}"
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(self._root / str(last), unfinished)
            unfinished.rename(mine)
        self._rows.commit(
            query.ref, token=row.token, version=row.version, changes=Changes(offsets={POINTER: row.token})
        )
        for old in self._root.iterdir():  # the last one stays, for whoever must look back
            if old.is_dir() and old.name.isdigit() and int(old.name) < last:
                shutil.rmtree(old, ignore_errors=True)
        return mine


def start_own_query(spark: SparkSession, query: OwnQuery, checkpoint: Path) -> StreamingQuery:
    """Run the user's function and check what it gives back."""
    module = load_entry(query.package_folder, query.package_entry, query.package_hash)
    function = getattr(module, query.function, None)
    if not callable(function):
        raise PipelineError(
            f"{query.package_entry} has no function {query.function!r}",
            why="the job says that it starts the query",
            fix="define it at the top level: def NAME(spark, checkpoint, arguments)",
        )
    found: Any = function(_own_session(spark), str(checkpoint), dict(query.arguments))
    if not isinstance(found, StreamingQuery):
        raise PipelineError(
            f"{query.function} of {query.package_entry} started no query",
            why=f"it gave back {type(found).__name__}",
            fix="end it with: return frame.writeStream … .start()",
        )
    used = _checkpoint_of(found)
    if not used.endswith(str(checkpoint)):
        found.stop()
        raise ConfigError(
            f"the query of {query.task_id} keeps its checkpoint elsewhere",
            why=f"it uses {used}; its place would be lost, or shared, when it moves",
            fix='pass what the function is given: .option("checkpointLocation", checkpoint)',
        )
    return found


def _own_session(spark: SparkSession) -> SparkSession:
    """A session whose settings are nobody else's, with state that can grow and be copied."""
    own = spark.newSession()
    for name, value in STATE_SETTINGS.items():
        own.conf.set(f"spark.sql.streaming.{name}", value)
    return own


def _checkpoint_of(query: StreamingQuery) -> str:
    wrapped: Any = query._jsq
    return str(wrapped.streamingQuery().resolvedCheckpointRoot()).removeprefix("file:").rstrip("/")


def progress_metrics(query: StreamingQuery | None) -> dict[str, float]:
    """What Spark says of the last batch."""
    progress: Any = query.lastProgress if query is not None else None
    if progress is None:
        return {}
    return {
        "input_rate": float(progress["inputRowsPerSecond"] or 0),
        "processed_rate": float(progress["processedRowsPerSecond"] or 0),
        "batch_ms": float(progress["durationMs"].get("triggerExecution", 0)),
    }
