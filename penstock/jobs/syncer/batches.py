"""Bulk transactions of the State Syncer: simple changes of thousands of jobs, new plans of hundreds.

A batch is a compare-and-set per job: a job that changed since the decision is left to the next round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from operator import itemgetter
from types import GenericAlias
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec
import sqlalchemy as sa
from pydantic import BaseModel

from penstock.core import text as json_text
from penstock.core.clock import Millis
from penstock.core.journal import Entry
from penstock.db.bulk import ByName, insert_rows, update_rows, update_rows_if
from penstock.db.database import COUNTERS, Database, check_term, next_values, upsert
from penstock.db.journal_store import AuditRow, JournalStore, append_audit, append_audits
from penstock.jobs.config import LATER_FIELDS, LATER_PART_FIELDS, PROCESS_FIELDS, Input, JobConfig
from penstock.jobs.job_store import JOBS, JobRecord
from penstock.jobs.layer_store import LAYERS
from penstock.jobs.layers import LayerRow, merge_layers
from penstock.jobs.running_store import (
    PLANS,
    QUARANTINE,
    RETIREMENTS,
    RUNNING,
    RUNNING_COLUMNS,
    TASKS_COUNTER,
    PlanRow,
    RunningRow,
    running_row,
)
from penstock.jobs.syncer.sync_plan import (
    ComplexSync,
    InSync,
    SimpleSync,
    diff_json,
    explain,
    needs_restart,
    steps_of,
)

# The fields that a release changes. Their validity does not depend on other fields.
RELEASE_FIELDS = ("package", "arguments")
_CACHE_MAX = 10_000
_LATER_FIELDS_OF: dict[Any, tuple[str, ...]] = {
    **{JobConfig.model_fields[part].annotation: names for part, names in LATER_PART_FIELDS.items()},
    Input: ("writer",),
}
_OMITTED_FIELDS = PROCESS_FIELDS | {*LATER_FIELDS}  # left out of the stored form at their defaults


class ReleaseDifference(NamedTuple):
    """The change of the release fields, shared by all jobs with the same old and new values."""

    reason: str
    paths: tuple[str, ...]
    restarts: bool
    values: Mapping[str, Any]  # the new, validated values


class FastComparison(NamedTuple):
    """The difference (None: none), and the whole new running config as JSON text."""

    difference: ReleaseDifference | None
    target: str


@dataclass(slots=True)
class FastComparer:
    """Compares expected and running configs without a full validation, if only release fields differ.

    For that it caches values of these fields that passed the full validation. A second path beside
    `plan_sync`, for releases of very many jobs: measured 30 us of processor time per job, where the full path
    takes 140 us; a release of 100,000 jobs takes 5 s with it (`bench.syncer`).
    """

    _valid: dict[tuple[str, bytes], Any] = field(default_factory=dict)
    _differences: dict[bytes, ReleaseDifference | None] = field(default_factory=dict)

    def compare(self, job: str, bodies: Sequence[tuple[int, str]], running: str) -> FastComparison | None:
        """Compare the merged layers (precedence, body) with `running`; None: a full comparison is needed."""
        try:
            new, old = _expected(bodies), _RUNNING.decode(running)
        except (msgspec.MsgspecError, UnicodeError):
            return None  # the full comparison reports the error
        if "process" in (new.kind, old.kind):
            return None  # its stored form has other fields
        wanted, runs = _values(new), _values(old)
        if new.name not in (None, job) or _other_values(wanted) != _other_values(runs):
            return None
        if _encode(_untyped(wanted)) != _encode(_untyped(runs)):
            return None  # equal in Python only, where true == 1
        wanted, runs = _release_values(wanted), _release_values(runs)
        if wanted == runs:
            return FastComparison(None, running)
        key = _encode((wanted, runs))
        if key not in self._differences and not self._compare_release(key, wanted, runs):
            return None
        difference = self._differences[key]
        if difference is None:
            return FastComparison(None, running)
        return FastComparison(difference, _encode(_replace(old, **difference.values)).decode())

    def _compare_release(self, key: bytes, wanted: Sequence[Any], runs: Sequence[Any]) -> bool:
        """Compute and cache a difference; False if a value was not validated yet."""
        before, after = dict(zip(RELEASE_FIELDS, runs, strict=True)), {}
        for name, value in zip(RELEASE_FIELDS, wanted, strict=True):
            valid = self._valid.get((name, _encode(value)))
            if valid is None and value != before[name]:
                return False
            after[name] = before[name] if valid is None else valid
        changed = diff_json(before, after)
        self._make_room()
        self._differences[key] = None
        if changed:
            paths = tuple(change.path for change in changed)
            self._differences[key] = ReleaseDifference(explain(changed), paths, needs_restart(changed), after)
        return True

    def learn(self, layers: Sequence[LayerRow], target: JobConfig) -> None:
        """Cache the release fields of a full validation: `target` is the validated merge of these layers."""
        merged, found = merge_layers(layers), target.to_json({*RELEASE_FIELDS})
        self._make_room()
        for name in RELEASE_FIELDS:
            if name in merged:
                self._valid[name, _encode(merged[name])] = found[name]

    def _make_room(self) -> None:
        for memory in (self._valid, self._differences):
            if len(memory) >= _CACHE_MAX:
                memory.clear()


def _expected(bodies: Sequence[tuple[int, str]]) -> Any:
    if len(bodies) == 1:
        return _EXPECTED.decode(bodies[0][1])
    rows = [
        LayerRow(layer="", precedence=precedence, body=json_text.loads(body)) for precedence, body in bodies
    ]
    return msgspec.convert(merge_layers(rows), _EXPECTED.type)


@cache
def _struct_of(model: type[BaseModel], *, with_defaults: bool = True) -> type[msgspec.Struct]:
    """A struct with a model's fields and defaults, without its validators. Other types are `Any`."""
    fields: list[Any] = []
    for name, info in model.model_fields.items():
        kind = Any if model is JobConfig and name in RELEASE_FIELDS else _field_type(info.annotation)
        if model is JobConfig and name == "name":  # optional in layers
            fields.append((name, kind, None))
        elif name in _LATER_FIELDS_OF.get(model, ()):
            fields.append((name, kind | msgspec.UnsetType, msgspec.UNSET))  # a missing field stays missing
        elif info.is_required() or (not with_defaults and name not in _OMITTED_FIELDS):
            fields.append((name, kind))
        else:
            default = json_text.loads(json_text.dumps(info.get_default(call_default_factory=True)))
            for later in _LATER_FIELDS_OF.get(info.annotation, ()):
                del default[later]
            fields.append((name, kind, msgspec.convert(default, kind)))
    return msgspec.defstruct(
        model.__name__,
        fields,
        kw_only=True,
        forbid_unknown_fields=True,
        frozen=True,
        omit_defaults=not with_defaults,  # a missing field stays missing
    )


