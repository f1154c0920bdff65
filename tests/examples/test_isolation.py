"""The demo's example of isolation does what it says, and says what happens."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from penstock.client import Client
from tests.server.world import InProcess, a_client, a_world

EXAMPLE = Path(__file__).parents[2] / "examples" / "zeitgeist" / "isolation.py"


def test_nobodys_wish_is_lost_without_a_word(tmp_path: Path):
    spec = importlib.util.spec_from_file_location("isolation", EXAMPLE)
    assert spec is not None and spec.loader is not None
    isolation = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(isolation)
    said: list[str] = []
    with a_world(tmp_path / "plane") as world, a_client(world) as admin:

        def hold(token: str) -> Client:
            return Client("http://localhost", token, transport=InProcess(world.api))

        assert list(isolation.show_isolation(admin, hold, said.append)) == []
    told = "\n".join(said)
    assert told.count("refused, version") == 2
    assert "layers: provisioner 10, scaler 15, oncall 30" in told
    assert "20 tasks expected" in told and "15 tasks, as the scaler wished" in told
