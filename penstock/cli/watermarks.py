"""`penstock watermark`: how far the streams are, and who holds them back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from penstock.cli.cells import low, new_table, number, span, text
from penstock.cli.connection import FOLDER, Folder, connect
from penstock.cli.output import Form, Output, show


def watermark(
    subject: Annotated[
        str, typer.Argument(help="A category, job or pipeline; none: all that nobody reads.")
    ] = "",
    folder: Folder = FOLDER,
    percent: Annotated[
        int | None, typer.Option(help="Also the low that so many per cent have reached.", min=1, max=100)
    ] = None,
    output: Output = Form.TABLE,
) -> None:
    """Low watermarks of what runs, from its sources on, and who holds them back."""
    with connect(folder, role="reader") as client:
        found = client.watermarks(subject or None, percent=percent)
    show(found, output, lambda: watermark_tables(found))


def watermark_tables(found: Mapping[str, Any]) -> RenderableType:
    """Categories and who writes them, intervals, and one line each on who holds what back."""
    parts: list[RenderableType] = [_categories(found)]
    if found["intervals"]:
        parts.append(_intervals(found))
    parts += [text(f"{item['category']}: {item['text']}", limit=1000) for item in found["held_back"]]
    if not found["held_back"]:
        parts.append(text("no job writes anything that has a watermark"))
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
    for name in ("interval", "input low", "output low", "oldest unsent", "to read", "trouble"):
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