def _field_type(annotation: Any) -> Any:
    if annotation in (bool, int, float, str) or get_origin(annotation) is Literal:
        return annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _struct_of(annotation)
    arguments = get_args(annotation)
    if get_origin(annotation) is tuple and arguments[1:] == (...,):
        return GenericAlias(list, (_field_type(arguments[0]),))
    return Any


def _is_untyped(kind: Any) -> bool:
    """Whether values of this type may contain values without a declared type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return any(_is_untyped(item.type) for item in msgspec.structs.fields(kind))
    return kind is Any or any(map(_is_untyped, get_args(kind) if get_origin(kind) is list else ()))


def _pick(names: Iterable[str]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    picked: Callable[[tuple[Any, ...]], tuple[Any, ...]] = itemgetter(*map(_FIELDS.index, names))
    return picked


_EXPECTED: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_struct_of(JobConfig))
_RUNNING: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_struct_of(JobConfig, with_defaults=False))
_FIELDS = tuple(JobConfig.model_fields)
_OTHER_FIELDS = tuple(name for name in _FIELDS if name not in ("name", *RELEASE_FIELDS))
_release_values, _other_values = _pick(RELEASE_FIELDS), _pick(_OTHER_FIELDS)
_untyped = _pick(
    name for name in _OTHER_FIELDS if _is_untyped(_field_type(JobConfig.model_fields[name].annotation))
)
_encode, _values, _replace = msgspec.json.encode, msgspec.structs.astuple, msgspec.structs.replace


_BODY = sa.cast(LAYERS.c.body, sa.Text)
_RUNS = sa.and_(
    RUNNING.c.birth == JOBS.c.birth,
    RUNNING.c.state != "removed",
    RUNNING.c.hold_generation < RUNNING.c.generation,
    ~JOBS.c.deleted,
)
_RUNNING_JOBS = ByName(
    sa.select(JOBS.c.expected_version.label("expected_now"), LAYERS.c.precedence, _BODY, *RUNNING_COLUMNS)
    .select_from(
        JOBS.join(RUNNING, RUNNING.c.job == JOBS.c.name).outerjoin(
            LAYERS, sa.and_(LAYERS.c.job == JOBS.c.name, _BODY != "{}")
        )
    )
    .where(_RUNS),
    JOBS.c.name,
)

_OCCUPIED = sa.union_all(*(sa.select(table.c.job) for table in (PLANS, QUARANTINE, RETIREMENTS)))


LayerBodies = list[tuple[int, str]]  # precedence and JSON text of each layer of a job
RunningJob = tuple[RunningRow, int, LayerBodies]  # the row, the job's expected version now, its layers


class SyncStore:
    """Reads for the rounds of the State Syncer."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def occupied(self) -> frozenset[str]:
        """The jobs with a plan, a quarantine or a retirement."""
        with self._database.reading() as connection:
            return frozenset(name for (name,) in connection.execute(_OCCUPIED))

    def running_jobs(self, names: Sequence[str]) -> list[RunningJob]:
        """Those of these jobs that exist and run without a hold, with their layers."""
        with self._database.reading() as connection:
            rows = _RUNNING_JOBS.rows(connection, names)
        found: dict[str, RunningJob] = {}
        for expected_version, precedence, body, job, *columns in rows:
            if job not in found:
                found[job] = (running_row((job, *columns)), expected_version, [])
            if body is not None:
                found[job][2].append((precedence, body))
        return list(found.values())


