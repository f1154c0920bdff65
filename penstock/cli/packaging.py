"""`penstock package`: puts code where jobs that are written by hand can name it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.connection import FOLDER, Folder, connect
from penstock.cli.output import Form, Output, as_yaml, show
from penstock.streams.packages import build_package


def package(
    file: Annotated[Path, typer.Argument(help="The file that a job enters by.")],
    include: Annotated[
        list[Path] | None, typer.Option("--include", help="A file or folder that it imports; repeat it.")
    ] = None,
    version: Annotated[str, typer.Option(help="For people; its hash is its identity.")] = "",
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Package code, keep it with the control plane, and say how a job names it."""
    built = build_package(file, include or ())
    with connect(folder, role="developer", timeout_s=60) as client:
        client.put_package(built.hash, built.data)
    said = built.ref(version).to_json()
    show(said, output, lambda: as_yaml({"package": said}))
