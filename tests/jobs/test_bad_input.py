"""Bad input gets an error that says what, why and what to do, and changes nothing: every kind, on every store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.core.errors import ConfigError, KeyReused, NotFound, Refused, UserError, VersionConflict
from penstock.db.database import Database
from penstock.jobs.job_service import Actor, JobService
from tests.builders import ADMIN, DEVELOPER, ONCALL, SCALER, a_body, a_job, a_pipeline, an_output
from tests.jobs.asking import asked, everything

JOB = "demo.count"
MIB = 1 << 20
SHOWN_MAX = 2_000
Case = tuple[type[UserError], str, Callable[[JobService], Any]]


def nested(depth: int) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for _ in range(depth):
        body = {"a": body}
    return body


def write(body: Any, **changes: Any) -> Callable[[JobService], Any]:
    return lambda s: s.write_layer(JOB, "oncall", body, **{"expected_version": 2, **asked(ONCALL), **changes})


def patch(changes: Any, **more: Any) -> Callable[[JobService], Any]:
    return lambda s: s.patch_layer(JOB, "oncall", changes, **{**asked(ONCALL), **more})


def create(name: Any, **changes: Any) -> Callable[[JobService], Any]:
    body = {**a_body("demo.x"), "name": name, **changes}
    return lambda s: s.create(name, body, birth="b", **asked(DEVELOPER))


def submit(*bodies: Any, **parts: Any) -> Callable[[JobService], Any]:
    compiled = {**a_pipeline(*bodies), **parts}
    return lambda s: s.submit_pipeline(compiled, new_birth=lambda: "b", **asked(DEVELOPER))


NAMES: dict[str, Any] = {
    "1 MiB name": "x" * MIB,
    "201 characters": "x" * 201,
    "empty name": "",
    "path upwards": "../../etc/passwd",
    "absolute path": "/etc/passwd",
    "backslashes": "..\\..\\windows",
    "hidden file": ".ssh",
    "SQL": "x'; DROP TABLE jobs; --",
    "template": "{{ 7 * 7 }}",
    "shell": "$(reboot)",
    "percent": "%2e%2e%2f",
    "markup": "<script>alert(1)</script>",
    "newline": "demo.x\n",
    "NUL": "demo.x\x00",
    "escape": "demo.\x1b[31mx",
    "right to left": "demo.\u202ex",
    "half a character": "demo.\ud800",
    "full width": "\uff44\uff45\uff4d\uff4f.x",
    "number": 7,
    "nothing": None,
    "list": ["demo.x"],
}
BODIES: dict[str, tuple[str, Any]] = {
    "misspelt field": ("did you mean `task_count`?", {"task_cout": 3}),
    "misspelt deep field": ("did you mean `resources.memory_mb`?", {"resources": {"memory_md": 3}}),
    "misspelt privilege": ("did you mean `privileged`?", {"priviledged": True}),
    "unknown field": ("there is no such field", {"zzz": 1}),
    "text for a number": ("task_count: Input should be a valid integer", {"task_count": "3"}),
    "boolean for a number": ("task_count: Input should be a valid integer", {"task_count": True}),
    "fraction for a number": ("task_count: Input should be a valid integer", {"task_count": 2.5}),
    "number for text": ("owner: Input should be a valid string", {"owner": 7}),
    "text for a list": ("inputs: Input should be a list", {"inputs": "queries"}),
    "list for a map": ("resources", {"resources": [1]}),
    "value for a map": ("cannot be merged at `plan`", {"plan": 1}),
    "map for a value": ("cannot be merged at `partitions`", {"partitions": {"a": 1}}),
    "null where a value must be": ("kind", {"kind": None}),
    "unknown state": ("state: Input should be 'running', 'paused' or 'stopped'", {"state": "asleep"}),
    "zero tasks": ("task_count", {"task_count": 0}),
    "negative": ("threads", {"threads": -1}),
    "NaN": ("slo.lag_s: it is not a finite number", {"slo": {"lag_s": float("nan")}}),
    "infinity": ("slo.lag_s: it is not a finite number", {"slo": {"lag_s": float("inf")}}),
    "minus infinity": ("x.y: it is not a finite number", {"x": {"y": float("-inf")}}),
    "huge number": ("task_count: it is a number of more than 64 bits", {"task_count": 10**400}),
    "64 bits and one": ("priority: it is a number of more than 64 bits", {"priority": 2**63}),
    "number beyond its bound": ("priority", {"priority": 2**62}),
    "deep nesting": ("nested deeper", nested(40)),
    "very deep nesting": ("nested deeper", nested(100_000)),
    "deep lists": ("nested deeper", {"a": [[[[[[[[nested(40)]]]]]]]]}),
    "too many values": ("more than 50000 values", {"labels": {f"k{n}": "v" for n in range(60_000)}}),
    "too many labels": ("labels", {"labels": {f"k{n}": "v" for n in range(65)}}),
    "too many arguments": ("arguments", {"arguments": {f"k{n}": "v" for n in range(257)}}),
    "too many outputs": ("outputs", {"outputs": [an_output(stream=f"s{n}") for n in range(257)]}),
    "too many policies": ("policies", {"policies": {f"p{n}": {} for n in range(33)}}),
    "nested policy": ("policies.p.a", {"policies": {"p": {"a": {"b": 1}}}}),
    "policy with NaN": (
        "policies.p.a: it is not a finite number",
        {"policies": {"p": {"a": float("nan")}}},
    ),
    "1 MiB text": ("owner: it is a text of 1048576 characters", {"owner": "x" * MIB}),
    "1 MiB key": ("is not a valid key", {"labels": {"x" * MIB: "v"}}),
    "long owner": ("owner: String should have at most 200 characters", {"owner": "x" * 201}),
    "control characters": ("owner: it contains control characters", {"owner": "a\x00b"}),
    "terminal escape": ("owner: it contains control characters", {"owner": "\x1b]0;pwned\x07"}),
    "newline in an owner": ("owner: it contains control characters", {"owner": "a\nb"}),
    "right to left in a label": ("it contains control characters", {"labels": {"team": "\u202etxt.exe"}}),
    "isolate in an argument": ("it contains control characters", {"arguments": {"a": "\u2066b"}}),
    "direction mark in a key": ("is not a valid key", {"labels": {"te\u200fam": "x"}}),
    "label name": ("labels.te am", {"labels": {"te am": "x"}}),
    "half a character": ("it contains control characters", {"owner": "\ud800"}),
    "SQL in a category": ("inputs[0].category", {"inputs": [{"category": "q'; DROP TABLE jobs"}]}),
    "path in a category": ("outputs[0].category", {"outputs": [an_output(category="../../x")]}),
    "package hash with a path": (
        "package.hash",
        {"package": {"name": "d", "version": "1", "hash": "../x", "entry": "d"}},
    ),
    "another name": ("name: it is 'demo.other'", {"name": "demo.other"}),
    "another pipeline": ("the job belongs to 'demo'", {"pipeline": "other"}),
    "not a map": ("it is not a map", [1, 2]),
    "text": ("it is not a map", "task_count=3"),
    "nothing": ("it is not a map", None),
    "a set": ("is not JSON", {"a": {1, 2}}),
    "bytes": ("is not JSON", {"a": b"x"}),
    "numbers as keys": ("is not a valid key", {1: 2}),
}
PATCHES: dict[str, tuple[str, Any]] = {
    "empty part": ("is not a valid path", {"slo..lag_s": 1}),
    "empty path": ("is not a valid path", {"": 1}),
    "through a value": ("cannot be set", {"owner": "me", "owner.name": "me"}),
    "misspelt": ("did you mean `task_count`?", {"task_cout": 3}),
    "not a map": ("it is not a map", ["task_count"]),
    "NaN": ("not a finite number", {"slo.lag_s": float("nan")}),
    "long path": ("is not a valid key", {"a." * 1000: 1}),
    "deep path": ("there is no such field", {".".join("a" * 200): 1}),
}
REASONS: dict[str, Any] = {
    "none": "",
    "blank": " \t ",
    "2,001 characters": "x" * 2001,
    "1 MiB": "x" * MIB,
    "NUL": "be\x00cause",
    "newline": "because\nroot said so",
    "right to left": "be\u202ecause",
    "half a character": "be\udfffcause",
    "number": 7,
    "nothing": None,
}
KEYS: dict[str, Any] = {
    "empty": "",
    "long": "k" * 201,
    "NUL": "k\x00",
    "newline": "k\n",
    "right to left": "k\u202e",
    "number": 7,
}
OTHERS: dict[str, Case] = {
    "stale version": (VersionConflict, "current version is 2", write({"threads": 2}, expected_version=0)),
    "version of the future": (
        VersionConflict,
        "your change is based on version 99",
        write({}, expected_version=99),
    ),
    "stale patch": (VersionConflict, "current version is 2", patch({"threads": 2}, expected_version=0)),
    "a scaler on call": (Refused, "'scaler' is not one of admin, oncall", write({}, **asked(SCALER))),
    "a developer on call": (Refused, "'developer' is not one of", write({}, **asked(DEVELOPER))),
    "a stranger": (Refused, "'wizard' is not one of", write({}, **asked(Actor(name="x", role="wizard")))),
    "unknown layer": (
        NotFound,
        "the layers are base, provisioner, scaler, oncall",
        lambda s: s.clear(JOB, "overlord", **asked(ADMIN)),
    ),
    "layer with SQL": (NotFound, "the layers are", lambda s: s.clear(JOB, "x'; --", **asked(ADMIN))),
    "unknown job": (
        NotFound,
        "was ever submitted",
        lambda s: s.clear("demo.nope", "oncall", **asked(ONCALL)),
    ),
    "a job that is there": (Refused, "created with birth", lambda s: a_job(s)),
    "reused key": (
        KeyReused,
        "a key identifies one request",
        lambda s: s.patch_layer(JOB, "scaler", {"threads": 9}, **asked(SCALER, "used")),
    ),
    "nameless actor": (ConfigError, "empty", write({}, **asked(Actor(name=" ", role="oncall")))),
    "actor with NUL": (ConfigError, "control", write({}, **asked(Actor(name="a\x00", role="oncall")))),
    "long actor": (ConfigError, "201 characters", write({}, **asked(Actor(name="a" * 201, role="oncall")))),
    "birth with NUL": (
        ConfigError,
        "control",
        lambda s: s.create("demo.x", a_body("demo.x"), birth="\x00", **asked(DEVELOPER)),
    ),
    "pipeline with a bad job": (
        ConfigError,
        "task_cout",
        submit(a_body("demo.a"), a_body("demo.b", task_cout=1)),
    ),
    "pipeline by a path": (ConfigError, "not a valid name", submit(a_body("demo.a"), pipeline="../demo")),
    "pipeline with deep graph": (ConfigError, "nested deeper", submit(a_body("demo.a"), graph=nested(100))),
    "job of a pipeline by a path": (ConfigError, "name", submit(a_body("demo.a/../../x"))),
    "job body without a name": (ConfigError, "has no unique name", submit({"kind": "stateless"})),
    "privilege": (Refused, "may change it, not 'oncall'", patch({"privileged": True})),
}


def cases() -> dict[str, Case]:
    found = dict(OTHERS)
    for what, name in NAMES.items():
        found[f"create: {what}"] = (ConfigError, "", create(name))
        found[f"clear: {what}"] = (
            UserError,
            "",
            lambda s, name=name: s.clear(name, "oncall", **asked(ONCALL)),
        )
        found[f"apply: {what}"] = (
            UserError,
            "",
            lambda s, name=name: s.apply(
                name, a_body("demo.x"), expected_version=None, birth="b", **asked(DEVELOPER)
            ),
        )
    for what, (says, body) in BODIES.items():
        found[f"write: {what}"] = (ConfigError, says, write(body))
    for what, (says, changes) in PATCHES.items():
        found[f"patch: {what}"] = (ConfigError, says, patch(changes))
    for what, reason in REASONS.items():
        found[f"reason: {what}"] = (ConfigError, "", patch({"threads": 2}, reason=reason))
    for what, key in KEYS.items():
        found[f"key: {what}"] = (ConfigError, "", patch({"threads": 2}, idempotency_key=key))
    return found


def test_every_kind_of_bad_input_is_refused_in_three_parts_and_changes_nothing(
    any_service: JobService, database: Database
) -> None:
    service = any_service
    a_job(service)
    service.patch_layer(JOB, "oncall", {"priority": 1}, **asked(ONCALL))
    service.patch_layer(a_job(service, "demo.other"), "scaler", {"threads": 2}, **asked(SCALER, "used"))
    before = everything(database)
    wrong: dict[str, str] = {}
    for name, (kind, says, attempt) in cases().items():
        try:
            attempt(service)
            wrong[name] = "was accepted"
        except UserError as error:
            text = str(error)
            if not isinstance(error, kind):
                wrong[name] = f"is a {type(error).__name__}: {text[:200]}"
            elif not (error.what and error.why and error.fix):
                wrong[name] = f"lacks a part: {text[:200]}"
            elif says not in text:
                wrong[name] = f"does not say {says!r}: {text[:300]}"
            elif len(text) > SHOWN_MAX or not text.replace("\n", "").isprintable():
                wrong[name] = f"repeats what it was given: {len(text)} {text[:200]!a}"
        if everything(database) != before:
            wrong[name] = "changed something"
            before = everything(database)
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())


READS: dict[str, Callable[[JobService, Any], Any]] = {
    "view": lambda s, name: s.view(name),
    "history": lambda s, name: s.history(name),
    "layers_at": lambda s, name: s.layers_at(name, 1),
    "diff": lambda s, name: s.diff(name, old=None, new=None),
}


@pytest.mark.parametrize("read", READS)
def test_a_name_that_cannot_be_finds_nothing(any_service: JobService, read: str) -> None:
    a_job(any_service)
    for name in NAMES.values():
        with pytest.raises(NotFound) as caught:
            READS[read](any_service, name)
        assert caught.value.what and caught.value.why and caught.value.fix
        assert len(str(caught.value)) < SHOWN_MAX and str(caught.value).replace("\n", "").isprintable()


def test_text_that_looks_dangerous_is_kept_as_it_is(any_service: JobService) -> None:
    """Only what cannot be stored or would mislead is refused; the rest is data, never code."""
    service, odd = (
        any_service,
        "x'; DROP TABLE jobs; -- {{ 7 * 7 }} <b>&amp; %s %(a)s $(ls) 数据 ß 🦆 \\ \" `",
    )
    job = a_job(service, labels={"team": odd}, owner=odd, arguments={odd: odd})
    service.patch_layer(job, "oncall", {"threads": 2}, **asked(Actor(name=odd, role="oncall"), odd, why=odd))
    view = service.view(job)
    assert (view.config.owner, view.config.arguments, view.config.labels) == (
        odd,
        {odd: odd},
        {"team": odd},
    )
    assert (view.provenance["threads"].actor, view.provenance["threads"].reason) == (odd, odd)
    assert [item.name for item in service.views(labels={"team": odd})] == [job]
    # The same key again is the same request.
    again = asked(Actor(name=odd, role="oncall"), odd, why=odd)
    assert service.patch_layer(job, "oncall", {"threads": 2}, **again) == view.expected_version
