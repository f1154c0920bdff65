"""What the Python client asks about containers that clusters lend each other."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.web.link import Json, Link, path_part


class _Order(msgspec.Struct, frozen=True):
    kind: str
    number: int
    to: str
    owner: str
    url: str
    token: str


class _Ordered(msgspec.Struct, frozen=True):
    state: str
    order: _Order | None


class LendingQuestions:
    """Asks over a link. Orders say what should be so: giving one twice is giving it once."""

    _link: Link

    def loans(self) -> list[Json]:
        """Which containers can be lent, are lent, borrowed or on their way."""
        return list(self._link.json("GET", "/loans", repeat=True)["loans"])

    def ask_order(self, container: str, *, owner: str = "") -> Json:
        """What a container should do: {state, order}."""
        answer = self._lending(container, "order", owner=owner)
        self._link.read(answer, _Ordered)
        return answer

    def answer_order(self, container: str, *, number: int, accepted: bool, why: str = "") -> Json:
        """What its host says to an order."""
        return self._lending(container, "order/answer", number=number, accepted=accepted, why=why)

    def lend(self, container: str, *, home: str, to: str, url: str, token: str, why: str) -> Json:
        """Begin to give a container to another cluster."""
        return self._lending(container, "lend", home=home, to=to, url=url, token=token, why=why)

    def keep_container(self, container: str, *, version: int, why: str) -> Json:
        """It stays after all."""
        return self._lending(container, "keep", version=version, why=why)

    def expect(self, container: str, *, lender: str, owner: str, version: int, why: str) -> Json:
        """It will come from another cluster: {version, token}; `version`: of the record that was seen."""
        body = {"lender": lender, "owner": owner, "version": version, "why": why}
        # Not repeated: the token is seen once.
        return self._link.json("POST", f"/containers/{path_part(container)}/expect", body=body)

    def forget_container(self, container: str, *, version: int, why: str) -> None:
        """It did not come, or is not here any more."""
        self._lending(container, "forget", version=version, why=why)

    def _lending(self, container: str, verb: str, **body: Any) -> Json:
        return self._link.json("POST", f"/containers/{path_part(container)}/{verb}", body=body, repeat=True)
