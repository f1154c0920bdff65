"""From a user's file to a compiled pipeline: load, package, check against the categories there are."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from penstock.client import Client, new_key
from penstock.core.errors import NeedsConsent
from penstock.jobs.provision import cannot_run, state_refusal
from penstock.streams.catalogue import StaticCatalogue, category_from_json
from penstock.streams.compiled import CompiledPipeline
from penstock.streams.packages import Package, build_package, load_pipeline
from penstock.streams.plan import compile_pipeline


def compile_file(path: Path, client: Client, *, version: str = "") -> tuple[CompiledPipeline, Package]:
    """Load the pipeline in this process (the control plane never does) and compile it."""
    pipeline = load_pipeline(path)
    package = build_package(path, pipeline.local_files, name=pipeline.name)
    catalogue = StaticCatalogue([category_from_json(item["spec"]) for item in client.categories()])
    return compile_pipeline(pipeline, catalogue, package.ref(version)), package


def check_can_run(compiled: CompiledPipeline) -> None:
    """Refuse before anything is sent what the control plane would refuse."""
    for job in compiled.jobs:
        refusal = cannot_run(job.name, job.to_json())
        if refusal is not None:
            raise refusal


def origin_of(path: Path) -> str:
    """Which file a pipeline comes from, by its name and its folder's: the same in every checkout."""
    file = path.resolve()
    return f"{file.parent.name}/{file.name}"


def check_state_kept(changes: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a plan whose submit or apply the control plane would refuse, because of its state."""
    conflicts = {str(change["job"]): str(change["conflict"]) for change in changes if change["conflict"]}
    if conflicts:
        raise state_refusal(conflicts)


def submit_compiled(client: Client, compiled: Mapping[str, Any], *, why: str, yes: bool) -> dict[str, Any]:
    """Submit, and agree to what it would stop or replace: because of `yes`, or of an answer at a terminal.

    What was agreed to is named in the request: if there is more by then, the control plane refuses again.
    """
    stops: Sequence[str] = ()
    replaces = ""
    while True:
        try:
            return client.submit_pipeline(compiled, why=why, key=new_key(), stops=stops, replaces=replaces)
        except NeedsConsent as error:
            if not yes and not _agrees(error):
                raise
            stops, replaces = error.stops, error.replaces


def _agrees(error: NeedsConsent) -> bool:
    """Ask, if there is somebody to ask."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    typer.echo(f"{error.what.removesuffix('; nothing was changed')}: {error.why}.", err=True)
    return typer.confirm("Do it?", default=False, err=True)
