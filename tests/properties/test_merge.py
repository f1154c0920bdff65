"""The merge of layers as laws: the top wins, order of rows is nothing, deep keys survive, clashes are refused.

And of what is kept beside it: whose word each value is, and the write that last changed it.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.jobs.layers import (
    LayerRow,
    carry_origins,
    changed_paths,
    is_same,
    leaves,
    merge_json,
    merge_layers,
    patch_body,
    provenance,
)

names = st.sampled_from("abcd")
values = (
    st.integers(0, 3) | st.booleans() | st.text("xy", max_size=2) | st.lists(st.integers(0, 2), max_size=2)
)


def bodies(depth: int = 3) -> st.SearchStrategy[dict[str, Any]]:
    """Maps at even places and values at odd ones, so that two of them never clash."""
    if depth == 0:
        return st.dictionaries(names.map(str.upper), values, max_size=3)
    below = st.dictionaries(names, bodies(depth - 1), max_size=2)
    return st.builds(
        lambda plain, maps: plain | maps, st.dictionaries(names.map(str.upper), values, max_size=2), below
    )


def rows(*parts: dict[str, Any]) -> list[LayerRow]:
    return [LayerRow(layer=f"l{number}", precedence=number, body=body) for number, body in enumerate(parts)]


@given(bodies())
def test_merging_a_body_with_itself_or_with_nothing_changes_nothing(body: dict[str, Any]) -> None:
    assert merge_json(body, body) == merge_json(body, {}) == merge_json({}, body) == body


@given(bodies(), bodies(), bodies())
def test_it_does_not_matter_which_neighbours_are_merged_first(a: dict, b: dict, c: dict) -> None:
    assert merge_json(merge_json(a, b), c) == merge_json(a, merge_json(b, c))


@given(bodies(), bodies())
def test_every_leaf_of_the_top_is_in_the_result(bottom: dict, top: dict) -> None:
    merged = dict(leaves(merge_json(bottom, top)))
    for path, value in leaves(top):
        if value != {}:
            assert merged[path] == value


@given(bodies(), bodies())
def test_every_leaf_of_the_bottom_that_the_top_does_not_name_survives(bottom: dict, top: dict) -> None:
    merged, above = dict(leaves(merge_json(bottom, top))), dict(leaves(top))
    for path, value in leaves(bottom):
        if path not in above and value != {}:
            assert merged[path] == value


@given(st.lists(bodies(), max_size=5), st.randoms(use_true_random=False))
def test_the_order_in_which_rows_are_read_is_nothing(parts: list[dict], rng: Any) -> None:
    ordered = rows(*parts)
    mixed = list(ordered)
    rng.shuffle(mixed)
    assert merge_layers(mixed) == merge_layers(ordered)
    assert provenance(mixed) == provenance(ordered)


@given(st.lists(bodies(), max_size=4))
def test_provenance_names_for_each_leaf_the_highest_layer_that_has_it(parts: list[dict]) -> None:
    ordered = rows(*parts)
    decided = provenance(ordered)
    merged = dict(leaves(merge_layers(ordered)))
    assert set(decided) == set(merged)
    for path, source in decided.items():
        having = [row.layer for row in ordered if path in dict(leaves(row.body))]
        assert source.layer == having[-1]


@given(bodies(), st.integers(0, 9))
def test_a_patch_that_is_taken_back_leaves_the_body_as_it_was(body: dict, value: int) -> None:
    assert patch_body(patch_body(body, {"z.z.z": value}), {"z.z.z": None}) == body


# Maps and values at the same places, so that two of them often clash; no nulls.
clashing = st.recursive(values, lambda below: st.dictionaries(names, below, max_size=3), max_leaves=8)
clashing_bodies = st.dictionaries(names, clashing, max_size=3)
with_nulls = st.dictionaries(
    names,
    st.recursive(values | st.none(), lambda below: st.dictionaries(names, below, max_size=3)),
    max_size=3,
)


def merged_or_refused(*parts: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return merge_layers(rows(*parts))
    except ConfigError:
        return None


def clashes(one: Any, other: Any) -> bool:
    """Whether one of the two has a map where the other has a plain value."""
    if isinstance(one, dict) != isinstance(other, dict):
        return True
    return isinstance(one, dict) and any(clashes(one[key], other[key]) for key in one.keys() & other.keys())


@given(clashing_bodies, clashing_bodies)
def test_a_merge_is_refused_exactly_where_a_map_meets_a_value(bottom: dict, top: dict) -> None:
    assert (merged_or_refused(bottom, top) is None) == clashes(bottom, top)


@given(clashing_bodies, st.lists(names, min_size=1, max_size=4), st.integers(0, 3))
def test_a_clash_is_named_by_its_path_however_deep(body: dict, path: list[str], value: int) -> None:
    def at(leaf: Any) -> dict[str, Any]:
        for part in reversed(path):
            leaf = {part: leaf}
        return leaf

    for bottom, top in ((at(value), at({"a": value})), (at({"a": value}), at(value))):
        with pytest.raises(ConfigError) as caught:
            merge_json(bottom, top)
        assert f"`{'.'.join(path)}`" in caught.value.what and caught.value.why and caught.value.fix


@given(clashing_bodies, clashing_bodies, clashing_bodies)
def test_neighbours_may_be_merged_first_also_where_merges_are_refused(a: dict, b: dict, c: dict) -> None:
    def nested(one: Any, other: Any) -> Any:
        return None if one is None or other is None else merged_or_refused(one, other)

    assert nested(nested(a, b), c) == nested(a, nested(b, c))


def test_a_null_takes_back_what_is_below_so_layers_are_folded_from_below() -> None:
    bottom, null, top = {"a": {"x": 1}}, {"a": None}, {"a": {"y": 2}}
    assert merge_layers(rows(bottom, null, top)) == {"a": {"y": 2}}
    assert merge_json(bottom, merge_json(null, top)) == {"a": {"x": 1, "y": 2}}


@given(st.lists(with_nulls, max_size=5))
def test_provenance_agrees_with_the_merge(parts: list[dict]) -> None:
    ordered = rows(*parts)
    merged = merged_or_refused(*parts)
    if merged is None:
        return
    decided = provenance(ordered)
    assert set(decided) == {path for path, _ in leaves(merged)}
    bodies_of = {row.layer: dict(leaves(row.body)) for row in ordered}
    for path, value in leaves(merged):
        assert is_same(bodies_of[decided[path].layer][path], value)


@given(st.lists(with_nulls, min_size=1, max_size=6))
def test_every_value_of_a_layer_remembers_the_write_that_last_changed_it(writes: list[dict]) -> None:
    """Against a replay: for each path, the last write before which it was absent or something else."""
    row: LayerRow | None = None
    changed_by: dict[str, int] = {}
    before: dict[str, Any] = {}
    for version, body in enumerate(writes, start=1):
        new = LayerRow(
            layer="oncall",
            precedence=30,
            body=body,
            version=version,
            actor=f"actor{version}",
            reason=f"reason{version}",
            at_ms=version * 10,
        )
        row = carry_origins(row, new)
        after = dict(leaves(body))
        changed_by = {
            path: changed_by[path] if path in before and is_same(before[path], value) else version
            for path, value in after.items()
        }
        before = after
        found = provenance([row])
        assert {path: source.version for path, source in found.items()} == changed_by
        for source in found.values():
            number = source.version
            assert (source.actor, source.reason, source.at_ms) == (
                f"actor{number}",
                f"reason{number}",
                number * 10,
            )


@given(with_nulls, with_nulls)
def test_the_changed_paths_of_two_bodies_are_those_that_differ(one: dict, other: dict) -> None:
    old, new = dict(leaves(one)), dict(leaves(other))
    changed = changed_paths(one, other)
    assert changed_paths(one, one) == ()
    assert set(changed) == {
        path
        for path in old.keys() | new.keys()
        if path not in old or path not in new or not is_same(old[path], new[path])
    }


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (0, False), (1, 1.0), ([1], [True]), ({"a": 1}, {"a": True})]
)
def test_values_that_only_python_takes_for_the_same_are_not(one: Any, other: Any) -> None:
    assert one == other and not is_same(one, other) and is_same(one, one) and is_same(other, other)
