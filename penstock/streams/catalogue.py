"""Catalogues of categories and their columns for the compiler: from the bus, or from values."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, Protocol

from penstock.core.errors import ConfigError, NotFound
from penstock.streams.bus.log import ARROW_TYPES, LOW_COLUMN, CategorySpec, Log


class Catalogue(Protocol):
    """The compiler's view of the bus."""

    def describe(self, name: str) -> CategorySpec:
        """NotFound if there is none."""

    def names(self) -> tuple[str, ...]:
        """All categories, for suggestions."""


class StaticCatalogue:
    """Categories given as values: for tests, local runs, and responses of the HTTP API."""

    def __init__(self, specs: Mapping[str, CategorySpec] | Iterable[CategorySpec] = ()) -> None:
        given = specs.values() if isinstance(specs, Mapping) else specs
        self._specs = {spec.name: spec for spec in given}

    def describe(self, name: str) -> CategorySpec:
        """NotFound if it was not given."""
        if name not in self._specs:
            raise no_category(name, self.names())
        return self._specs[name]

    def names(self) -> tuple[str, ...]:
        """All given categories, sorted."""
        return tuple(sorted(self._specs))


class LogCatalogue:
    """The categories of a bus."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def describe(self, name: str) -> CategorySpec:
        """NotFound if the bus has none of that name."""
        return self._log.describe(name).spec

    def names(self) -> tuple[str, ...]:
        """All categories of the bus, sorted."""
        return tuple(sorted(category.spec.name for category in self._log.categories()))


def no_category(name: str, names: Iterable[str]) -> NotFound:
    """The error for a category that does not exist."""
    there = sorted(names)
    near = nearest(name, there)
    listed = ", ".join(there[:20]) + (", …" if len(there) > 20 else "")
    return NotFound(
        f"there is no category {name!r}",
        why=f"the bus has: {listed}" if there else "the bus has no categories yet",
        fix=f"did you mean {near!r}?" if near else "create the category first, or correct the name",
    )


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The most similar name, if there is one; case is ignored."""
    by_lower = {candidate.lower(): candidate for candidate in names}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def category_to_json(spec: CategorySpec) -> dict[str, Any]:
    """A spec as JSON; columns become lists."""
    return {**asdict(spec), "columns": [list(column) for column in spec.columns]}


def category_from_json(data: Mapping[str, Any]) -> CategorySpec:
    """A spec from JSON; ConfigError names the invalid field."""
    known = {field.name for field in fields(CategorySpec)}
    for name in data:
        if name not in known:
            near = nearest(name, known)
            raise ConfigError(
                f"a category has no field {name!r}",
                why=f"the fields are {', '.join(sorted(known))}",
                fix=f"did you mean {near!r}?" if near else "remove it",
            )
    try:
        columns = tuple((str(name), str(kind)) for name, kind in data["columns"])
        spec = CategorySpec(**{**data, "columns": columns})
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            "the description of a category is not complete",
            why=f"name, partitions and columns ([[name, type], …]) are needed: {error}",
            fix="add what is missing",
        ) from error
    for name, kind in spec.columns:
        is_lows = (name, kind) == LOW_COLUMN and spec.watermark == "producers"
        if kind not in ARROW_TYPES or (name.startswith("_") and not is_lows):
            raise ConfigError(
                f"category {spec.name!r} cannot have the column {name!r} of type {kind!r}",
                why=f"names do not start with '_', and types are {', '.join(ARROW_TYPES)}",
                fix="correct the column",
            )
    return spec


def has_no_times(spec: CategorySpec) -> bool:
    """True if external records have no event time of their own."""
    return spec.watermark in ("event_time", "injector") and spec.format != "typed" and not spec.ts_column


def no_time_note(spec: CategorySpec) -> str:
    """A note about the event times of the records of such a category."""
    return (
        f"{spec.name} has no time column: the event time of a record is the stamp that an Injector gives it; "
        "what comes from files gets the moment at which it is published, in a backfill 0. If records carry "
        "their time, name its column: `ts_column`, or --ts of `penstock category --create`."
    )
