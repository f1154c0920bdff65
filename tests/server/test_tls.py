"""Claims about TLS: beyond loopback there is no other way, and clients believe only who can prove it."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.app import ControlPlane
from penstock.client import Client
from penstock.core.errors import ConfigError, EnvironmentProblem, PenstockError
from penstock.fleet.messages import Heartbeat
from penstock.server.serving import Listening, Tls, bind, tls_context
from penstock.server.workers import ApiProcesses
from penstock.settings import Settings
from tests.server.served import served
from tests.waiting import LIMIT_S

NAME = "penstock.test"


@dataclass(frozen=True)
class Certificate:
    cert: Path
    key: Path

    @property
    def tls(self) -> Tls:
        return Tls(cert=self.cert, key=self.key)


def make(folder: Path, name: str) -> Certificate:
    """A certificate that signed itself, for localhost and `NAME`."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not there")
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        f"/CN={name}",
    ]
    command += ["-addext", f"subjectAltName=DNS:localhost,DNS:{NAME},IP:127.0.0.1"]
    command += ["-keyout", str(made.key), "-out", str(made.cert)]
    subprocess.run(command, check=True, capture_output=True)
    return made


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make(tmp_path_factory.mktemp("tls"), "one")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make(tmp_path_factory.mktemp("tls"), "two")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "192.0.2.7", "fe80::1"])
def test_beyond_loopback_without_tls_is_refused_before_anything_listens(host: str):
    with pytest.raises(ConfigError, match="without TLS") as caught:
        bind(Listening(host=host, port=0))
    assert caught.value.why and "--tls-cert" in caught.value.fix


@pytest.mark.parametrize("host", ["localhost.evil", "", "127.0.0.1:80", "all"])
def test_what_is_no_address_is_not_listened_on(host: str):
    with pytest.raises(ConfigError) as caught:
        bind(Listening(host=host, port=0))
    assert caught.value.why and caught.value.fix


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5"])
def test_loopback_needs_no_tls(host: str):
    with bind(Listening(host=host)) as listener:
        assert listener.getsockname()[0] == host


def test_everywhere_with_tls(tmp_path: Path, certificate: Certificate):
    """Plan: listen on all addresses with TLS; a client with the certificate reads and writes."""
    listening = Listening(host="0.0.0.0", tls=certificate.tls)
    with served(tmp_path / "plane", listening=listening) as world:
        assert world.server.url.startswith("https://localhost:")
        with world.client("admin", ca=certificate.cert) as client:
            assert client.jobs() == []
            assert client.issue_token("x", "reader", days=1, why="a test", key="k")["token"].startswith("pk_")
            assert list(client.events(since=0, wait_s=0))


def test_a_name_of_the_certificate_is_a_name_of_the_server(tmp_path: Path, certificate: Certificate):
    listening = Listening(tls=certificate.tls, name=NAME)
    assert listening.url(7337) == f"https://{NAME}:7337"


def test_a_client_believes_only_who_can_prove_it(
    tmp_path: Path, certificate: Certificate, other: Certificate, monkeypatch: pytest.MonkeyPatch
):
    with served(tmp_path / "plane", listening=Listening(tls=certificate.tls)) as world:
        url, token = world.server.url, world.tokens["reader"]
        for ca in (None, other.cert):
            with Client(url, token, ca=ca) as client, pytest.raises(EnvironmentProblem) as caught:
                client.jobs()
            assert "is not trusted" in caught.value.what and "PENSTOCK_CA" in caught.value.fix
            assert token not in str(caught.value)
        monkeypatch.setenv("PENSTOCK_CA", str(certificate.cert))
        with Client(url, token) as client:
            assert client.jobs() == []


def test_a_plain_request_to_a_tls_port_gets_no_answer(tmp_path: Path, certificate: Certificate):
    with served(tmp_path / "plane", listening=Listening(tls=certificate.tls)) as world:
        plain = world.server.url.replace("https", "http")
        with Client(plain, world.tokens["reader"], retries=0) as client, pytest.raises(PenstockError):
            client.jobs()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
def test_old_protocols_are_not_spoken(tmp_path: Path, certificate: Certificate, version: ssl.TLSVersion):
    with served(tmp_path / "plane", listening=Listening(tls=certificate.tls)) as world:
        port = int(world.server.url.rsplit(":", 1)[1])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(certificate.cert)
        with pytest.warns(DeprecationWarning):
            context.minimum_version = context.maximum_version = version
        context.set_ciphers("ALL:@SECLEVEL=0")
        refused = pytest.raises((ssl.SSLError, ConnectionError))
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as plain, refused:
            context.wrap_socket(plain, server_hostname="localhost")


def test_at_least_tls_1_2_is_set(certificate: Certificate):
    assert tls_context(certificate.tls).minimum_version >= ssl.TLSVersion.TLSv1_2


def test_a_certificate_that_cannot_be_used_is_explained(
    tmp_path: Path, certificate: Certificate, other: Certificate
):
    text = tmp_path / "text"
    text.write_text("no certificate")
    wrong = [
        Tls(cert=tmp_path / "nowhere", key=certificate.key),
        Tls(cert=certificate.cert, key=tmp_path / "nowhere"),
        Tls(cert=certificate.cert, key=other.key),
        Tls(cert=text, key=text),
    ]
    locked = tmp_path / "locked.key"
    command = [
        "openssl",
        "rsa",
        "-aes256",
        "-passout",
        "pass:x",
        "-in",
        str(certificate.key),
        "-out",
        str(locked),
    ]
    subprocess.run(command, check=True, capture_output=True)
    wrong.append(Tls(cert=certificate.cert, key=locked))
    for tls in wrong:
        with pytest.raises(EnvironmentProblem) as caught:
            bind(Listening(host="0.0.0.0", tls=tls))
        assert caught.value.what and caught.value.why and caught.value.fix


@pytest.mark.parametrize("content", ["", "no certificates"])
def test_a_ca_file_that_cannot_be_used_is_explained(tmp_path: Path, content: str):
    ca = tmp_path / "ca.pem"
    ca.write_text(content)
    for path in (ca, tmp_path / "nowhere"):
        with pytest.raises(EnvironmentProblem) as caught:
            Client("https://localhost:1", "pk_token", ca=path)
        assert caught.value.why and "PENSTOCK_CA" in caught.value.fix


def test_workers_show_the_certificate_and_trust_it_where_they_pass_requests_on(tmp_path: Path):
    made = make(tmp_path, "worker")
    listening = Listening(tls=made.tls, name="localhost")
    with bind(listening) as listener, bind(listening) as control:
        plane = ControlPlane(Settings(folder=tmp_path / "plane"))
        now_ms = plane.clock.now_ms()
        token = plane.tokens.issue("somebody", "reader", now_ms=now_ms)
        own = plane.tokens.issue("c1", "container", now_ms=now_ms, container="c1")
        server = ApiProcesses(plane, listener, control, listening).start()
        try:
            assert server.url.startswith("https://localhost:")
            with Client(server.url, token, ca=made.cert) as client:
                assert client.jobs() == [] and client.status()["containers"] == []
            with Client(server.url, own, ca=made.cert) as client:
                client.register("c1", "i1", "f1")
                for sequence in (1, 2):
                    beat = Heartbeat(container="c1", incarnation="i1", sequence=sequence)
                    assert client.beat(beat).sequence == sequence
                assert client._link._control == f"{server.control.url}/api/v1"
            with Client(server.url, token, retries=0) as stranger, pytest.raises(PenstockError):
                stranger.jobs()
        finally:
            server.stop()
            plane.stop()
