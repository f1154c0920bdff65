"""The Python client of the API, for the CLI, containers and other programs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from penstock.client.link import RETRY_AFTER_MS_MAX, RETRY_MS, Json, Link, encoded, given, path_part
from penstock.client.link import given as _given
from penstock.client.link import path_part as _part
from penstock.core.clock import Millis
from penstock.core.errors import OutcomeUnknown, StoreUnavailable
from penstock.core.system_clock import sleep_ms
from penstock.fleet.messages import Heartbeat, HeartbeatReply, InstallationInfo


class AlarmRequests:
    """Requests about alarms, silences and capacity."""

    _link: Link

    def alarms(self, *, job: str | None = None, everything: bool = False) -> Json:
        """Firing alarms, or all stored ones: {alarms, routes}."""
        return self._get("/alarms", job=job, all=everything or None)

    def alarm(self, alarm_id: str) -> Json:
        """One alarm."""
        return self._get(f"/alarms/{path_part(alarm_id)}")

    def acknowledge_alarm(self, alarm_id: str, *, why: str, key: str) -> Json:
        """Acknowledge an alarm: no more reminders."""
        path = f"/alarms/{path_part(alarm_id)}/acknowledge"
        return self._link.json("POST", path, body={"why": why}, headers={"Idempotency-Key": key}, repeat=True)

    def silences(self) -> list[Json]:
        """The active silences."""
        return list(self._get("/silences")["silences"])

    def silence_alarms(
        self, *, job: str, kind: str = "*", severity: str = "critical", for_s: int, why: str, key: str
    ) -> Json:
        """Send no notices for these alarms for `for_s` seconds. `job` and `kind` may have `*`."""
        body = {"job": job, "kind": kind, "severity": severity, "for_s": for_s, "why": why}
        return self._link.json("POST", "/silences", body=body, headers={"Idempotency-Key": key}, repeat=True)

    def end_silence(self, silence_id: str, *, why: str, key: str) -> Json:
        """End a silence early."""
        path, headers = f"/silences/{path_part(silence_id)}", {"Idempotency-Key": key}
        return self._link.json("DELETE", path, params={"why": why}, headers=headers, repeat=True)

    def test_alarm_routes(self, *, why: str) -> list[Json]:
        """Send a test notice through each route: [{route, is_taken, answer}]."""
        # Not repeated: the notice would be sent twice.
        return list(self._link.json("POST", "/alarm-routes/test", body={"why": why})["routes"])

    def capacity(self) -> Json:
        """The cluster's resources: total, reserved and used."""
        return self._get("/capacity")

    def _get(self, path: str, **params: Any) -> Json:
        return self._link.json("GET", path, params=given(params), repeat=True)


class _Order(msgspec.Struct, frozen=True):
    kind: str
    number: int
    to: str
    owner: str
    url: str
    token: str


class _Ordered(msgspec.Struct, frozen=True):
    state: str
    order: _Order | None


class LendingRequests:
    """Requests about lending. All but `expect` are idempotent."""

    _link: Link

    def loans(self) -> list[Json]:
        """Containers that can be lent, are lent, borrowed, or on their way."""
        return list(self._link.json("GET", "/loans", repeat=True)["loans"])

    def ask_order(self, container: str, *, owner: str = "") -> Json:
        """Poll for a container's order: {state, order}."""
        answer = self._lending(container, "order", owner=owner)
        self._link.read(answer, _Ordered)
        return answer

    def answer_order(self, container: str, *, number: int, accepted: bool, why: str = "") -> Json:
        """Answer an order as the container's host."""
        return self._lending(container, "order/answer", number=number, accepted=accepted, why=why)

    def lend(self, container: str, *, home: str, to: str, url: str, token: str, why: str) -> Json:
        """Begin to lend a container to another cluster."""
        return self._lending(container, "lend", home=home, to=to, url=url, token=token, why=why)

    def keep_container(self, container: str, *, version: int, why: str) -> Json:
        """Cancel lending a container."""
        return self._lending(container, "keep", version=version, why=why)

    def expect(self, container: str, *, lender: str, owner: str, version: int, why: str) -> Json:
        """Announce a container from another cluster: {version, token}; `version`: of the record read."""
        body = {"lender": lender, "owner": owner, "version": version, "why": why}
        # Not repeated: the token is returned only once.
        return self._link.json("POST", f"/containers/{path_part(container)}/expect", body=body)

    def forget_container(self, container: str, *, version: int, why: str) -> None:
        """Delete the record of a container that did not come or has left."""
        self._lending(container, "forget", version=version, why=why)

    def _lending(self, container: str, verb: str, **body: Any) -> Json:
        return self._link.json("POST", f"/containers/{path_part(container)}/{verb}", body=body, repeat=True)


