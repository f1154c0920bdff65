"""What the fleet's demo judges by: lives, overlaps and gaps, read from what processes wrote down."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "fleet" / "traces.py"


@pytest.fixture(scope="module")
def traces() -> ModuleType:
    spec = importlib.util.spec_from_file_location("traces", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["traces"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def write(folder: Path, name: str, *lines: tuple[int, int, str]) -> None:
    (folder / name).write_text("".join(f"{at} {pid} {version}\n" for at, pid, version in lines))


def test_one_life_after_another_is_no_overlap_and_has_a_gap(traces: ModuleType, tmp_path: Path):
    write(tmp_path, "a_0", (100, 1, "1"), (200, 1, "1"), (900, 2, "2"), (1000, 2, "2"))
    assert [(life.pid, life.version) for life in traces.lives_of(tmp_path / "a_0")] == [(1, "1"), (2, "2")]
    assert traces.overlaps(tmp_path) == []
    assert traces.longest_gap_ms(tmp_path, since_ms=0) == 700
    assert traces.longest_gap_ms(tmp_path, since_ms=950) == 0


def test_two_lives_at_once_are_found_whoever_is_between(traces: ModuleType, tmp_path: Path):
    write(tmp_path, "a_0", (100, 1, "1"), (200, 2, "1"), (300, 1, "1"), (400, 2, "1"))
    write(tmp_path, "a_1", (100, 1, "1"), (200, 2, "1"), (300, 3, "1"), (350, 1, "1"))
    assert len(traces.overlaps(tmp_path)) == 3
    write(tmp_path, "a_0", (100, 1, "1"), (100, 2, "1"))
    assert any("a_0" in case for case in traces.overlaps(tmp_path)), "the same moment is one too many"


def test_only_who_wrote_a_moment_ago_is_alive(traces: ModuleType, tmp_path: Path):
    now_ms = traces.now_ms()
    write(tmp_path, "a_0", (now_ms - 100, 1, "1"))
    write(tmp_path, "a_1", (now_ms - 5_000, 2, "1"))
    assert {name: life.pid for name, life in traces.alive(tmp_path).items()} == {"a_0": 1}
