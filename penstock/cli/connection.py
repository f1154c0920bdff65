"""How a command finds its control plane: the environment, or the folder that `penstock up` runs in."""

from __future__ import annotations

import json
import os
from pathlib import Path

from penstock.client import Client
from penstock.core.errors import EnvironmentProblem

FOLDER = Path(".penstock")


def endpoint_file(folder: Path) -> Path:
    """Where a running `penstock up` says how to reach it."""
    return folder / "endpoint.json"


def token_file(folder: Path, role: str) -> Path:
    """Where `penstock up` keeps the tokens it issued for this machine."""
    return folder / "tokens" / role


def connect(folder: Path = FOLDER, *, role: str = "admin", timeout_s: float = 10) -> Client:
    """A client, from PENSTOCK_URL and PENSTOCK_TOKEN, else from the folder and its token of a role."""
    url = os.environ.get("PENSTOCK_URL") or _url(folder)
    token = os.environ.get("PENSTOCK_TOKEN") or _token(folder, role)
    return Client(url, token, timeout_s=timeout_s)


def _url(folder: Path) -> str:
    path = endpoint_file(folder)
    try:
        return str(json.loads(path.read_text())["url"])
    except FileNotFoundError as error:
        raise EnvironmentProblem(
            f"no control plane runs in the folder {str(folder)!r}",
            why=f"there is no {path}, and PENSTOCK_URL is not set",
            fix="start one with `penstock up`, or name its folder with --folder",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
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
