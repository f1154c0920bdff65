"""Writes layers: with authorisation, idempotency keys, validation of the merge, and compare-and-set.

The layer, its history, the audit, the journal and the response are written in one transaction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, NotFound, Refused, VersionConflict
from penstock.core.journal import Entry
from penstock.db.database import GroupedWrites
from penstock.db.journal_store import AuditRow, JournalStore, append_audit
from penstock.jobs import job_store
from penstock.jobs.config import JobConfig, skip_problem, validate_config, writers_of
from penstock.jobs.job_store import JobRecord, JobRow, JobStore, put_labels
from penstock.jobs.layer_store import put_layer, read_kinds
from penstock.jobs.layers import Layer, LayerRow, carry_origins, changed_paths, leaves, merge_layers
from penstock.jobs.provision import STATE_CHECK_FIELDS, check_state_fits
from penstock.jobs.tasks import check_partition_tasks
from penstock.jobs.text_rules import check_json, check_line, shown

if TYPE_CHECKING:
    import sqlalchemy as sa

Response = TypeVar("Response")
# Refuses a config that this installation cannot run; it is called when one of these fields changes.
ConfigCheck = Callable[[JobConfig], None]
INSTALLATION_FIELDS = frozenset({"kind", "plan"})
REASON_MAX = 2000
NAME_MAX = 200
CLEANUP_MS: Millis = 60_000  # how often old responses are deleted
PATHS_MAX = 50  # in the audit; the history has the whole body


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """The user or service that makes a call."""

    name: str
    role: str


class CallOptions(TypedDict):
    """The keyword arguments of every change."""

    actor: Actor
    reason: str
    idempotency_key: str | None
    now_ms: Millis


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The actor, the reason and the idempotency key of a change."""

    actor: Actor
    reason: str
    idempotency_key: str | None
    now_ms: Millis

    def check(self) -> None:
        """ConfigError if a part cannot be stored, or the reason is missing."""
        check_line("the name of the actor", self.actor.name, length_max=NAME_MAX)
        check_line("the role of the actor", self.actor.role, length_max=NAME_MAX)
        if self.idempotency_key is not None:
            check_line("the idempotency key", self.idempotency_key, length_max=NAME_MAX)
        if isinstance(self.reason, str) and not self.reason.strip():
            raise ConfigError(
                "a change needs a reason", why="it is stored in the audit", fix="add a short reason"
            )
        check_line("the reason", self.reason, length_max=REASON_MAX)


def accept_every_config(config: JobConfig) -> None:
    """A `ConfigCheck` that accepts every config."""


