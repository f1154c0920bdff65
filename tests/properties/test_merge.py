"""The merge of layers as laws: the top wins, order of rows is nothing, deep keys survive."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.jobs.layers import LayerRow, leaves, merge_json, merge_layers, patch_body, provenance

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
    for path, layer in decided.items():
        having = [row.layer for row in ordered if path in dict(leaves(row.body))]
        assert layer == having[-1]


@given(bodies(), st.integers(0, 9))
def test_a_patch_that_is_taken_back_leaves_the_body_as_it_was(body: dict, value: int) -> None:
    assert patch_body(patch_body(body, {"z.z.z": value}), {"z.z.z": None}) == body
