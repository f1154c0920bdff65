"""Where data lies: an installation's folder keeps its bus, and is never given another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError, CorruptData, PenstockError, StoreUnavailable
from penstock.streams.bus.embedded_log import EmbeddedLog
from penstock.streams.places import identify, kept_bus, open_log, settle_bus
from tests.contracts.buses import SPEC, assert_three_parts


def test_a_folder_has_its_own_bus_unless_another_is_named(tmp_path: Path):
    assert settle_bus(tmp_path, "") == f"embedded:{tmp_path / 'bus'}"
    assert kept_bus(tmp_path) == ""
    other = f"embedded:{tmp_path / 'elsewhere'}"
    assert settle_bus(tmp_path, other) == other
    assert settle_bus(tmp_path, "") == other == kept_bus(tmp_path)


def test_a_folder_with_streams_is_given_no_other_bus(tmp_path: Path):
    EmbeddedLog(tmp_path / "bus").create(SPEC)
    with pytest.raises(ConfigError, match="on another bus") as caught:
        settle_bus(tmp_path, f"embedded:{tmp_path / 'elsewhere'}")
    assert_three_parts(caught.value)
    assert kept_bus(tmp_path) == ""
    assert settle_bus(tmp_path, f"embedded:{tmp_path / 'bus'}") == settle_bus(tmp_path, "")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"place": "x"}'])
def test_a_damaged_note_is_named_not_guessed(tmp_path: Path, text: str):
    (tmp_path / "bus.json").write_text(text)
    for look in (kept_bus, lambda folder: settle_bus(folder, "")):
        with pytest.raises(CorruptData, match="cannot tell on which bus") as caught:
            look(tmp_path)
        assert_three_parts(caught.value)


@pytest.mark.parametrize(
    "place",
    ["", "disk", "embedded:", "kafka:", "kafka://", "kafka://host", "kafka://u:p@host:1", "tcp://h:1/"],
)
def test_what_is_no_bus_is_refused_before_anything_is_asked(tmp_path: Path, place: str):
    with pytest.raises(ConfigError, match="no such bus") as caught:
        identify(place)
    assert_three_parts(caught.value)
    assert "u:p" not in str(caught.value)


def test_a_broker_that_does_not_answer_is_named(tmp_path: Path):
    with pytest.raises(StoreUnavailable, match=r"no Kafka broker answers at 127\.0\.0\.1:1") as caught:
        settle_bus(tmp_path, "kafka://127.0.0.1:1/x-")
    assert_three_parts(caught.value)
    assert "refused" in caught.value.why
    assert not list(tmp_path.iterdir())


def test_a_cluster_is_known_by_its_id_not_by_its_address(kafka: Any, tmp_path: Path):
    place = kafka.new_place()
    assert settle_bus(tmp_path, place) == place
    open_log(place).create(SPEC)
    moved = place.replace("127.0.0.1", "localhost")
    assert settle_bus(tmp_path, moved) == moved == settle_bus(tmp_path, "")
    for wrong in (kafka.new_place(), f"embedded:{tmp_path / 'bus'}"):
        with pytest.raises(PenstockError, match="on another bus"):
            settle_bus(tmp_path, wrong)
