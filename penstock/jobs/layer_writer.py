"""The one way a layer is written: authorised, once per key, validated as merged, by compare-and-set.

The layer, its history, the audit, the journal and the answer are one transaction.
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
from penstock.jobs import job_store as key_store
from penstock.jobs.config import JobConfig, skip_problem, validate_config, writers_of
from penstock.jobs.job_store import JobRecord, JobRow, JobStore, put_labels
from penstock.jobs.layer_store import put_layer, read_kinds
from penstock.jobs.layers import Layer, LayerRow, carry_origins, changed_paths, leaves, merge_layers
from penstock.jobs.provision import STATE_CHECK_FIELDS, check_state_fits
from penstock.jobs.tasks import check_partition_tasks
from penstock.jobs.text_rules import check_json, check_line, shown

if TYPE_CHECKING:
    import sqlalchemy as sa

Answer = TypeVar("Answer")
# Refuses a config that an installation cannot run; it looks at these fields.
ConfigCheck = Callable[[JobConfig], None]
INSTALLATION_FIELDS = frozenset({"kind", "plan"})
REASON_MAX = 2000
NAME_MAX = 200
CLEANUP_MS: Millis = 60_000  # how often old answers are looked for
PATHS_MAX = 50  # in the audit; the history has the whole body


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who asks."""

    name: str
    role: str


class CallOptions(TypedDict):
    """What every change is asked with, by keyword."""

    actor: Actor
    reason: str
    idempotency_key: str | None
    now_ms: Millis


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Who asks for a change, why, and under which key a repeat is recognised."""

    actor: Actor
    reason: str
    idempotency_key: str | None
    now_ms: Millis

    def check(self) -> None:
        """Refuse what could not be kept, or not be understood later."""
        check_line("the name of who asks", self.actor.name, length_max=NAME_MAX)
        check_line("the role of who asks", self.actor.role, length_max=NAME_MAX)
        if self.idempotency_key is not None:
            check_line("the idempotency key", self.idempotency_key, length_max=NAME_MAX)
        if isinstance(self.reason, str) and not self.reason.strip():
            raise ConfigError(
                "a change needs a reason", why="others will ask for it later", fix="say why in a few words"
            )
        check_line("the reason", self.reason, length_max=REASON_MAX)


def accept_every_config(config: JobConfig) -> None:
    """Of an installation that can run every config."""


class LayerWriter:
    """Writes layers for one call, inside its transaction."""

    def __init__(
        self, connection: sa.Connection, journal: JournalStore, call: Call, check: ConfigCheck
    ) -> None:
        self.connection, self.call, self._journal, self._check = connection, call, journal, check

    @cached_property
    def kinds(self) -> Mapping[str, Layer]:
        """The layers there are, by name; read under the lock, so that a new one counts at once."""
        return {layer.name: layer for layer in read_kinds(self.connection)}

    def authorise(self, layer: str) -> None:
        """Deny by default: only a role that the layer names may write it."""
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
                fix="use a token with one of these roles, or write the layer that is yours",
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
        """Validate the merge with the new body, then write the layer; returns the version and the merge."""
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
                fix="leave `pipeline` as it is; a job moves by being removed and submitted anew",
            )
        paths = changed_paths({} if before is None else before.body, body)
        self._check_fields(layer, body, paths)
        # What runs already may always be stopped and tuned, wherever it keeps what it keeps.
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
        """Create a job with an empty base layer. Requires: `previous`, if any, is removed."""
        check_is_stopped(job, previous)
        pipeline = str(body.get("pipeline", ""))
        row = job_store.insert_job(
            self.connection, name=job, birth=birth, pipeline=pipeline, now_ms=self.call.now_ms
        )
        put_labels(self.connection, job, {})
        # The base layer is there from the start, so that a view always shows it.
        base = self._row("base", {}, row.expected_version)
        put_layer(self.connection, job, base, birth=birth)
        self.record("job.created", job, {"birth": birth, "version": row.expected_version})
        return JobRecord(job=row, layers=(base,), running=None, plan=None, quarantine=None, retirements=())

    def record(self, action: str, subject: str, data: Mapping[str, Any], *, kind: str = "layer") -> None:
        """Audit and journal a change, in its transaction."""
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
        """Deny by default: a role sets only the fields that are its own, and only where the layer takes them.

        Taking a value back needs the right to write the layer alone, since what holds then was set below by
        somebody who may; but for fields of admins, which nobody else touches.
        """
        role, kind, kept = self.call.actor.role, self.kinds[layer], {path for path, _ in leaves(body)}
        for path in paths:
            field, allowed = _field(path), writers_of(path)
            if path not in kept and allowed != {"admin"}:
                continue
            if not kind.takes(field):
                raise Refused(
                    f"the {layer} layer has no `{field}`",
                    why=f"it is a layer for {', '.join(sorted(kind.fields))}",
                    fix=f"leave `{field}` out, or write it in another layer",
                )
            if role not in allowed:
                raise Refused(
                    f"{self.call.actor.name} may not change `{field if field != 'policies' else path}`",
                    why=f"that is for {' and '.join(sorted(allowed)) or 'nobody'}, not for {role!r}",
                    fix=_how_to_change(allowed, allowed & kind.writers, layer),
                )


def _how_to_change(allowed: frozenset[str], here: frozenset[str], layer: str) -> str:
    """How a field gets another value all the same."""
    elsewhere = "a developer changes the job itself: `penstock submit` or `penstock job apply`"
    ask = f"ask {' or '.join(sorted(here))} to write it in the {layer} layer" if here else "leave it out"
    return f"{ask}; {elsewhere}" if "developer" in allowed else ask


class IdempotentWriter:
    """Takes calls: each is one transaction, and the repeat of a key gets the first answer."""

    def __init__(self, store: JobStore, *, check: ConfigCheck = accept_every_config) -> None:
        self._store, self._journal, self._check = store, JournalStore(store.database), check
        self._writes = GroupedWrites(store.database)
        self._tidied_ms: Millis = -CLEANUP_MS

    def once(
        self,
        asked: CallOptions,
        request: Mapping[str, Any],
        write: Callable[[LayerWriter], Answer],
        *,
        layer: str | None = None,
    ) -> Answer:
        """Run a write for a caller who may write `layer` (None: `write` checks that itself)."""
        call = Call(**asked)
        call.check()
        check_json("the request", request)
        digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        actor, key = call.actor.name, call.idempotency_key

        def run(connection: sa.Connection) -> Answer:
            writer = LayerWriter(connection, self._journal, call, self._check)
            if layer is not None:
                writer.authorise(layer)
            if key is not None:
                kept = key_store.find_response(
                    connection, actor=actor, key=key, request=digest, now_ms=call.now_ms
                )
                if kept is not None:
                    recalled: Answer = kept
                    return recalled
            answer = write(writer)
            if not 0 <= call.now_ms - self._tidied_ms < CLEANUP_MS:
                key_store.delete_old_responses(connection, now_ms=call.now_ms)
                self._tidied_ms = call.now_ms
            if key is not None:
                key_store.store_response(
                    connection, actor=actor, key=key, request=digest, answer=answer, now_ms=call.now_ms
                )
            return answer

        return self._writes.run(run)


def validate(job: str, layers: Sequence[LayerRow], row: LayerRow) -> JobConfig:
    """The config that results when `row` takes its layer's place."""
    others = [other for other in layers if other.layer != row.layer]
    config = validate_config(job, merge_layers([*others, row]))
    before = next((other for other in layers if other.layer == row.layer), None)
    check_partition_tasks(job, before, row, others, config)
    check_limits(job, before, row, config)
    if row.body.get("poison") == "skip" and (why := skip_problem(config)):
        raise ConfigError(
            f"the config of job {shown(job)} is not valid",
            why=f"poison: `skip` would change nothing, since {why}",
            fix="leave it out; let process_batch leave such records out by itself",
        )
    return config


