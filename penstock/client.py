"""The Python client: what the CLI, containers and programs use to talk to a control plane."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

from penstock.core.errors import (
    ConfigError,
    EnvironmentProblem,
    OutcomeUnknown,
    Refused,
    StoreUnavailable,
)
from penstock.tasks.messages import Heartbeat, HeartbeatReply
from penstock.web.problems import from_problem

_TOKEN = re.compile(r"[A-Za-z0-9_.~+/=-]+")


class Client:
    """A control plane at a URL, as the holder of one token."""

    def __init__(
        self, url: str, token: str, *, timeout_s: float = 10.0, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._url = url.rstrip("/")
        if not _TOKEN.fullmatch(token):
            raise Refused(
                "this is not a token",
                why="a token is one word of letters, digits, dashes and underscores",
                fix="look at PENSTOCK_TOKEN, or at the token file in the folder of `penstock up`",
            )
        try:
            self._http = httpx.Client(
                base_url=f"{self._url}/api/v1",
                headers={"Authorization": f"Bearer {token}"},
                timeout=timeout_s,
                transport=transport,
                trust_env=False,
            )
        except httpx.InvalidURL as error:
            raise _not_a_url(self._url, str(error)) from error

    def close(self) -> None:
        """Give the connections back."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What runs.

    def status(self) -> dict[str, Any]:
        """Everything the live table shows."""
        return self._json("GET", "/status")

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs, shortly."""
        return _rows(self._json("GET", "/jobs"), "jobs")

    def job(self, name: str) -> dict[str, Any]:
        """One job: layers, provenance, running config, plan."""
        return self._json("GET", f"/jobs/{_part(name)}")

    def plan_pipeline(self, compiled: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What submitting would change."""
        return _rows(self._json("POST", "/pipelines/plan", body={"compiled": compiled}), "changes")

    def submit_pipeline(self, compiled: Mapping[str, Any], *, why: str, key: str) -> dict[str, Any]:
        """Make it what runs. Repeating with the same key does nothing more."""
        body = {"compiled": compiled, "why": why}
        return self._json("POST", "/pipelines", body=body, headers={"Idempotency-Key": key})

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
        """Set dotted paths in one layer (None removes); with `expected_version` only if nobody wrote."""
        headers = {"Idempotency-Key": key}
        if expected_version is not None:
            headers["If-Match"] = f'"{expected_version}"'
        body = {"changes": changes, "why": why}
        path = f"/jobs/{_part(job)}/layers/{_part(layer)}"
        return int(self._json("PATCH", path, body=body, headers=headers)["version"])

    def journal(
        self, *, subject: str | None = None, since: int = 0, limit: int = 100
    ) -> list[dict[str, Any]]:
        """What was decided and why, oldest first."""
        params = {"since": since, "limit": limit} | ({"subject": subject} if subject else {})
        return _rows(self._json("GET", "/journal", params=params), "entries")

    # Streams and packages.

    def categories(self) -> list[dict[str, Any]]:
        """All categories of the bus."""
        return _rows(self._json("GET", "/categories"), "categories")

    def category(self, name: str) -> dict[str, Any]:
        """One category's spec, birth, end offsets and watermark."""
        return self._json("GET", f"/categories/{_part(name)}")

    def create_category(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Create it, or nothing if it is there with the same spec."""
        return self._json("POST", "/categories", body=dict(spec))

    def put_package(self, hash_: str, data: bytes) -> None:
        """Upload code by its content's hash."""
        self._json("PUT", f"/packages/{_part(hash_)}", body=data, headers={"Content-Type": "application/zip"})

    def package(self, hash_: str) -> bytes:
        """Download code."""
        return self._request("GET", f"/packages/{_part(hash_)}").content

    # Containers.

    def register(self, container: str, incarnation: str, folder_id: str) -> None:
        """Announce a new incarnation of a container."""
        body = {"incarnation": incarnation, "folder_id": folder_id}
        self._json("POST", f"/containers/{_part(container)}/register", body=body)

    def beat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """One heartbeat."""
        path = f"/containers/{_part(heartbeat.container)}/beat"
        # An error text that is no text must not cost the container its lease.
        body = _encoded(heartbeat.to_json(), errors="replace")
        return HeartbeatReply.from_json(self._json("POST", path, body=body))

    def task_list(self, since: int | None) -> dict[str, Any]:
        """The task list: all of it, or what changed since a version."""
        return self._json("GET", "/tasks", params={} if since is None else {"since": since})

    def container_log(self, container: str, *, lines: int) -> str:
        """The end of a container's log."""
        return str(self._json("GET", f"/containers/{_part(container)}/log", params={"lines": lines})["text"])

    def _json(self, method: str, path: str, *, body: Any = None, **kwargs: Any) -> dict[str, Any]:
        if body is not None:
            headers = {"Content-Type": "application/json", **kwargs.pop("headers", {})}
            kwargs |= {"content": body if isinstance(body, bytes) else _encoded(body), "headers": headers}
        response = self._request(method, path, **kwargs)
        try:
            answer = response.json()
        except ValueError as error:
            raise self._strange(response) from error
        if not isinstance(answer, dict):
            raise self._strange(response)
        return answer

    def _request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **kwargs)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise _not_a_url(self._url, str(error)) from error
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise StoreUnavailable(
                f"no control plane answers at {self._url}",
                why=str(error) or "the connection was refused",
                fix="start one with `penstock up`, or name another with PENSTOCK_URL",
            ) from error
        except httpx.HTTPError as error:
            # A question that was not answered changed nothing; a change may have been made.
            kind = StoreUnavailable if method == "GET" else OutcomeUnknown
            raise kind(
                f"the control plane at {self._url} did not answer in time",
                why=f"{type(error).__name__}: {error}",
                fix="try again with the same idempotency key: what was done is not done twice",
            ) from error
        if response.is_success:
            return response
        try:
            problem = response.json()
        except ValueError:
            problem = None
        if not isinstance(problem, dict):
            raise self._strange(response)
        raise from_problem(problem, response.status_code)

    def _strange(self, response: httpx.Response) -> StoreUnavailable:
        return StoreUnavailable(
            f"what answers at {self._url} does not speak as a control plane does",
            why=f"status {response.status_code}: {response.text[:200]!r}",
            fix="look at the URL, and whether both sides run the same version",
        )


def _rows(answer: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    return list(answer[name])


def _part(name: str) -> str:
    if name in ("", ".", ".."):  # in a path these would name something else
        raise ConfigError(f"{name!r} is not a name", why="nothing is called so", fix="give the whole name")
    try:
        return quote(name, safe="")
    except UnicodeEncodeError as error:
        raise _not_text(error) from error


def _encoded(body: Any, *, errors: str = "strict") -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode(errors=errors)
    except (TypeError, ValueError) as error:
        raise _not_text(error) from error


def _not_text(error: Exception) -> ConfigError:
    return ConfigError(
        "this cannot be sent", why=str(error), fix="use text in UTF-8, finite numbers, lists and maps"
    )


def _not_a_url(url: str, why: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"not the URL of a control plane: {url!r}",
        why=why,
        fix="set PENSTOCK_URL to one like http://host:7337",
    )
