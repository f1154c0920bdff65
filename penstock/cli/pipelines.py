"""`penstock plan`, `submit` and `package`: compile a user's file into jobs, and package its code."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import tables as change_tables
from penstock.cli.output import FOLDER, Folder, Form, Output, as_yaml, connect, out, show
from penstock.client.client import Client, new_key
from penstock.core.errors import NeedsConsent
from penstock.jobs.provision import cannot_run, state_refusal
from penstock.streams.catalogue import StaticCatalogue, category_from_json
from penstock.streams.compile.compiled import CompiledPipeline
from penstock.streams.compile.drawing import draw_plan
from penstock.streams.compile.packages import Package, build_package, load_pipeline
from penstock.streams.compile.plan import compile_pipeline

Why = Annotated[str, typer.Option("--why", help="The reason, stored with the change.")]
Reset = Annotated[
    list[str] | None,
    typer.Option("--reset-state", help="A job that restarts with empty state; repeatable."),
]
PipelineFile = Annotated[
    Path, typer.Argument(help="A Python file that makes one Pipeline, or a .sql file of INSERTs.")
]


def plan(
    pipeline: PipelineFile, folder: Folder = FOLDER, reset_state: Reset = None, output: Output = Form.TABLE
) -> None:
    """Draw a pipeline and its jobs, and show what a submit would change, or why it would be refused."""

    with connect(folder, role="developer") as client:
        compiled, _ = compile_file(pipeline, client)
        request = {**compiled.to_json(), "reset_state": reset_state or [], "origin": origin_of(pipeline)}
        planned = client.plan_submit(request)
    if output is Form.TABLE:
        out.print(draw_plan(compiled), markup=False)
    result = {"compiled": compiled.to_json(), **planned, "notes": list(compiled.notes)}
    show(result, output, lambda: change_tables.changes_tables(planned))
    check_can_run(compiled)
    check_state_kept(planned["changes"])


def submit(
    pipeline: PipelineFile,
    folder: Folder = FOLDER,
    why: Why = "submitted",
    version: Annotated[str, typer.Option(help="A version label; the package's identity is its hash.")] = "",
    reset_state: Reset = None,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Stop jobs that the file no longer has; replace another file's."),
    ] = False,
    output: Output = Form.TABLE,
) -> None:
    """Package a pipeline's code and submit its jobs.

    If running jobs would stop, or the pipeline was submitted from another file, it asks first; without a
    terminal it refuses, unless --yes is given.
    """

    with connect(folder, role="developer", timeout_s=60) as client:
        compiled, package = compile_file(pipeline, client, version=version)
        check_can_run(compiled)
        client.put_package(package.hash, package.data)
        request = {**compiled.to_json(), "reset_state": reset_state or [], "origin": origin_of(pipeline)}
        answer = submit_compiled(client, request, why=why, yes=yes)
    show(answer, output, lambda: change_tables.submitted_text(answer))


def compile_file(path: Path, client: Client, *, version: str = "") -> tuple[CompiledPipeline, Package]:
    """Load the pipeline in this process (the control plane never does) and compile it."""
    pipeline = load_pipeline(path)
    package = build_package(path, pipeline.local_files, name=pipeline.name)
    catalogue = StaticCatalogue([category_from_json(item["spec"]) for item in client.categories()])
    return compile_pipeline(pipeline, catalogue, package.ref(version)), package


def check_can_run(compiled: CompiledPipeline) -> None:
    """Refuse jobs that the control plane would refuse, before anything is sent."""
    for job in compiled.jobs:
        refusal = cannot_run(job.name, job.to_json())
        if refusal is not None:
            raise refusal


def origin_of(path: Path) -> str:
    """The pipeline's file as folder/file name, which is the same in every checkout."""
    file = path.resolve()
    return f"{file.parent.name}/{file.name}"


def check_state_kept(changes: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a plan whose submit or apply would be refused because of the jobs' state."""
    conflicts = {str(change["job"]): str(change["conflict"]) for change in changes if change["conflict"]}
    if conflicts:
        raise state_refusal(conflicts)


def submit_compiled(client: Client, compiled: Mapping[str, Any], *, why: str, yes: bool) -> dict[str, Any]:
    """Submit; consent to what it would stop or replace is given by `yes`, or by an answer at the terminal.

    The request lists what was consented to; if there is more by then, the control plane refuses again.
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
    """Ask for consent, if there is a terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    typer.echo(f"{error.what.removesuffix('; nothing was changed')}: {error.why}.", err=True)
    return typer.confirm("Do it?", default=False, err=True)


def package(
    file: Annotated[Path, typer.Argument(help="The job's entry file.")],
    include: Annotated[
        list[Path] | None, typer.Option("--include", help="A file or folder that it imports; repeatable.")
    ] = None,
    version: Annotated[str, typer.Option(help="A version label; the identity is the hash.")] = "",
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Package code, upload it, and print its reference for a job file."""
    built = build_package(file, include or ())
    with connect(folder, role="developer", timeout_s=60) as client:
        client.put_package(built.hash, built.data)
    reference = built.ref(version).model_dump()
    show(reference, output, lambda: as_yaml({"package": reference}))
