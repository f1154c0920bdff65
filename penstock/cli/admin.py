"""`penstock layer`, `penstock token`, `penstock audit`: what an installation has, and who changed it."""

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


layer = typer.Typer(
    name="layer", help="The levels of every job's config.", epilog=EXIT_CODES, no_args_is_help=True
)
token = typer.Typer(
    name="token",
    help="Who may call: issue tokens, list them, take them back.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
)


@layer.command("ls", epilog=EXIT_CODES)
def list_layers(folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """The layers there are, lowest first, and which roles write them."""
    with connect(folder, role="reader") as client:
        kinds = client.layer_kinds()
    show(kinds, output, lambda: change_tables.layer_kinds_table(kinds))


@layer.command("add", epilog=EXIT_CODES)
def add_layer(
    name: Annotated[str, typer.Argument(help="The layer's name.")],
    precedence: Annotated[
        int, typer.Option(help="Larger ones win; base 0, provisioner 10, scaler 20, oncall 30.")
    ],
    writers: Annotated[
        list[str], typer.Option("--writer", help="A role that may write it; several: repeat it.")
    ],
    why: Why,
    replaces_plan: Annotated[
        bool, typer.Option("--replaces-plan", help="A change of it does not wait for the open plan.")
    ] = False,
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--field", help="A field it may set; several: repeat it; none: any its writers may set."
        ),
    ] = None,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Add a layer for a component of its own."""
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
    name: Annotated[str, typer.Argument(help="Whose it is; of role container: which container's.")],
    role: Annotated[str, typer.Option(help="reader, developer, oncall, scaler, container or admin.")],
    why: Why,
    days: Annotated[int, typer.Option(help="It ends after so many.", min=1, max=3650)] = 365,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Issue a token. It is printed this once: nobody can show it again."""
    with connect(folder, role="admin") as client:
        issued = client.issue_token(name, role, days=days, why=why, key=new_key())
    show(issued, output, lambda: str(issued["token"]))


@token.command("ls", epilog=EXIT_CODES)
def list_tokens(folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """Every token ever issued, without the tokens themselves."""
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
    """Take a token back: it is refused from now on."""
    with connect(folder, role="admin") as client:
        row = client.revoke_token(token_id, why=why, key=new_key())
    show(row, output, lambda: f"[green]revoked[/] {row['id']} of {row['name']} ({row['role']})")


def audit(
    subject: Annotated[
        str, typer.Argument(help="A job, layer, pipeline or token id; none: everything.")
    ] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", help="The newest so many.", min=1, max=1000)] = 50,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Who changed what, when and why, newest first."""
    with connect(folder, role="developer") as client:
        entries = client.audit(subject=subject or None, limit=limit)
    show(entries, output, lambda: change_tables.audit_table(entries))
