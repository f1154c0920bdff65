"""What `penstock bus` shows: categories, their partitions, and records as lines. Pure: JSON in, text out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from penstock.cli.cells import low, new_table, number, printable, text
from penstock.cli.tables import categories_table

__all__ = ["categories_table", "category_tables", "record_of", "record_text"]

VALUE_SHOWN_MAX = 1000


def category_tables(found: Mapping[str, Any]) -> RenderableType:
    """A category, its partitions, and the producers that its watermark waits for."""
    partitions = new_table("partitions")
    for name in ("partition", "records"):
        partitions.add_column(name, justify="right", no_wrap=True)
    for partition, end in enumerate(found["end_offsets"]):
        partitions.add_row(str(partition), number(end))
    parts: list[RenderableType] = [categories_table([found]), partitions]
    if found["producers"]:
        parts.append(_producers_table(found["producers"]))
    return Group(*parts)


def _producers_table(producers: Mapping[str, int]) -> Table:
    table = new_table("producers")
    table.add_column("producer", overflow="fold")
    table.add_column("low watermark", no_wrap=True)
    for producer, at in sorted(producers.items()):
        table.add_row(text(producer), low(at))
    return table


def record_of(line: bytes) -> dict[str, Any]:
    """A record's line as a value."""
    found: dict[str, Any] = json.loads(line)
    return found


def record_text(line: bytes) -> str:
    """partition:offset, event time, key, value: one line that cannot steer a terminal."""
    record = record_of(line)
    value = record.get("value_base64", None)
    shown = json.dumps(record["value"], ensure_ascii=False) if "value" in record else f"base64 {value}"
    if len(shown) > VALUE_SHOWN_MAX:
        shown = f"{shown[:VALUE_SHOWN_MAX]}… ({len(shown):,} characters)"
    late = " late" if record.get("late") else ""
    key = "-" if record["key"] is None else record["key"]
    return printable(f"{record['partition']}:{record['offset']} {_when(record['ts'])}{late} {key} {shown}")


def _when(at_ms: int) -> str:
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    except (ValueError, OverflowError, OSError):
        return f"{at_ms}ms"
