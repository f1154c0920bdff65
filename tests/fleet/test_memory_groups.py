"""Where the kernel limits memory for us: found, set, read and removed; on files laid out as it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.container import process_runner as memory_groups
from penstock.container.process_runner import PREFIX, MemoryGroups, find_groups

FIRST = "4:memory:/service\n3:cpu,cpuacct:/service\n0::/service\n"
SECOND = "0::/system.slice/penstock.service/main\n"
DEAD = 2**30  # above what a process can have as its number


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """A service to which memory was delegated, its own processes in a group below."""
    parent = tmp_path / "system.slice" / "penstock.service"
    (parent / "main").mkdir(parents=True)
    (parent / "cgroup.subtree_control").write_text("cpu memory\n")
    (parent / "main" / "cgroup.subtree_control").write_text("\n")
    return parent


def made(groups: MemoryGroups | None, parent: Path) -> tuple[memory_groups.MemoryGroup, Path]:
    assert groups is not None
    group = groups.make("a_0", 64)
    (folder,) = parent.glob(f"{PREFIX}*a_0")
    assert group is not None and group.procs_file == str(folder / "cgroup.procs")
    return group, folder


def test_version_1_limits_memory_and_swap_together(tmp_path: Path):
    parent = tmp_path / "memory" / "service"
    parent.mkdir(parents=True)
    group, folder = made(find_groups(tmp_path, FIRST), parent)
    assert (folder / "memory.limit_in_bytes").read_text() == str(64 * 2**20)
    (folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    (folder / "memory.stat").write_text("cache 100\nrss 5\ntotal_cache 100\ntotal_rss 3145728\n")
    (folder / "memory.max_usage_in_bytes").write_text(f"{60 * 2**20}\n")
    (folder / "cgroup.procs").write_text("7\n8\n")
    assert (group.kills(), group.used_mb(), group.peak_mb(), group.members()) == (2, 3.0, 60.0, [7, 8])


def test_version_2_takes_the_group_that_was_delegated(tmp_path: Path, second: Path):
    group, folder = made(find_groups(tmp_path, SECOND), second)
    assert (folder / "memory.max").read_text() == str(64 * 2**20)
    (folder / "memory.events").write_text("low 0\nmax 9\noom 1\noom_kill 1\noom_group_kill 1\n")
    (folder / "memory.stat").write_text("anon 2097152\nfile 9\n")
    assert (group.kills(), group.used_mb(), group.peak_mb()) == (1, 2.0, 0.0)


def test_without_a_group_to_make_some_in_memory_is_watched(tmp_path: Path, second: Path):
    (second / "cgroup.subtree_control").write_text("cpu\n")
    (second / "cgroup.subtree_control").unlink()
    assert find_groups(tmp_path, SECOND) is None
    assert find_groups(tmp_path, FIRST) is None
    assert find_groups(tmp_path, "") is None and find_groups(tmp_path, "nonsense\n") is None


def test_a_group_that_the_kernel_refuses_is_none(tmp_path: Path):
    groups = MemoryGroups(tmp_path / "gone", 2)
    assert groups.make("a_0", 64) is None


def test_what_ended_processes_left_is_removed(tmp_path: Path):
    left = tmp_path / f"{PREFIX}{DEAD}-1-a_0"
    mine = tmp_path / f"{PREFIX}1-1-a_0"
    other = tmp_path / "other"
    for folder in (left, mine, other):
        folder.mkdir()
    MemoryGroups(tmp_path, 2)
    assert not left.exists() and mine.exists() and other.exists()
