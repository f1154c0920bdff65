"""How commands speak: tables for people, JSON and YAML for programs, errors in three parts, exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console, RenderableType

from penstock.cli import tables
from penstock.core.errors import NotFound, PenstockError, StoreUnavailable, VersionConflict

EXIT_CODES = (
    "Exit codes: 0 done, 1 refused or failed (stderr says what, why and what to do), 2 wrong usage, "
    "3 not found, 4 somebody wrote first, 5 the control plane does not answer or the outcome is unknown."
)
FAILED, NOT_FOUND, CONFLICT, NO_ANSWER = 1, 3, 4, 5

out, err = Console(highlight=False), Console(stderr=True, highlight=False, soft_wrap=True)


class Form(StrEnum):
    """How an answer is printed."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


Output = Annotated[Form, typer.Option("--output", "-o", help="How to print the answer.")]


def show(value: Any, form: Form, table: Callable[[], RenderableType | str]) -> None:
    """Print an answer: as data, or as people read it."""
    if form is Form.JSON:
        print(json.dumps(value, indent=2, default=str))
    elif form is Form.YAML:
        print(as_yaml(value), end="")
    else:
        out.print(table())


def show_line(value: Any, form: Form) -> None:
    """One of many answers that follow each other: a line of JSON, or a document of YAML."""
    if form is Form.YAML:
        print(f"---\n{as_yaml(value)}", end="", flush=True)
    else:
        print(json.dumps(value, default=str), flush=True)


def as_yaml(value: Any) -> str:
    """YAML that a job file may hold: no aliases, and keys in the order they have."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def exit_code_of(error: PenstockError) -> int:
    """What a program can tell from how a command ended."""
    if isinstance(error, NotFound):
        return NOT_FOUND
    if isinstance(error, VersionConflict):
        return CONFLICT
    return NO_ANSWER if isinstance(error, StoreUnavailable) else FAILED


_MEND = "restore what is named from a backup, or put the category's folder away; all others go on"


def tell_unreadable(categories: Mapping[str, str]) -> None:
    """Name the categories that a list cannot show."""
    for name, why in sorted(categories.items()):
        err.print(tables.error_text(f"category {name!r} cannot be read", why, _MEND))


def fail(error: PenstockError) -> None:
    """Say what happened, why, and what to do; then end."""
    err.print(tables.error_text(error.what, error.why, error.fix))
    sys.exit(exit_code_of(error))
