"""`penstock oncall` and `penstock config`: overruling settings of a job, and who decided which."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from penstock.cli import tables as change_tables
from penstock.cli.connection import FOLDER, Folder, connect
from penstock.cli.jobs import JobName, Version, Why
from penstock.cli.output import EXIT_CODES, Form, Output, show
from penstock.client.client import new_key
from penstock.core.errors import ConfigError

oncall = typer.Typer(
    name="oncall",
    help="Override settings of one job above everybody else, or take that back.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
)
config = typer.Typer(
    name="config",
    help="The merged config of a job: every field with who decided it, when and why.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
)


@oncall.command("set", epilog=EXIT_CODES)
def set_fields(
    name: JobName,
    settings: Annotated[list[str], typer.Argument(help="field=value …; dots reach inside.")],
    why: Why,
    version: Version = None,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Set fields above every other layer."""
    changes = dict(_setting(text) for text in settings)
    _patch(name, changes, why, version, folder, output)


@oncall.command("clear", epilog=EXIT_CODES)
def clear_fields(
    name: JobName,
    why: Why,
    fields: Annotated[
        list[str] | None, typer.Argument(help="Fields to take back; none: all of them.")
    ] = None,
    version: Version = None,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Take back what oncall says: some fields, or everything."""
    if fields:
        bad = next((field for field in fields if "=" in field or not field), None)
        if bad is not None:
            raise ConfigError(
                f"not a field: {bad!r}", why="what is taken back has no value", fix="e.g. task_count"
            )
        _patch(name, dict.fromkeys(fields), why, version, folder, output)
        return
    with connect(folder, role="oncall") as client:
        if not any(row["layer"] == "oncall" and row["body"] for row in client.layers(name)["layers"]):
            said = {"job": name, "version": None}
            show(said, output, lambda: f"oncall says nothing about {name}: nothing to take back")
            return
        at = client.clear_layer(name, "oncall", why=why, key=new_key(), expected_version=version)
    show({"job": name, "version": at}, output, lambda: f"[green]cleared[/] {name}, expected version {at}")


@config.command("show", epilog=EXIT_CODES)
def show_config(
    name: JobName,
    with_layers: Annotated[bool, typer.Option("--layers", help="Also what each layer says.")] = False,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Every setting of a job, and which layer, who, when and why decided it."""
    with connect(folder, role="reader") as client:
        job = client.job(name)
    said: dict[str, Any] = {"config": job["config"], "provenance": job["provenance"]}
    if with_layers:
        said["layers"] = job["layers"]
    show(said, output, lambda: change_tables.config_tables(job, with_layers=with_layers))


def _patch(
    name: str, changes: dict[str, Any], why: str, version: int | None, folder: Any, output: Form
) -> None:
    with connect(folder, role="oncall") as client:
        at = client.patch_layer(name, "oncall", changes, why=why, key=new_key(), expected_version=version)
    said = {"job": name, "version": at, "changes": changes}
    show(said, output, lambda: f"[green]written[/] {name} is at expected version {at}")


def _setting(text: str) -> tuple[str, Any]:
    path, equals, value = text.partition("=")
    if not equals or not path or not value:
        raise ConfigError(
            f"not a setting: {text!r}",
            why="it must be field=value",
            fix="e.g. task_count=4; `penstock oncall clear` takes one back",
        )
    try:
        return path, json.loads(value, parse_constant=str)
    except (ValueError, RecursionError):
        return path, value
