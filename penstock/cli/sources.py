"""What `penstock backfill` and `penstock run` read: files per category, descriptions of categories, times."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, NotFound
from penstock.streams.bus.log import Category, CategorySpec
from penstock.streams.catalogue import category_from_json, no_category
from penstock.streams.compiled import CompiledPipeline
from penstock.streams.record_lines import TABLE


def read_specs(paths: Iterable[Path]) -> list[CategorySpec]:
    """Categories from JSON files: one description each, or a list of them."""
    found = []
    for path in paths:
        try:
            said: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path} describes no category",
                why=str(error),
                fix="give a JSON file with name, partitions, columns",
            ) from error
        for item in said if isinstance(said, list) else [said]:
            if not isinstance(item, Mapping):
                raise ConfigError(
                    f"{path} describes no category", why="it is no JSON object", fix="see `--category`"
                )
            found.append(category_from_json({"format": "json", "watermark": "event_time", **item}))
    return found


def read_inputs(given: Iterable[str]) -> dict[str, list[str]]:
    """`category=file`, as often as there are files; or `category=table:name`."""
    found: dict[str, list[str]] = {}
    for text in given:
        category, equals, path = text.partition("=")
        if not (category and equals and path):
            raise ConfigError(
                f"not an input: {text!r}",
                why="it is category=file, or category=table:name",
                fix="e.g. --input queries=queries.ndjson",
            )
        if path.startswith(TABLE):
            found.setdefault(category, []).append(path)
            continue
        if not Path(path).exists():
            raise NotFound(
                f"there is no file {path!r}", why=f"it was named for {category!r}", fix="check the path"
            )
        found.setdefault(category, []).append(str(Path(path).absolute()))
    return found


def read_time(text: str) -> Millis | None:
    """Milliseconds since 1970, or a date or time as ISO 8601 has it (UTC unless it says otherwise)."""
    if not text:
        return None
    if text.removeprefix("-").isdigit():
        return int(text)
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"not a time: {text[:60]!r}",
            why=str(error),
            fix="e.g. 2026-11-16, 2026-11-16T12:00:00Z, or milliseconds",
        ) from error
    return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)


def categories_read(compiled: CompiledPipeline, known: Sequence[Category]) -> list[Category]:
    """The categories that a pipeline reads and does not write itself."""
    by_name = {category.spec.name: category for category in known}
    made = {output.category for job in compiled.jobs for output in job.outputs}
    wanted = sorted({item.category for job in compiled.jobs for item in job.inputs} - made)
    for name in wanted:
        if name not in by_name:
            raise no_category(name, by_name)
    return [by_name[name] for name in wanted]


def check_inputs(inputs: Mapping[str, Sequence[str]], read: Sequence[Category]) -> None:
    """Files for a category that the pipeline does not read are a slip."""
    for name in inputs:
        if name not in {category.spec.name for category in read}:
            error = no_category(name, [category.spec.name for category in read])
            raise ConfigError(
                f"the pipeline does not read {name!r}",
                why=f"it reads {', '.join(category.spec.name for category in read)}",
                fix=error.fix,
            )
