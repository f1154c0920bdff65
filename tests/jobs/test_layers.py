from __future__ import annotations

import pytest

from penstock.core.errors import ConfigError
from penstock.jobs.layers import LayerRow, merge_json, merge_layers, patch_body, provenance

BASE = LayerRow(layer="base", precedence=0, body={"slo": {"lag_s": 60}, "threads": 1})
SCALER = LayerRow(layer="scaler", precedence=20, body={"threads": 2, "resources": {"cpu": 2}})
ONCALL = LayerRow(layer="oncall", precedence=30, body={"resources": {"cpu": 4}})


def test_the_top_layer_wins_whatever_order_the_rows_come_in() -> None:
    merged = {"slo": {"lag_s": 60}, "threads": 2, "resources": {"cpu": 4}}
    assert merge_layers([ONCALL, BASE, SCALER]) == merge_layers([BASE, SCALER, ONCALL]) == merged


def test_a_fifth_layer_needs_no_change_of_the_merge() -> None:
    doctor = LayerRow(
        layer="doctor", precedence=25, body={"threads": 7, "resources": {"cpu": 3, "memory_mb": 9}}
    )
    merged = merge_layers([ONCALL, doctor, BASE, SCALER])
    assert (merged["threads"], merged["resources"]) == (7, {"cpu": 4, "memory_mb": 9})


def test_provenance_names_the_layer_that_decides_each_path() -> None:
    decided = {"slo.lag_s": "base", "threads": "scaler", "resources.cpu": "oncall"}
    found = provenance([BASE, SCALER, ONCALL])
    assert {path: source.layer for path, source in found.items()} == decided


@pytest.mark.parametrize(
    ("bottom", "top"), [({"a": {"b": {"c": 1}}}, {"a": {"b": 2}}), ({"a": {"b": 2}}, {"a": {"b": {}}})]
)
def test_a_map_and_a_plain_value_at_one_path_are_refused_by_path(bottom: dict, top: dict) -> None:
    with pytest.raises(ConfigError, match=r"`a\.b`"):
        merge_json(bottom, top)


def test_null_fits_over_and_under_a_map() -> None:
    assert merge_json({"a": {"b": 1}}, {"a": None}) == {"a": None}
    assert merge_json({"a": None}, {"a": {"b": 1}}) == {"a": {"b": 1}}


def test_the_inputs_of_a_merge_are_left_alone() -> None:
    bottom, top = {"a": {"b": 1}}, {"a": {"c": 2}}
    merge_json(bottom, top)
    assert (bottom, top) == ({"a": {"b": 1}}, {"a": {"c": 2}})


def test_a_patch_sets_and_removes_paths_and_drops_emptied_maps() -> None:
    body = {"resources": {"cpu": 2}, "threads": 1}
    patched = patch_body(body, {"resources.cpu": None, "slo.lag_s": 5, "threads": 4, "labels": None})
    assert patched == {"slo": {"lag_s": 5}, "threads": 4}
    assert body == {"resources": {"cpu": 2}, "threads": 1}


@pytest.mark.parametrize("path", ["threads.x", "a..b", ""])
def test_a_patch_of_a_path_that_cannot_be_is_refused(path: str) -> None:
    with pytest.raises(ConfigError):
        patch_body({"threads": 1}, {path: 1})
