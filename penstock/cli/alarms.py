"""`penstock alarm`: alarms, acknowledgements, silences, and tests of routes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.cli.jobs import Why
from penstock.cli.output import EXIT_CODES, FAILED, FOLDER, Folder, Form, Output, connect, show
from penstock.cli.tables import new_table, text, when
from penstock.client.client import new_key
from penstock.core.errors import ConfigError, NotFound

SILENCE_S_MAX = 30 * 86_400
TEST_WAIT_S = 300.0

alarm = typer.Typer(
    name="alarm",
    help="Alarms: list, acknowledge and silence them, and test the routes of notices.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
)
AlarmId = Annotated[str, typer.Argument(help="An alarm's id, as `penstock alarm ls` shows it.")]


class Severity(StrEnum):
    """Severities of alarms."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


@alarm.command("ls", epilog=EXIT_CODES)
def list_alarms(
    everything: Annotated[bool, typer.Option("--all", help="Also resolved alarms.")] = False,
    job: Annotated[str, typer.Option(help="Of one job; `fleet`: of the whole fleet; default: all.")] = "",
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Firing alarms, the worst first."""
    with connect(folder, role="reader") as client:
        found = client.alarms(job=job or None, everything=everything)
    show(found, output, lambda: alarms_table(found))


@alarm.command("show", epilog=EXIT_CODES)
def show_alarm(alarm_id: AlarmId, folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """One alarm: the problem, since when, and what to do."""
    with connect(folder, role="reader") as client:
        found = client.alarm(_id(alarm_id, "alarm", "ls --all"))
    show(found, output, lambda: alarm_table(found))


@alarm.command(epilog=EXIT_CODES)
def ack(alarm_id: AlarmId, why: Why, folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """Acknowledge an alarm: no more reminders until it is resolved or becomes worse."""
    with connect(folder, role="oncall") as client:
        found = client.acknowledge_alarm(_id(alarm_id, "alarm", "ls"), why=why, key=new_key())
    show(found, output, lambda: f"[green]acknowledged[/] {found['id']}")


@alarm.command(epilog=EXIT_CODES)
def silence(
    time: Annotated[str, typer.Option("--for", help="How long: 30m, 2h, 1d.")],
    why: Why,
    job: Annotated[str, typer.Option(help="A job; `*` is a wildcard.")] = "",
    kind: Annotated[str, typer.Option(help="A kind of alarm, e.g. crash_loop; `*` is a wildcard.")] = "",
    severity: Annotated[
        Severity, typer.Option(help="The worst severity silenced; worse alarms still send notices.")
    ] = Severity.CRITICAL,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Send no notices of some alarms for a while. Afterwards notices are sent for those that still fire."""
    if not job and not kind:
        raise ConfigError(
            "it is not clear which alarms to silence",
            why="neither --job nor --kind is given",
            fix="give one of them; --job '*' for all alarms",
        )
    for_s = seconds_of(time, what="a duration of a silence", most_s=SILENCE_S_MAX)
    with connect(folder, role="oncall") as client:
        found = client.silence_alarms(
            job=job or "*", kind=kind or "*", severity=severity.value, for_s=for_s, why=why, key=new_key()
        )
    show(found, output, lambda: f"[green]silenced[/], end it with `penstock alarm unsilence {found['id']}`")


@alarm.command(epilog=EXIT_CODES)
def silences(folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """The active silences."""
    with connect(folder, role="reader") as client:
        found = client.silences()
    show(found, output, lambda: silences_table(found))


@alarm.command(epilog=EXIT_CODES)
def unsilence(
    silence_id: Annotated[str, typer.Argument(help="A silence's id, as `penstock alarm silences` shows it.")],
    why: Why = "no longer needed",
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """End a silence early; notices of firing alarms are sent within seconds."""
    with connect(folder, role="oncall") as client:
        found = client.end_silence(_id(silence_id, "silence", "silences"), why=why, key=new_key())
    show(found, output, lambda: f"[green]ended[/] {found['id']}")


@alarm.command(epilog=EXIT_CODES)
def test(why: Why = "a test", folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """Send a test notice through each route, and show the results; exit code 1 if one failed."""
    with connect(folder, role="oncall", timeout_s=TEST_WAIT_S) as client:
        answers = client.test_alarm_routes(why=why)
    show(answers, output, lambda: answers_table(answers))
    if not all(row["is_taken"] for row in answers):
        raise typer.Exit(FAILED)


def _id(text: str, what: str, command: str) -> str:
    if re.fullmatch(r"[0-9a-f]{12}", text):
        return text
    raise NotFound(
        f"there is no {what} {text[:100]!r}",
        why="an id has twelve letters, 0 to 9 and a to f",
        fix=f"`penstock alarm {command}` lists them",
    )


Rows = Sequence[Mapping[str, Any]]
_COLOURS = {"critical": "bold red", "warning": "yellow", "info": "cyan"}


def alarms_table(found: Mapping[str, Any]) -> RenderableType:
    """One line per alarm."""
    table = new_table("alarms")
    for name in ("id", "severity"):
        table.add_column(name, no_wrap=True)
    for name in ("job", "kind", "since", "state"):
        table.add_column(name, overflow="fold")
    table.add_column("what", overflow="fold")
    for alarm in found["alarms"]:
        table.add_row(
            text(alarm["id"]),
            text(alarm["severity"], _COLOURS[alarm["severity"]]),
            text(alarm["job"], limit=40),
            text(alarm["kind"], limit=30),
            when(alarm["first_ms"]),
            text(alarm_state(alarm), limit=40),
            text(alarm["text"]),
        )
    if not found["alarms"]:
        table.caption = "no alarm is firing"
    return Group(table, text(f"routes of notices: {', '.join(found['routes'])}", "dim"))


def alarm_state(alarm: Mapping[str, Any]) -> str:
    """The alarm's state: resolved, acknowledged, silenced or firing."""
    if not alarm["is_firing"]:
        return "resolved"
    if alarm["acked_by"]:
        return f"acknowledged by {alarm['acked_by']}"
    return "silenced" if alarm["is_silenced"] else "firing"


def alarm_table(alarm: Mapping[str, Any]) -> Table:
    """Everything about one alarm."""
    table = new_table(f"alarm {alarm['id']}")
    table.show_header = False
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    rows: list[tuple[str, Any]] = [
        ("what", alarm["text"]),
        ("job", alarm["job"]),
        ("kind", f"{alarm['kind']}, detected by {alarm['source']}"),
        ("severity", Text(alarm["severity"], _COLOURS[alarm["severity"]])),
        ("state", alarm_state(alarm)),
        ("since", when(alarm["first_ms"])),
        ("last seen", when(alarm["last_ms"])),
        ("began", f"{alarm['count']} times"),
        ("notified", "not yet" if alarm["told_ms"] is None else when(alarm["told_ms"])),
    ]
    if alarm["acked_ms"] is not None:
        rows.append(("acknowledged", f"{when(alarm['acked_ms'])} by {alarm['acked_by']}"))
    if alarm["resolved_ms"] is not None:
        rows.append(("resolved", when(alarm["resolved_ms"])))
    rows += [(name, value) for name, value in alarm["evidence"].items()]
    rows.append(("what to do", alarm["what_to_do"] or "–"))
    for name, value in rows:
        table.add_row(text(name), value if isinstance(value, Text) else text(value, limit=1000))
    return table


def silences_table(silences: Rows) -> Table:
    """One line per active silence."""
    table = new_table("silences")
    for name in ("id", "job", "kind", "up to", "until", "by"):
        table.add_column(name, no_wrap=True)
    table.add_column("why", overflow="fold")
    for row in silences:
        cells = (row["id"], row["job"], row["kind"], row["severity"])
        table.add_row(
            *(text(cell, limit=40) for cell in cells),
            when(row["until_ms"]),
            text(row["by"], limit=30),
            text(row["why"]),
        )
    if not silences:
        table.caption = "no active silences"
    return table


def answers_table(answers: Rows) -> Table:
    """The results of a test notice, a line per route."""
    table = new_table("routes")
    table.add_column("route", no_wrap=True)
    table.add_column("answer", overflow="fold")
    for row in answers:
        result = text("accepted", "green") if row["is_taken"] else text(row["answer"], "red")
        table.add_row(text(row["route"]), result)
    return table


UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_FORM = re.compile(r"(?:([0-9]{1,9})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s)?")


def seconds_of(text: str, *, what: str, most_s: int) -> int:
    """Parse a duration from one second to `most_s`; anything else is refused, with an example."""
    found = _FORM.fullmatch(text.strip().lower())
    parts = found.groups() if found is not None else ()
    if not any(parts):
        raise ConfigError(
            f"{text[:100]!r} is not {what}",
            why="it is a number with d, h, m or s behind it, or several of these",
            fix="e.g. 30m, 2h, 1d, 1h30m",
        )
    seconds = sum(int(part or 0) * size for part, size in zip(parts, UNITS.values(), strict=True))
    if not 1 <= seconds <= most_s:
        raise ConfigError(
            f"{text[:100]!r} is not {what}",
            why=f"it is {seconds} s, where 1 to {most_s} are allowed",
            fix=f"name at least 1s and at most {most_s // UNITS['d']}d",
        )
    return seconds