def check_limits(job: str, before: LayerRow | None, row: LayerRow, config: JobConfig) -> None:
    """Refuse a write of limits that leave no number of tasks. A number outside of them is clamped."""
    fewest, most = config.scaler.task_count_min, config.task_count_max
    if fewest <= most or _limits_of(before) == _limits_of(row):
        return  # what an older version accepted does not stop other writes
    raise ConfigError(
        f"the config of job {shown(job)} is not valid",
        why=f"scaler.task_count_min: at least {fewest} tasks, but task_count_max allows {most}",
        fix="write both so that scaler.task_count_min is not above task_count_max; nothing was changed",
    )


def _limits_of(row: LayerRow | None) -> tuple[object, object]:
    if row is None:
        return None, None
    scaler = row.body.get("scaler")
    least = scaler.get("task_count_min") if isinstance(scaler, Mapping) else None
    return least, row.body.get("task_count_max")


def check_is_map(job: str, layer: str, body: object) -> None:
    """A layer is a partial config, so it is a map."""
    if not isinstance(body, Mapping):
        raise ConfigError(
            f"the {layer} layer of job {shown(job)} is not valid", why="it is not a map", fix="write a map"
        )


def check_is_stopped(job: str, previous: JobRecord | None) -> None:
    """Refuse to begin a life while the former one of this name may still run."""
    if previous is not None and (previous.plan is not None or previous.old is not None):
        raise Refused(
            f"the job {job!r} is still being removed",
            why="tasks of its former life may run",
            fix="try again in a few seconds",
        )


def check_version(job: JobRow, expected_version: int | None) -> None:
    """A decision made on another version is refused; None: on whatever stands."""
    if expected_version is not None and job.expected_version != expected_version:
        raise VersionConflict(f"job {job.name!r}", expected=expected_version, actual=job.expected_version)


def _field(path: str) -> str:
    return path.partition(".")[0]
