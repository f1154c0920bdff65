"""A container's token speaks for that container alone: over the API, for hosts that lend, after an upgrade."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.client import Client
from penstock.core.errors import ConfigError, PenstockError, Refused
from penstock.db.database import Database
from penstock.db.tokens import TokenStore
from penstock.fleet.messages import Heartbeat
from penstock.jobs.job_service import Actor
from tests.jobs.asking import asked
from tests.server.served import Served, served


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as found:
        yield found


def beat(client: Client, container: str) -> None:
    client.beat(Heartbeat(container=container, incarnation="i", sequence=1))


SPEAKS: list[tuple[str, Callable[[Client], object]]] = [
    ("register", lambda client: client.register("c1", "i", "f")),
    ("beat", lambda client: beat(client, "c1")),
    ("dead", lambda client: client.container_dead("c1", "f")),
    ("order", lambda client: client.ask_order("c1")),
    ("answer", lambda client: client.answer_order("c1", number=1, accepted=True)),
]


@pytest.mark.parametrize(("verb", "speak"), SPEAKS, ids=[name for name, _ in SPEAKS])
def test_a_container_cannot_speak_for_another(
    plane: Served, verb: str, speak: Callable[[Client], object]
) -> None:
    """Nothing that c2's token says as c1 is taken; c1 itself is heard."""
    with plane.client(container="c1") as own:
        own.register("c1", "i", "f")
    before = plane.plane.fleet.containers(), plane.plane.lending.loans()
    with plane.client(container="c2") as other, pytest.raises(Refused) as caught:
        speak(other)
    assert "is not valid for the container 'c1'" in caught.value.what and "'c2'" in caught.value.why
    assert "token new c1 --role container" in caught.value.fix
    assert (plane.plane.fleet.containers(), plane.plane.lending.loans()) == before
    with plane.client(container="c1") as own:
        try:
            speak(own)
        except PenstockError as error:
            assert not isinstance(error, Refused), error  # heard, whatever is said to it
    with plane.client("admin") as admin:
        beat(admin, "c1")  # who may do everything may do this


def test_the_token_of_another_cluster_is_given_to_the_container_that_goes_there_alone(
    plane: Served,
) -> None:
    with plane.client(container="c1") as own:
        own.register("c1", "i", "f")
        own.beat(
            Heartbeat(container="c1", incarnation="i", sequence=1, engine_ready=True, capacity=(1, 1, 1, 1))
        )
        own.ask_order("c1")
        with plane.client("admin") as admin:
            admin.lend("c1", home="a", to="b", url="http://b:1", token="pk_of_b", why="b needs it")
        order = own.ask_order("c1")["order"]
        assert order is not None and order["token"] == "pk_of_b"
    with plane.client(container="c2") as other, pytest.raises(Refused):
        other.ask_order("c1")
    for role in ("reader", "developer", "oncall"):
        with plane.client(role) as client:
            assert "pk_of_b" not in str(client.loans())


def test_the_token_that_a_borrowed_container_comes_with_is_its_own(plane: Served) -> None:
    with plane.client("admin") as admin:
        came = admin.expect("c7", lender="b", owner="b", version=0, why="we are short")
    with plane.client(token=came["token"]) as client:
        client.register("c7", "i", "f")
        with pytest.raises(Refused, match="is not valid for"):
            client.register("c8", "i", "f")


def test_a_token_that_is_issued_for_a_container_speaks_for_the_name_that_it_has(plane: Served) -> None:
    with plane.client("admin") as admin:
        issued = admin.issue_token("far", "container", days=1, why="a machine", key="k")
        assert issued["container"] == "far"
        reader = admin.issue_token("rita", "reader", days=1, why="a colleague", key="k2")
        assert reader["container"] == ""
    root = asked(Actor(name="root", role="admin"))
    with pytest.raises(ConfigError, match="cannot be the name of a container") as caught:
        plane.plane.token_service.issue("the far one", "container", lifetime_ms=1000, **root)
    assert "has the name of its container" in caught.value.why
    with plane.client(token=issued["token"]) as client:
        assert client.installation()["container"] == "far"
        client.register("far", "i", "f")


def test_a_token_of_a_former_version_speaks_for_the_first_container_that_uses_it(tmp_path: Path) -> None:
    """Also on another instance, and after a restart; what is only read does not bind it."""
    with served(tmp_path) as plane:
        old = plane.plane.tokens.issue("fleet", "container", now_ms=plane.plane.clock.now_ms())
        with plane.client(token=old) as client:
            client.task_list(None)
            assert client.installation()["container"] == ""
            with pytest.raises(PenstockError):
                client.register("no name", "i", "f")
            client.register("c5", "i", "f")
            beat(client, "c5")
            with pytest.raises(Refused, match="is not valid for the container 'c6'"):
                client.register("c6", "i", "f")
        other = TokenStore(Database(tmp_path / "store.db"))
        assert other.caller(old, now_ms=plane.plane.clock.now_ms()).container == "c5"
        assert other.bind(other.caller(old, now_ms=plane.plane.clock.now_ms()).token_id, "c6") == "c5"
        with plane.client("admin") as admin:
            (row,) = (row for row in admin.tokens() if row["name"] == "fleet")
            assert row["container"] == "c5"
