"""`penstock doctor`, `explain`, `job manage` and `job readmit`: findings and decisions of policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from penstock.cli.output import FOLDER, Folder, Form, Output, connect, show
from penstock.cli.tables import text, when

TIMEOUT_S = 100  # a user's policy process may have to start first
_COLOURS = {
    **dict.fromkeys(("applied", "done", "would be done", "kept"), "green"),
    **dict.fromkeys(("held", "advised", "alert", "undone", "useless"), "yellow"),
    **dict.fromkeys(("broken", "fights", "not done"), "red"),
}
JobName = Annotated[str, typer.Argument(help="The job.")]


def manage(
    name: JobName,
    policy: Annotated[str, typer.Option("--policy", "-p", help="Only this one; default: all.")] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done; change nothing.")
    ] = False,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Evaluate a job's policies now: each answer, the change made, and changes refused."""
    with connect(folder, role="oncall", timeout_s=TIMEOUT_S) as client:
        found = client.manage_job(name, policy=policy or None, dry_run=dry_run)
    show(found, output, lambda: managed_text(found))


def readmit(
    name: JobName,
    why: Annotated[str, typer.Option("--why", help="The reason, stored with the change.")],
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """End all exclusions of a job from containers."""
    with connect(folder, role="oncall") as client:
        found = client.readmit_job(name, why=why)
    show(found, output, lambda: text(f"{found['lifted']} exclusions of {name} ended"))


def explain(
    job: JobName,
    limit: Annotated[int, typer.Option("--limit", "-n", help="The newest N.", min=1, max=1000)] = 20,
    before: Annotated[
        int | None, typer.Option("--before", help="Only decisions before this id: the next page.", min=1)
    ] = None,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Decisions about a job with reasons, newest first; also why nothing was done."""
    with connect(folder, role="reader") as client:
        found = client.decisions(job, before=before, limit=limit)
    show(found, output, lambda: decisions_text(found))


def managed_text(found: Mapping[str, Any]) -> RenderableType:
    """The change, then a paragraph for each policy, then the alerts."""
    change, parts = found["change"], list[RenderableType]()
    if change is None:
        parts.append(text("nothing was changed", "bold"))
    else:
        head = text(change["outcome"], _COLOURS.get(change["outcome"], ""))
        parts.append(head.append("  ").append_text(text(f"{change['policy']}: {change['what']}", "bold")))
        parts.append(_line("because", change["why"]))
        if change["refused"]:
            parts.append(_line("refused", change["refused"]))
    for said in found["said"]:
        parts += _said(said, is_dry=found["is_dry"])
    for alert in found["alerts"]:
        parts.append(text(f"alarm {alert['severity']}  {alert['policy']}: {alert['text']}", limit=600))
        if alert["what_to_do"]:
            parts.append(_line("do", alert["what_to_do"], "cyan"))
    return Group(*parts)


def decisions_text(found: Mapping[str, Any]) -> RenderableType:
    """A paragraph for each decision."""
    parts: list[RenderableType] = []
    for entry in found["decisions"]:
        head = Text(f"{when(entry['at_ms'])}  ", "dim").append_text(text(entry["actor"], "cyan", 60))
        parts.append(head.append("  ").append_text(text(entry["decision"], "bold", 400)))
        data = dict(entry["data"])
        said = data.pop("said", None)
        if isinstance(said, list):
            for each in said:
                parts += _said(each, is_dry=False)
        else:
            parts.append(_line("because", entry["reason"]))
        shown = ", ".join(f"{name} {value}" for name, value in data.items())
        if shown:
            parts.append(_line("with", shown, "dim"))
    if not parts:
        parts.append(text(f"no decisions about {found['job']} yet"))
    if found["next"] is not None:
        parts.append(text(f"next page: --before {found['next']}", "dim"))
    return Group(*parts)


def _said(said: Mapping[str, Any], *, is_dry: bool) -> list[RenderableType]:
    outcome = str(said.get("outcome", ""))
    shown = "would be applied" if is_dry and outcome == "applied" else outcome
    head = Text("  ").append_text(text(said.get("policy", ""), "bold", 60)).append("  ")
    lines: list[RenderableType] = [head.append_text(text(shown, _COLOURS.get(outcome, "dim")))]
    lines.append(_line("because", said.get("reason", "")))
    inputs = said.get("inputs") or {}
    numbers = ", ".join(f"{name} {value}" for name, value in inputs.items())
    for label, value in (("seen", numbers), ("formula", said.get("formula")), ("bound", said.get("bound"))):
        if value:
            lines.append(_line(label, value, "dim"))
    return lines


def _line(label: str, value: Any, style: str = "") -> Text:
    return Text(f"    {label:<9}").append_text(text(value, style, 800))


_SEVERITY_COLOURS = {"critical": "bold red", "warning": "yellow", "info": "dim"}


def doctor(
    job: Annotated[str, typer.Argument(help="The job.")],
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Diagnose a job: findings with cause, confidence and commands; causes that were ruled out."""
    with connect(folder, role="reader") as client:
        found = client.doctor(job)
    show(found, output, lambda: doctor_text(found))


def doctor_text(found: Mapping[str, Any]) -> RenderableType:
    """A paragraph for each finding, the worst first."""
    parts: list[RenderableType] = []
    for finding in found["findings"]:
        head = text(finding["severity"], _SEVERITY_COLOURS.get(str(finding["severity"]), ""))
        parts.append(head.append("  ").append_text(text(finding["symptom"], limit=500)))
        sure = f" ({finding['confidence']:.0%} sure)"
        parts.append(Text("  because  ").append_text(text(finding["cause"] + sure, limit=600)))
        shown = ", ".join(f"{name} {value}" for name, value in finding["evidence"].items())
        if shown:
            parts.append(Text("  seen     ").append_text(text(shown, "dim", limit=500)))
        for advice in finding["todo"]:
            parts.append(Text("  do       ").append_text(text(advice["text"], limit=500)))
            if advice["command"]:
                parts.append(Text("           ").append_text(text(advice["command"], "cyan", limit=500)))
        parts.append(Text(""))
    if not found["findings"]:
        parts.append(text(f"no problem found in {found['job']}"))
    parts.append(text(f"ruled out: {', '.join(found['ruled_out']) or 'nothing'}", "dim", limit=1000))
    for item in found["not_known"]:
        parts.append(text(f"unknown: {item['rule']}: {item['why']}", "dim", limit=300))
    return Group(*parts)
