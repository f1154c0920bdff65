"""The Job Service: the only way to change what is expected of a job (Turbine III-A).

Each call is one transaction: who may write what, the merge is valid, the version is the one decided on, and
the layer, its history, the audit, the journal and the answer are written, or nothing is.
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
# Whose word a state is, when nobody names a layer.
STATE_LAYERS = {"oncall": "oncall", "admin": "oncall", "developer": "provisioner"}
Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPatch:
    """Dotted paths of one layer to set, None removes."""

    job: str
    layer: str
    changes: Body
    expected_version: int | None
    asked: CallOptions


class JobService(JobReads):
    """Validates and writes the layers of jobs, one transaction per call.

    Every change takes who asks, why, an idempotency key and the time by keyword. An `expected_version` is the
    version of the job that the change was decided on; None: whatever stands.
    """

    def __init__(self, store: JobStore, *, check: ConfigCheck = accept_every_config) -> None:
        super().__init__(store, check=check)
        self._desk = IdempotentWriter(store, check=check)

    def create(self, job: str, body: Body, *, birth: str, **asked: Unpack[CallOptions]) -> int:
        """Create one job with its provisioner layer; returns its expected version."""
        check_new_name(job)

        def write(writer: LayerWriter) -> int:
            record = job_store.find_record(writer.connection, job)
            if record is not None and not record.job.deleted:
                raise Refused(
                    f"there is a job {job!r} already",
                    why=f"it was created with birth {record.job.birth}",
                    fix="write its layers instead, or take another name",
                )
            return _begin(writer, record, job, body, birth)

        return self._desk.once(asked, {"create": job, "body": body}, write, layer="provisioner")

    def apply(
        self, job: str, body: Body, *, expected_version: int | None, birth: str, **asked: Unpack[CallOptions]
    ) -> Applied:
        """Create the job, or replace its provisioner layer. Version 0: there must be no such job yet."""
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
        return Applied(**self._desk.once(asked, request, write, layer="provisioner"))

    def write_layer(
        self, job: str, layer: str, body: Body, *, expected_version: int | None, **asked: Unpack[CallOptions]
    ) -> int:
        """Replace one layer; returns the new version of the job."""

        def write(writer: LayerWriter) -> int:
            record = find_record(writer.connection, job)
            return writer.write(record, layer, body, expected_version)[0]

        request = {"write": job, "layer": layer, "body": body, "version": expected_version}
        return self._desk.once(asked, request, write, layer=layer)

    def patch_layer(
        self,
        job: str,
        layer: str,
        changes: Body,
        *,
        expected_version: int | None = None,
        **asked: Unpack[CallOptions],
    ) -> int:
        """Set dotted paths of one layer, None removes; returns the new version of the job."""

        def write(writer: LayerWriter) -> int:
            record = find_record(writer.connection, job)
            # Before the patch is applied: a stale version is the first thing that the caller must hear of.
            check_version(record.job, expected_version)
            check_is_map(job, layer, changes)
            body = patch_body(layer_body(record, layer), changes)
            return writer.write(record, layer, body, expected_version)[0]

        request = {"patch": job, "layer": layer, "changes": changes, "version": expected_version}
        return self._desk.once(asked, request, write, layer=layer)

    def patch_layers(self, patches: Sequence[LayerPatch]) -> list[int | Exception]:
        """`patch_layer` for several callers, each for itself: of each the new version, or what it raised."""
        answers: list[int | Exception] = []
        for patch in patches:
            try:
                version = self.patch_layer(
                    patch.job,
                    patch.layer,
                    patch.changes,
                    expected_version=patch.expected_version,
                    **patch.asked,
                )
            except PenstockError as error:
                answers.append(error)
            else:
                answers.append(version)
        return answers

    def clear(
        self, job: str, layer: str, *, expected_version: int | None = None, **asked: Unpack[CallOptions]
    ) -> int:
        """Take back everything a layer says; returns the new version of the job."""

        def write(writer: LayerWriter) -> int:
            record = find_record(writer.connection, job)
            return writer.write(record, layer, {}, expected_version)[0]

        request = {"clear": job, "layer": layer, "version": expected_version}
        return self._desk.once(asked, request, write, layer=layer)

    def rollback(
        self,
        job: str,
        layer: str,
        *,
        to_version: int,
        expected_version: int | None,
        **asked: Unpack[CallOptions],
    ) -> int:
        """Write a layer again as it was at an earlier version of this life; returns the new version."""

        def write(writer: LayerWriter) -> int:
            record = find_record(writer.connection, job)
            check_version(record.job, expected_version)
            life, layers = layers_at(writer.connection, record, to_version)
            if life != record.job.birth:
                raise Refused(
                    f"version {to_version} of {job!r} is of a former life",
                    why="the job was removed since, and created anew",
                    fix="look at that version's layers, and apply what you want of them",
                )
            body = next((row.body for row in layers if row.layer == layer), {})
            return writer.write(record, layer, body, expected_version, note={"back_to": to_version})[0]

        request = {"rollback": job, "layer": layer, "to": to_version, "version": expected_version}
        return self._desk.once(asked, request, write, layer=layer)

    def set_state(
        self,
        job: str,
        state: str,
        *,
        layer: str | None = None,
        expected_version: int | None = None,
        **asked: Unpack[CallOptions],
    ) -> StateSet:
        """Ask a job to be running, paused or stopped, in a layer of one's own if none is named."""
        if state not in DESIRED:
            raise ConfigError(
                f"a job cannot be {shown(state)}",
                why=f"it can be {', '.join(DESIRED)}",
                fix="choose one of them",
            )
        own = layer if layer is not None else STATE_LAYERS.get(asked["actor"].role, "oncall")

        def write(writer: LayerWriter) -> dict[str, Any]:
            record = find_record(writer.connection, job)
            check_version(record.job, expected_version)
            body = _with_state(writer, record, own, state)
            version, config = writer.write(record, own, body, expected_version, note={"state": state})
            return asdict(StateSet(version=version, layer=own, effective=config.state))

        request = {"state": state, "job": job, "layer": layer, "version": expected_version}
        return StateSet(**self._desk.once(asked, request, write, layer=own))

    def remove(self, job: str, *, expected_version: int | None = None, **asked: Unpack[CallOptions]) -> int:
        """End a job's life: its tasks stop, its producers go. Its layers and its history stay."""

        def write(writer: LayerWriter) -> int:
            record = find_record(writer.connection, job)
            check_version(record.job, expected_version)
            return _bump(writer, record, "job.removed", deleted=True)

        request = {"remove": job, "version": expected_version}
        return self._desk.once(asked, request, write, layer="provisioner")

    def restore(self, job: str, *, expected_version: int | None = None, **asked: Unpack[CallOptions]) -> int:
        """Bring a removed job back with the layers, the birth and so the state it had."""

        def write(writer: LayerWriter) -> int:
            record = any_record(writer.connection, job)
            if not record.job.deleted:
                raise NotFound(
                    f"there is no removed job {shown(job)}",
                    why="it is not removed",
                    fix="look at the list of removed jobs",
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
        return self._desk.once(asked, request, write, layer="provisioner")

    def add_layer_kind(
        self,
        name: str,
        precedence: int,
        writers: Sequence[str],
        *,
        replaces_plan: bool = False,
        fields: Sequence[str] = (),
        **asked: Unpack[CallOptions],
    ) -> None:
        """Add a layer at a level that is free; admins only. It counts from the next write on.

        `fields`: what may be said in it; none: every field that its writers may set.
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
                        f"the layer {name!r} cannot be added at level {precedence}",
                        why=f"there is {other.name!r} at level {other.precedence}",
                        fix="choose another name and a level that is free",
                    )
            insert_kind(writer.connection, layer)
            next_value(writer.connection, EXPECTED_COUNTER)
            writer.record("layer_kind.added", name, data)
            return name

        # Whoever may write the base layer may say which layers there are.
        self._desk.once(asked, {"layer": name, **data}, write, layer="base")

    def submit_pipeline(
        self, compiled: Body, *, new_birth: Callable[[], str], **asked: Unpack[CallOptions]
    ) -> Submitted:
        """Write the provisioner layers of all jobs of a pipeline at once; jobs it no longer has are stopped.

        NeedsConsent, and nothing is written, if it would stop a job that `compiled` does not name in `stops`,
        or replace a pipeline that came from another file than `replaces`.
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
            leavers = self._leavers(writer.connection, pipeline)
            package = job_store.pipeline_package(writer.connection, pipeline.name)
            replaced = replaced_origin(pipeline, package)
            check_consent(pipeline, [record.job.name for record in leavers], replaced)
            versions: dict[str, int] = {}
            done: dict[str, str] = {}
            for name, body in pipeline.jobs.items():
                record = records.get(name)
                if record is None or record.job.deleted:
                    versions[name], done[name] = _begin(writer, record, name, body, new_birth()), "created"
                else:
                    before = layer_body(record, "provisioner")
                    body = pipeline.body_after(name, before, record.job.expected_version)
                    versions[name], _ = writer.write(record, "provisioner", body, None)
                    done[name] = action_taken(before, body)
            for record in leavers:
                body = {**layer_body(record, "provisioner"), "state": "stopped"}
                versions[record.job.name], _ = writer.write(record, "provisioner", body, None)
                done[record.job.name] = "stopped"
            origin = pipeline.origin or str((package or {}).get("origin", ""))
            version = job_store.put_pipeline(
                writer.connection,
                name=pipeline.name,
                graph=pipeline.graph,
                package={**pipeline.package, "origin": origin},
                now_ms=asked["now_ms"],
            )
            writer.record(
                "pipeline.submitted", pipeline.name, {"version": version, "jobs": versions, "done": done}
            )
            return {"jobs": versions, "done": done}

        return Submitted.of(self._desk.once(asked, {"submit": compiled}, write, layer="provisioner"))


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
    """The layer's body with this state; to run, it says nothing, unless something below says otherwise."""
    body = patch_body(layer_body(record, layer), {"state": None if state == "running" else state})
    level = writer.kinds[layer].precedence
    below = [row for row in record.layers if row.precedence < level]
    if state == "running" and merge_layers(below).get("state") not in (None, "running"):
        body["state"] = "running"
    return body


def _check_kind(name: object, precedence: object, writers: object) -> None:
    why = ""
    if not isinstance(name, str) or not name.isascii() or not name.isidentifier() or len(name) > 50:
        why = f"the name {shown(name)} is not a word of at most 50 letters, digits and '_'"
    elif name == "default":
        why = "`default` stands for values that no layer decides"
    elif type(precedence) is not int or abs(precedence) > PRECEDENCE_MAX:
        why = f"the precedence {shown(precedence)} is not a number from -{PRECEDENCE_MAX} to {PRECEDENCE_MAX}"
    elif not isinstance(writers, list | tuple | set | frozenset) or not writers or not set(writers) <= ROLES:
        why = f"the writers {shown(writers)} are not roles; these are: {', '.join(sorted(ROLES))}"
    if why:
        raise ConfigError("the layer cannot be added", why=why, fix="correct it; nothing was changed")


def _check_fields(writers: Sequence[str], fields: Sequence[str]) -> None:
    """Each field must be one that a writer may set, and each writer must be of some use."""
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
            why = f"`{field}` may be set by {allowed}, and none of them writes this layer"
    if why:
        raise ConfigError("the layer cannot be added", why=why, fix="correct it; nothing was changed")
