"""How a command finds its control plane: options, environment, or the folder that `penstock up` runs in."""

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
    """A client, from PENSTOCK_URL and PENSTOCK_TOKEN, else from the folder."""
    url, token = os.environ.get("PENSTOCK_URL"), os.environ.get("PENSTOCK_TOKEN")
    if url is None:
        try:
            url = str(json.loads(endpoint_file(folder).read_text())["url"])
        except (FileNotFoundError, ValueError, KeyError) as error:
            raise EnvironmentProblem(
                f"no control plane runs in the folder {str(folder)!r}",
                why=f"there is no {endpoint_file(folder)}, and PENSTOCK_URL is not set",
                fix="start one with `penstock up`, or name its folder with --folder",
            ) from error
    if token is None:
        try:
            token = token_file(folder, role).read_text().strip()
        except OSError as error:
            raise EnvironmentProblem(
                "no token to show",
                why=f"{token_file(folder, role)} cannot be read, and PENSTOCK_TOKEN is not set",
                fix="set PENSTOCK_TOKEN, or use the folder of the `penstock up` that you started",
            ) from error
    return Client(url, token, timeout_s=timeout_s)
