"""The reads of the Job Service; each result is from one snapshot."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, NotFound, PenstockError, Refused
from penstock.core.workers import SLICE, Rest
from penstock.db.bulk import ByName
from penstock.db.database import values_of
from penstock.db.journal_store import AuditRow
from penstock.jobs import job_store
from penstock.jobs.config import NAME_PATTERN, JobConfig, guarantees_of, validate_config
from penstock.jobs.job_store import (
    JOBS,
    ChangedJobs,
    JobFilter,
    JobRecord,
    JobStore,
    list_names,
    load_records,
)
from penstock.jobs.layer_store import read_history, read_kinds, read_layers_at
from penstock.jobs.layer_writer import (
    INSTALLATION_FIELDS,
    ConfigCheck,
    accept_every_config,
    check_is_map,
    check_is_stopped,
    validate,
)
from penstock.jobs.layers import Layer, LayerRow, Provenance, merge_layers, provenance
from penstock.jobs.provision import (
    JobChange,
    SubmitAction,
    SubmittedPipeline,
    plan_change,
    plan_removal,
    read_compiled,
    replaced_origin,
)
from penstock.jobs.running_store import PLANS, QUARANTINE, RUNNING, PlanRow, QuarantineRow, RunningRow
from penstock.jobs.syncer.sync_plan import FieldChange, diff_json
from penstock.jobs.text_rules import INT_MAX, check_json, is_line, shown

if TYPE_CHECKING:
    import sqlalchemy as sa


STATES = (
    "new",  # never started
    "running",
    "paused",
    "stopped",
    "changing",  # a plan is open
    "behind",  # the running config is not as expected; the next round of the State Syncer changes it
    "invalid",  # the merge of the layers is not valid
    "quarantined",  # a plan was given up; the former config still runs
    "removed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """The whole state of a job from one snapshot."""

    name: str
    birth: str
    pipeline: str
    created_ms: Millis
    removed: bool
    expected_version: int
    layers: tuple[LayerRow, ...]
    expected: JobConfig | None  # the validated merge, with defaults; None: it is not valid
    merged: Mapping[str, Any]  # the same as JSON; the plain merge if it is not valid
    problem: str  # why the merge is not valid, "" if it is
    running: RunningRow | None
    plan: PlanRow | None
    quarantine: QuarantineRow | None

    @property
    def config(self) -> JobConfig:
        """The expected config. Requires: there is no `problem`."""
        assert self.expected is not None, self.problem
        return self.expected

    @property
    def provenance(self) -> Mapping[str, Provenance]:
        """The provenance of each path; an absent path has its default."""
        try:
            return provenance(self.layers)
        except PenstockError:
            return {}  # the layers cannot be merged: `problem` says why

    @property
    def guarantees(self) -> list[str]:
        """The delivery guarantees, as texts."""
        return [] if self.expected is None else list(guarantees_of(self.expected))

    @property
    def is_in_sync(self) -> bool:
        """Whether the running config is the expected one."""
        if self.plan is not None or self.quarantine is not None or self.problem:
            return False
        if self.running is None:
            return self.removed or self.config.state != "running"
        return self.running.expected_version == self.expected_version

    @property
    def state(self) -> str:
        """One of `STATES`."""
        if self.removed:
            return "removed"
        if self.quarantine is not None:
            return "quarantined"
        if self.problem:
            return "invalid"
        if self.plan is not None:
            return "changing"
        if self.running is None:
            return self.config.state if self.is_in_sync else "new"
        return self.running.state if self.is_in_sync else "behind"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with every field, `state` and `is_in_sync`.

        `provenance` maps a path to {layer, actor, at_ms, reason, version}: the layer that sets it, and the
        write that last changed it in that layer. An absent path has its default.
        """
        return {
            "name": self.name,
            "birth": self.birth,
            "pipeline": self.pipeline,
            "created_ms": self.created_ms,
            "removed": self.removed,
            "expected_version": self.expected_version,
            "layers": [row.to_json() for row in self.layers],
            "config": self.merged,
            "guarantees": self.guarantees,
            "problem": self.problem,
            "provenance": {path: values_of(found) for path, found in self.provenance.items()},
            "running": None if self.running is None else self.running.to_json(),
            "plan": None if self.plan is None else self.plan.to_json(),
            "quarantine": None if self.quarantine is None else values_of(self.quarantine),
            "is_in_sync": self.is_in_sync,
            "state": self.state,
        }


