from __future__ import annotations

import pytest

from penstock.core.errors import ConfigError, Fenced, Refused, VersionConflict
from penstock.db.database import Database, take_term
from penstock.db.journal_store import JournalStore
from penstock.fleet import shard_store as shard_rows_store
from penstock.fleet.container_store import ContainerState
from penstock.fleet.messages import Heartbeat, HeartbeatVerdict, ShardState
from penstock.fleet.placement.placement import Move, Placement
from penstock.fleet.shard_store import FailedOver, Renewed, ShardStore
from tests.fleet.harness import dropping, owned


class Desk:
    """A store with two shards, and the calls of a Shard Manager in short."""

    def __init__(self) -> None:
        self.database = Database(None)
        self.store = ShardStore(self.database, JournalStore(self.database))
        self.term = take_term(self.database, "shard_manager", "test")
        self.store.ensure_shards(2, term=self.term)

    def register(self, name: str, life: int = 1, folder_id: str = "f"):
        row, _ = self.store.register(
            name, f"{name}-{life}", folder_id=folder_id, host="", pid=0, term=self.term, at_ms=0
        )
        return row

    def beat(self, name: str, *acked, life: int = 1, sequence: int = 1, **values):
        beat = Heartbeat(
            container=name, incarnation=f"{name}-{life}", sequence=sequence, acked=acked, **values
        )
        (outcome,) = self.store.heartbeats([beat], term=self.term, at_ms=0)
        return outcome

    def move(self, shard: int, source: str | None, target: str) -> None:
        moves = (Move(shard=shard, source=source, target=target, reason="test"),)
        self.store.rearrange(lambda shards, containers: Placement(moves=moves), term=self.term, at_ms=0)

    def fail_over(self, name: str, renewals: int | None, moves=(), life: int = 1):
        return self.store.fail_over(
            name,
            f"{name}-{life}",
            renewals=renewals,
            plan=lambda shards, containers: Placement(moves=tuple(moves)),
            term=self.term,
            at_ms=0,
            reason="test",
        )

    def shard(self, shard: int):
        return self.store.shards()[shard]


def two_containers() -> Desk:
    desk = Desk()
    desk.register("c1")
    desk.register("c2")
    desk.move(0, None, "c1")
    return desk


def test_every_change_of_a_record_takes_a_larger_epoch_which_is_the_version_of_the_set():
    desk = two_containers()
    seen = [desk.shard(0).epoch]
    desk.move(0, "c1", "c2")
    seen.append(desk.shard(0).epoch)
    assert desk.shard(0).state is ShardState.DROPPING and desk.beat("c1").assignment.version == seen[-1]
    outcome = desk.beat("c1", dropping(0, seen[-1]), sequence=2)
    seen.append(desk.shard(0).epoch)
    assert seen == sorted(set(seen)) and outcome.assignment.version == seen[-1]
    assert (desk.shard(0).container, desk.shard(0).state) == ("c2", ShardState.OWNED)


@pytest.mark.parametrize("stale", [owned(0, 4), dropping(0, 3), dropping(0, 99), dropping(1, 4)])
def test_only_the_drop_of_this_very_epoch_frees_a_shard(stale):
    desk = two_containers()
    desk.move(0, "c1", "c2")
    assert desk.shard(0).epoch == 4
    desk.beat("c1", stale)
    assert (desk.shard(0).container, desk.shard(0).state) == ("c1", ShardState.DROPPING)


def test_nobody_frees_the_shard_of_another():
    desk = two_containers()
    desk.move(0, "c1", "c2")
    desk.beat("c2", dropping(0, 4))
    assert desk.shard(0).container == "c1"


def test_a_dropped_shard_whose_target_is_gone_is_owned_by_nobody():
    desk = two_containers()
    desk.move(0, "c1", "c2")
    desk.fail_over("c2", renewals=1)
    desk.beat("c1", dropping(0, 4))
    assert desk.shard(0).container is None and desk.shard(0).epoch > 4


def test_a_fail_over_is_refused_when_the_lease_row_was_renewed():
    desk = two_containers()
    assert desk.store.renew("c1", "c1-1") is not None  # no Shard Manager was in reach, but the store was
    assert desk.fail_over("c1", renewals=1) == Renewed(renewals=2)
    assert desk.shard(0).container == "c1"


def test_a_fail_over_revokes_and_gives_away_in_one_transaction():
    desk = two_containers()
    before = desk.shard(0).epoch
    outcome = desk.fail_over("c1", 1, [Move(shard=0, source=None, target="c2", reason="test")])
    assert isinstance(outcome, FailedOver)
    assert desk.shard(0).container == "c2" and desk.shard(0).epoch > before
    assert desk.store.containers()[0].state is ContainerState.GONE
    assert desk.store.renew("c1", "c1-1") is None
    assert desk.beat("c1").verdict is HeartbeatVerdict.REBOOT
    assert desk.fail_over("c1", 1) is None