_SIMPLE_COLUMNS = ("job", "version", "restart_version", "expected_version", "config", "updated_ms")
_COUNTERS = ByName(sa.select(COUNTERS.c.name, COUNTERS.c.value), COUNTERS.c.name)
_PLAN_COLUMNS = tuple(column.name for column in PLANS.columns)


class SimpleCommit(NamedTuple):
    """One simple change of a running row. It is small, because a batch has thousands."""

    job: str
    expected_version: int
    is_change: bool  # False: only `expected_version` is updated
    restarts: bool
    version: int  # of the running row as read
    restart_version: int
    config: str  # as JSON text
    reason: str
    data: str  # of its audit entry, as JSON text


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """What a batch wrote, and how long its transaction took."""

    versions: Mapping[str, int]  # of the written running rows, by job; changed jobs are left out
    took_ms: Millis


def simple_commit(record: JobRecord, sync: SimpleSync | InSync) -> SimpleCommit:
    """The simple change for a decision. Requires: the job has a running row, without a hold."""
    row = record.old
    assert row is not None and not row.is_held, "a held job has a plan, and then gets no simple change"
    config, restarts = row.config_json, False
    paths: tuple[str, ...] = ()
    if isinstance(sync, SimpleSync):
        config, restarts = json_text.dumps(sync.target.to_json()), sync.restarts
        paths = tuple(change.path for change in sync.changed)
    return SimpleCommit(
        job=row.job,
        expected_version=record.job.expected_version,
        is_change=isinstance(sync, SimpleSync),
        restarts=restarts,
        version=row.version,
        restart_version=row.restart_version,
        config=config,
        reason=sync.reason,
        data=_data(record.job.expected_version, paths),
    )


def fast_commit(row: RunningRow, expected_version: int, comparison: FastComparison) -> SimpleCommit:
    """The simple change for a fast comparison."""
    found = comparison.difference
    return SimpleCommit(
        job=row.job,
        expected_version=expected_version,
        is_change=found is not None,
        restarts=found is not None and found.restarts,
        version=row.version,
        restart_version=row.restart_version,
        config=comparison.target,
        reason=explain(()) if found is None else found.reason,
        data=_data(expected_version, () if found is None else found.paths),
    )


def _data(expected_version: int, paths: tuple[str, ...]) -> str:
    return f'{{"expected_version":{expected_version},"paths":{_paths(paths)}}}'


@lru_cache(maxsize=1000)
def _paths(paths: tuple[str, ...]) -> str:
    return json_text.dumps(paths)


def commit_simple(leader: LeaderStore, batch: Sequence[SimpleCommit], now_ms: Millis) -> BatchResult:
    """Commit simple changes. A job with a plan, or with a hold or a changed running row, is left out."""
    with leader.writing("simple") as connection:
        began_ms = leader.measure_ms()
        changes = sum(item.is_change for item in batch)
        numbers = iter(next_values(connection, TASKS_COUNTER, changes) if changes else ())
        rows = [
            _values_after(item, next(numbers) if item.is_change else item.version, now_ms) for item in batch
        ]
        written = _update_unchanged(leader, connection, batch, rows)
        items = [item for item in batch if item.job in written]
        done = {job: version for job, version, *_ in rows if job in written}
        recorded = [
            ("sync.simple" if item.is_change else "sync.noted", item.job, item.reason, item.data)
            for item in items
        ]
        leader.record_all(connection, recorded, now_ms, silent="sync.noted")
    return BatchResult(versions=done, took_ms=leader.measure_ms() - began_ms)


