"""`penstock doctor`: what is wrong with a job, why, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from penstock.cli.cells import text
from penstock.cli.connection import FOLDER, Folder, connect
from penstock.cli.output import Form, Output, show

_COLOURS = {"critical": "bold red", "warning": "yellow", "info": "dim"}


def doctor(
    job: Annotated[str, typer.Argument(help="The job.")],
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """What is wrong with a job, why, how sure that is, and what to do; and what was ruled out."""
    with connect(folder, role="reader") as client:
        found = client.doctor(job)
    show(found, output, lambda: doctor_text(found))


def doctor_text(found: Mapping[str, Any]) -> RenderableType:
    """A paragraph for each finding, the worst first."""
    parts: list[RenderableType] = []
    for finding in found["findings"]:
        head = text(finding["severity"], _COLOURS.get(str(finding["severity"]), ""))
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
        parts.append(text(f"nothing is wrong with {found['job']} that shows"))
    parts.append(text(f"well: {', '.join(found['ruled_out']) or 'nothing'}", "dim", limit=1000))
    for item in found["not_known"]:
        parts.append(text(f"not known: {item['rule']}: {item['why']}", "dim", limit=300))
    return Group(*parts)