# The server reads the whole interval before it sends the first line.
EXPORT_WAIT_S = 600.0


class StreamRequests:
    """Requests about categories, watermarks, packages and state."""

    _link: Link

    def categories(self) -> list[Json]:
        """All categories of the bus."""
        return list(self._get("/categories")["categories"])

    def unreadable_categories(self) -> dict[str, str]:
        """Categories that cannot be read, with the error."""
        return dict(self._get("/categories").get("unreadable", {}))

    def category(self, name: str) -> Json:
        """One category's spec, birth, end offsets and watermark."""
        return self._get(f"/categories/{path_part(name)}")

    def watermarks(self, subject: str | None = None, *, percent: int | None = None) -> Json:
        """Watermarks of a category, of a job's or a pipeline's outputs, or all; and what holds each back."""
        return self._get("/watermarks", subject=subject, percent=percent)

    def doctor(self, job: str) -> Json:
        """Diagnose a job: findings with cause and remedy."""
        return self._get(f"/jobs/{path_part(job)}/doctor")

    def create_category(self, spec: Mapping[str, Any]) -> Json:
        """Create a category; no change if it exists with the same spec."""
        return self._link.json("POST", "/categories", body=dict(spec), repeat=True)

    def put_package(self, hash_: str, data: bytes) -> None:
        """Upload a package under the hash of its content."""
        headers = {"Content-Type": "application/zip"}
        self._link.json("PUT", f"/packages/{path_part(hash_)}", body=data, headers=headers, repeat=True)

    def package(self, hash_: str) -> bytes:
        """Download a package."""
        return self._link.request("GET", f"/packages/{path_part(hash_)}").content

    # State of jobs.
    def state(self, job: str, key: str) -> Json:
        """State of one key: {key, partition, version, states, timers}."""
        return self._get(f"/jobs/{path_part(job)}/states/of", key=key)

    def states(self, job: str, *, prefix: str = "", after: str | None = None, limit: int = 100) -> Json:
        """A page of states: {states, versions, next}; `next`: the `after` of the next page, or None."""
        return self._get(f"/jobs/{path_part(job)}/states", prefix=prefix, after=after, limit=limit)

    def timers(self, job: str, *, key: str = "", after: str | None = None, limit: int = 100) -> Json:
        """A page of pending timers, of all keys or of one: {timers, versions, next}."""
        return self._get(f"/jobs/{path_part(job)}/timers", key=key, after=after, limit=limit)

    def export_states(self, job: str, partition: int) -> Iterator[Json]:
        """All state of one interval at one version."""
        path = f"/jobs/{path_part(job)}/states/export"
        return self._link.rows(path, {"partition": partition}, wait_s=EXPORT_WAIT_S)

    def _get(self, path: str, **params: Any) -> Json:
        return self._link.json("GET", path, params=given(params), repeat=True)


RETRIES = 3
WATCH_S = 3600


