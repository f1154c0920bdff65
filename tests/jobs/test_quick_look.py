"""The quick look may leave a job to the full one; what it does say must be what the full one says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.core.errors import PenstockError
from penstock.jobs.config import SYNC_OF, Sync, validate_config
from penstock.jobs.layers import LayerRow, merge_layers
from penstock.jobs.syncer.batches import RELEASE_FIELDS, FastComparer
from penstock.jobs.syncer.sync_plan import InSync, RunningView, SimpleSync, plan_sync
from penstock.jobs.tasks import map_partitions
from tests.builders import PACKAGE, a_body, a_stored_config, an_output

JOB = "demo.count"


def package(version: str) -> dict[str, Any]:
    return {"name": "demo", "version": version, "hash": PACKAGE, "entry": "demo"}


# Also bodies that say less, or say a default, or say the same in another form, or are wrong.
CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "package": st.sampled_from([package("1"), package("2"), {"name": "demo"}]),
    "arguments": st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from(["1", "2", 3])),
    "state": st.sampled_from(["running", "paused"]),
    "task_count": st.sampled_from([1, 2, 64, True]),
    "outputs": st.sampled_from([[an_output()], [an_output(format="typed")], [an_output(category="b")], []]),
    "inputs": st.sampled_from([[{"category": "queries"}], [{"category": "queries", "start": "earliest"}]]),
    "resources": st.sampled_from([{}, {"cpu": 1}, {"cpu": 1.0}, {"cpu": 2}]),
    "slo": st.sampled_from([{}, {"lag_s": 90}, {"lag_s": 5}]),
    "labels": st.dictionaries(st.sampled_from(["a", "b"]), st.just("1")),
    "policies": st.sampled_from([{}, {"a": {"on": 1}}, {"a": {"on": True}}, {"a": {"on": 1.0}}]),
    "name": st.sampled_from([JOB, "demo.other"]),
    "plan": st.sampled_from([{}, {"stages": [], "key": None}, {"key": "a"}]),
    "nonsense": st.just(1),
    "task_count_max": st.sampled_from([1, 32]),
}
bodies = st.fixed_dictionaries({}, optional=CHANGES).map(lambda changes: {**a_body(JOB), **changes})
tops = st.lists(st.fixed_dictionaries({}, optional=CHANGES), max_size=2)


def layers_of(body: dict[str, Any], above: list[dict[str, Any]]) -> list[LayerRow]:
    rows = [body, *above]
    return [LayerRow(layer=str(n), precedence=n * 10, body=row) for n, row in enumerate(rows)]


def texts(layers: list[LayerRow]) -> list[tuple[int, str]]:
    return [(row.precedence, json.dumps(row.body)) for row in layers]


@given(before=bodies, after=bodies, above=tops, taught=st.booleans())
def test_it_says_what_the_full_look_says_or_nothing(
    before: dict[str, Any], after: dict[str, Any], above: list[dict[str, Any]], taught: bool
) -> None:
    """Compared with plan_sync: reason, paths, restarts and the config to be; in any layering, valid or not."""
    try:
        old = validate_config(JOB, before)
    except PenstockError:
        assume(False)
    look, layers = FastComparer(), layers_of(after, above)
    try:
        target = validate_config(JOB, merge_layers(layers))
    except PenstockError:
        target = None
    if taught and target is not None:
        look.learn(layers, target)
    quick = look.compare(JOB, texts(layers), json.dumps(old.to_json()))
    if quick is None:
        return
    assert target is not None, "an invalid config is left to the full look, which says why"
    mapping = map_partitions(old.partitions, old.task_count)
    sync = plan_sync(target, RunningView(config=old, generation=1, mapping=mapping))
    if quick.difference is None:
        assert isinstance(sync, InSync)
    else:
        assert isinstance(sync, SimpleSync)
        assert quick.difference.reason == sync.reason and quick.difference.restarts is sync.restarts
        assert quick.difference.paths == tuple(change.path for change in sync.changed)
    assert json.loads(quick.target) == target.to_json()


def test_a_release_is_seen_once_its_package_was_found_valid() -> None:
    old = validate_config(JOB, a_body(JOB)).to_json()
    layers = layers_of(a_body(JOB, package=package("2")), [])
    look = FastComparer()
    assert look.compare(JOB, texts(layers), json.dumps(old)) is None, "nobody has validated this package yet"
    look.learn(layers, validate_config(JOB, merge_layers(layers)))
    quick = look.compare(JOB, texts(layers), json.dumps(old))
    assert quick is not None and quick.difference is not None
    assert (quick.difference.reason, quick.difference.restarts) == ("package.version changed", True)
    assert list(json.loads(quick.target)) == list(old), "the fields keep their order"


def test_what_runs_as_expected_is_seen_at_once() -> None:
    body = a_body(JOB)
    quick = FastComparer().compare(
        JOB, [(10, json.dumps(body))], json.dumps(validate_config(JOB, body).to_json())
    )
    assert quick is not None and quick.difference is None


@pytest.mark.parametrize("missing", ["policies", "privileged", "slo"])
def test_a_running_config_of_an_older_version_gets_a_full_look(missing: str) -> None:
    """It lacks a field that this version has: the full look writes it anew."""
    old = {
        name: value for name, value in validate_config(JOB, a_body(JOB)).to_json().items() if name != missing
    }
    assert FastComparer().compare(JOB, [(10, json.dumps(a_body(JOB)))], json.dumps(old)) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"task_count": NaN}', '{"owner": "\\ud800"}'])
def test_what_is_no_config_gets_a_full_look(text: str) -> None:
    old = json.dumps(validate_config(JOB, a_body(JOB)).to_json())
    assert FastComparer().compare(JOB, [(10, text)], old) is None
    assert FastComparer().compare(JOB, [(10, json.dumps(a_body(JOB)))], text) is None


def test_a_release_touches_no_field_that_needs_a_plan() -> None:
    assert all(SYNC_OF[name] is not Sync.COMPLEX for name in RELEASE_FIELDS)


def test_its_memory_is_bounded() -> None:
    look, old = FastComparer(), json.dumps(validate_config(JOB, a_body(JOB)).to_json())
    for number in range(10_050):
        layers = layers_of({"package": package(str(number))}, [])
        look.learn(layers, a_stored_config(package=package(str(number))))
    layers = layers_of(a_body(JOB, package=package("10049")), [])
    assert look.compare(JOB, texts(layers), old) is not None
    assert len(look._valid) <= 10_000
