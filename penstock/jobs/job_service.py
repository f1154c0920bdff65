"""The Job Service: all changes of expected configs (Turbine III-A).

Each call is one transaction: it checks the actor's rights, the merge and the expected version, and writes the
layer, its history, the audit, the journal and the response.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Unpack

from penstock.core.errors import ConfigError, NotFound, PenstockError, Refused, VersionConflict
from penstock.db.database import next_value
from penstock.db.tokens import ROLES
from penstock.jobs import job_store
from penstock.jobs.config import FIELD_WRITERS, validate_config
from penstock.jobs.job_reads import (
    Applied,
    JobReads,
    JobView,
    Page,
    StateSet,
    Submitted,
    any_record,
    check_new_name,
    find_record,
    layer_body,
    layers_at,
)
from penstock.jobs.job_store import EXPECTED_COUNTER, JobRecord, JobStore
from penstock.jobs.layer_store import insert_kind
from penstock.jobs.layer_writer import (
    Actor,
    CallOptions,
    ConfigCheck,
    IdempotentWriter,
    LayerWriter,
    accept_every_config,
    check_is_map,
    check_is_stopped,
    check_version,
)
from penstock.jobs.layers import Layer, merge_layers, patch_body
from penstock.jobs.provision import (
    SubmitAction,
    action_taken,
    cannot_run,
    check_consent,
    check_state_fits,
    read_compiled,
    replaced_origin,
)
from penstock.jobs.text_rules import check_line, shown

__all__ = ["Actor", "Applied", "JobService", "JobView", "LayerPatch", "Page", "StateSet", "Submitted"]

BIRTH_MAX = 100
PRECEDENCE_MAX = 1_000_000
DESIRED = ("running", "paused", "stopped")
# The layer that a role sets a job's state in, by default.
STATE_LAYERS = {"oncall": "oncall", "admin": "oncall", "developer": "provisioner"}
Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPatch:
    """Dotted paths of one layer to set; None removes a path."""

    job: str
    layer: str
    changes: Body
    expected_version: int | None
    options: CallOptions


class JobService(JobReads):
    """Validates and writes the layers of jobs, one transaction per call.

    Every change takes the `CallOptions`. `expected_version`: the job's version that the change is based on;
    VersionConflict if it has another one; None: any version.
    """

    def __init__(self, store: JobStore, *, check: ConfigCheck = accept_every_config) -> None:
        super().__init__(store, check=check)
        self._writer = IdempotentWriter(store, check=check)

    def create(self, job: str, body: Body, *, birth: str, **options: Unpack[CallOptions]) -> int:
        """Create one job with its provisioner layer; returns its expected version."""
        check_new_name(job)

        def write(writer: LayerWriter) -> int:
            record = job_store.find_record(writer.connection, job)
            if record is not None and not record.job.deleted:
                raise Refused(
                    f"the job {job!r} exists already",
                    why=f"it was created with birth {record.job.birth}",
                    fix="write its layers instead, or use another name",
                )
            return _begin(writer, record, job, body, birth)

        return self._writer.once(options, {"create": job, "body": body}, write, layer="provisioner")

    def apply(
        self,
        job: str,
        body: Body,
        *,
        expected_version: int | None,
        birth: str,
        **options: Unpack[CallOptions],
    ) -> Applied:
        """Create the job, or replace its provisioner layer. Version 0: only if the job does not exist."""
        check_new_name(job)

        def write(writer: LayerWriter) -> dict[str, Any]:
            record = job_store.find_record(writer.connection, job)
            if record is not None and not record.job.deleted:
                version, _ = writer.write(record, "provisioner", body, expected_version)
                return asdict(Applied(version=version, created=False))
            actual = 0 if record is None else record.job.expected_version
            if expected_version not in (None, 0, actual):
                assert expected_version is not None
                raise VersionConflict(f"job {shown(job)}", expected=expected_version, actual=actual)
            return asdict(Applied(version=_begin(writer, record, job, body, birth), created=True))

        request = {"apply": job, "body": body, "version": expected_version}
        return Applied(**self._writer.once(options, request, write, layer="provisioner"))

    def write_layer(
        self,
        job: str,
        layer: str,
        body: Body,
        *,
        expected_version: int | None,
        **options: Unpack[CallOptions],
    ) -> int:
        """Replace one layer; returns the new version of the job."""

        def write(writer: LayerWriter) -> int:
            record = find_record(writer.connection, job)
            return writer.write(record, layer, body, expected_version)[0]

        request = {"write": job, "layer": layer, "body": body, "version": expected_version}
        return self._writer.once(options, request, write, layer=layer)

    def patch_layer(
        self,
        job: str,
        layer: str,
        changes: Body,
        *,
        expected_version: int | None = None,
        **options: Unpack[CallOptions],
    ) -> int:
        """Set dotted paths of one layer; None removes a path. Returns the new version of the job."""

        def write(writer: LayerWriter) -> int:
            record = find_record(writer.connection, job)
            # Before the patch is applied, so that a stale version is the error that the caller gets.
            check_version(record.job, expected_version)
            check_is_map(job, layer, changes)
            body = patch_body(layer_body(record, layer), changes)
            return writer.write(record, layer, body, expected_version)[0]

        request = {"patch": job, "layer": layer, "changes": changes, "version": expected_version}
        return self._writer.once(options, request, write, layer=layer)

    def patch_layers(self, patches: Sequence[LayerPatch]) -> list[int | Exception]:
        """Independent calls of `patch_layer`; returns the new version or the error of each."""
        results: list[int | Exception] = []
        for patch in patches:
            try:
                version = self.patch_layer(
                    patch.job,
                    patch.layer,
                    patch.changes,
                    expected_version=patch.expected_version,
                    **patch.options,
                )
            except PenstockError as error:
                results.append(error)
            else:
                results.append(version)
        return results

    def clear(
        self, job: str, layer: str, *, expected_version: int | None = None, **options: Unpack[CallOptions]
    ) -> int:
        """Remove all fields of a layer; returns the new version of the job."""

        def write(writer: LayerWriter) -> int:
            record = find_record(writer.connection, job)
            return writer.write(record, layer, {}, expected_version)[0]

        request = {"clear": job, "layer": layer, "version": expected_version}
        return self._writer.once(options, request, write, layer=layer)

    def rollback(
        self,
        job: str,
        layer: str,
        *,
        to_version: int,
        expected_version: int | None,
        **options: Unpack[CallOptions],
    ) -> int:
        """Restore a layer from an earlier version of this life of the job; returns the new version."""

        def write(writer: LayerWriter) -> int:
            record = find_record(writer.connection, job)
            check_version(record.job, expected_version)
            life, layers = layers_at(writer.connection, record, to_version)
            if life != record.job.birth:
                raise Refused(
                    f"version {to_version} of {job!r} belongs to a former life of the job",
                    why="the job was removed and created again since then",
                    fix="read the layers of that version, and apply the values that you want",
                )
            body = next((row.body for row in layers if row.layer == layer), {})
            return writer.write(record, layer, body, expected_version, note={"back_to": to_version})[0]

        request = {"rollback": job, "layer": layer, "to": to_version, "version": expected_version}
        return self._writer.once(options, request, write, layer=layer)

    def set_state(
        self,
        job: str,
        state: str,
        *,
        layer: str | None = None,
        expected_version: int | None = None,
        **options: Unpack[CallOptions],
    ) -> StateSet:
        """Set the desired state: running, paused or stopped. Default layer: that of the actor's role."""
        if state not in DESIRED:
            raise ConfigError(
                f"{shown(state)} is not a state that a job can be set to",
                why=f"the states are {', '.join(DESIRED)}",
                fix="use one of them",
            )
        own = layer if layer is not None else STATE_LAYERS.get(options["actor"].role, "oncall")

        def write(writer: LayerWriter) -> dict[str, Any]:
            record = find_record(writer.connection, job)
            check_version(record.job, expected_version)
            body = _with_state(writer, record, own, state)
            version, config = writer.write(record, own, body, expected_version, note={"state": state})
            return asdict(StateSet(version=version, layer=own, effective=config.state))

        request = {"state": state, "job": job, "layer": layer, "version": expected_version}
        return StateSet(**self._writer.once(options, request, write, layer=own))

    def remove(self, job: str, *, expected_version: int | None = None, **options: Unpack[CallOptions]) -> int:
        """Remove a job: its tasks stop, its producers are unregistered; layers and history are kept."""

        def write(writer: LayerWriter) -> int:
            record = find_record(writer.connection, job)
            check_version(record.job, expected_version)
            return _bump(writer, record, "job.removed", deleted=True)

        request = {"remove": job, "version": expected_version}
        return self._writer.once(options, request, write, layer="provisioner")

    def restore(
        self, job: str, *, expected_version: int | None = None, **options: Unpack[CallOptions]
    ) -> int:
        """Restore a removed job with its layers, its birth and so its state."""

        def write(writer: LayerWriter) -> int:
            record = any_record(writer.connection, job)
            if not record.job.deleted:
                raise NotFound(
                    f"there is no removed job {shown(job)}",
                    why="the job exists and is not removed",
                    fix="check the name in the list of removed jobs",
                )
            check_version(record.job, expected_version)
            check_is_stopped(job, record)
            if record.retirements:
                raise Refused(
                    f"the job {job!r} is still being removed",
                    why="its producers are not unregistered yet",
                    fix="try again in a few seconds",
                )
            validate_config(job, merge_layers(record.layers))
            return _bump(writer, record, "job.restored", deleted=False)

        request = {"restore": job, "version": expected_version}
        return self._writer.once(options, request, write, layer="provisioner")

    def add_layer_kind(
        self,
        name: str,
        precedence: int,
        writers: Sequence[str],
        *,
        replaces_plan: bool = False,
        fields: Sequence[str] = (),
        **options: Unpack[CallOptions],
    ) -> None:
        """Add a kind of layer at a free precedence; admins only. It is valid from the next write on.

        `fields`: the fields that it may contain; none: all fields that its writers may set.
        """
        _check_kind(name, precedence, writers)
        _check_fields(writers, fields)
        layer = Layer(
            name=name,
            precedence=precedence,
            writers=frozenset(writers),
            replaces_plan=replaces_plan,
            fields=frozenset(fields),
        )
        data: dict[str, Any] = {"precedence": precedence, "writers": sorted(writers)}
        data |= {"replaces_plan": replaces_plan} | ({"fields": sorted(fields)} if fields else {})

        def write(writer: LayerWriter) -> str:
            for other in writer.kinds.values():
                if name == other.name or precedence == other.precedence:
                    raise Refused(
                        f"the layer {name!r} cannot be added with precedence {precedence}",
                        why=f"the layer {other.name!r} has precedence {other.precedence}",
                        fix="use another name and a precedence that is free",
                    )
            insert_kind(writer.connection, layer)
            next_value(writer.connection, EXPECTED_COUNTER)
            writer.record("layer_kind.added", name, data)
            return name

        # Roles that may write the base layer may add layers.
        self._writer.once(options, {"layer": name, **data}, write, layer="base")

    def submit_pipeline(
        self, compiled: Body, *, new_birth: Callable[[], str], **options: Unpack[CallOptions]
    ) -> Submitted:
        """Write the provisioner layers of all jobs of a pipeline; jobs that it no longer has are stopped.

        NeedsConsent, and no change, if it would stop a job that is not in `stops` of `compiled`, or replace a
        pipeline of another file than `replaces`.
        """

        def write(writer: LayerWriter) -> dict[str, Any]:
            pipeline = read_compiled(compiled)
            for name, body in pipeline.jobs.items():
                if (refusal := cannot_run(name, body)) is not None:
                    raise refusal
            records, configs = self._proposals(writer.connection, pipeline)
            check_state_fits(
                {
                    name: (record.old.config, configs[name])
                    for name, record in records.items()
                    if record.old is not None and not record.job.deleted
                }
            )
            removed = self._removed_jobs(writer.connection, pipeline)
            package = job_store.pipeline_package(writer.connection, pipeline.name)
            replaced = replaced_origin(pipeline, package)
            check_consent(pipeline, [record.job.name for record in removed], replaced)
            versions: dict[str, int] = {}
            actions: dict[str, SubmitAction] = {}
            for name, body in pipeline.jobs.items():
                record = records.get(name)
                if record is None or record.job.deleted:
                    versions[name], actions[name] = _begin(writer, record, name, body, new_birth()), "created"
                else:
                    before = layer_body(record, "provisioner")
                    body = pipeline.body_after(name, before, record.job.expected_version)
                    versions[name], _ = writer.write(record, "provisioner", body, None)
                    actions[name] = action_taken(before, body)
            for record in removed:
                body = {**layer_body(record, "provisioner"), "state": "stopped"}
                versions[record.job.name], _ = writer.write(record, "provisioner", body, None)
                actions[record.job.name] = "stopped"
            origin = pipeline.origin or str((package or {}).get("origin", ""))
            version = job_store.put_pipeline(
                writer.connection,
                name=pipeline.name,
                graph=pipeline.graph,
                package={**pipeline.package, "origin": origin},
                now_ms=options["now_ms"],
            )
            writer.record(
                "pipeline.submitted", pipeline.name, {"version": version, "jobs": versions, "done": actions}
            )
            return {"jobs": versions, "done": actions}

        return Submitted.of(self._writer.once(options, {"submit": compiled}, write, layer="provisioner"))


