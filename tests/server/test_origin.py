"""Claims about Host and Origin: pages of a browser cannot use this API behind a user's back."""

from __future__ import annotations

import pytest

from penstock.core.errors import PenstockError
from penstock.server.security import CheckOrigin
from tests.server.test_access import ROUTES, filled
from tests.server.world import World

METHODS = ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "anything")


def check(
    method: str, *headers: tuple[str, str], names: tuple[str, ...] = (), any_address: bool = False
) -> None:
    async def nothing(*_: object) -> None: ...

    scope = {"method": method, "headers": [(name.encode(), value.encode()) for name, value in headers]}
    CheckOrigin(nothing, names=names, any_address=any_address).check(scope)


def is_refused(method: str, *headers: tuple[str, str], **kwargs: object) -> bool:
    try:
        check(method, *headers, **kwargs)  # type: ignore[arg-type]
    except PenstockError as error:
        assert error.what and error.why and error.fix
        return True
    return False


@pytest.mark.parametrize("host", ["localhost", "LocalHost:7337", "127.0.0.1", "127.0.0.1:80", "[::1]:7337"])
def test_loopback_is_a_name_of_ours(host: str):
    assert not is_refused("GET", ("host", host))


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "evil.example:7337",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "127.0.0.1@evil.example",
        "localhost:7337:1",
        "localhost/x",
        "",
        " localhost",
    ],
)
def test_a_rebound_name_is_not(host: str):
    assert is_refused("GET", ("host", host))


def test_one_host_and_one_only():
    assert is_refused("GET")
    assert is_refused("GET", ("host", "localhost"), ("host", "localhost"))


def test_with_tls_a_name_of_the_certificate_or_an_address_will_do():
    kwargs = {"names": ("Penstock.Internal",), "any_address": True}
    assert not is_refused("GET", ("host", "penstock.internal:7337"), **kwargs)
    assert not is_refused("GET", ("host", "10.1.2.3:7337"), **kwargs)
    assert not is_refused("GET", ("host", "[fe80::1]:7337"), **kwargs)
    assert is_refused("GET", ("host", "evil.example"), **kwargs)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("origin", ["http://localhost:7337", "http://evil.example", "null", ""])
def test_no_page_writes_whatever_the_method(method: str, origin: str):
    """CVE-2026-27482: POST and PUT were blocked for browsers, DELETE was forgotten."""
    assert is_refused(method, ("host", "localhost:7337"), ("origin", origin))
    assert is_refused(method, ("host", "localhost:7337"), ("sec-fetch-site", "same-origin"))
    assert not is_refused(method, ("host", "localhost:7337"))


def test_another_page_does_not_even_read():
    assert is_refused("GET", ("host", "localhost:7337"), ("origin", "http://evil.example"))
    assert is_refused("GET", ("host", "localhost:7337"), ("origin", "http://localhost:9999"))
    assert not is_refused("GET", ("host", "localhost:7337"), ("origin", "http://localhost:7337"))


@pytest.mark.parametrize(("method", "path", "verb", "body"), ROUTES, ids=[f"{r[0]} {r[1]}" for r in ROUTES])
def test_every_route_refuses_a_foreign_host_and_a_page_that_writes(
    shared: World, method: str, path: str, verb: str, body: object
):
    before = shared.everything()
    answer = shared.ask(method, filled(path), json=body, headers={"Host": "evil.example"})
    assert answer.status_code == 403 and "evil.example" in answer.json()["title"]
    answer = shared.ask(method, filled(path), json=body, headers={"Origin": "http://evil.example"})
    assert answer.status_code == 403 and "may not" in answer.json()["title"]
    assert "access-control-allow-origin" not in answer.headers
    assert shared.everything() == before
