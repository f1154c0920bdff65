"""One instance per role at a time; who is fenced is decided by terms, never by clocks."""

from __future__ import annotations

import threading

import pytest

from penstock.core.errors import Fenced
from penstock.db.database import Database, check_term
from penstock.db.leases import RoleLease

LEASE_MS = 6_000


def lease(database: Database, holder: str, role: str = "syncer") -> RoleLease:
    return RoleLease(database, role, holder, lease_ms=LEASE_MS)


def test_the_first_is_active_and_the_second_waits(place):
    database = Database(place)
    one, two = lease(database, "one"), lease(database, "two")
    assert one.renew(0) == 1
    assert two.renew(10) is None
    assert (one.term, two.term) == (1, None)
    assert lease(database, "three", role="shard_manager").renew(10) == 1
    database.close()


def test_a_lease_that_is_kept_is_never_taken(place):
    database = Database(place)
    one, two = lease(database, "one"), lease(database, "two")
    for now_ms in range(0, 60_000, 1_000):
        assert one.renew(now_ms) == 1
        assert two.renew(now_ms + 1) is None
    database.close()


def test_a_lease_that_is_over_is_taken_with_a_larger_term_and_fences_the_old_one(place):
    database = Database(place)
    one, two = lease(database, "one"), lease(database, "two")
    assert one.renew(0) == 1
    assert two.renew(LEASE_MS - 1) is None
    assert two.renew(LEASE_MS) == 2
    with pytest.raises(Fenced), database.transaction() as connection:
        check_term(connection, "syncer", 1)
    assert one.renew(LEASE_MS + 1) is None  # it notices when it asks next
    assert two.renew(2 * LEASE_MS - 1) == 2
    database.close()


def test_a_release_hands_over_at_once_and_its_term_never_comes_back(place):
    database = Database(place)
    one, two = lease(database, "one"), lease(database, "two")
    one.renew(0)
    one.release()
    one.release()
    assert two.renew(1) == 2
    assert one.renew(2) is None
    two.release()
    assert one.renew(3) == 3
    database.close()


def test_a_late_release_does_not_end_the_successors_lease(place):
    database = Database(place)
    one, two = lease(database, "one"), lease(database, "two")
    one.renew(0)
    two.renew(LEASE_MS)
    one.release()
    assert lease(database, "three").renew(LEASE_MS + 1) is None
    database.close()


def test_who_knows_that_the_holder_is_gone_may_seize(place):
    database = Database(place)
    lease(database, "one").renew(0)
    assert lease(database, "one again").renew(1, seize=True) == 2
    database.close()


def test_a_clock_that_was_far_ahead_does_not_lock_the_role_for_ever(place):
    database = Database(place)
    lease(database, "from the future").renew(10**12)
    assert lease(database, "now").renew(1_000) == 2
    database.close()


def test_a_clock_that_goes_back_asks_the_store(place):
    database = Database(place)
    one, two = lease(database, "one"), lease(database, "two")
    assert one.renew(100_000) == 1
    assert two.renew(200_000) == 2
    assert one.renew(50_000) is None
    database.close()


def test_of_many_that_ask_at_once_one_gets_it(place):
    database = Database(place)
    terms: list[int | None] = []

    def ask(number: int) -> None:
        terms.append(lease(database, f"instance {number}").renew(0))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(term for term in terms if term is not None) == [1]
    database.close()