def _begin(writer: LayerWriter, previous: JobRecord | None, job: str, body: Body, birth: str) -> int:
    check_is_map(job, "provisioner", body)
    check_line("the birth of the job", birth, length_max=BIRTH_MAX)
    record = writer.begin_life(previous, job, body, birth)
    return writer.write(record, "provisioner", body, None)[0]


def _bump(writer: LayerWriter, record: JobRecord, action: str, *, deleted: bool) -> int:
    job = record.job
    version = job_store.bump_version(writer.connection, job, desired=job.desired, deleted=deleted)
    writer.record(action, job.name, {"version": version, "birth": job.birth})
    return version


def _with_state(writer: LayerWriter, record: JobRecord, layer: str, state: str) -> dict[str, Any]:
    """The layer's body with this state. The default `running` is set only over another state below."""
    body = patch_body(layer_body(record, layer), {"state": None if state == "running" else state})
    level = writer.kinds[layer].precedence
    below = [row for row in record.layers if row.precedence < level]
    if state == "running" and merge_layers(below).get("state") not in (None, "running"):
        body["state"] = "running"
    return body


def _check_kind(name: object, precedence: object, writers: object) -> None:
    why = ""
    if not isinstance(name, str) or not name.isascii() or not name.isidentifier() or len(name) > 50:
        why = f"the name {shown(name)} may only have up to 50 letters, digits and '_'"
    elif name == "default":
        why = "the name `default` is reserved for values that no layer sets"
    elif type(precedence) is not int or abs(precedence) > PRECEDENCE_MAX:
        why = (
            f"the precedence {shown(precedence)} is not an integer from -{PRECEDENCE_MAX} to {PRECEDENCE_MAX}"
        )
    elif not isinstance(writers, list | tuple | set | frozenset) or not writers or not set(writers) <= ROLES:
        why = f"the writers {shown(writers)} are not roles; the roles are {', '.join(sorted(ROLES))}"
    if why:
        raise ConfigError(
            "the layer cannot be added", why=why, fix="correct the request; nothing was changed"
        )


def _check_fields(writers: Sequence[str], fields: Sequence[str]) -> None:
    """Each field must be settable by a writer, and each writer must be able to set a field."""
    settable = {role: {field for field, roles in FIELD_WRITERS.items() if role in roles} for role in writers}
    why = ""
    for role in sorted(settable):
        if not settable[role]:
            why = f"the role {role} may set no field of a job's config"
    for field in sorted(set(fields)):
        if field not in FIELD_WRITERS:
            near = difflib.get_close_matches(field, FIELD_WRITERS, n=1)
            why = f"there is no field {shown(field)}" + (f"; did you mean {near[0]}?" if near else "")
        elif not any(field in settable[role] for role in settable):
            allowed = ", ".join(sorted(FIELD_WRITERS[field]))
            why = f"`{field}` may be set by {allowed} only, and none of them is a writer of this layer"
    if why:
        raise ConfigError(
            "the layer cannot be added", why=why, fix="correct the request; nothing was changed"
        )
