"""`penstock job metrics`: what a job did, minute by minute, as lines of small bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType

from penstock.cli.cells import new_table, text, when
from penstock.cli.connection import FOLDER, Folder, connect
from penstock.cli.output import Form, Output, show

BARS = "▁▂▃▄▅▆▇█"
GAP = "·"
WIDTH = 24


def metrics(
    name: Annotated[str, typer.Argument(help="The job.")],
    minutes: Annotated[
        int, typer.Option("--minutes", "-n", help="The newest so many; 14 days are kept.", min=1, max=20_160)
    ] = 60,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", "-m", help="Only this one; several: repeat it.")
    ] = None,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """What a job did, minute by minute: rates, lag, busy time, memory, failures. A dot: unknown."""
    with connect(folder, role="reader") as client:
        found = client.job_metrics(name, metrics=",".join(metric) if metric else None, minutes=minutes)
    show(found, output, lambda: metrics_table(found))


def metrics_table(found: Mapping[str, Any]) -> RenderableType:
    """A line per metric: its newest number, smallest, mean and largest, and how it went."""
    table = new_table("")
    table.title = text(f"{found['job']}, {found['minutes']} min from {when(found['first_ms'])} UTC")
    table.add_column("metric", no_wrap=True, min_width=15)
    for name in ("now", "min", "mean", "max"):
        table.add_column(name, justify="right", no_wrap=True, min_width=6)  # one that is cut is a wrong one
    table.add_column("", no_wrap=True)
    for name, line in found["metrics"].items():
        values = line["values"]
        known = [value for value in values if value is not None]
        spread = (min(known), sum(known) / len(known), max(known)) if known else (None, None, None)
        cells = [short(value) for value in (values[-1] if values else None, *spread)]
        table.add_row(text(name), *cells, sparkline(values))
    if not found["metrics"]:
        return Group(table, text("nothing is known of these minutes: a minute is shown when it is over"))
    return table


def short(value: float | None) -> str:
    """A number with three digits that count; – if nobody knows it."""
    if value is None:
        return "–"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g} {unit}"
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def sparkline(values: Sequence[float | None], width: int = WIDTH) -> str:
    """A bar per minute or stretch of minutes, from nothing to the largest; a dot where it is unknown."""
    stretches = [
        values[len(values) * place // width : len(values) * (place + 1) // width] for place in range(width)
    ]
    if len(values) <= width:
        stretches = [[value] for value in values]
    means = [_mean([value for value in stretch if value is not None]) for stretch in stretches]
    most = max((mean for mean in means if mean is not None), default=0.0)
    return "".join(
        GAP if mean is None else BARS[0] if most <= 0 else BARS[min(7, int(mean / most * 7.999))]
        for mean in means
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