class Client(StreamRequests, AlarmRequests, LendingRequests):
    """A client of the control plane at a URL, with one token.

    If the control plane does not answer, reads are retried, and so are writes with an idempotency key.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_s: float = 10.0,
        ca: str | Path | None = None,
        retries: int = RETRIES,
        pause: Callable[[Millis], None] = sleep_ms,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._pause = pause
        self._link = Link(
            url, token, timeout_s=timeout_s, ca=ca, retries=retries, pause=pause, transport=transport
        )

    def close(self) -> None:
        """Close the connections."""
        self._link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Jobs.
    def status(self) -> Json:
        """Status of all jobs, containers and loops."""
        return self._get("/status")

    def jobs(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        state: str | None = None,
        pipeline: str | None = None,
        removed: bool = False,
    ) -> list[Json]:
        """Summaries of all matching jobs, read page by page."""
        found: list[Json] = []
        after: str | None = ""
        while after is not None:
            page = self.jobs_page(
                labels=labels, state=state, pipeline=pipeline, removed=removed, after=after, limit=1000
            )
            found += page["jobs"]
            after = page["next"]
        return found

    def jobs_page(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        state: str | None = None,
        pipeline: str | None = None,
        removed: bool = False,
        after: str = "",
        limit: int = 100,
    ) -> Json:
        """A page of job summaries: `jobs`, and `next`: the `after` of the next page, None at the end."""
        label = [f"{name}={value}" for name, value in (labels or {}).items()]
        params = {
            "label": label,
            "state": state,
            "pipeline": pipeline,
            "removed": removed or None,
            "after": after or None,
            "limit": limit,
        }
        return self._get("/jobs", **params)

    def job(self, name: str) -> Json:
        """One job: layers, provenance, running config, plan."""
        return self._get(f"/jobs/{_part(name)}")

    def apply_job(
        self,
        name: str,
        config: Mapping[str, Any],
        *,
        why: str,
        key: str,
        expected_version: int | None = None,
        only_new: bool = False,
    ) -> Json:
        """Write the job's provisioner layer; creates the job if it does not exist: {version, created}."""
        headers = _headers(key, expected_version) | ({"If-None-Match": "*"} if only_new else {})
        return self._write("PUT", f"/jobs/{_part(name)}", {"config": config, "why": why}, headers)

    def plan_job(self, name: str, config: Mapping[str, Any]) -> Json:
        """What applying would change."""
        return self._link.json("POST", f"/jobs/{_part(name)}/plan", body={"config": config}, repeat=True)

    def set_state(
        self,
        job: str,
        state: str,
        *,
        why: str,
        key: str,
        layer: str | None = None,
        expected_version: int | None = None,
    ) -> Json:
        """Set the state that a job should have: running, paused or stopped: {version, layer, effective}."""
        body = {"state": state, "layer": layer, "why": why}
        return self._write("POST", f"/jobs/{_part(job)}/state", body, _headers(key, expected_version))

    def remove_job(self, job: str, *, why: str, key: str, expected_version: int | None = None) -> int:
        """Remove a job; `restore_job` brings it back."""
        headers = _headers(key, expected_version)
        return int(self._write("DELETE", f"/jobs/{_part(job)}", None, headers, why=why)["version"])

    def restore_job(self, job: str, *, why: str, key: str, expected_version: int | None = None) -> int:
        """Restore a removed job with its layers."""
        headers = _headers(key, expected_version)
        return int(self._write("POST", f"/jobs/{_part(job)}/restore", {"why": why}, headers)["version"])

    def plan_pipeline(self, compiled: Mapping[str, Any]) -> list[Json]:
        """What submitting would change."""
        return _rows(self.plan_submit(compiled), "changes")

    def plan_submit(self, compiled: Mapping[str, Any]) -> Json:
        """What a submit would change, and the file whose pipeline it would replace: {changes, replaces}."""
        return self._link.json("POST", "/pipelines/plan", body={"compiled": compiled}, repeat=True)

    def submit_pipeline(
        self,
        compiled: Mapping[str, Any],
        *,
        why: str,
        key: str,
        stops: Sequence[str] = (),
        replaces: str = "",
    ) -> Json:
        """Submit a compiled pipeline: {jobs, done}. A repeat with the same key changes nothing.

        NeedsConsent, with nothing changed, if that would stop a running job which is not in `stops`, or
        replace a pipeline that was submitted from another file than `replaces`.
        """
        agreed: Json = {"stops": list(stops)} if stops else {}
        if replaces:
            agreed["replaces"] = replaces
        body = {"compiled": {**compiled, **agreed}, "why": why}
        return self._write("POST", "/pipelines", body, _headers(key))

    # Layers.
    def layers(self, job: str, *, version: int | None = None) -> Json:
        """A job's layers, now or at a version: {version, layers}."""
        return self._get(f"/jobs/{_part(job)}/layers", version=version)

    def put_layer(
        self, job: str, layer: str, body: Mapping[str, Any], *, why: str, key: str, expected_version: int
    ) -> int:
        """Replace one layer, if the job is still at the expected version."""
        headers = _headers(key, expected_version)
        return int(self._write("PUT", _layer(job, layer), {"body": body, "why": why}, headers)["version"])

    def patch_layer(
        self,
        job: str,
        layer: str,
        changes: Mapping[str, Any],
        *,
        why: str,
        key: str,
        expected_version: int | None = None,
    ) -> int:
        """Set dotted paths in one layer (None removes); with `expected_version` only at this version."""
        headers, body = _headers(key, expected_version), {"changes": changes, "why": why}
        return int(self._write("PATCH", _layer(job, layer), body, headers)["version"])

    def clear_layer(
        self, job: str, layer: str, *, why: str, key: str, expected_version: int | None = None
    ) -> int:
        """Clear a layer: remove every value that it sets."""
        headers = _headers(key, expected_version)
        return int(self._write("DELETE", _layer(job, layer), None, headers, why=why)["version"])

    def rollback(
        self,
        job: str,
        layer: str,
        *,
        to_version: int,
        why: str,
        key: str,
        expected_version: int | None = None,
    ) -> int:
        """Write a layer as it was at an earlier version."""
        headers, body = _headers(key, expected_version), {"to_version": to_version, "why": why}
        return int(self._write("POST", f"{_layer(job, layer)}/rollback", body, headers)["version"])

    def history(
        self, job: str, *, layer: str | None = None, before: int | None = None, limit: int = 100
    ) -> list[Json]:
        """Writes of a job's layers, newest first."""
        answer = self._get(f"/jobs/{_part(job)}/history", layer=layer, before=before, limit=limit)
        return _rows(answer, "history")

    def diff(self, job: str, *, old: int | None = None, new: int | None = None) -> list[Json]:
        """Differences of two versions; default: `old` the running config, `new` the expected config."""
        return _rows(self._get(f"/jobs/{_part(job)}/diff", old=old, new=new), "changes")

    def layer_kinds(self) -> list[Json]:
        """All kinds of layers, lowest first."""
        return _rows(self._get("/layers"), "layers")

    def add_layer_kind(
        self,
        name: str,
        precedence: int,
        writers: Sequence[str],
        *,
        why: str,
        key: str,
        replaces_plan: bool = False,
        fields: Sequence[str] = (),
    ) -> list[Json]:
        """Add a kind of layer for a component of the user's own; returns all kinds."""
        rights: Json = {"writers": list(writers), "replaces_plan": replaces_plan}
        rights |= {"fields": list(fields)} if fields else {}
        body = {"name": name, "precedence": precedence, **rights, "why": why}
        return _rows(self._write("POST", "/layers", body, _headers(key)), "layers")

    def job_metrics(self, name: str, *, metrics: str | None = None, minutes: int = 60) -> Json:
        """Metrics of a job by minute; `metrics`: comma-separated names; null where unknown."""
        return self._get(f"/jobs/{_part(name)}/metrics", metrics=metrics, minutes=minutes)

    def manage_job(self, name: str, *, policy: str | None = None, dry_run: bool = False) -> Json:
        """Evaluate a job's policies now: {change, said, alerts}."""
        body = {"policy": policy, "dry_run": dry_run}
        return self._link.json("POST", f"/jobs/{_part(name)}/manage", body=body, repeat=dry_run)

    def readmit_job(self, name: str, *, why: str) -> Json:
        """End all exclusions of a job from containers: {lifted}."""
        return self._order(f"/jobs/{_part(name)}/readmit", why)

    def decisions(self, name: str, *, before: int | None = None, limit: int = 50) -> Json:
        """Decisions about a job, newest first: `decisions`, and `next`, the `before` of the next page."""
        return self._get(f"/jobs/{_part(name)}/decisions", before=before, limit=limit)

    # Journal, audit and tokens.
    def journal(self, *, subject: str | None = None, since: int = 0, limit: int = 100) -> list[Json]:
        """Journal entries, oldest first."""
        return _rows(self._get("/journal", subject=subject or None, since=since, limit=limit), "entries")

    def audit(self, *, subject: str | None = None, before: int | None = None, limit: int = 100) -> list[Json]:
        """Who changed what, newest first."""
        return _rows(self._get("/audit", subject=subject or None, before=before, limit=limit), "entries")

    def tokens(self) -> list[Json]:
        """Every token ever issued, without its secret."""
        return _rows(self._get("/tokens"), "tokens")

    def issue_token(self, name: str, role: str, *, days: int, why: str, key: str) -> Json:
        """Issue a token; its secret `token` is returned only once."""
        body = {"name": name, "role": role, "days": days, "why": why}
        answer = self._write("POST", "/tokens", body, _headers(key))
        if answer["token"] is None:
            raise OutcomeUnknown(
                f"the token {answer['id']} was issued, but its secret was lost",
                why="the first response did not arrive, and the secret is sent only once",
                fix=f"revoke it with `penstock token revoke {answer['id']}` and issue another",
            )
        return answer

    def revoke_token(self, token_id: str, *, why: str, key: str) -> Json:
        """Revoke a token."""
        return self._write("DELETE", f"/tokens/{_part(token_id)}", None, _headers(key), why=why)

    # Events.
    def events(
        self,
        *,
        since: int | None = None,
        subject: str | None = None,
        limit: int | None = None,
        wait_s: int = WATCH_S,
    ) -> Iterator[Json]:
        """Stream journal entries after `since` (None: new ones) over one connection, until it ends."""
        params = _given({"since": since, "subject": subject, "limit": limit, "wait_s": wait_s})
        return self._link.lines("/events", params)

    def watch(
        self, *, since: int | None = None, subject: str | None = None, patience_ms: Millis | None = None
    ) -> Iterator[Json]:
        """Stream journal entries without end and without gaps; reconnects after the last received entry.

        `patience_ms`: after so long without the control plane StoreUnavailable is raised (None: never).
        """
        if since is None:
            newest = self.journal(limit=1)
            since = newest[-1]["id"] if newest else 0
        away_ms, pause_ms = 0, RETRY_MS  # time without the control plane, next backoff
        while True:
            try:
                for event in self.events(since=since, subject=subject):
                    since, away_ms, pause_ms = event["id"], 0, RETRY_MS
                    yield event
                away_ms = 0
            except StoreUnavailable:
                away_ms += pause_ms
                if patience_ms is not None and away_ms > patience_ms:
                    raise
            self._pause(pause_ms)
            pause_ms = min(2 * pause_ms, RETRY_AFTER_MS_MAX)

    # Requests of containers, which retry by themselves.
    def register(self, container: str, incarnation: str, folder_id: str) -> None:
        """Register a new incarnation of a container."""
        body = {"incarnation": incarnation, "folder_id": folder_id}
        self._link.json("POST", f"/containers/{_part(container)}/register", body=body)

    def beat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """Send one heartbeat."""
        path = f"/containers/{_part(heartbeat.container)}/beat"
        body = encoded(heartbeat.to_json(), errors="replace")  # invalid text must not prevent the heartbeat
        return self._link.read(self._link.json("POST", path, body=body, to_control=True), HeartbeatReply)

    def container_dead(self, container: str, folder_id: str) -> bool:
        """Report as its host that a container has ended; False: this was known already."""
        path = f"/containers/{_part(container)}/dead"
        answer = self._link.json("POST", path, body={"folder_id": folder_id}, repeat=True)
        return answer.get("is_news") is True

    def installation(self) -> Json:
        """The settings that a container needs to join."""
        answer = self._get("/installation")
        self._link.read(answer, InstallationInfo)
        return answer

    def task_list(self, since: int | None, *, wait_s: float | None = None) -> Json | None:
        """The task list, or its changes since a version; None: no change (within `wait_s`)."""
        headers = {} if since is None else {"If-None-Match": f'"{since}"'}
        params = _given({"since": since, "wait_s": wait_s})
        return self._link.json_if_changed("/tasks", params=params, headers=headers, to_control=True)

    def container_log(self, container: str, *, lines: int) -> str:
        """The end of a container's log."""
        return str(self._get(f"/containers/{_part(container)}/log", lines=lines)["text"])

    # Containers, shards and tasks.
    def containers(self) -> list[Json]:
        """Every container that ever registered."""
        return _rows(self._get("/containers"), "containers")

    def drain(self, container: str, *, why: str) -> Json:
        """Move all shards away from a container, and place no new ones there."""
        return self._order(f"/containers/{_part(container)}/drain", why)

    def cordon(self, container: str, *, why: str) -> Json:
        """Place no new shards on a container."""
        return self._order(f"/containers/{_part(container)}/cordon", why)

    def uncordon(self, container: str, *, why: str) -> Json:
        """Use a container for placement again."""
        return self._order(f"/containers/{_part(container)}/uncordon", why)

    def shards(self, *, container: str | None = None) -> list[Json]:
        """Every shard, or those that one container owns or is the target of."""
        return _rows(self._get("/shards", container=container), "shards")

    def shard(self, number: int) -> Json:
        """One shard with its history and outlook."""
        return self._get(f"/shards/{number}")

    def move_shard(self, number: int, container: str, *, why: str) -> Json:
        """Begin to move a shard to a container."""
        return self._order(f"/shards/{number}/move", why, container=container)

    def release_shard(self, number: int, *, why: str) -> Json:
        """Allow a quarantined shard to be placed again."""
        return self._order(f"/shards/{number}/release", why)

    def tasks(self, *, job: str | None = None, container: str | None = None) -> list[Json]:
        """Tasks that containers report, and expected tasks that no container reports."""
        return _rows(self._get("/tasks/reports", job=job, container=container), "tasks")

    def restart_task(self, job: str, index: int, *, why: str) -> Json:
        """Order a restart of one task: {task_id, container}."""
        return self._order(f"/jobs/{_part(job)}/tasks/{index}/restart", why)

    def task_log(self, job: str, index: int, *, lines: int = 100, after: str | None = None) -> Json:
        """A task's log: its last lines, or the text after the `place` of an earlier response."""
        return self._get(f"/jobs/{_part(job)}/tasks/{index}/log", lines=lines, after=after)

    # Requests.

    def _order(self, path: str, why: str, **body: Any) -> Json:
        # Orders are idempotent.
        return self._link.json("POST", path, body={**body, "why": why}, repeat=True)

    def _write(self, method: str, path: str, body: Any, headers: dict[str, str], **params: Any) -> Json:
        # Idempotent because of the key.
        return self._link.json(method, path, body=body, headers=headers, params=_given(params), repeat=True)


def new_key() -> str:
    """An idempotency key for one write; use the same key until the outcome is known."""
    return secrets.token_hex(16)


def _headers(key: str, expected_version: int | None = None) -> dict[str, str]:
    version = {} if expected_version is None else {"If-Match": f'"{expected_version}"'}
    return {"Idempotency-Key": key, **version}


def _rows(answer: Mapping[str, Any], name: str) -> list[Json]:
    return list(answer[name])


def _layer(job: str, layer: str) -> str:
    return f"/jobs/{_part(job)}/layers/{_part(layer)}"
