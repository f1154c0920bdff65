"""An error of user code says which line of the user's own files it came from, wherever it is shown."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.fleet import tasks_table
from penstock.cli.policies import doctor_text
from penstock.core.errors import ComputationFailed, PenstockError
from penstock.scaling.doctor.doctor import examine
from penstock.streams.dsl.computation import UserCall, report_user_errors
from penstock.streams.spark.run_errors import readable
from tests.cli.by_hand import Container
from tests.cli.test_oncall_settings import HALVES, JOB, SHUFFLE, Records, inject, settle, shops
from tests.cli.test_tables import shown
from tests.cli.world import Run, World, plain
from tests.scaling.policies.test_doctor import failing

__all__ = ["inject", "shops"]
LINE = next(n for n, line in enumerate(HALVES.splitlines(), 1) if "100 // n" in line)
AT = f"shops.py:{LINE} in share"


def as_spark_tells(error: BaseException) -> RuntimeError:
    """What Spark makes of an error of a Python worker."""
    trace = "".join(traceback.format_exception(error))
    return RuntimeError(
        "[STREAM_FAILED] Query [id = 1] terminated with exception: Job aborted due to stage failure: Task 0 in "
        "stage 5.0 failed 1 times: org.apache.spark.api.python.PythonException: [PYTHON_EXCEPTION] An exception "
        f"was thrown from the Python worker: {trace}\n SQLSTATE: 38000\n"
        "\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:1097)\n"
        "\nDriver stacktrace: SQLSTATE: XXKST"
    )


@pytest.fixture
def error(shops: Container, inject: Records) -> str:
    """The error of a task whose step met a record that its user code cannot take."""
    inject(1, 0, 2)
    shops.step(SHUFFLE)
    with pytest.raises(ComputationFailed) as caught:
        shops.step(JOB)
    return readable(as_spark_tells(caught.value))


def test_a_tasks_error_names_line_exception_and_record(error: str, empty: World):
    what, why, _ = error.splitlines()
    (category,) = [one.spec.name for one in empty.plane.log.categories() if one.spec.name.startswith(SHUFFLE)]
    assert what == (
        f"user code failed at {AT}: job '{JOB}', key 'a', record at 1 of '{category}', partition 0"
    )
    assert why == "Why: ZeroDivisionError: integer division or modulo by zero"
    assert "\tat " not in error and "Traceback" not in error


def test_lists_of_tasks_and_the_doctor_show_it(error: str):
    task = {
        "task_id": f"{JOB}/0",
        "container": "c0",
        "state": "backoff",
        "shard": 1,
        "generation": 1,
        "restarts": 2,
        "metrics": {},
        "error": error,
    }
    listed = "".join(plain(shown(tasks_table([task]))).split())  # its columns are narrow here
    assert AT.replace(" ", "") in listed and "ZeroDivisionError" in listed
    examination = examine(failing(error)).to_json()
    text = " ".join(shown(doctor_text(examination)).split())
    assert f"user code failed at {AT}" in text and "ZeroDivisionError: integer division" in text
    (finding,) = [found for found in examination["findings"] if found["name"] == "user_code"]
    assert finding["evidence"]["line"] == AT and finding["evidence"]["exception"] == "ZeroDivisionError"
    assert f"penstock bus tail {SHUFFLE}" in finding["todo"][0]["command"]
    assert "--partition 0 --from 1 --lines 1" in finding["todo"][0]["command"]


def test_what_user_code_may_not_do_names_its_line_too(
    shops: Container, inject: Records, run: Run, empty: World, tmp_path: Path
):
    wrong = HALVES.replace('"n": share(record["n"])', '"m": 1')
    (tmp_path / "shops.py").write_text(wrong)
    assert run("submit", tmp_path / "shops.py", "--folder", empty.folder).code == 0
    settle(empty, JOB)
    inject(1)
    shops.step(SHUFFLE)
    with pytest.raises(ComputationFailed) as caught:
        shops.step(JOB)
    line = next(n for n, text in enumerate(wrong.splitlines(), 1) if "ctx.produce" in text)
    assert f" at shops.py:{line} in process_record: job '{JOB}', key 'a', record at 0 of" in caught.value.what


def test_a_query_brought_as_it_is_names_the_line_of_its_function(tmp_path: Path):
    """Its functions run in workers without our step: the line is read from the traceback that Spark passes on."""
    file = tmp_path / "udf.py"
    file.write_text("def half(n):\n    return 100 // n\n")
    space: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), space)
    with pytest.raises(ZeroDivisionError) as caught:
        space["half"](0)
    for told in (as_spark_tells(caught.value), caught.value):
        assert readable(told).splitlines() == [
            "user code failed at udf.py:2 in half",
            "Why: ZeroDivisionError: integer division or modulo by zero",
        ]


def test_what_spark_says_comes_without_traces_of_java():
    text = (
        "[DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012\n== SQL (line 1, position 1) ==\n100 / n\n^^^^^^^\n\n"
        "\tat org.apache.spark.sql.errors.QueryExecutionErrors$.divideByZeroError(Q.scala:1)\n"
        "Caused by: java.lang.ArithmeticException\n\t... 21 more"
    )
    found = readable(RuntimeError(text))
    assert found.startswith("[DIVIDE_BY_ZERO] Division by zero.") and "100 / n" in found
    assert "\tat " not in found and "java." not in found


def test_messages_and_keys_have_limits_and_what_cannot_be_shown_ends_nothing():
    class Unshown(Exception):
        def __str__(self) -> str:
            raise ValueError("no")

    for wrong, expected in ((ValueError("x" * 10_000), "ValueError: xxx"), (Unshown(), "cannot be shown")):
        with pytest.raises(PenstockError) as caught, report_user_errors(lambda: UserCall("j", "record at 1")):
            raise wrong
        assert expected in caught.value.why and len(caught.value.why) < 600