def _update_unchanged(
    leader: LeaderStore,
    connection: sa.Connection,
    batch: Sequence[SimpleCommit],
    rows: Sequence[tuple[Any, ...]],
) -> set[str]:
    """Write the rows of unchanged jobs; returns these jobs. Version numbers of the others stay unused."""
    if connection.dialect.name == "postgresql":
        versions = [item.version for item in batch]
        return update_rows_if(
            connection, RUNNING, _SIMPLE_COLUMNS, rows, at=("version", versions), unless_in=PLANS
        )
    unchanged = leader.unchanged(connection, {item.job: item.version for item in batch})
    update_rows(connection, RUNNING, _SIMPLE_COLUMNS, [row for row in rows if row[0] in unchanged])
    return unchanged


def open_plans(
    leader: LeaderStore, decided: Sequence[tuple[JobRecord, ComplexSync]], now_ms: Millis
) -> BatchResult:
    """Insert a plan with a new generation for each decision whose running row did not change."""
    with leader.writing("open") as connection:
        began_ms = leader.measure_ms()
        unchanged = leader.unchanged(
            connection, {record.job.name: version_of(record) for record, _ in decided}
        )
        items = [(record, sync) for record, sync in decided if record.job.name in unchanged]
        plans = new_plans(connection, items, now_ms)
        insert_rows(connection, PLANS, _PLAN_COLUMNS, [_plan_values(plan) for plan in plans])
        recorded = [
            (
                "plan.opened",
                plan.job,
                plan.reason,
                json_text.dumps(
                    {"generation": plan.generation, "had_old": record.old is not None, "plan": plan.id}
                ),
            )
            for (record, _), plan in zip(items, plans, strict=True)
        ]
        leader.record_all(connection, recorded, now_ms)
    opened = {plan.job: plan.running_version for plan in plans}
    return BatchResult(versions=opened, took_ms=leader.measure_ms() - began_ms)


def new_plans(
    connection: sa.Connection, items: Sequence[tuple[JobRecord, ComplexSync]], now_ms: Millis
) -> list[PlanRow]:
    """New plans with ids and generations from counters; the caller inserts them in the same transaction."""
    if not items:
        return []
    numbers = next_values(connection, "plans", len(items))
    generations = _next_generations(connection, [record.job.name for record, _ in items])
    return [
        PlanRow(
            job=record.job.name,
            id=number,
            birth=record.job.birth,
            generation=generations[record.job.name],
            target=sync.target,
            mapping=sync.mapping,
            expected_version=record.job.expected_version,
            running_version=version_of(record),
            step=steps_of(sync.target, has_old=record.old is not None)[0],
            attempts=0,
            error="",
            reason=sync.reason,
            abandoned=(),
            held_ms=None,
            started_ms=now_ms,
            updated_ms=now_ms,
        )
        for number, (record, sync) in zip(numbers, items, strict=True)
    ]


def version_of(record: JobRecord) -> int:
    """The version of the running row, 0 if there is none."""
    return 0 if record.running is None else record.running.version


def generation_counter(job: str) -> str:
    """The counter of a job's generations, shared by all lives of the name, so that none is used twice."""
    return f"generation/{job}"


def _next_generations(connection: sa.Connection, jobs: Sequence[str]) -> dict[str, int]:
    # Write transactions are serialized, so read and write may be two statements.
    names = [generation_counter(job) for job in jobs]
    last: dict[str, int] = {name: value for name, value in _COUNTERS.rows(connection, names)}
    following = {job: last.get(name, 0) + 1 for job, name in zip(jobs, names, strict=True)}
    rows = [{"name": generation_counter(job), "value": value} for job, value in following.items()]
    upsert(connection, COUNTERS, rows, replace=("value",))
    return following


def _values_after(item: SimpleCommit, version: int, now_ms: Millis) -> tuple[Any, ...]:
    restart_version = version if item.restarts else item.restart_version
    return (item.job, version, restart_version, item.expected_version, item.config, now_ms)


