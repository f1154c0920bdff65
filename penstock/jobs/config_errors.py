"""What is wrong with a job's config, in words for whoever wrote it. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from penstock.core.errors import ConfigError
from penstock.jobs.text_rules import shown

PROBLEMS_SHOWN_MAX = 5
PATH_SHOWN_MAX = 200


def config_error(
    job: str, error: ValidationError, model: type[BaseModel], patterns: Mapping[str, str]
) -> ConfigError:
    """Each wrong field with its path and reason; `patterns`: what a pattern asks for, in words."""
    reasons, hints = [], []
    for problem in error.errors()[:PROBLEMS_SHOWN_MAX]:
        path, reason = _path(problem["loc"]), problem["msg"].removeprefix("Value error, ")
        reason = patterns.get(problem.get("ctx", {}).get("pattern", ""), reason)
        if problem["type"] == "tuple_type":
            reason = "Input should be a list"
        if problem["type"] == "extra_forbidden":
            reason = "there is no such field"
            hints += _suggestions(problem["loc"], path, model)
        reasons.append(f"{path}: {reason}" if path else reason)
    hidden = error.error_count() - len(reasons)
    if hidden > 0:
        reasons.append(f"and {hidden} more")
    return ConfigError(
        f"the config of job {shown(job)} is not valid",
        why="; ".join(reasons),
        fix="; ".join(hints) or "correct the named fields and write the layer again; nothing was changed",
    )


def _path(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{shown(part)[1:-1]}"
    return text.removeprefix(".")[:PATH_SHOWN_MAX]


def _suggestions(location: tuple[int | str, ...], path: str, model: type[BaseModel]) -> list[str]:
    models: list[type[BaseModel]] = [model]
    for part in location[:-1]:
        fields = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        # A list index or the tag of a union is no field: the candidates stay.
        models = [model for annotation in fields for model in _models_in(annotation)] or models
    known = sorted({name for model in models for name in model.model_fields})
    near = difflib.get_close_matches(str(location[-1]), known, n=1)
    return [f"did you mean `{path[: len(path) - len(str(location[-1]))]}{near[0]}`?"] if near else []


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