@pytest.mark.parametrize(
    ("is_draining", "has_shards", "said"),
    [
        (True, False, "left"),
        (True, True, "failed over, 0 shards given"),
        (False, False, "failed over, 0 shards given"),
    ],
)
def test_one_that_was_drained_and_ended_has_left(is_draining: bool, has_shards: bool, said: str):
    """Nobody is alarmed by what was asked for."""
    desk = two_containers()
    name = "c1" if has_shards else "c2"
    desk.store.cordon(
        name, cordoned=is_draining, draining=is_draining, term=desk.term, at_ms=0, reason="asked to"
    )
    assert desk.store.mark_dead(name, f"{name}-1", term=desk.term, at_ms=0)
    assert isinstance(desk.fail_over(name, None), FailedOver)
    entries = [entry for entry in JournalStore(desk.database).after(0) if entry.kind == "failover"]
    assert [(entry.subject, entry.decision) for entry in entries] == [(name, said)]


def test_a_failed_transaction_leaves_nothing_behind():
    desk = two_containers()

    def plan(shards, containers):
        raise Refused("no plan")

    before = (desk.store.shards(), desk.store.containers())
    with pytest.raises(Refused):
        desk.store.fail_over("c1", "c1-1", renewals=1, plan=plan, term=desk.term, at_ms=0, reason="test")
    assert (desk.store.shards(), desk.store.containers()) == before


def test_a_shard_manager_of_an_older_term_writes_nothing():
    desk = two_containers()
    take_term(desk.database, "shard_manager", "successor")
    before = (desk.store.shards(), desk.store.containers())
    for write in (
        lambda: desk.beat("c1"),
        lambda: desk.register("c3"),
        lambda: desk.move(1, None, "c1"),
        lambda: desk.fail_over("c1", 1),
        lambda: desk.store.mark_dead("c1", "c1-1", term=desk.term, at_ms=0),
        lambda: desk.store.withhold("c1", "c1-1", shard=0, term=desk.term, at_ms=0, reason=""),
        lambda: desk.store.cordon("c1", cordoned=True, draining=False, term=desk.term, at_ms=0, reason=""),
    ):
        with pytest.raises(Fenced):
            write()
    assert (desk.store.shards(), desk.store.containers()) == before


def test_a_second_container_of_a_live_name_is_refused_unless_it_holds_the_folder():
    desk = two_containers()
    with pytest.raises(Refused) as refused:
        desk.register("c1", life=2, folder_id="another")
    assert refused.value.why and refused.value.fix
    with pytest.raises(Refused):
        desk.register("c1", life=2, folder_id="")
    before = desk.shard(0).epoch
    desk.register("c1", life=2)
    assert desk.shard(0).container == "c1" and desk.shard(0).epoch > before
    assert desk.beat("c1", life=1).verdict is HeartbeatVerdict.REBOOT
    assert desk.beat("c1", life=2).verdict is HeartbeatVerdict.OK


def test_a_registration_may_be_repeated_but_a_life_does_not_come_back():
    desk = two_containers()
    before = desk.store.shards()
    desk.register("c1")
    assert desk.store.shards() == before
    desk.fail_over("c1", renewals=1)
    with pytest.raises(Refused):
        desk.register("c1")
    desk.register("c1", life=2, folder_id="anywhere")
    assert desk.beat("c1", life=2).assignment.shards == ()


def test_a_late_beat_is_a_sign_of_life_but_no_news():
    desk = two_containers()
    desk.beat("c1", sequence=5, list_version=9, engine_ready=True)
    outcome = desk.beat("c1", sequence=4, list_version=3, engine_ready=False)
    row = desk.store.containers()[0]
    assert (row.list_version, row.engine_ready, row.renewals) == (9, True, outcome.renewals)
    assert outcome.renewals == 3


def test_a_withheld_lease_is_not_extended_by_beats_nor_by_the_row():
    desk = two_containers()
    desk.store.withhold("c1", "c1-1", shard=0, term=desk.term, at_ms=0, reason="test")
    assert desk.beat("c1").verdict is HeartbeatVerdict.WITHHELD
    assert desk.store.renew("c1", "c1-1") is None
    assert isinstance(desk.fail_over("c1", renewals=1), FailedOver)


def test_a_compare_and_set_on_an_old_epoch_loses():
    desk = two_containers()
    old = desk.shard(0)
    desk.move(0, "c1", "c2")
    with pytest.raises(VersionConflict), desk.database.transaction() as connection:
        shard_rows_store.update_shards(
            connection, [shard_rows_store.ShardUpdate(old, "c2", ShardState.OWNED)]
        )
    assert desk.shard(0).container == "c1"


def test_another_number_of_shards_is_refused():
    desk = Desk()
    with pytest.raises(ConfigError) as error:
        desk.store.ensure_shards(3, term=desk.term)
    assert "2 shards" in error.value.fix


def test_every_decision_is_in_the_journal_with_its_reason():
    desk = two_containers()
    desk.fail_over("c1", 1, [Move(shard=0, source=None, target="c2", reason="test")])
    entries = desk.store._journal.entries()
    assert [(entry.kind, entry.subject) for entry in entries] == [
        ("container", "c1"),
        ("container", "c2"),
        ("placement", "shards"),
        ("failover", "c1"),
    ]
    assert all(entry.reason for entry in entries)
    assert entries[-1].data == {"shards": {"0": "c2"}}
