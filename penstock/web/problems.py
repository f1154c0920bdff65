"""Errors as problem+json and back: the three parts survive the wire, and so does the kind. Pure."""

from __future__ import annotations

from typing import Any

from penstock.core import errors
from penstock.core.errors import PenstockError

STATUS: dict[type[PenstockError], int] = {
    errors.ConfigError: 422,
    errors.PipelineError: 422,
    errors.VersionConflict: 409,
    errors.NotFound: 404,
    errors.Refused: 403,
    errors.Fenced: 409,
    errors.OutcomeUnknown: 503,
    errors.StoreUnavailable: 503,
    errors.DiskFull: 507,
    errors.UserError: 400,
}


def status_of(error: PenstockError) -> int:
    """The HTTP status of the nearest kind in the table."""
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return 500


def to_problem(error: PenstockError, status: int | None = None) -> dict[str, Any]:
    """RFC 9457, with our three parts."""
    problem = {
        "type": f"urn:penstock:{type(error).__name__}",
        "title": error.what,
        "status": status_of(error) if status is None else status,
        "detail": error.why,
        "fix": error.fix,
    }
    if isinstance(error, errors.VersionConflict):
        problem |= {"key": error.key, "expected": error.expected, "actual": error.actual}
    return problem


def from_problem(problem: dict[str, Any], status: int) -> PenstockError:
    """The error that the other side raised, or the nearest we know."""
    name = str(problem.get("type", "")).rpartition(":")[2]
    if name == "VersionConflict" and {"key", "expected", "actual"} <= problem.keys():
        return errors.VersionConflict(problem["key"], expected=problem["expected"], actual=problem["actual"])
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, PenstockError)):
        kind = errors.StoreUnavailable if status >= 500 else errors.UserError
        kind = errors.Refused if status in (401, 403) else kind
    return kind(
        str(problem.get("title", f"the server answered {status}")),
        why=str(problem.get("detail", "")),
        fix=str(problem.get("fix", "")),
    )
