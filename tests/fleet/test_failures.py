"""Claims about classes of failures: told from what a run said."""

from __future__ import annotations

import pytest

from penstock.fleet.messages import CLASSES_MAX, OTHER, count_failure, failure_class, summarize_error


@pytest.mark.parametrize(
    ("error", "name"),
    [
        ("out of memory: it used 900 MB and had reserved 512 MB", "OutOfMemory"),
        ("java.lang.OutOfMemoryError: Java heap space", "OutOfMemory"),
        ("[DIVIDE_BY_ZERO] Division by zero. Use `try_divide`", "DIVIDE_BY_ZERO"),
        ("org.apache.spark.SparkException: Job aborted", "SparkException"),
        ("Traceback …\nValueError: bad row", "ValueError"),
        ("it was ended by SIGKILL (memory: 12 MB at most)", "SIGKILL"),
        ("it ended with code 3 (memory: 12 MB at most)", "ExitCode3"),
        ("it ended by itself", OTHER),
        ("", OTHER),
    ],
)
def test_a_failure_has_a_class(error: str, name: str):
    assert failure_class(error) == name


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            "user code failed: job 'a'\nWhy: KeyError: 'x'\nWhat to do: mend it",
            "user code failed: job 'a' Why: KeyError: 'x'",
        ),
        ("  ValueError: x\n  at line 3\n", "ValueError: x"),
        ("\n \n", ""),
        ("", ""),
        ("x" * 1000, "x" * 300),
    ],
)
def test_an_error_is_told_on_one_line_with_its_reason(error: str, line: str):
    assert summarize_error(error) == line


def test_the_counts_of_a_task_stay_small():
    counts: dict[str, int] = {}
    for number in range(100):
        counts = count_failure(counts, f"Some{number}Error: x")
    assert sum(counts.values()) == 100 and len(counts) <= CLASSES_MAX + 1
    assert counts[OTHER] == 100 - CLASSES_MAX
