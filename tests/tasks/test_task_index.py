"""The task list by shard."""

from __future__ import annotations

import os
import subprocess
import sys

from penstock.tasks.task_index import TaskIndex
from penstock.tasks.task_service import TaskList
from tests.tasks.harness import a_list, a_spec

ORDER = """
from penstock.tasks.task_index import TaskIndex
from tests.tasks.harness import a_list, a_spec
index = TaskIndex()
for version in (1, 2):
    index.take(a_list(version, *(a_spec(f"job{n}/0", generation=version) for n in range(20))))
    print([spec.task_id for _, spec in index.tasks_of([0], 1)])
"""


def test_a_delta_changes_what_it_names():
    index = TaskIndex()
    assert index.take(a_list(1, a_spec("a/0"), a_spec("b/0")))
    assert {spec.task_id for _, spec in index.tasks_of([0], 1)} == {"a/0", "b/0"}
    changed = a_spec("b/0", generation=2)
    assert index.take(TaskList(version=2, full=False, since=1, jobs={"b": (changed,)}, removed=("a",)))
    assert [spec for _, spec in index.tasks_of([0], 1)] == [changed]
    assert index.spec("b", "b/0") is changed and index.spec("a", "a/0") is None


def test_a_task_is_found_before_anybody_asked_for_shards():
    index, spec = TaskIndex(), a_spec("a/0")
    assert index.spec("a", "a/0") is None
    index.take(a_list(1, spec))
    assert index.spec("a", "a/0") is spec and index.spec("a", "a/1") is None


def test_tasks_come_in_the_same_order_in_every_process():
    """They are started in this order; sets of names are ordered by a secret of each process."""
    found = set()
    for secret in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": secret}
        done = subprocess.run(
            [sys.executable, "-c", ORDER], env=environment, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1
