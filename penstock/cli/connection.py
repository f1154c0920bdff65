"""How a command finds its control plane: the environment, or the folder that `penstock up` runs in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.client.client import Client
from penstock.core.errors import EnvironmentProblem, StoreUnavailable
from penstock.core.folder import endpoint_file, token_file
from penstock.settings import FOLDER

__all__ = ["FOLDER", "Folder", "connect", "find_access"]

Folder = Annotated[
    Path, typer.Option("--folder", envvar="PENSTOCK_FOLDER", help="The folder of `penstock up`.")
]


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
