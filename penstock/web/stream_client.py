"""What the Python client asks about streams: categories, watermarks, packages, and what jobs keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.web.link import Json, Link, given, path_part

# An interval is read whole before its first line comes.
EXPORT_WAIT_S = 600.0


class StreamQuestions:
    """Asks over a link."""

    _link: Link

    def categories(self) -> list[Json]:
        """All categories of the bus."""
        return list(self._question("/categories")["categories"])

    def unreadable_categories(self) -> dict[str, str]:
        """Those that cannot be read, and why."""
        return dict(self._question("/categories").get("unreadable", {}))

    def category(self, name: str) -> Json:
        """One category's spec, birth, end offsets and watermark."""
        return self._question(f"/categories/{path_part(name)}")

    def watermarks(self, subject: str | None = None, *, percent: int | None = None) -> Json:
        """Watermarks of a category, a job's or a pipeline's outputs, or all; and who holds each back."""
        return self._question("/watermarks", subject=subject, percent=percent)

    def doctor(self, job: str) -> Json:
        """What is wrong with a job, why, and what to do."""
        return self._question(f"/jobs/{path_part(job)}/doctor")

    def create_category(self, spec: Mapping[str, Any]) -> Json:
        """Create it, or nothing if it is there with the same spec."""
        return self._link.json("POST", "/categories", body=dict(spec), repeat=True)

    def put_package(self, hash_: str, data: bytes) -> None:
        """Upload code by its content's hash."""
        headers = {"Content-Type": "application/zip"}
        self._link.json("PUT", f"/packages/{path_part(hash_)}", body=data, headers=headers, repeat=True)

    def package(self, hash_: str) -> bytes:
        """Download code."""
        return self._link.request("GET", f"/packages/{path_part(hash_)}").content

    # What jobs keep.
    def state(self, job: str, key: str) -> Json:
        """What a job keeps for one key: {key, partition, version, states, timers}."""
        return self._question(f"/jobs/{path_part(job)}/states/of", key=key)

    def states(self, job: str, *, prefix: str = "", after: str | None = None, limit: int = 100) -> Json:
        """Some states: {states, versions, next}; `next` is the `after` of the next page, None at the end."""
        return self._question(f"/jobs/{path_part(job)}/states", prefix=prefix, after=after, limit=limit)

    def timers(self, job: str, *, key: str = "", after: str | None = None, limit: int = 100) -> Json:
        """Some pending timers, of all keys or of one: {timers, versions, next}."""
        return self._question(f"/jobs/{path_part(job)}/timers", key=key, after=after, limit=limit)

    def export_states(self, job: str, partition: int) -> Iterator[Json]:
        """Every state of one interval, all of one version."""
        path = f"/jobs/{path_part(job)}/states/export"
        return self._link.rows(path, {"partition": partition}, wait_s=EXPORT_WAIT_S)

    def _question(self, path: str, **params: Any) -> Json:
        return self._link.json("GET", path, params=given(params), repeat=True)