def view_of(record: JobRecord) -> JobView:
    """The view of a record; the error of an invalid merge is its `problem`."""
    expected: JobConfig | None = None
    merged: Mapping[str, Any] = {}
    problem = ""
    try:
        merged = merge_layers(record.layers)
        expected = validate_config(record.job.name, merged)
        merged = expected.to_json()
    except PenstockError as error:
        problem = str(error)
    return JobView(
        name=record.job.name,
        birth=record.job.birth,
        pipeline=record.job.pipeline,
        created_ms=record.job.created_ms,
        removed=record.job.deleted,
        expected_version=record.job.expected_version,
        layers=record.layers,
        expected=expected,
        merged=merged,
        problem=problem,
        running=record.old,
        plan=record.plan,
        quarantine=record.quarantine,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A provisioner layer was written."""

    version: int  # the job's expected version now
    created: bool  # whether the job was created


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A pipeline was submitted: the new expected version of each job, and what was done to it."""

    jobs: Mapping[str, int]
    done: Mapping[str, SubmitAction]

    @classmethod
    def of(cls, response: Mapping[str, Any]) -> Submitted:
        """From a stored response. Earlier releases stored only the versions."""
        if set(response) == {"jobs", "done"}:
            return cls(jobs=response["jobs"], done=response["done"])
        return cls(jobs=response, done={})


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSet:
    """The desired state of a job was set."""

    version: int
    layer: str  # the layer that was written
    effective: str  # the state of the merge: a higher layer may set another one


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Jobs by name, and the `after` of the next page (None: this is the last page)."""

    items: tuple[JobView, ...]
    next: str | None

    def __iter__(self) -> Iterator[JobView]:
        return iter(self.items)


VIEWS_MAX = 10_000

# The large columns are left out: they change only together with a version column.
_LARGE = {RUNNING.c.config, RUNNING.c.mapping, PLANS.c.target, PLANS.c.mapping, PLANS.c.abandoned}
_STAMP = sa.select(
    *(column for table in (JOBS, RUNNING, PLANS, QUARANTINE) for column in table.c if column not in _LARGE)
).select_from(
    JOBS.outerjoin(RUNNING, RUNNING.c.job == JOBS.c.name)
    .outerjoin(PLANS, PLANS.c.job == JOBS.c.name)
    .outerjoin(QUARANTINE, QUARANTINE.c.job == JOBS.c.name)
)
_STAMPS = ByName(_STAMP, JOBS.c.name)
_PAGE = (
    _STAMP.where(JOBS.c.name > sa.bindparam("after", type_=JOBS.c.name.type), ~JOBS.c.deleted)
    .order_by(JOBS.c.name)
    .limit(sa.bindparam("most", type_=sa.Integer))
)

Stamp = tuple[Any, ...]


class ViewCache:
    """A cache of views, each with its stamp (the versions it was read at). Thread-safe."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Stamp, JobView]] = {}

    def views(self, connection: sa.Connection, names: Sequence[str]) -> dict[str, JobView]:
        """The views of these jobs, removed ones included; unknown names are left out."""
        return self._views(connection, _STAMPS.rows(connection, names))

    def page(self, connection: sa.Connection, *, after: str, limit: int) -> tuple[list[JobView], str | None]:
        """The next jobs after a name that are not removed, and the `after` of the next page."""
        rows = connection.execute(_PAGE, {"after": after, "most": limit + 1}).all()
        views = self._views(connection, rows[:limit])
        names = [row[0] for row in rows[:limit]]
        return [views[name] for name in names], names[-1] if len(rows) > limit else None

    def _views(self, connection: sa.Connection, rows: Sequence[sa.Row[Any]]) -> dict[str, JobView]:
        """The views for these stamps, cached ones if the stamp is the same. Requires: one transaction."""
        stamps: dict[str, Stamp] = {row[0]: tuple(row) for row in rows}
        views, changed = dict[str, JobView](), list[str]()
        for name, stamp in stamps.items():
            made = self._made.get(name)
            if made is not None and made[0] == stamp:
                views[name] = made[1]
            else:
                changed.append(name)
        records = load_records(connection, changed)
        fresh = {name: view_of(record) for name, record in records.items()}
        self._store_views({name: (stamps[name], view) for name, view in fresh.items()})
        return views | fresh

    def _store_views(self, made: Mapping[str, tuple[Stamp, JobView]]) -> None:
        if len(self._made) + len(made) > VIEWS_MAX:
            self._made.clear()
        self._made.update(made)


PAGE_MAX = 1000
INACTIVE_STATES = ("paused", "stopped", "removed")
# A filter that the store cannot evaluate exactly needs several queries per page; a page may then be short.
PAGE_QUERIES_MAX = 20


class JobReads:
    """Reads of jobs, their history, and what a change would do."""

    def __init__(self, store: JobStore, *, check: ConfigCheck = accept_every_config) -> None:
        """`check` raises for a config that this installation cannot run."""
        self._store, self._views, self._check = store, ViewCache(), check

    def view(self, job: str, *, removed: bool = False) -> JobView:
        """One job; NotFound if it does not exist, or is removed and `removed` is False."""
        _check_name(job)
        found = self._found([job]).get(job)
        if found is None or (found.removed and not removed):
            raise job_store.job_not_found(job, was_removed=found is not None)
        return found

    def views_of(self, names: Sequence[str]) -> dict[str, JobView]:
        """The views of these jobs; unknown and removed ones are left out."""
        return {name: view for name, view in self._found(names).items() if not view.removed}

    def inactive(self, names: Sequence[str]) -> dict[str, str]:
        """The state of those of these jobs that are in sync and have no tasks: paused, stopped or removed."""
        return {
            name: view.state for name, view in self._found(names).items() if view.state in INACTIVE_STATES
        }

    def _found(self, names: Sequence[str]) -> dict[str, JobView]:
        wanted = list(dict.fromkeys(filter(is_name, names)))
        if not wanted:
            return {}
        with self._store.reading() as connection:
            return self._views.views(connection, wanted)

    def views(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        state: str | None = None,
        pipeline: str | None = None,
        removed: bool = False,
        after: str = "",
        limit: int = 100,
    ) -> Page:
        """Jobs by name that match all conditions. `removed`: removed jobs too; state `removed`: only those.

        The next page: `after=page.next`, until it is None. A page may have fewer than `limit` jobs.
        """
        if state is not None and state not in STATES:
            raise ConfigError(
                f"there is no state {shown(state)}",
                why=f"the states are {', '.join(STATES)}",
                fix="use one of these",
            )
        labels = labels or {}
        # No job has such names or labels, and not every store accepts them in a query.
        if not all(is_line(text) for text in (after, pipeline or "", *labels.keys(), *labels.values())):
            return Page(items=(), next=None)
        limit, found = max(1, min(limit, PAGE_MAX)), list[JobView]()
        if not labels and not removed and state is None and pipeline is None:
            with self._store.reading() as connection:
                plain, following = self._views.page(connection, after=after, limit=limit)
            return Page(items=tuple(plain), next=following)
        with self._store.reading() as connection:
            for _ in range(PAGE_QUERIES_MAX):
                wanted = JobFilter(
                    labels=labels, state=state, pipeline=pipeline, removed=removed, after=after
                )
                room = limit - len(found)
                names = list_names(connection, wanted, limit=room + 1)
                views = self._views.views(connection, names[:room])
                for name in names[:room]:
                    if name in views and state in (None, views[name].state):
                        found.append(views[name])
                if len(names) <= room:
                    return Page(items=tuple(found), next=None)
                after = names[room - 1]
                if len(found) == limit:
                    break
        return Page(items=tuple(found), next=after)

    def every_view(self, rest: Rest | None = None) -> Iterator[JobView]:
        """Every job that is not removed, by name, read in pages; with `rest`: small pages and pauses."""
        after: str | None = ""
        while after is not None:
            page = self.views(after=after, limit=PAGE_MAX if rest is None else SLICE)
            yield from page.items
            after = page.next
            if rest is not None:
                rest()

    def layer_kinds(self) -> tuple[Layer, ...]:
        """The kinds of layers, lowest precedence first."""
        return self._store.layer_kinds()

    def changed_since(self, version: int) -> ChangedJobs:
        """The jobs whose expected config changed after `version` of the store."""
        return self._store.changed_since(version)

    def history(
        self, job: str, *, layer: str | None = None, before: int | None = None, limit: int = 100
    ) -> tuple[LayerRow, ...]:
        """Writes of a job's layers, newest first; `before`: only smaller versions. Also for removed jobs."""
        with self._store.reading() as connection:
            any_record(connection, job)
            if layer is not None and layer not in {kind.name for kind in read_kinds(connection)}:
                raise NotFound(
                    f"there is no layer {shown(layer)}", why="no such kind of layer", fix="leave `layer` out"
                )
            before = None if before is None else min(before, INT_MAX)
            limit = max(1, min(limit, PAGE_MAX))
            return read_history(connection, job, layer=layer, before=before, limit=limit)

    def layers_at(self, job: str, version: int) -> tuple[LayerRow, ...]:
        """The layers at an expected version, lowest first. Also for removed jobs."""
        with self._store.reading() as connection:
            return layers_at(connection, any_record(connection, job), version)[1]

    def diff(self, job: str, *, old: int | None, new: int | None) -> tuple[FieldChange, ...]:
        """The paths with different values in the merges at two expected versions.

        `old` None: the running config. `new` None: the expected config (of a removed job: the last one).
        """
        with self._store.reading() as connection:
            record = any_record(connection, job)
            if old is not None:
                before = _merged(job, layers_at(connection, record, old)[1])
            else:
                before = {} if record.old is None else record.old.config.to_json()
            layers = record.layers if new is None else layers_at(connection, record, new)[1]
        return diff_json(before, _merged(job, layers))

    def audit(
        self, *, subject: str | None = None, before: int | None = None, limit: int = 100
    ) -> tuple[AuditRow, ...]:
        """Changes, newest first; `before`: only smaller ids."""
        if subject is not None and not is_line(subject):
            return ()
        before = None if before is None else min(before, INT_MAX)
        return self._store.audit(subject, before=before, limit=max(1, min(limit, PAGE_MAX)))[::-1]

    def plan_job(self, job: str, body: Mapping[str, Any]) -> JobChange:
        """What `apply` would change. Writes nothing."""
        check_new_name(job)
        check_json("the config", body)
        check_is_map(job, "provisioner", body)
        with self._store.reading() as connection:
            record = job_store.find_record(connection, job)
            if record is not None and record.job.deleted:
                check_is_stopped(job, record)
            config = self._proposal(connection, job, body, record)
        old = None if record is None or record.old is None else record.old.view()
        return plan_change(job, config, old)

    def plan_pipeline(self, compiled: Mapping[str, Any]) -> tuple[JobChange, ...]:
        """What submitting this pipeline would change. Writes nothing."""
        return self.plan_submit(compiled)[0]

    def plan_submit(self, compiled: Mapping[str, Any]) -> tuple[tuple[JobChange, ...], str]:
        """What submitting would change, and the other file that it would replace ("" if none)."""
        check_json("the compiled pipeline", compiled)
        pipeline = read_compiled(compiled)
        with self._store.reading() as connection:
            records, configs = self._proposals(connection, pipeline)
            removed = self._removed_jobs(connection, pipeline)
            package = job_store.pipeline_package(connection, pipeline.name)
        changes = []
        for name, config in configs.items():
            old = records[name].old if name in records else None
            changes.append(plan_change(name, config, None if old is None else old.view()))
        for record in removed:
            changes.append(plan_removal(record.job.name, None if record.old is None else record.old.view()))
        return tuple(changes), replaced_origin(pipeline, package)

    def _proposals(
        self, connection: sa.Connection, pipeline: SubmittedPipeline
    ) -> tuple[dict[str, JobRecord], dict[str, JobConfig]]:
        """The current records, and each job's valid config with its new provisioner layer."""
        records = job_store.load_records(connection, list(pipeline.jobs))
        configs = {}
        for name in pipeline.jobs:
            record = records.get(name)
            body = pipeline.body_after(name, {}, 0)
            if record is not None and not record.job.deleted:
                before = layer_body(record, "provisioner")
                body = pipeline.body_after(name, before, record.job.expected_version)
            configs[name] = self._proposal(connection, name, body, record)
        return records, configs

    def _proposal(
        self, connection: sa.Connection, job: str, body: Mapping[str, Any], record: JobRecord | None
    ) -> JobConfig:
        kinds = {kind.name: kind for kind in read_kinds(connection)}
        row = LayerRow(layer="provisioner", precedence=kinds["provisioner"].precedence, body=body)
        if record is None or record.job.deleted:
            config = validate(job, (), row)
            self._check(config)
            return config
        config = validate(job, record.layers, row)
        if any(body.get(name) != layer_body(record, "provisioner").get(name) for name in INSTALLATION_FIELDS):
            self._check(config)
        if config.pipeline != record.job.pipeline:
            raise Refused(
                f"the job {job!r} belongs to another pipeline",
                why=f"it belongs to {record.job.pipeline!r}",
                fix="rename the pipeline or the step",
            )
        return config

    def _removed_jobs(self, connection: sa.Connection, pipeline: SubmittedPipeline) -> list[JobRecord]:
        names = [
            name
            for name in job_store.jobs_of_pipeline(connection, pipeline.name)
            if name not in pipeline.jobs
        ]
        records = job_store.load_records(connection, names)
        return [
            records[name]
            for name in names
            if layer_body(records[name], "provisioner").get("state") != "stopped"
        ]


def find_record(connection: sa.Connection, job: str) -> JobRecord:
    """The record of a job that is not removed; NotFound otherwise."""
    _check_name(job)
    return job_store.load_record(connection, job)


def check_new_name(job: object) -> None:
    """ConfigError for an invalid job name."""
    if not is_name(job):
        raise ConfigError(
            f"{shown(job)} cannot be the name of a job",
            why="a name has 1 to 200 letters, digits, '_', '-' or '.', and does not start with '-' or '.'",
            fix="use such a name",
        )


def layers_at(connection: sa.Connection, record: JobRecord, version: int) -> tuple[str, tuple[LayerRow, ...]]:
    """The birth id of the life with an expected version, and its layers then; NotFound if there is none."""
    if 0 <= version <= record.job.expected_version:
        life, layers = read_layers_at(connection, record.job.name, version)
        if layers:
            return life, layers
    raise NotFound(
        f"the job {record.job.name!r} has no version {version}",
        why=f"its expected version is {record.job.expected_version}",
        fix="use a version of its history",
    )


def layer_body(record: JobRecord, layer: str) -> Mapping[str, Any]:
    """The current body of a layer of a job."""
    return next((row.body for row in record.layers if row.layer == layer), {})


def any_record(connection: sa.Connection, job: str) -> JobRecord:
    """The record of a job, removed or not; NotFound if it never existed."""
    _check_name(job)
    record = job_store.find_record(connection, job)
    if record is None:
        raise job_store.job_not_found(job)
    return record


def _check_name(job: object) -> None:
    # Without a query: the store may not accept such a name.
    if not is_name(job):
        raise job_store.job_not_found(job)


def is_name(job: object) -> bool:
    """Whether this is a valid job name."""
    return isinstance(job, str) and re.fullmatch(NAME_PATTERN, job) is not None


def _merged(job: str, layers: tuple[LayerRow, ...]) -> Mapping[str, Any]:
    """The validated merge; the plain merge if it is not valid any more."""
    merged = merge_layers(layers)
    try:
        return validate_config(job, merged).to_json()
    except PenstockError:
        return merged
