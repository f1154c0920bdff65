"""Job Services with planted bugs: the checks that guard the real one must find each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Unpack

from penstock.jobs.job_reads import JobView
from penstock.jobs.job_service import JobService
from penstock.jobs.job_store import JobStore
from penstock.jobs.layer_writer import CallOptions, IdempotentWriter, LayerWriter


class _ForgetfulDesk(IdempotentWriter):
    def once(self, asked: CallOptions, request: Mapping[str, Any], write: Any, **about: Any) -> Any:
        return super().once({**asked, "idempotency_key": None}, request, write, **about)


class ForgetsKeys(JobService):
    """Does not keep idempotency keys, so a repeat is done again."""

    def __init__(self, store: JobStore) -> None:
        super().__init__(store)
        self._writer = _ForgetfulDesk(store)


class IgnoresVersions(JobService):
    """Compare-and-set without the comparison."""

    def write_layer(
        self,
        job: str,
        layer: str,
        body: Mapping[str, Any],
        *,
        expected_version: int | None,
        **asked: Unpack[CallOptions],
    ) -> int:
        return super().write_layer(job, layer, body, expected_version=None, **asked)


class ReadsAreOld(JobService):
    """Every third look at a job shows what the look before it saw."""

    def __init__(self, store: JobStore) -> None:
        super().__init__(store)
        self._looks, self._last = 0, dict[str, JobView]()

    def view(self, job: str, *, removed: bool = False) -> JobView:
        self._looks += 1
        kept = self._last.get(job)
        if kept is not None and self._looks % 3 == 0:
            return kept
        self._last[job] = super().view(job, removed=removed)
        return self._last[job]


class PatchesWhatItSawBefore(JobService):
    """A patch reads the layer outside the transaction that writes it, so it may undo somebody's write."""

    _bodies: ClassVar[dict[str | None, dict[str, Any]]] = {}  # by key, of all services on the store

    def patch_layer(
        self,
        job: str,
        layer: str,
        changes: Mapping[str, Any],
        *,
        expected_version: int | None = None,
        **asked: Unpack[CallOptions],
    ) -> int:
        key = asked["idempotency_key"]
        if key not in self._bodies:  # a repeat is the same request, also of a service with a bug
            view = self.view(job)
            body = next((dict(row.body) for row in view.layers if row.layer == layer), {})
            self._bodies[key] = {**body, **changes}
        return super().write_layer(job, layer, self._bodies[key], expected_version=None, **asked)


class _SilentWriter(LayerWriter):
    def record(self, action: str, subject: str, data: Mapping[str, Any]) -> None:
        if action != "job.removed":
            super().record(action, subject, data)


class _SilentDesk(IdempotentWriter):
    def once(self, asked: CallOptions, request: Mapping[str, Any], write: Any, **about: Any) -> Any:
        return super().once(asked, request, _silenced(write), **about)


def _silenced(write: Callable[[LayerWriter], Any]) -> Callable[[LayerWriter], Any]:
    return lambda writer: write(_SilentWriter(writer.connection, writer._journal, writer.call, writer._check))


class RemovesInSilence(JobService):
    """A removal has no row in the audit."""

    def __init__(self, store: JobStore) -> None:
        super().__init__(store)
        self._writer = _SilentDesk(store)


class RestoresAnew(JobService):
    """A restore forgets the oncall layer."""

    def restore(self, job: str, *, expected_version: int | None = None, **asked: Unpack[CallOptions]) -> int:
        super().restore(job, expected_version=expected_version, **asked)
        return super().clear(job, "oncall", **{**asked, "idempotency_key": None})  # type: ignore[typeddict-item]
