"""Merges the layers of a job's expected config: the top layer wins (Turbine III-A, Algorithm 1).

Pure: layers are data, so a new component can get its own layer without a change of the merge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One kind of layer: the larger precedence wins, and only the roles in `writers` may write it.

    A role sets only its own fields (`config.py: FIELD_WRITERS`); in a layer with `fields`, only those.
    """

    name: str
    precedence: int
    writers: frozenset[str]
    replaces_plan: bool = False  # a change of it replaces an open plan
    fields: frozenset[str] = frozenset()  # empty: all fields

    def allows(self, field: str) -> bool:
        """Whether the layer may contain a field."""
        return not self.fields or field in self.fields


DEFAULT_LAYERS: tuple[Layer, ...] = (
    Layer(name="base", precedence=0, writers=frozenset({"admin"})),
    Layer(name="provisioner", precedence=10, writers=frozenset({"developer", "admin"})),
    Layer(name="scaler", precedence=20, writers=frozenset({"scaler", "admin"})),
    Layer(name="oncall", precedence=30, writers=frozenset({"oncall", "admin"}), replaces_plan=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """An earlier write of a layer, and the paths that still have the values it set."""

    version: int
    actor: str
    at_ms: Millis
    reason: str
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a field has its value from: the layer that sets it, and the write that last changed it there."""

    layer: str
    actor: str
    at_ms: Millis
    reason: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """One layer of one job: its partial config, and the actor, time and reason of the write."""

    layer: str
    precedence: int
    body: Mapping[str, Any]
    version: int = 0  # the expected version of the job after this write
    actor: str = ""
    reason: str = ""
    at_ms: Millis = 0
    origins: tuple[Origin, ...] = ()  # of the values that this write did not change

    def to_json(self) -> dict[str, Any]:
        """All fields but the origins, which a view has as provenance."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "origins"}


def merge_json(bottom: Mapping[str, Any], top: Mapping[str, Any], *, path: str = "") -> dict[str, Any]:
    """Merge `top` over `bottom`, recursively. A map and a plain value do not merge; null merges with both."""
    merged = dict(bottom)
    for key, value in top.items():
        below, here = merged.get(key), f"{path}.{key}" if path else key
        if below is None or value is None:
            merged[key] = value
        elif isinstance(value, Mapping) != isinstance(below, Mapping):
            raise ConfigError(
                f"the layers cannot be merged at `{here}`",
                why=f"it is {_kind(below)} in one layer and {_kind(value)} in a higher one",
                fix=f"use the same type as the lower layer for `{here}`, or change the lower layer first",
            )
        else:
            merged[key] = merge_json(below, value, path=here) if isinstance(value, Mapping) else value
    return merged


def merge_layers(layers: Iterable[LayerRow]) -> dict[str, Any]:
    """Merge the layers, lowest precedence first; their order in `layers` does not matter."""
    return reduce(merge_json, (row.body for row in _ordered(layers)), {})


def provenance(layers: Iterable[LayerRow]) -> dict[str, Provenance]:
    """The provenance of each path of the merge. An absent path has its default."""
    rows = _ordered(layers)
    paths = {path for path, _ in leaves(merge_layers(rows))}
    decided: dict[str, Provenance] = {}
    for row in rows:
        decided |= {path: found for path, found in _sources(row).items() if path in paths}
    return decided


def carry_origins(before: LayerRow | None, after: LayerRow) -> LayerRow:
    """`after` with the origins of the values that are the same as in `before`."""
    if before is None:
        return after
    old, sources = dict(leaves(before.body)), _sources(before)
    unchanged: dict[int, list[str]] = {}
    for path, value in leaves(after.body):
        if path in old and is_same(old[path], value):
            unchanged.setdefault(sources[path].version, []).append(path)
    writes = {found.version: found for found in sources.values()}
    return replace(
        after,
        origins=tuple(
            Origin(
                version=version,
                actor=writes[version].actor,
                at_ms=writes[version].at_ms,
                reason=writes[version].reason,
                paths=tuple(sorted(unchanged[version])),
            )
            for version in sorted(unchanged)
        ),
    )


_PLAIN = frozenset({str, int, float, bool, type(None)})


def is_same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal. Unlike Python, true is not 1, and 1 is not 1.0."""
    if type(one) in _PLAIN:  # fast path for most values
        return type(one) is type(other) and bool(one == other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return type(one) is type(other) and bool(one == other)


def changed_paths(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """The paths with different values in the two bodies; a missing path is different."""
    old, new = dict(leaves(before)), dict(leaves(after))
    both = old.keys() & new.keys()
    differ = {path for path in both if not is_same(old[path], new[path])}
    return tuple(sorted((old.keys() ^ new.keys()) | differ))


def _sources(row: LayerRow) -> dict[str, Provenance]:
    """The write that last changed each path of a layer."""
    own = Provenance(
        layer=row.layer, actor=row.actor, at_ms=row.at_ms, reason=row.reason, version=row.version
    )
    found = {path: own for path, _ in leaves(row.body)}
    for origin in row.origins:
        earlier = replace(
            own, actor=origin.actor, at_ms=origin.at_ms, reason=origin.reason, version=origin.version
        )
        found |= {path: earlier for path in origin.paths if path in found}
    return found


def leaves(body: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted path with its value; maps are traversed, lists are values."""
    for key, value in body.items():
        here = f"{path}.{key}" if path else key
        if isinstance(value, Mapping) and value:
            yield from leaves(value, here)
        else:
            yield here, value


def patch_body(body: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Set each dotted path to its value; None removes the path, and maps that become empty."""
    patched = dict(body)
    for path, value in changes.items():
        patched = _patched(patched, path.split("."), value, path)
    return patched


def _patched(body: Mapping[str, Any], parts: list[str], value: Any, path: str) -> dict[str, Any]:
    head, rest = parts[0], parts[1:]
    if not head:
        raise ConfigError(
            f"`{path}` is not a valid path", why="a part of it is empty", fix="write it as `field.field`"
        )
    result = dict(body)
    if not rest:
        changed = value
    else:
        below = result.get(head) or {}
        if not isinstance(below, Mapping):
            raise ConfigError(
                f"`{path}` cannot be set",
                why=f"`{head}` is {_kind(below)} in this layer, not a map",
                fix=f"set `{head}` as a whole",
            )
        # An empty map is removed too: a layer contains only what it overrides.
        changed = _patched(below, rest, value, path) or None
    if changed is None:
        result.pop(head, None)
    else:
        result[head] = changed
    return result


def _ordered(layers: Iterable[LayerRow]) -> list[LayerRow]:
    return sorted(layers, key=lambda row: (row.precedence, row.layer))


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a map"
    return "a list" if isinstance(value, list | tuple) else "a plain value"
