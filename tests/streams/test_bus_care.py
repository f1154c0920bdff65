"""One category that is damaged costs no other its marks, its retention or its compaction, and is told by name."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import structlog

from penstock.streams.bus.care import BusCare
from penstock.streams.bus.embedded.clean import COMPACT_FROM
from penstock.streams.bus.embedded.log import EmbeddedLog
from penstock.streams.bus.log import CategorySpec, NotAllCleaned
from tests.contracts.buses import SPEC, records

HOUR_MS = 3_600_000
NAMES = ("alpha", "broken", "zeta")
PARTITIONS = 16  # of which a publish lies in the index, until there are enough of them for a file
PUBLISHES = 2 * COMPACT_FROM // PARTITIONS


@pytest.fixture
def log(tmp_path: Path) -> EmbeddedLog:
    made = EmbeddedLog(tmp_path, boot_id="one")
    for name in NAMES:
        columns = SPEC.columns
        made.create(CategorySpec(name=name, partitions=PARTITIONS, columns=columns, retention_ms=HOUR_MS))
        made.register_producer(name, "a")
    return made


def publish(log: EmbeddedLog, first: int) -> None:
    for name in ("alpha", "zeta"):
        for seq in range(first, first + PUBLISHES):
            batches = dict.fromkeys(range(PARTITIONS), records(seq))
            log.publish(name, producer="a", epoch=1, batches=batches, gapless=True)
        assert not list((log._folder / name).glob("*.arrow")), "nothing was compacted yet"


def overwritten(sound: bytes) -> bytes:
    return bytes(len(sound))


def cut_off(sound: bytes) -> bytes:
    return sound[:5000]


def emptied(sound: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [overwritten, cut_off, emptied])
@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
def test_a_damaged_index_stops_no_other_category(
    log: EmbeddedLog, tmp_path: Path, damage: Callable[[bytes], bytes], restarts: bool
):
    """Plan: damage one; give the others something to mark, to compact and to let go; look at each of them."""
    care = BusCare(log, clean_ms=60_000, clean_after_ms=600_000)
    care.tick(now_ms=1_000, boot_ms=1_000)
    log.close()
    index = tmp_path / "broken" / "index.db"
    (tmp_path / "damaged").write_bytes(damage(index.read_bytes()))
    os.replace(tmp_path / "damaged", index)
    if restarts:
        log = EmbeddedLog(tmp_path, boot_id="one")
        care = BusCare(log, clean_ms=60_000, clean_after_ms=600_000)
    publish(log, 1)
    for name in ("alpha", "zeta"):
        log.report_low(name, producer="a", epoch=1, low=10, now_ms=2_000)
        log.report_low(
            name, producer="a", epoch=1, low=20, now_ms=2_010
        )  # too soon: the round makes the mark
    with structlog.testing.capture_logs() as said:
        for minute in range(1, 4):
            care.tick(now_ms=60_000 * minute, boot_ms=60_000 * minute)
    (failing,) = care.failing
    assert failing.name == "broken" and failing.streak == 3
    assert failing.error.what and failing.error.why and failing.error.fix
    assert [line["category"] for line in said if "category" in line] == ["broken"], "once, not each round"
    for name in ("alpha", "zeta"):
        assert log.watermark(name) == 20
        assert list((tmp_path / name).glob("*.arrow")), "small publishes became a file"
    care.tick(now_ms=2 * HOUR_MS, boot_ms=2 * HOUR_MS)
    for name in ("alpha", "zeta"):
        assert log.start_offsets(name) == log.end_offsets(name) == (PUBLISHES,) * PARTITIONS


def test_several_damaged_categories_are_all_named_and_one_that_is_restored_goes_on(
    log: EmbeddedLog, tmp_path: Path
):
    care = BusCare(log, clean_ms=60_000, clean_after_ms=600_000)
    log.close()
    sound = {name: (tmp_path / name / "index.db").read_bytes() for name in NAMES}
    for name in ("alpha", "broken"):
        (tmp_path / name / "index.db").write_bytes(overwritten(sound[name]))
    with pytest.raises(NotAllCleaned, match="not cleaned: alpha, broken") as caught:
        log.clean(now_ms=0, older_than_ms=600_000)
    assert caught.value.why and caught.value.fix
    care.tick(now_ms=60_000, boot_ms=60_000)
    assert [found.name for found in care.failing] == ["alpha", "broken"]
    log.close()
    for name in ("alpha", "broken"):
        (tmp_path / name / "index.db").write_bytes(sound[name])
    care.tick(now_ms=120_000, boot_ms=120_000)
    assert care.failing == ()


def test_what_only_the_cleaning_finds_is_told_until_a_cleaning_succeeds(log: EmbeddedLog, tmp_path: Path):
    """Plan: a small publish is damaged in the index, which only the compaction reads; later it is let go."""
    care = BusCare(log, clean_ms=60_000, clean_after_ms=600_000)
    publish(log, 1)
    log.close()
    with closing(sqlite3.connect(tmp_path / "alpha" / "index.db")) as connection, connection:
        connection.execute("UPDATE segments SET payload = zeroblob(length(payload)) WHERE id = 1")
    care.tick(now_ms=1_000, boot_ms=1_000)
    care.tick(now_ms=2_000, boot_ms=2_000)
    assert [(found.name, found.streak) for found in care.failing] == [("alpha", 2)]
    assert list((tmp_path / "zeta").glob("*.arrow")) and not list((tmp_path / "alpha").glob("*.arrow"))
    log.truncate("alpha", dict.fromkeys(range(PARTITIONS), 1))
    care.tick(now_ms=70_000, boot_ms=70_000)
    assert care.failing == ()
