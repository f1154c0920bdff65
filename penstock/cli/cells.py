"""What cells of tables hold. Pure: values in, Rich text out.

Everything that came from somebody goes through `text`: no markup, no control characters, not too long.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from penstock.jobs.partition_tasks import FIELD, why_ignored

_COLOURS = {
    "running": "green",
    "live": "green",
    "stopped": "dim",
    "new": "yellow",
    "behind": "yellow",
    "starting": "yellow",
    "backoff": "yellow",
    "quarantined": "bold red",
    "invalid": "bold red",
    "dead": "red",
    "gone": "red",
    "withheld": "red",
    "fenced": "red",
}
_LAYERS = {"base": "dim", "provisioner": "", "scaler": "cyan", "oncall": "bold magenta", "default": "dim"}
_LOW_MAX = 2**62
TEXT_MAX = 200


def new_table(title: str) -> Table:
    """An empty table of ours."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def text(value: Any, style: str = "", limit: int = TEXT_MAX) -> Text:
    """Somebody's text: no markup, no control characters, not too long."""
    shown = " ".join(printable(line) for line in str(value).splitlines())
    return Text(shown if len(shown) <= limit else shown[: limit - 1] + "…", style=style)


def printable(line: str) -> str:
    """A line that cannot steer a terminal."""
    return "".join(letter if letter.isprintable() else "�" for letter in line)


def state_text(state: str) -> Text:
    """A state in its colour."""
    return text(state, _COLOURS.get(state.split(" ")[0], "cyan"), 24)


def task_text(job: Mapping[str, Any]) -> Text:
    """How many tasks run, of how many, and how many there should be."""
    up = sum(1 for task in job["tasks"] if task["state"] == "running")
    wanted, there = job["task_count"], job["running_task_count"]
    text = Text(f"{up}/{there}", style="" if up >= there else "yellow")
    return text if wanted == there else text.append(f" → {wanted}", style="cyan")


def package_text(package: Mapping[str, Any]) -> Text:
    """A package by its version, else by the beginning of its hash."""
    return text(package.get("version") or str(package.get("hash", ""))[:8], limit=8)


def value_text(value: Any) -> str:
    """A setting's value, shortly."""
    if isinstance(value, Mapping | list | tuple):
        return "none" if not value else ", ".join(_item(item) for item in _items(value))
    return "none" if value is None else str(value)


def _items(value: Any) -> list[Any]:
    return (
        [f"{key}: {value_text(item)}" for key, item in value.items()]
        if isinstance(value, Mapping)
        else list(value)
    )


def _item(item: Any) -> str:
    """An input, an output or a stage by what tells it from the others."""
    if not isinstance(item, Mapping):
        return value_text(item)
    for name in ("category", "op"):
        if name in item:
            rest = {key: item[key] for key in ("stream", "start", "partitions", "expr") if key in item}
            return (
                f"{item[name]} ({', '.join(str(value) for value in rest.values())})"
                if rest
                else str(item[name])
            )
    return value_text(item)


def flat(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every dotted path of a value."""
    if isinstance(value, Mapping) and value:
        return [pair for key in value for pair in flat(value[key], f"{path}.{key}" if path else str(key))]
    return [(path, value)]


def first_line(text: str) -> str:
    """What an error says first."""
    return text.splitlines()[0] if text else ""


def number(value: float | None) -> str:
    """A number with its thousands apart."""
    return "–" if value is None else f"{value:,.0f}"


def span(seconds: float) -> str:
    """A time span in the unit that fits."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} s"


def lag(metrics: Mapping[str, Any]) -> str:
    """How many records wait to be read, and for how long the oldest has; – if nobody knows."""
    if "lag_records" not in metrics:
        return "–"
    waiting = f" ({span(metrics['lag_s'])})" if metrics["lag_records"] and "lag_s" in metrics else ""
    return f"{number(metrics['lag_records'])}{waiting}"


def when(at_ms: int, *, with_year: bool = False) -> str:
    """A moment, in UTC."""
    form = "%Y-%m-%d" if with_year else "%m-%d %H:%M:%S"
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime(form) if at_ms else "–"


def low(low_ms: int) -> str:
    """A watermark as a moment."""
    if abs(low_ms) >= _LOW_MAX:
        return "–" if low_ms < 0 else "end"
    return when(low_ms)


def layer_text(decided: Mapping[str, Any] | None) -> Text:
    """The layer that decided something, in its colour; nobody: the default."""
    name = "default" if decided is None else str(decided["layer"])
    return text(name, _LAYERS.get(name, ""), 30)


def ignored_text(job: Mapping[str, Any]) -> list[Text]:
    """What a job's layers ask for and cannot have as they stand together, a line each."""
    why = "" if job.get("problem") else why_ignored(job["config"])
    return [text(f"{FIELD} is ignored: {why}; partitions are dealt evenly", "yellow")] if why else []
