"""Output of commands: tables, JSON or YAML, errors in three parts, exit codes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console, RenderableType

from penstock.cli import tables
from penstock.client.client import Client
from penstock.core.errors import (
    EnvironmentProblem,
    NotFound,
    PenstockError,
    StoreUnavailable,
    VersionConflict,
)
from penstock.core.folder import endpoint_file, token_file
from penstock.settings import FOLDER

EXIT_CODES = (
    "Exit codes: 0 done, 1 refused or failed (see stderr), 2 wrong usage, 3 not found, 4 version conflict, "
    "5 the control plane does not answer or the outcome is unknown."
)
FAILED, NOT_FOUND, CONFLICT, NO_ANSWER = 1, 3, 4, 5

out, err = Console(highlight=False), Console(stderr=True, highlight=False, soft_wrap=True)


class Form(StrEnum):
    """Output formats."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


Output = Annotated[Form, typer.Option("--output", "-o", help="The output format.")]


def show(value: Any, form: Form, table: Callable[[], RenderableType | str]) -> None:
    """Print a result as a table, JSON or YAML."""
    if form is Form.JSON:
        print(json.dumps(value, indent=2, default=str))
    elif form is Form.YAML:
        print(as_yaml(value), end="")
    else:
        out.print(table())


def show_line(value: Any, form: Form) -> None:
    """Print one of a sequence of results: a line of JSON, or a YAML document."""
    if form is Form.YAML:
        print(f"---\n{as_yaml(value)}", end="", flush=True)
    else:
        print(json.dumps(value, default=str), flush=True)


def as_yaml(value: Any) -> str:
    """YAML in the form of a job file: no aliases, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def exit_code_of(error: PenstockError) -> int:
    """The exit code of an error."""
    if isinstance(error, NotFound):
        return NOT_FOUND
    if isinstance(error, VersionConflict):
        return CONFLICT
    return NO_ANSWER if isinstance(error, StoreUnavailable) else FAILED


_RESTORE = "restore the named file from a backup, or move the category's folder away; other categories work"


def show_unreadable(categories: Mapping[str, str]) -> None:
    """Print the errors of categories that cannot be read."""
    for name, why in sorted(categories.items()):
        err.print(tables.error_text(f"category {name!r} cannot be read", why, _RESTORE))


def fail(error: PenstockError) -> None:
    """Print an error in three parts, and exit with its code."""
    err.print(tables.error_text(error.what, error.why, error.fix))
    sys.exit(exit_code_of(error))


__all__ = ["FOLDER", "Folder", "connect", "find_access"]

Folder = Annotated[
    Path, typer.Option("--folder", envvar="PENSTOCK_FOLDER", help="The folder of `penstock up`.")
]


def connect(folder: Path = FOLDER, *, role: str = "admin", timeout_s: float = 10) -> Client:
    """A client: from PENSTOCK_URL, PENSTOCK_TOKEN and PENSTOCK_CA, else from the folder, as a role."""
    url, token, ca = find_access(folder, role=role)
    return Client(url, token, timeout_s=timeout_s, ca=ca)


def find_access(folder: Path, *, role: str) -> tuple[str, str, str | None]:
    """URL, token and certificate authority, as `connect` uses them."""
    url, known_ca = os.environ.get("PENSTOCK_URL"), None
    if not url:
        url, known_ca = _endpoint(folder)
    token = os.environ.get("PENSTOCK_TOKEN") or _token(folder, role)
    return url, token, os.environ.get("PENSTOCK_CA") or known_ca


def _endpoint(folder: Path) -> tuple[str, str | None]:
    path = endpoint_file(folder)
    try:
        endpoint: Any = json.loads(path.read_text())
        return str(endpoint["url"]), endpoint.get("ca")
    except FileNotFoundError as error:
        raise StoreUnavailable(
            f"no control plane runs in the folder {str(folder)!r}",
            why=f"there is no {path}, and PENSTOCK_URL is not set",
            fix="start one with `penstock up`, or name its folder with --folder",
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentProblem(
            f"cannot find the address of the control plane of {str(folder)!r}",
            why=f"{path} cannot be read: {error}",
            fix="start `penstock up` there again, or set PENSTOCK_URL",
        ) from error


def _token(folder: Path, role: str) -> str:
    path = token_file(folder, role)
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(
            "there is no token",
            why=f"{path} cannot be read ({error}), and PENSTOCK_TOKEN is not set",
            fix="set PENSTOCK_TOKEN, or use the folder of a `penstock up` that you started",
        ) from error
