"""How a command finds its control plane: the environment, or the folder that `penstock up` runs in."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.client import Client
from penstock.core.errors import EnvironmentProblem, StoreUnavailable

FOLDER = Path(".penstock")
Folder = Annotated[Path, typer.Option("--folder", help="The folder of `penstock up`.")]


def endpoint_file(folder: Path) -> Path:
    """Where a running `penstock up` says how to reach it."""
    return folder / "endpoint.json"


def token_file(folder: Path, role: str) -> Path:
    """Where `penstock up` keeps a token that it issued for this machine.

    Those of people are in a folder of their user, not in the one that the code of jobs runs in.
    """
    return tokens_folder(folder) / role


def tokens_folder(folder: Path) -> Path:
    """Where the tokens of people for a `penstock up` are kept: below XDG_CONFIG_HOME, or ~/.config."""
    named = Path(os.environ.get("XDG_CONFIG_HOME") or "")
    try:
        config = named if named.is_absolute() else Path.home() / ".config"
    except RuntimeError as error:
        raise EnvironmentProblem(
            "there is no place for tokens",
            why=f"this user has no home folder: {error}",
            fix="set HOME, or XDG_CONFIG_HOME to a folder that only this user can read",
        ) from error
    return config / "penstock" / "tokens" / hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]


def connect(folder: Path = FOLDER, *, role: str = "admin", timeout_s: float = 10) -> Client:
    """A client, from PENSTOCK_URL, PENSTOCK_TOKEN and PENSTOCK_CA, else from the folder, as a role."""
    url, token, ca = find_access(folder, role=role)
    return Client(url, token, timeout_s=timeout_s, ca=ca)


def find_access(folder: Path, *, role: str) -> tuple[str, str, str | None]:
    """URL, token and certificates, as `connect` uses them."""
    url, known_ca = os.environ.get("PENSTOCK_URL"), None
    if not url:
        url, known_ca = _endpoint(folder)
    token = os.environ.get("PENSTOCK_TOKEN") or _token(folder, role)
    return url, token, os.environ.get("PENSTOCK_CA") or known_ca


def _endpoint(folder: Path) -> tuple[str, str | None]:
    path = endpoint_file(folder)
    try:
        said: Any = json.loads(path.read_text())
        return str(said["url"]), said.get("ca")
    except FileNotFoundError as error:
        raise StoreUnavailable(
            f"no control plane runs in the folder {str(folder)!r}",
            why=f"there is no {path}, and PENSTOCK_URL is not set",
            fix="start one with `penstock up`, or name its folder with --folder",
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentProblem(
            f"cannot tell where the control plane of {str(folder)!r} answers",
            why=f"{path} cannot be read: {error}",
            fix="start `penstock up` there again, or set PENSTOCK_URL",
        ) from error


def _token(folder: Path, role: str) -> str:
    path = token_file(folder, role)
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(
            "no token to show",
            why=f"{path} cannot be read ({error}), and PENSTOCK_TOKEN is not set",
            fix="set PENSTOCK_TOKEN, or use the folder of a `penstock up` that you started",
        ) from error
