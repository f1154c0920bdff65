"""The one way a layer is written: authorised, once per key, validated as merged, by compare-and-set.

The layer, its history, the audit, the journal and the answer are one transaction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, NotFound, Refused, VersionConflict
from penstock.core.journal import Entry
from penstock.core.journal_store import JournalStore
from penstock.jobs import job_store
from penstock.jobs.audit_store import AuditRow, append_audit
from penstock.jobs.config import JobConfig, validate_config
from penstock.jobs.job_store import JobRecord, JobRow, JobStore
from penstock.jobs.layers import Layer, LayerRow, leaves, merge_layers

if TYPE_CHECKING:
    import sqlalchemy as sa

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who asks."""

    name: str
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Who asks for a change, why, and under which key a repeat is recognised."""

    actor: Actor
    reason: str
    idempotency_key: str | None
    now_ms: Millis


class LayerWriter:
    """Writes layers inside the transactions of the Job Service."""

    def __init__(self, store: JobStore, layers: Sequence[Layer]) -> None:
        self._store, self._journal = store, JournalStore(store.database)
        self._layers = {layer.name: layer for layer in layers}

    def once(
        self, call: Call, request: Mapping[str, Any], write: Callable[[sa.Connection], Answer]
    ) -> Answer:
        """Run a write in one transaction; the repeat of an idempotency key gets the first answer."""
        digest = _digest(request)
        with self._store.transaction() as connection:
            key, actor = call.idempotency_key, call.actor.name
            if key:
                kept = job_store.recall_answer(connection, actor=actor, key=key, request=digest)
                if kept is not None:
                    answer: Answer = kept
                    return answer
            answer = write(connection)
            if key:
                job_store.keep_answer(
                    connection, actor=actor, key=key, request=digest, answer=answer, now_ms=call.now_ms
                )
            return answer

    def authorise(self, call: Call, layer: str) -> None:
        """Deny by default: only a role that the layer names may write it, and only with a reason."""
        known = self._layers.get(layer)
        if known is None:
            raise NotFound(
                f"there is no layer {layer!r}", why=f"the layers are {', '.join(self._layers)}", fix="use one"
            )
        if call.actor.role not in known.writers:
            raise Refused(
                f"{call.actor.name} may not write the {layer} layer",
                why=f"the role {call.actor.role!r} is not one of {', '.join(sorted(known.writers))}",
                fix="use a token with one of these roles, or write the layer that is yours",
            )
        if not call.reason.strip():
            raise Refused(
                "a change needs a reason", why="others will ask for it later", fix="say why in a few words"
            )

    def write(
        self,
        connection: sa.Connection,
        record: JobRecord,
        layer: str,
        body: Mapping[str, Any],
        expected_version: int,
        call: Call,
    ) -> int:
        """Validate the merge with the new body, then write the layer; all under the transaction's lock."""
        job = record.job.name
        check_version(record.job, expected_version)
        row = self._layer_row(layer, body, expected_version + 1, call)
        config = self.validate(job, record.layers, row)
        if config.pipeline != record.job.pipeline:
            raise ConfigError(
                f"the config of job {job!r} is not valid",
                why=f"pipeline: the job belongs to {record.job.pipeline!r}, not to {config.pipeline!r}",
                fix="leave `pipeline` as it is; a job moves by being removed and submitted anew",
            )
        job_store.bump_version(connection, job, expected_version=expected_version)
        job_store.put_layer(connection, job, row)
        paths = [path for path, _ in leaves(body)]
        self.record(connection, call, f"layer.{layer}", job, {"version": row.version, "paths": paths})
        return row.version

    def begin_life(
        self,
        connection: sa.Connection,
        previous: JobRecord | None,
        job: str,
        body: Mapping[str, Any],
        birth: str,
        call: Call,
    ) -> JobRecord:
        """Create a job with an empty base layer. Requires: `previous`, if any, is removed."""
        if previous is not None and (previous.plan is not None or previous.old is not None):
            raise Refused(
                f"the job {job!r} is still being removed",
                why="tasks of its former life may run",
                fix="try again in a few seconds",
            )
        pipeline = str(body.get("pipeline", ""))
        row = job_store.insert_job(connection, name=job, birth=birth, pipeline=pipeline, now_ms=call.now_ms)
        # The base layer is there from the start, so that a view always shows it.
        base = self._layer_row("base", {}, row.expected_version, call)
        job_store.put_layer(connection, job, base)
        self.record(connection, call, "job.created", job, {"birth": birth})
        return JobRecord(job=row, layers=(base,), running=None, plan=None, quarantine=None, retirements=())

    def validate(self, job: str, layers: Sequence[LayerRow], row: LayerRow) -> JobConfig:
        """The config that results when `row` takes its layer's place."""
        if not isinstance(row.body, Mapping):
            raise ConfigError(
                f"the {row.layer} layer of job {job!r} is not valid", why="it is not a map", fix="write a map"
            )
        others = [other for other in layers if other.layer != row.layer]
        return validate_config(job, merge_layers([*others, row]))

    def _layer_row(self, layer: str, body: Mapping[str, Any], version: int, call: Call) -> LayerRow:
        return LayerRow(
            layer=layer,
            precedence=self._layers[layer].precedence,
            body=body,
            version=version,
            actor=call.actor.name,
            reason=call.reason,
            at_ms=call.now_ms,
        )

    def record(
        self, connection: sa.Connection, call: Call, action: str, subject: str, data: dict[str, Any]
    ) -> None:
        """Audit and journal a change, in its transaction."""
        actor, at_ms = call.actor, call.now_ms
        append_audit(
            connection,
            AuditRow(
                at_ms=at_ms,
                actor=actor.name,
                role=actor.role,
                action=action,
                subject=subject,
                reason=call.reason,
                data=data,
            ),
        )
        entry = Entry(
            at_ms=at_ms,
            actor=actor.name,
            kind="layer",
            subject=subject,
            decision=action,
            reason=call.reason,
            data=data,
        )
        self._journal.append(connection, entry)


def check_version(job: JobRow, expected_version: int) -> None:
    """A decision made on another version is refused."""
    if job.expected_version != expected_version:
        raise VersionConflict(f"job {job.name!r}", expected=expected_version, actual=job.expected_version)


def _digest(request: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(request, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "the request is not JSON",
            why=str(error),
            fix="use strings, finite numbers, booleans, lists and maps",
        ) from error
    return hashlib.sha256(text.encode()).hexdigest()
