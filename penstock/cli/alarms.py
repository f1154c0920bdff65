"""`penstock alarm` and `penstock capacity`: what is wrong, who looks after it, what the cluster has left."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

import typer

from penstock.cli import alarm_tables
from penstock.cli.connection import FOLDER, Folder, connect
from penstock.cli.durations import seconds_of
from penstock.cli.jobs import Why
from penstock.cli.output import EXIT_CODES, FAILED, Form, Output, show
from penstock.client import new_key
from penstock.core.errors import ConfigError, NotFound

SILENCE_S_MAX = 30 * 86_400
TEST_WAIT_S = 300.0

alarm = typer.Typer(
    name="alarm",
    help="Alarms: what fires, who looks after it, what is silent, and by which routes people are told.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
)
AlarmId = Annotated[str, typer.Argument(help="An alarm's id, as `penstock alarm ls` shows it.")]


class Severity(StrEnum):
    """How bad."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


@alarm.command("ls", epilog=EXIT_CODES)
def list_alarms(
    everything: Annotated[bool, typer.Option("--all", help="Also those that are over.")] = False,
    job: Annotated[str, typer.Option(help="Of one job; `fleet`: of no single one. None: all.")] = "",
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """What fires now, the worst first."""
    with connect(folder, role="reader") as client:
        found = client.alarms(job=job or None, everything=everything)
    show(found, output, lambda: alarm_tables.alarms_table(found))


@alarm.command("show", epilog=EXIT_CODES)
def show_alarm(alarm_id: AlarmId, folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """One alarm: what is wrong, since when, and what to do."""
    with connect(folder, role="reader") as client:
        found = client.alarm(_id(alarm_id, "alarm", "ls --all"))
    show(found, output, lambda: alarm_tables.alarm_table(found))


@alarm.command(epilog=EXIT_CODES)
def ack(alarm_id: AlarmId, why: Why, folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """Say that you look after it: no more reminders until it is over or gets worse."""
    with connect(folder, role="oncall") as client:
        found = client.acknowledge_alarm(_id(alarm_id, "alarm", "ls"), why=why, key=new_key())
    show(found, output, lambda: f"[green]acknowledged[/] {found['id']}")


@alarm.command(epilog=EXIT_CODES)
def silence(
    time: Annotated[str, typer.Option("--for", help="How long: 30m, 2h, 1d.")],
    why: Why,
    job: Annotated[str, typer.Option(help="A job; `*` stands for any letters.")] = "",
    kind: Annotated[str, typer.Option(help="A kind of alarm, e.g. crash_loop; `*` as above.")] = "",
    severity: Annotated[
        Severity, typer.Option(help="Up to which; worse ones are told all the same.")
    ] = Severity.CRITICAL,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Tell nobody of some alarms for a while. They still show here, and what fires then is told."""
    if not job and not kind:
        raise ConfigError(
            "nothing says which alarms",
            why="neither --job nor --kind is given",
            fix="name one of them; --job '*' if all are meant",
        )
    for_s = seconds_of(time, what="a time to be silent for", most_s=SILENCE_S_MAX)
    with connect(folder, role="oncall") as client:
        found = client.silence_alarms(
            job=job or "*", kind=kind or "*", severity=severity.value, for_s=for_s, why=why, key=new_key()
        )
    show(found, output, lambda: f"[green]silenced[/], end it with `penstock alarm unsilence {found['id']}`")


@alarm.command(epilog=EXIT_CODES)
def silences(folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """The silences that hold."""
    with connect(folder, role="reader") as client:
        found = client.silences()
    show(found, output, lambda: alarm_tables.silences_table(found))


@alarm.command(epilog=EXIT_CODES)
def unsilence(
    silence_id: Annotated[str, typer.Argument(help="A silence's id, as `penstock alarm silences` shows it.")],
    why: Why = "no longer needed",
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """End a silence before its time; what fires is told within seconds."""
    with connect(folder, role="oncall") as client:
        found = client.end_silence(_id(silence_id, "silence", "silences"), why=why, key=new_key())
    show(found, output, lambda: f"[green]ended[/] {found['id']}")


@alarm.command(epilog=EXIT_CODES)
def test(why: Why = "a test", folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """Send a notice through each route, and say what each answered; 1 if one did not take it."""
    with connect(folder, role="oncall", timeout_s=TEST_WAIT_S) as client:
        answers = client.test_alarm_routes(why=why)
    show(answers, output, lambda: alarm_tables.answers_table(answers))
    if not all(row["is_taken"] for row in answers):
        raise typer.Exit(FAILED)


def capacity(folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """What the cluster has, how much is reserved and used, what is left, and who was stopped for it."""
    with connect(folder, role="reader") as client:
        found = client.capacity()
    show(found, output, lambda: alarm_tables.capacity_tables(found))


def _id(text: str, what: str, command: str) -> str:
    if re.fullmatch(r"[0-9a-f]{12}", text):
        return text
    raise NotFound(
        f"there is no {what} {text[:100]!r}",
        why="an id has twelve letters, 0 to 9 and a to f",
        fix=f"`penstock alarm {command}` shows them",
    )
