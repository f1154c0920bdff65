"""The Job Service: the only way to change what is expected of a job (Turbine III-A).

Each call is one transaction: who may write what, the merge is valid, the version is the one decided on, and
the layer, its history, the audit, the journal and the answer are written, or nothing is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.core.clock import Millis
from penstock.core.errors import Refused
from penstock.jobs import job_store
from penstock.jobs.config import JobConfig
from penstock.jobs.job_store import JobRecord, JobStore
from penstock.jobs.job_view import JobView, view_of
from penstock.jobs.layer_writer import Actor, Call, LayerWriter, check_version
from penstock.jobs.layers import DEFAULT_LAYERS, Layer, LayerRow, patch_body
from penstock.jobs.provision import CompiledPipeline, JobChange, plan_change, plan_removal, read_compiled

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = ["Actor", "JobService", "JobView"]


class JobService:
    """Validates and writes the layers of jobs, one transaction per call."""

    def __init__(self, store: JobStore, *, layers: Sequence[Layer] = DEFAULT_LAYERS) -> None:
        self._store, self._writer = store, LayerWriter(store, layers)
        self._provisioner = next(layer for layer in layers if layer.name == "provisioner")

    def create(
        self,
        job: str,
        body: Mapping[str, Any],
        *,
        birth: str,
        actor: Actor,
        reason: str,
        idempotency_key: str | None,
        now_ms: Millis,
    ) -> int:
        """Create one job with its provisioner layer; returns its expected version."""
        call = Call(actor=actor, reason=reason, idempotency_key=idempotency_key, now_ms=now_ms)
        self._writer.authorise(call, "provisioner")

        def write(connection: sa.Connection) -> int:
            record = job_store.load_records(connection, [job]).get(job)
            if record is not None and not record.job.deleted:
                raise Refused(
                    f"there is a job {job!r} already",
                    why=f"it was created with birth {record.job.birth}",
                    fix="write its layers instead, or take another name",
                )
            record = self._writer.begin_life(connection, record, job, body, birth, call)
            return self._writer.write(
                connection, record, "provisioner", body, record.job.expected_version, call
            )

        return self._writer.once(call, {"create": job, "body": body}, write)

    def write_layer(
        self,
        job: str,
        layer: str,
        body: Mapping[str, Any],
        *,
        expected_version: int,
        actor: Actor,
        reason: str,
        idempotency_key: str | None,
        now_ms: Millis,
    ) -> int:
        """Replace one layer, decided on `expected_version` of the job; returns the new version."""
        call = Call(actor=actor, reason=reason, idempotency_key=idempotency_key, now_ms=now_ms)
        self._writer.authorise(call, layer)

        def write(connection: sa.Connection) -> int:
            record = job_store.load_record(connection, job)
            return self._writer.write(connection, record, layer, body, expected_version, call)

        request = {"write": job, "layer": layer, "body": body, "version": expected_version}
        return self._writer.once(call, request, write)

    def patch_layer(
        self,
        job: str,
        layer: str,
        changes: Mapping[str, Any],
        *,
        expected_version: int | None = None,
        actor: Actor,
        reason: str,
        idempotency_key: str | None,
        now_ms: Millis,
    ) -> int:
        """Set dotted paths of one layer, None removes; without `expected_version` on whatever stands now."""
        call = Call(actor=actor, reason=reason, idempotency_key=idempotency_key, now_ms=now_ms)
        self._writer.authorise(call, layer)

        def write(connection: sa.Connection) -> int:
            record = job_store.load_record(connection, job)
            version = record.job.expected_version if expected_version is None else expected_version
            # Before the patch is applied: a stale decision is told so, whatever else is wrong.
            check_version(record.job, version)
            body = patch_body(_body(record, layer), changes)
            return self._writer.write(connection, record, layer, body, version, call)

        request = {"patch": job, "layer": layer, "changes": changes, "version": expected_version}
        return self._writer.once(call, request, write)

    def clear(
        self,
        job: str,
        layer: str,
        *,
        expected_version: int | None = None,
        actor: Actor,
        reason: str,
        idempotency_key: str | None,
        now_ms: Millis,
    ) -> int:
        """Take back everything a layer says; returns the new version."""
        call = Call(actor=actor, reason=reason, idempotency_key=idempotency_key, now_ms=now_ms)
        self._writer.authorise(call, layer)

        def write(connection: sa.Connection) -> int:
            record = job_store.load_record(connection, job)
            version = record.job.expected_version if expected_version is None else expected_version
            return self._writer.write(connection, record, layer, {}, version, call)

        return self._writer.once(call, {"clear": job, "layer": layer, "version": expected_version}, write)

    def remove(
        self, job: str, *, actor: Actor, reason: str, idempotency_key: str | None, now_ms: Millis
    ) -> int:
        """End a job's life: its tasks stop, its producers go. Then the name is free again."""
        call = Call(actor=actor, reason=reason, idempotency_key=idempotency_key, now_ms=now_ms)
        self._writer.authorise(call, "provisioner")

        def write(connection: sa.Connection) -> int:
            record = job_store.load_record(connection, job)
            current = record.job.expected_version
            version = job_store.bump_version(connection, job, expected_version=current, deleted=True)
            self._writer.record(connection, call, "job.removed", job, {"version": version})
            return version

        return self._writer.once(call, {"remove": job}, write)

    def submit_pipeline(
        self,
        compiled: Mapping[str, Any],
        *,
        actor: Actor,
        reason: str,
        idempotency_key: str | None,
        now_ms: Millis,
        new_birth: Callable[[], str],
    ) -> dict[str, int]:
        """Write the provisioner layers of all jobs of a pipeline at once; jobs it no longer has are stopped.

        Returns the new expected version of every job written.
        """
        call = Call(actor=actor, reason=reason, idempotency_key=idempotency_key, now_ms=now_ms)
        self._writer.authorise(call, "provisioner")
        pipeline = read_compiled(compiled)

        def write(connection: sa.Connection) -> dict[str, int]:
            records, _ = self._proposals(connection, pipeline)
            versions: dict[str, int] = {}
            for name, body in pipeline.jobs.items():
                record = records.get(name)
                if record is None or record.job.deleted:
                    record = self._writer.begin_life(connection, record, name, body, new_birth(), call)
                current = record.job.expected_version
                versions[name] = self._writer.write(connection, record, "provisioner", body, current, call)
            for record in self._leavers(connection, pipeline):
                body = {**_body(record, "provisioner"), "state": "stopped"}
                current = record.job.expected_version
                versions[record.job.name] = self._writer.write(
                    connection, record, "provisioner", body, current, call
                )
            version = job_store.put_pipeline(
                connection, name=pipeline.name, graph=pipeline.graph, package=pipeline.package, now_ms=now_ms
            )
            self._writer.record(
                connection, call, "pipeline.submitted", pipeline.name, {"version": version, "jobs": versions}
            )
            return versions

        return self._writer.once(call, {"submit": compiled}, write)

    def plan_pipeline(self, compiled: Mapping[str, Any]) -> tuple[JobChange, ...]:
        """What submitting this pipeline would change. Writes nothing."""
        pipeline = read_compiled(compiled)
        with self._store.transaction() as connection:
            records, configs = self._proposals(connection, pipeline)
            leavers = self._leavers(connection, pipeline)
        changes = []
        for name, config in configs.items():
            old = records[name].old if name in records else None
            changes.append(plan_change(name, config, None if old is None else old.view()))
        for record in leavers:
            changes.append(plan_removal(record.job.name, None if record.old is None else record.old.view()))
        return tuple(changes)

    def view(self, job: str) -> JobView:
        """One job; NotFound if there is none."""
        with self._store.transaction() as connection:
            return view_of(job_store.load_record(connection, job))

    def views(self) -> tuple[JobView, ...]:
        """Every job that is not removed, by name."""
        records = self._store.load(self._store.names())
        return tuple(view_of(records[name]) for name in sorted(records) if not records[name].job.deleted)

    def history(self, job: str) -> tuple[LayerRow, ...]:
        """Every write of every layer, oldest first; of a removed job too."""
        return self._store.history(job)

    def _proposals(
        self, connection: sa.Connection, pipeline: CompiledPipeline
    ) -> tuple[dict[str, JobRecord], dict[str, JobConfig]]:
        """The present records, and each job's config with its new provisioner layer, all of them valid."""
        records = job_store.load_records(connection, list(pipeline.jobs))
        configs = {}
        for name, body in pipeline.jobs.items():
            record = records.get(name)
            is_alive = record is not None and not record.job.deleted
            if record is not None and is_alive and record.job.pipeline != pipeline.name:
                raise Refused(
                    f"the job {name!r} belongs to another pipeline",
                    why=f"it was created by {record.job.pipeline!r}",
                    fix="name the pipeline or the step differently",
                )
            layers = record.layers if record is not None and is_alive else ()
            row = LayerRow(layer="provisioner", precedence=self._provisioner.precedence, body=body)
            configs[name] = self._writer.validate(name, layers, row)
        return records, configs

    def _leavers(self, connection: sa.Connection, pipeline: CompiledPipeline) -> list[JobRecord]:
        names = [
            name
            for name in job_store.jobs_of_pipeline(connection, pipeline.name)
            if name not in pipeline.jobs
        ]
        records = job_store.load_records(connection, names)
        return [
            records[name] for name in names if _body(records[name], "provisioner").get("state") != "stopped"
        ]


def _body(record: JobRecord, layer: str) -> Mapping[str, Any]:
    return next((row.body for row in record.layers if row.layer == layer), {})
