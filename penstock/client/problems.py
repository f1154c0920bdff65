"""Converts errors to problem+json (RFC 9457) and back, with kind, three parts and data. Pure."""

from __future__ import annotations

from typing import Any

from penstock.core import errors
from penstock.core.errors import PenstockError


class Unauthorised(errors.Refused):
    """No token, or an invalid one."""


class TooLarge(errors.ConfigError):
    """The body is larger than the route's limit."""


class HeadersTooLarge(errors.ConfigError):
    """The headers exceed the server's limits."""


class NeedsVersion(errors.ConfigError):
    """A write that requires an expected version, and has none."""


class TooMany(errors.Refused):
    """Over a rate limit, or over the limit of event streams."""


STATUS: dict[type[PenstockError], int] = {
    errors.ConfigError: 422,
    errors.PipelineError: 422,
    errors.VersionConflict: 409,
    errors.NotFound: 404,
    errors.Refused: 403,
    errors.NeedsConsent: 409,
    errors.KeyReused: 422,
    errors.Fenced: 409,
    errors.OutcomeUnknown: 503,
    errors.StoreUnavailable: 503,
    errors.DiskFull: 507,
    errors.UserError: 400,
    Unauthorised: 401,
    TooLarge: 413,
    NeedsVersion: 428,
    HeadersTooLarge: 431,
    TooMany: 429,
}
# Additional data of a kind of error.
DATA: dict[type[PenstockError], dict[str, tuple[type, ...]]] = {
    errors.VersionConflict: {"key": (str,), "expected": (int,), "actual": (int,)},
    errors.NeedsConsent: {"stops": (list,), "replaces": (str,)},
    errors.ComputationFailed: {"job": (str,), "key": (str,), "offset": (int, type(None))},
}
KINDS: dict[str, type[PenstockError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, PenstockError)
}
_PREFIX = "urn:penstock:"


def status_of(error: PenstockError) -> int:
    """The HTTP status of the nearest kind in the table."""
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


def to_problem(error: PenstockError, status: int | None = None) -> dict[str, Any]:
    """An error as a problem: its kind, three parts and additional data."""
    kind = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return {
        "type": f"{_PREFIX}{kind.__name__}",
        "title": error.what,
        "status": status_of(error) if status is None else status,
        "detail": error.why,
        "fix": error.fix,
        **{name: getattr(error, name) for name in _data_of(kind)},
    }


def from_problem(problem: dict[str, Any], status: int) -> PenstockError:
    """The error that the server raised, or the nearest known kind."""
    name = str(problem.get("type", "")).removeprefix(_PREFIX)
    kind = KINDS.get(name)
    if kind is None or not _fits(problem, _data_of(kind)):
        kind = errors.StoreUnavailable if status >= 500 else errors.UserError
        kind = errors.Refused if status in (401, 403) else kind
    error = kind.__new__(kind)
    # Not the kind's own __init__: some build their text from data, and here the text is given.
    PenstockError.__init__(
        error,
        str(problem.get("title") or f"the server answered {status}"),
        why=str(problem.get("detail") or ""),
        fix=str(problem.get("fix") or ""),
    )
    for field in _data_of(kind):
        setattr(error, field, problem[field])
    return error


def _data_of(kind: type) -> dict[str, tuple[type, ...]]:
    return next((DATA[above] for above in kind.__mro__ if above in DATA), {})


def _fits(problem: dict[str, Any], data: dict[str, tuple[type, ...]]) -> bool:
    return all(name in problem and isinstance(problem[name], kinds) for name, kinds in data.items())
