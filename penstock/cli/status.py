"""`penstock status`, `journal`, `logs`, `dashboard` and `watermark`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from penstock.cli import tables
from penstock.cli.output import FOLDER, Folder, Form, Output, connect, find_access, out, show
from penstock.cli.tables import low, new_table, number, span, text
from penstock.cli.watching import ChangeWait, until_ctrl_c, watch
from penstock.client.client import Client


def status(
    folder: Folder = FOLDER,
    is_watching: Annotated[
        bool,
        typer.Option("--watch", "-w", help="Refresh every second and after each change, until Ctrl-C."),
    ] = False,
    output: Output = Form.TABLE,
) -> None:
    """Jobs, their tasks and lag, and containers."""
    with connect(folder, role="reader") as client:
        if is_watching:
            with until_ctrl_c():
                watch(client.status, tables.status_tables, ChangeWait(client).wait, form=output)
            return
        found = client.status()
    show(found, output, lambda: tables.status_tables(found))


def journal(
    subject: Annotated[str, typer.Argument(help="A job, container or category; default: all.")] = "",
    folder: Folder = FOLDER,
    limit: Annotated[int, typer.Option("--limit", "-n", help="The newest N.", min=1, max=1000)] = 50,
    output: Output = Form.TABLE,
) -> None:
    """Decisions with actor and reason, oldest first."""
    with connect(folder, role="reader") as client:
        entries = client.journal(subject=subject or None, limit=limit)
    show(entries, output, lambda: tables.journal_table(entries))


def logs(
    container: Annotated[str, typer.Argument(help="A container, e.g. c1.")],
    folder: Folder = FOLDER,
    lines: Annotated[int, typer.Option("--lines", "-n", help="The last N.", min=1, max=10_000)] = 100,
    output: Output = Form.TABLE,
) -> None:
    """The end of a container's log."""
    with connect(folder, role="oncall") as client:
        text = client.container_log(container, lines=lines)
    if output is Form.TABLE:
        print(text)
    else:
        show({"container": container, "text": text}, output, lambda: "")


def dashboard(
    job: Annotated[str, typer.Argument(help="The job whose page is shown; default: all jobs.")] = "",
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Print the dashboard's address. It contains a token, a read-only one unless PENSTOCK_TOKEN is set."""
    url, token, ca = find_access(folder, role="reader")
    with Client(url, token, ca=ca) as client:
        # Checked here, so that a wrong address, token or name fails in the terminal, not in the browser.
        if job:
            client.job(job)
        else:
            client.jobs_page(limit=1)
    # In the fragment, which browsers do not send to the server.
    page = f"&job={quote(job, safe='')}" if job else ""
    address = f"{url.rstrip('/')}/#token={quote(token, safe='')}{page}"
    if output is Form.TABLE:
        out.print(address, markup=False, highlight=False, soft_wrap=True)  # one line, to be copied
    else:
        show({"url": address}, output, lambda: address)


def watermark(
    subject: Annotated[
        str, typer.Argument(help="A category, job or pipeline; default: all final outputs.")
    ] = "",
    folder: Folder = FOLDER,
    percent: Annotated[
        int | None, typer.Option(help="Also the low that so many percent have reached.", min=1, max=100)
    ] = None,
    output: Output = Form.TABLE,
) -> None:
    """Low watermarks from the sources on, and what holds them back."""
    with connect(folder, role="reader") as client:
        found = client.watermarks(subject or None, percent=percent)
    show(found, output, lambda: watermark_tables(found))


def watermark_tables(found: Mapping[str, Any]) -> RenderableType:
    """Categories with their producers, intervals, and a line for each watermark that is held back."""
    parts: list[RenderableType] = [_categories(found)]
    if found["intervals"]:
        parts.append(_intervals(found))
    parts += [text(f"{item['category']}: {item['text']}", limit=1000) for item in found["held_back"]]
    if not found["held_back"]:
        parts.append(text("no job has an output with a watermark"))
    return Group(*parts)


def _categories(found: Mapping[str, Any]) -> Table:
    table = new_table("watermarks")
    for name in ("category", "of", "low watermark", "age"):
        table.add_column(name, overflow="fold" if name in ("category", "of") else "ellipsis")
    for item in found["categories"]:
        table.add_row(text(item["category"]), text(item["watermark"]), low(item["low"]), _age(item))
        if "percent" in item:
            table.add_row("", f"{item['percent']} % of them", low(item["percentile_low"]), "")
        for producer in item["producers"]:
            table.add_row("", text(producer["who"]), low(producer["low"]), _age(producer))
        for partition, at in enumerate(item["partitions"]):
            table.add_row("", f"partition {partition}", low(at), "")
    return table


def _intervals(found: Mapping[str, Any]) -> Table:
    table = new_table("intervals")
    for name in ("interval", "input low", "output low", "oldest unsent", "to read", "problem"):
        table.add_column(name, overflow="fold")
    for item in found["intervals"]:
        unsent = "–" if item["outbox"] is None else low(item["outbox"])
        waiting = number(sum(source["waiting"] for source in item["inputs"]))
        table.add_row(
            text(item["name"]), low(item["input_low"]), low(item["output_low"]), unsent, waiting,
            text(item["trouble"]),
        )  # fmt: skip
    return table


def _age(item: Mapping[str, Any]) -> str:
    return "–" if item["age_ms"] is None else span(max(0, item["age_ms"]) / 1000)
