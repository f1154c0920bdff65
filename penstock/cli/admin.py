"""`penstock oncall`, `config`, `layer`, `token` and `audit`: settings of jobs, access, and the audit log."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from penstock.cli import tables as change_tables
from penstock.cli.jobs import JobName, Version, Why
from penstock.cli.output import EXIT_CODES, FOLDER, Folder, Form, Output, connect, show
from penstock.client.client import new_key
from penstock.core.errors import ConfigError
from penstock.core.system_clock import SystemClock

oncall = typer.Typer(
    name="oncall",
    help="Override settings of one job above all other layers, or clear the override.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
)
config = typer.Typer(
    name="config",
    help="The merged config of a job: every field with its layer, actor, time and reason.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
)


@oncall.command("set", epilog=EXIT_CODES)
def set_fields(
    name: JobName,
    settings: Annotated[list[str], typer.Argument(help="field=value …; dots for nested fields.")],
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
    fields: Annotated[list[str] | None, typer.Argument(help="Fields to clear; default: all.")] = None,
    version: Version = None,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Clear fields of the oncall layer, or all of it."""
    if fields:
        bad = next((field for field in fields if "=" in field or not field), None)
        if bad is not None:
            raise ConfigError(
                f"not a field: {bad!r}", why="`clear` takes field names without values", fix="e.g. task_count"
            )
        _patch(name, dict.fromkeys(fields), why, version, folder, output)
        return
    with connect(folder, role="oncall") as client:
        if not any(row["layer"] == "oncall" and row["body"] for row in client.layers(name)["layers"]):
            result = {"job": name, "version": None}
            show(result, output, lambda: f"the oncall layer of {name} is empty: nothing to clear")
            return
        at = client.clear_layer(name, "oncall", why=why, key=new_key(), expected_version=version)
    show({"job": name, "version": at}, output, lambda: f"[green]cleared[/] {name}, expected version {at}")


@config.command("show", epilog=EXIT_CODES)
def show_config(
    name: JobName,
    with_layers: Annotated[bool, typer.Option("--layers", help="Also the values of each layer.")] = False,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Every setting of a job, with the layer that sets it, actor, time and reason."""
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
            fix="e.g. task_count=4; `penstock oncall clear` removes one",
        )
    try:
        return path, json.loads(value, parse_constant=str)
    except (ValueError, RecursionError):
        return path, value


layer = typer.Typer(
    name="layer", help="Kinds of layers of every job's config.", epilog=EXIT_CODES, no_args_is_help=True
)
token = typer.Typer(
    name="token",
    help="Access tokens: issue, list, revoke.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
)


@layer.command("ls", epilog=EXIT_CODES)
def list_layers(folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """All kinds of layers, lowest first, and the roles that may write them."""
    with connect(folder, role="reader") as client:
        kinds = client.layer_kinds()
    show(kinds, output, lambda: change_tables.layer_kinds_table(kinds))


@layer.command("add", epilog=EXIT_CODES)
def add_layer(
    name: Annotated[str, typer.Argument(help="The layer's name.")],
    precedence: Annotated[
        int, typer.Option(help="The larger wins; base 0, provisioner 10, scaler 20, oncall 30.")
    ],
    writers: Annotated[list[str], typer.Option("--writer", help="A role that may write it; repeatable.")],
    why: Why,
    replaces_plan: Annotated[
        bool,
        typer.Option("--replaces-plan", help="A change replaces the open plan instead of waiting for it."),
    ] = False,
    fields: Annotated[
        list[str] | None,
        typer.Option("--field", help="A field it may set; repeatable; default: any its writers may set."),
    ] = None,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Add a kind of layer for a component of your own."""
    with connect(folder, role="admin") as client:
        kinds = client.add_layer_kind(
            name,
            precedence,
            writers,
            why=why,
            key=new_key(),
            replaces_plan=replaces_plan,
            fields=fields or (),
        )
    show(kinds, output, lambda: change_tables.layer_kinds_table(kinds))


@token.command("new", epilog=EXIT_CODES)
def new_token(
    name: Annotated[
        str, typer.Argument(help="The token's owner; with role container: the container's name.")
    ],
    role: Annotated[str, typer.Option(help="reader, developer, oncall, scaler, container or admin.")],
    why: Why,
    days: Annotated[int, typer.Option(help="Days until it expires.", min=1, max=3650)] = 365,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Issue a token. It is printed only once, and cannot be shown again."""
    with connect(folder, role="admin") as client:
        issued = client.issue_token(name, role, days=days, why=why, key=new_key())
    show(issued, output, lambda: str(issued["token"]))


@token.command("ls", epilog=EXIT_CODES)
def list_tokens(folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """Every token ever issued, without its secret."""
    with connect(folder, role="admin") as client:
        tokens = client.tokens()
    show(tokens, output, lambda: change_tables.tokens_table(tokens, SystemClock().now_ms()))


@token.command("revoke", epilog=EXIT_CODES)
def revoke_token(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="The token's id, from `penstock token ls`.")],
    why: Why,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Revoke a token: it is refused from now on."""
    with connect(folder, role="admin") as client:
        row = client.revoke_token(token_id, why=why, key=new_key())
    show(row, output, lambda: f"[green]revoked[/] {row['id']} of {row['name']} ({row['role']})")


def audit(
    subject: Annotated[str, typer.Argument(help="A job, layer, pipeline or token id; default: all.")] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", help="The newest N.", min=1, max=1000)] = 50,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Audit log: every change with actor, time and reason, newest first."""
    with connect(folder, role="developer") as client:
        entries = client.audit(subject=subject or None, limit=limit)
    show(entries, output, lambda: change_tables.audit_table(entries))