class LayerWriter:
    """Writes layers for one call, in its transaction."""

    def __init__(
        self, connection: sa.Connection, journal: JournalStore, call: Call, check: ConfigCheck
    ) -> None:
        self.connection, self.call, self._journal, self._check = connection, call, journal, check

    @cached_property
    def kinds(self) -> Mapping[str, Layer]:
        """The kinds of layers by name, read in the transaction, so that a new one is valid at once."""
        return {layer.name: layer for layer in read_kinds(self.connection)}

    def authorise(self, layer: str) -> None:
        """Refused unless the actor's role is one of the layer's writers."""
        known = self.kinds.get(layer) if isinstance(layer, str) else None
        if known is None:
            raise NotFound(
                f"there is no layer {shown(layer)}",
                why=f"the layers are {', '.join(self.kinds)}",
                fix="use one of them",
            )
        if self.call.actor.role not in known.writers:
            raise Refused(
                f"{self.call.actor.name} may not write the {layer} layer",
                why=f"the role {self.call.actor.role!r} is not one of {', '.join(sorted(known.writers))}",
                fix="use a token with one of these roles, or write a layer of your role",
            )

    def write(
        self,
        record: JobRecord,
        layer: str,
        body: Mapping[str, Any],
        expected_version: int | None,
        *,
        note: Mapping[str, Any] | None = None,
    ) -> tuple[int, JobConfig]:
        """Validate the merge with the new body, and write the layer; returns the version and the merge."""
        job = record.job
        check_version(job, expected_version)
        check_is_map(job.name, layer, body)
        before = next((row for row in record.layers if row.layer == layer), None)
        row = carry_origins(before, self._row(layer, body, job.expected_version + 1))
        config = validate(job.name, record.layers, row)
        if config.pipeline != job.pipeline:
            raise ConfigError(
                f"the config of job {job.name!r} is not valid",
                why=f"pipeline: the job belongs to {job.pipeline!r}, not to {config.pipeline!r}",
                fix="do not change `pipeline`; to move a job, remove it and submit it in the other pipeline",
            )
        paths = changed_paths({} if before is None else before.body, body)
        self._check_fields(layer, body, paths)
        # Checked only when these fields change: a running job can always be stopped and tuned.
        if any(_field(path) in INSTALLATION_FIELDS for path in paths):
            self._check(config)
        if record.old is not None and any(_field(path) in STATE_CHECK_FIELDS for path in paths):
            check_state_fits({job.name: (record.old.config, config)})
        job_store.bump_version(self.connection, job, desired=config.state, deleted=False)
        put_layer(self.connection, job.name, row, birth=job.birth)
        if any(_field(path) == "labels" for path in paths):
            put_labels(self.connection, job.name, config.labels)
        data = {"version": row.version, "paths": list(paths[:PATHS_MAX]), **(note or {})}
        self.record(f"layer.{layer}", job.name, data)
        return row.version, config

    def begin_life(
        self, previous: JobRecord | None, job: str, body: Mapping[str, Any], birth: str
    ) -> JobRecord:
        """Create a job with an empty base layer. Requires: `previous` is None or removed."""
        check_is_stopped(job, previous)
        pipeline = str(body.get("pipeline", ""))
        row = job_store.insert_job(
            self.connection, name=job, birth=birth, pipeline=pipeline, now_ms=self.call.now_ms
        )
        put_labels(self.connection, job, {})
        # The base layer always exists, so that a view shows it.
        base = self._row("base", {}, row.expected_version)
        put_layer(self.connection, job, base, birth=birth)
        self.record("job.created", job, {"birth": birth, "version": row.expected_version})
        return JobRecord(job=row, layers=(base,), running=None, plan=None, quarantine=None, retirements=())

    def record(self, action: str, subject: str, data: Mapping[str, Any], *, kind: str = "layer") -> None:
        """Write a change to the audit and the journal, in its transaction."""
        actor, at_ms, reason = self.call.actor, self.call.now_ms, self.call.reason
        row = AuditRow(
            at_ms=at_ms,
            actor=actor.name,
            role=actor.role,
            action=action,
            subject=subject,
            reason=reason,
            data=data,
        )
        append_audit(self.connection, row)
        entry = Entry(
            at_ms=at_ms,
            actor=actor.name,
            kind=kind,
            subject=subject,
            decision=action,
            reason=reason,
            data=data,
        )
        self._journal.append(self.connection, entry)

    def _row(self, layer: str, body: Mapping[str, Any], version: int) -> LayerRow:
        return LayerRow(
            layer=layer,
            precedence=self.kinds[layer].precedence,
            body=body,
            version=version,
            actor=self.call.actor.name,
            reason=self.call.reason,
            at_ms=self.call.now_ms,
        )

    def _check_fields(self, layer: str, body: Mapping[str, Any], paths: Sequence[str]) -> None:
        """Refused if a changed path is not allowed in this layer, or not for the actor's role.

        To remove a value, the right to write the layer is enough, except for fields of admins: the value that
        then applies was set by a role that may set it.
        """
        role, kind, present = self.call.actor.role, self.kinds[layer], {path for path, _ in leaves(body)}
        for path in paths:
            field, allowed = _field(path), writers_of(path)
            if path not in present and allowed != {"admin"}:
                continue
            if not kind.allows(field):
                raise Refused(
                    f"the {layer} layer may not contain `{field}`",
                    why=f"it may only contain {', '.join(sorted(kind.fields))}",
                    fix=f"leave `{field}` out, or write it in another layer",
                )
            if role not in allowed:
                raise Refused(
                    f"{self.call.actor.name} may not change `{field if field != 'policies' else path}`",
                    why=f"only {' and '.join(sorted(allowed)) or 'no role'} may change it, not {role!r}",
                    fix=_how_to_change(allowed, allowed & kind.writers, layer),
                )


def _how_to_change(allowed: frozenset[str], here: frozenset[str], layer: str) -> str:
    """Who can change a field that this actor may not change."""
    elsewhere = "a developer changes the job itself: `penstock submit` or `penstock job apply`"
    ask = f"ask {' or '.join(sorted(here))} to write it in the {layer} layer" if here else "leave it out"
    return f"{ask}; {elsewhere}" if "developer" in allowed else ask