def _plan_values(plan: PlanRow) -> tuple[Any, ...]:
    values = plan.to_json()
    for name in ("target", "mapping", "abandoned"):
        values[name] = None if values[name] is None else json_text.dumps(values[name])
    return tuple(values[name] for name in _PLAN_COLUMNS)


ROLE = "syncer"
ACTOR = "state_syncer"


# Failpoints for tests. "before": written, not committed; "after": committed.
WRITES = ("simple", "open", "hold", "commit", "retired", "replace", "drop", "failed", "give_up", "lift")
CALLS = ("prepare", "is_stopped", "fence", "retire")
FAILPOINTS = tuple(f"{name}.{side}" for name in (*WRITES, *CALLS) for side in ("before", "after"))


_VERSIONS = ByName(sa.select(RUNNING.c.job, RUNNING.c.version), RUNNING.c.job)


_PLANNED = ByName(sa.select(PLANS.c.job), PLANS.c.job)


def pass_failpoint(point: str) -> None:
    """The failpoint handler in production: does nothing."""


class LeaderStore:
    """Transactions of the leading syncer; each checks that `term` is still the current one. Thread-safe.

    `reach(point)` is called at the failpoints of `WRITES`; `measure_ms` is a clock for durations.
    """

    def __init__(
        self,
        database: Database,
        *,
        term: int,
        reach: Callable[[str], None] = pass_failpoint,
        measure_ms: Callable[[], Millis] = lambda: 0,
    ) -> None:
        self.database, self.term, self._journal = database, term, JournalStore(database)
        self.reach, self.measure_ms = reach, measure_ms
        # Writes are serialized anyway; threads that wait here hold no connection.
        self._turn = threading.Lock()

    def check(self) -> None:
        """Raise Fenced unless this syncer is still the leader."""
        with self.database.reading() as connection:
            self.check_term(connection)

    @contextmanager
    def writing(self, write: str) -> Iterator[sa.Connection]:
        """The transaction of one of `WRITES`."""
        with self._turn, self.database.transaction() as connection:
            self.check_term(connection)
            yield connection
            self.reach(f"{write}.before")
        self.reach(f"{write}.after")

    def check_term(self, connection: sa.Connection) -> None:
        """Raise Fenced unless this syncer is still the leader."""
        check_term(connection, ROLE, self.term)

    def unchanged(self, connection: sa.Connection, versions: Mapping[str, int]) -> set[str]:
        """Those of these jobs without a plan whose running row has this version (0: no row)."""
        names = list(versions)
        found: dict[str, int] = {job: version for job, version in _VERSIONS.rows(connection, names)}
        same = {job for job, version in versions.items() if found.get(job, 0) == version}
        return same.difference(job for (job,) in _PLANNED.rows(connection, names))

    def record(
        self,
        connection: sa.Connection,
        action: str,
        job: str,
        reason: str,
        now_ms: Millis,
        data: Mapping[str, Any],
        *,
        kind: str | None = "sync",
    ) -> None:
        """Write a change to the audit, and to the journal unless `kind` is None."""
        append_audit(connection, _audit(action, job, reason, now_ms, data))
        if kind is not None:
            self._journal.append(connection, _entry(action, job, reason, now_ms, data, kind))

    def record_all(
        self,
        connection: sa.Connection,
        changes: Sequence[tuple[str, str, str, str]],
        now_ms: Millis,
        *,
        silent: str = "",
    ) -> None:
        """Write changes (action, job, reason, data as JSON text) to the audit. Those with other actions than
        `silent` are written to the journal too.
        """
        append_audits(connection, changes, at_ms=now_ms, actor=ACTOR, role=ROLE)
        journalled = [change for change in changes if change[0] != silent]
        self._journal.append_all(connection, journalled, at_ms=now_ms, actor=ACTOR, kind="sync")

    def alert(self, job: str, decision: str, problem: str, now_ms: Millis) -> None:
        """Write an alert for operators to the journal."""
        with self._turn, self.database.transaction() as connection:
            self.check_term(connection)
            self._journal.append(connection, _entry(decision, job, problem, now_ms, {}, "alert"))


def _audit(action: str, job: str, reason: str, now_ms: Millis, data: Mapping[str, Any]) -> AuditRow:
    return AuditRow(
        at_ms=now_ms, actor=ACTOR, role=ROLE, action=action, subject=job, reason=reason, data=data
    )


def _entry(action: str, job: str, reason: str, now_ms: Millis, data: Mapping[str, Any], kind: str) -> Entry:
    return Entry(at_ms=now_ms, actor=ACTOR, kind=kind, subject=job, decision=action, reason=reason, data=data)
