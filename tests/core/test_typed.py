"""Types that several threads of a control plane decode are known to msgspec before any thread begins."""

from __future__ import annotations

import ast
import builtins
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock.core.text import make_known
from tests.tidy_rules import ROOT, package_sources
from tests.waiting import LIMIT_S

# Where several threads decode. In Spark's Python workers one thread does.
AREAS = ("alarms", "client", "container", "db", "fleet", "jobs", "scaling", "server")
KAFKA = "streams/bus/kafka/control.py"


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def classes_in(kind: ast.expr) -> set[str]:
    """The classes that an expression for a type names; others are variables, constants or built in."""
    names = {node.id for node in ast.walk(kind) if isinstance(node, ast.Name)} - {*dir(builtins), "Any"}
    return {name for name in names if name.lstrip("_")[:1].isupper() and not name.isupper()}


def decoded(tree: ast.AST) -> Iterator[str]:
    """The classes that msgspec decodes in the functions of a module."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for name, call in calls(function):
            if name in ("msgspec.json.decode", "msgspec.msgpack.decode"):
                for keyword in call.keywords:
                    yield from classes_in(keyword.value) if keyword.arg == "type" else ()
            elif (name == "msgspec.convert" and len(call.args) > 1) or (
                name == "read_message" and len(call.args) > 1
            ):
                yield from classes_in(call.args[1])


def test_every_class_that_threads_decode_is_known_when_its_module_is_imported():
    sources = package_sources().values()
    known = {
        name
        for source in sources
        for called, call in calls(source.tree)
        if called == "make_known"
        for kind in call.args
        for name in classes_in(kind)
    }
    found = {
        (source.path, name)
        for source in sources
        if source.area in AREAS or source.path == KAFKA
        for name in decoded(source.tree)
    }
    assert len(found) > 10
    assert {(path, name) for path, name in found if name not in known} == set()


def test_a_class_that_is_not_known_is_found():
    text = "def f(text):\n    return msgspec.json.decode(text, type=dict[str, Odd] | None)\n"
    assert [*decoded(ast.parse(text))] == ["Odd"]


@pytest.mark.parametrize(
    "kinds", ["alarms.decide.Alarm", "scaling.policies.round.PolicyRecord", "fleet.messages.HeartbeatReply"]
)
def test_many_threads_may_be_the_first_to_decode(kinds: str):
    """In a fresh process that changes threads as often as it can: it ended with a read of NULL, if seldom."""
    module, _, name = f"penstock.{kinds}".rpartition(".")
    program = f"""
import contextlib, sys, threading
import msgspec
from {module} import {name} as kind
sys.setswitchinterval(1e-6)
def decode():
    with contextlib.suppress(msgspec.ValidationError):
        msgspec.json.decode(b"{{}}", type=kind)
threads = [threading.Thread(target=decode) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_a_type_that_msgspec_cannot_read_is_refused_at_once():
    with pytest.raises(TypeError):
        make_known(int | complex | bytes | str)
