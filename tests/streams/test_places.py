"""Where data lies: an installation's folder keeps its bus, and is never given another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError, CorruptData, PenstockError, StoreUnavailable
from penstock.streams.bus.embedded.log import EmbeddedLog
from penstock.streams.places import (
    hidden_password,
    identify,
    identify_rows,
    kept_bus,
    kept_rows,
    open_log,
    open_rows,
    settle_bus,
    settle_rows,
)
from tests.contracts.buses import SPEC, assert_three_parts


def bus_of(folder: Path, given: str) -> str:
    """The bus of a folder once something was started on it."""
    settled = settle_bus(folder, given)
    settled.keep()
    return settled.place


def rows_of(folder: Path, given: str) -> str:
    settled = settle_rows(folder, given)
    settled.keep()
    return settled.place


def test_what_is_settled_is_remembered_only_when_it_is_kept(tmp_path: Path):
    """Plan: a bus is named and asked about; what comes next is refused; nothing is written."""
    other = f"embedded:{tmp_path / 'elsewhere'}"
    settled = settle_bus(tmp_path, other)
    assert settled.place == other and not list(tmp_path.iterdir())
    assert settle_bus(tmp_path, "").place == f"embedded:{tmp_path / 'bus'}"
    settled.keep()
    assert settle_bus(tmp_path, "").place == other


def test_a_folder_has_its_own_bus_unless_another_is_named(tmp_path: Path):
    assert bus_of(tmp_path, "") == f"embedded:{tmp_path / 'bus'}"
    assert kept_bus(tmp_path) == ""
    other = f"embedded:{tmp_path / 'elsewhere'}"
    assert bus_of(tmp_path, other) == other
    assert bus_of(tmp_path, "") == other == kept_bus(tmp_path)


def test_a_folder_with_streams_is_given_no_other_bus(tmp_path: Path):
    EmbeddedLog(tmp_path / "bus").create(SPEC)
    with pytest.raises(ConfigError, match="on another bus") as caught:
        bus_of(tmp_path, f"embedded:{tmp_path / 'elsewhere'}")
    assert_three_parts(caught.value)
    assert kept_bus(tmp_path) == ""
    assert bus_of(tmp_path, f"embedded:{tmp_path / 'bus'}") == bus_of(tmp_path, "")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"place": "x"}'])
def test_a_damaged_note_is_named_not_guessed(tmp_path: Path, text: str):
    (tmp_path / "bus.json").write_text(text)
    for look in (kept_bus, lambda folder: bus_of(folder, "")):
        with pytest.raises(CorruptData, match="the bus of the folder") as caught:
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
        bus_of(tmp_path, "kafka://127.0.0.1:1/x-")
    assert_three_parts(caught.value)
    assert "refused" in caught.value.why
    assert not list(tmp_path.iterdir())


def test_a_cluster_is_known_by_its_id_not_by_its_address(kafka: Any, tmp_path: Path):
    place = kafka.new_place()
    assert bus_of(tmp_path, place) == place
    open_log(place).create(SPEC)
    moved = place.replace("127.0.0.1", "localhost")
    assert bus_of(tmp_path, moved) == moved == bus_of(tmp_path, "")
    for wrong in (kafka.new_place(), f"embedded:{tmp_path / 'bus'}"):
        with pytest.raises(PenstockError, match="on another bus"):
            bus_of(tmp_path, wrong)


def test_rows_are_kept_in_the_folder_or_where_they_were_before(postgres: Any, tmp_path: Path):
    own = f"sqlite:{tmp_path / 'rows'}"
    assert rows_of(tmp_path, "") == own
    assert kept_rows(tmp_path) == ""
    place = postgres.new_database()
    assert rows_of(tmp_path, place) == place == rows_of(tmp_path, "") == kept_rows(tmp_path)
    assert (tmp_path / "rows.json").stat().st_mode & 0o077 == 0, "an address may carry a password"
    moved = place + "&application_name=moved"
    assert rows_of(tmp_path, moved) == moved == kept_rows(tmp_path)
    for wrong in (postgres.new_database(), own):
        with pytest.raises(ConfigError, match="in another row store") as caught:
            rows_of(tmp_path, wrong)
        assert_three_parts(caught.value)
    assert kept_rows(tmp_path) == moved


def test_a_folder_with_states_is_given_no_other_rows(postgres: Any, tmp_path: Path):
    (tmp_path / "rows").mkdir()
    with pytest.raises(ConfigError, match="in another row store"):
        rows_of(tmp_path, postgres.new_database())
    assert kept_rows(tmp_path) == ""


@pytest.mark.parametrize("place", ["", "disk", "sqlite", "mysql://u:secret@h/x", "postgresql:secret"])
def test_what_is_no_row_store_is_named_without_its_password(place: str):
    for look in (open_rows, identify_rows):
        if (look, place) == (open_rows, "sqlite"):
            continue
        with pytest.raises(PenstockError) as caught:
            look(place)
        assert_three_parts(caught.value)
        assert "secret" not in str(caught.value)


def test_a_password_is_not_shown():
    assert hidden_password("postgresql://u:secret@h:5432/x") == "postgresql://u:***@h:5432/x"
    assert hidden_password("postgresql://h:5432/x?user=u") == "postgresql://h:5432/x?user=u"