class IdempotentWriter:
    """Runs calls, each in one transaction. A retry with the same key gets the stored response."""

    def __init__(self, store: JobStore, *, check: ConfigCheck = accept_every_config) -> None:
        self._store, self._journal, self._check = store, JournalStore(store.database), check
        self._writes = GroupedWrites(store.database)
        self._cleaned_ms: Millis = -CLEANUP_MS

    def once(
        self,
        options: CallOptions,
        request: Mapping[str, Any],
        write: Callable[[LayerWriter], Response],
        *,
        layer: str | None = None,
    ) -> Response:
        """Run a write, or return its stored response. The role must be a writer of `layer`, if given."""
        call = Call(**options)
        call.check()
        check_json("the request", request)
        digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        actor, key = call.actor.name, call.idempotency_key

        def run(connection: sa.Connection) -> Response:
            writer = LayerWriter(connection, self._journal, call, self._check)
            if layer is not None:
                writer.authorise(layer)
            if key is not None:
                stored = job_store.find_response(
                    connection, actor=actor, key=key, request=digest, now_ms=call.now_ms
                )
                if stored is not None:
                    first_response: Response = stored
                    return first_response
            response = write(writer)
            if not 0 <= call.now_ms - self._cleaned_ms < CLEANUP_MS:
                job_store.delete_old_responses(connection, now_ms=call.now_ms)
                self._cleaned_ms = call.now_ms
            if key is not None:
                job_store.store_response(
                    connection, actor=actor, key=key, request=digest, response=response, now_ms=call.now_ms
                )
            return response

        return self._writes.run(run)


def validate(job: str, layers: Sequence[LayerRow], row: LayerRow) -> JobConfig:
    """The valid config that results when `row` replaces its layer."""
    others = [other for other in layers if other.layer != row.layer]
    config = validate_config(job, merge_layers([*others, row]))
    before = next((other for other in layers if other.layer == row.layer), None)
    check_partition_tasks(job, before, row, others, config)
    check_limits(job, before, row, config)
    if row.body.get("poison") == "skip" and (why := skip_problem(config)):
        raise ConfigError(
            f"the config of job {shown(job)} is not valid",
            why=f"poison: `skip` would have no effect: {why}",
            fix="leave it out; process_batch can skip such records itself",
        )
    return config


def check_limits(job: str, before: LayerRow | None, row: LayerRow, config: JobConfig) -> None:
    """Refuse a write of limits that exclude each other. A task count outside of the limits is clamped."""
    fewest, most = config.scaler.task_count_min, config.task_count_max
    if fewest <= most or _limits_of(before) == _limits_of(row):
        return  # limits that an older version accepted do not block other writes
    raise ConfigError(
        f"the config of job {shown(job)} is not valid",
        why=f"scaler.task_count_min is {fewest}, and task_count_max is {most}",
        fix="set scaler.task_count_min to at most task_count_max; nothing was changed",
    )


def _limits_of(row: LayerRow | None) -> tuple[object, object]:
    if row is None:
        return None, None
    scaler = row.body.get("scaler")
    least = scaler.get("task_count_min") if isinstance(scaler, Mapping) else None
    return least, row.body.get("task_count_max")


def check_is_map(job: str, layer: str, body: object) -> None:
    """ConfigError unless the body is a map."""
    if not isinstance(body, Mapping):
        raise ConfigError(
            f"the {layer} layer of job {shown(job)} is not valid",
            why="it is not a map",
            fix="send a map of fields",
        )


def check_is_stopped(job: str, previous: JobRecord | None) -> None:
    """Refuse to begin a life of a name while tasks of the former life may run."""
    if previous is not None and (previous.plan is not None or previous.old is not None):
        raise Refused(
            f"the job {job!r} is still being removed",
            why="tasks of the removed job may still run",
            fix="try again in a few seconds",
        )


def check_version(job: JobRow, expected_version: int | None) -> None:
    """VersionConflict if the job has another version; None: any version."""
    if expected_version is not None and job.expected_version != expected_version:
        raise VersionConflict(f"job {job.name!r}", expected=expected_version, actual=job.expected_version)


def _field(path: str) -> str:
    return path.partition(".")[0]
