"""Claims about callers that send slowly, or without end."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.server.serving import BoundedHttp
from tests.server.served import Served, served

HEAD_S = 1.0  # who sends a whole head at once is much faster, however busy the machine is


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(BoundedHttp, "head_s", HEAD_S)
    monkeypatch.setattr(BoundedHttp, "stall_s", HEAD_S)
    with served(tmp_path / "plane") as world:
        yield world


def answer_to(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    found = b""
    with connection:
        while data := connection.recv(65536):
            found += data
    return found


def head(world: Served, *lines: str, path: str = "/health") -> bytes:
    return "\r\n".join([f"GET /api/v1{path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


@pytest.mark.parametrize("sent", [b"", b"GET /api/v1/health HTTP/1.1\r\nHost: local"])
def test_a_head_that_does_not_come_is_not_waited_for(world: Served, sent: bytes):
    connection = world.connect()
    connection.sendall(sent)
    began = time.monotonic()
    assert answer_to(connection) == b""
    assert time.monotonic() - began >= 0.9 * HEAD_S


def test_a_head_that_comes_in_drops_is_not_waited_for(world: Served):
    with world.connect() as connection, pytest.raises(ConnectionError):
        for byte in itertools.chain(head(world)[:-4] + b"\r\nX: ", itertools.repeat(ord("y"))):
            connection.sendall(bytes([byte]))
            time.sleep(0.01)


def test_a_head_without_end_is_cut_off(world: Served):
    with world.connect() as connection:
        connection.sendall(b"GET /api/v1/health HTTP/1.1\r\n")
        with pytest.raises(ConnectionError):
            while True:  # how much fits on the way is the kernel's affair
                connection.sendall(b"X: " + b"y" * 1000 + b"\r\n")


def test_a_body_that_stops_is_not_waited_for_and_nothing_is_done(world: Served):
    world.apply()
    before = world.plane.jobs.view("demo.count")
    request = (
        f"PATCH /api/v1/jobs/demo.count/layers/oncall HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {world.tokens['oncall']}\r\nContent-Type: application/json\r\n"
        'Content-Length: 100\r\n\r\n{"changes": '
    )
    connection = world.connect()
    connection.sendall(request.encode())
    assert b"200 OK" not in answer_to(connection)
    assert world.plane.jobs.view("demo.count") == before


def test_a_connection_that_is_used_again_is_not_cut_off(world: Served):
    with world.connect() as connection:
        for pause_s in (1.5 * HEAD_S, 0, 0):  # longer than a head may take, but nothing has been begun
            connection.sendall(head(world))
            assert b"200 OK" in connection.recv(65536)
            time.sleep(pause_s)


def test_a_slow_answer_is_not_cut_off(world: Served):
    token = f"Authorization: Bearer {world.tokens['reader']}"
    with world.connect() as connection:
        connection.sendall(head(world, token, path="/events?wait_s=2"))
        began, found = time.monotonic(), b""
        while b"\r\n0\r\n\r\n" not in found:
            data = connection.recv(65536)
            assert data, found
            found += data
    assert time.monotonic() - began >= 1.5 * HEAD_S
