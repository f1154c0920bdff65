"""Claims about what people see: it fits, it is coloured by state, and nobody's text can steer the terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from penstock.cli import tables
from penstock.cli import tables as change_tables
from tests.cli.world import plain

LOAD = {"input_rate": 123456.7, "processed_rate": 99999.2, "lag_s": 12345.6, "busy": 0.93}
TASK = {
    "task_id": "zeitgeist.count_per_second/0",
    "container": "c1",
    "shard": 3,
    "generation": 2,
    "state": "running",
    "restarts": 0,
    "metrics": {"lag_records": 1234.0},
    "error": "",
}


def a_line(**changes: Any) -> dict[str, Any]:
    return {
        "name": "zeitgeist.count_per_second",
        "state": "running",
        "task_count": 3,
        "running_task_count": 3,
        "tasks": [TASK] * 2,
        "package": {"version": "e65280a15ec8", "hash": "e65280a15ec8d0a2"},
        "plan": "",
        "problem": "",
        "scaler": "",
        "load": LOAD,
        **changes,
    }


def a_container(**changes: Any) -> dict[str, Any]:
    row = {
        "name": "c1",
        "state": "live",
        "ready": True,
        "seen_ms": 9100,
        "shards": 32,
        "tasks": 3,
        "pid": 4711,
    }
    return {**row, **changes}


def a_status(*lines: dict[str, Any], containers: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"now_ms": 10_000, "jobs": list(lines), "containers": list(containers), "loops": {}}


def shown(table: RenderableType, width: int = 100) -> str:
    output = io.StringIO()
    Console(file=output, width=width, force_terminal=True, color_system="standard", highlight=False).print(
        table
    )
    return output.getvalue()


def test_a_status_fits_into_100_columns_with_every_number_whole():
    status = a_status(
        a_line(
            scaler="lag 12.1 s over the SLO of 3 s: needs 5333 records/s, one task gives 1999; 1 -> 3 tasks"
        ),
        a_line(name="zeitgeist.by_query", state="changing (wait_stopped)", plan="wait_stopped", task_count=4),
        a_line(name="a" * 150, state="quarantined", problem="three attempts failed\nand more"),
        containers=(a_container(), a_container(name="c2", ready=False), a_container(name="c3", state="dead")),
    )
    text = plain(shown(tables.status_tables(status)))
    assert max(map(len, text.splitlines())) <= 100
    squeezed = " ".join(text.split())
    assert "zeitgeist.count_per_second running 2/3 123,457 99,999 3.4 h 93% e65280a" in squeezed
    assert "zeitgeist.by_query changing 2/3 → 4 " in squeezed
    assert "1 -> 3 tasks" in squeezed and "changing, at step wait_stopped" in squeezed
    assert "three attempts failed" in squeezed and "and more" not in squeezed
    assert "a" * 100 not in text and "…" in text
    assert "c1 live 32 3 0.9 s ago 4711" in squeezed and "c2 starting" in squeezed and "c3 dead" in squeezed


@pytest.mark.parametrize(
    ("state", "colour"),
    [("running", "32"), ("quarantined", "1;31"), ("invalid", "1;31"), ("new", "33"), ("changing (x)", "36")],
)
def test_a_state_has_its_colour(state: str, colour: str):
    word = state.split(" ")[0]
    assert f"\x1b[{colour}m{word}" in shown(tables.jobs_table([a_line(state=state)]))


def test_an_empty_status_says_what_to_do():
    text = plain(shown(tables.status_tables(a_status())))
    assert "penstock submit" in text and "no containers" in text


def test_an_old_status_says_that_it_is_old():
    text = plain(shown(tables.status_tables(a_status(), "nobody answers")))
    assert "nobody answers; showing the last known state" in text


def test_a_job_without_load_has_dashes():
    text = " ".join(plain(shown(tables.jobs_table([a_line(load=None)]))).split())
    assert "– – – –" in text


EVIL = "[bold]x[/] [/nothing] \x1b[2J\x07\u202e end"


def a_view(**changes: Any) -> dict[str, Any]:
    layer = {
        "layer": "oncall",
        "version": 5,
        "actor": EVIL,
        "at_ms": 1,
        "reason": EVIL,
        "body": {"owner": EVIL},
    }
    config = {
        "name": "a",
        "owner": EVIL,
        "labels": {},
        "slo": {"lag_s": 3},
        "inputs": [{"category": "queries", "start": "earliest"}],
        "outputs": [{"stream": "out", "category": "counts", "partitions": 6, "columns": [["q", "string"]]}],
        "plan": {"stages": [{"op": "filter", "expr": EVIL}], "key": None},
    }
    who = {"actor": EVIL, "at_ms": 1, "reason": EVIL, "version": 5}
    deciders = {"owner": "oncall", "inputs": "provisioner", "plan.stages": "provisioner"}
    provenance = {path: {"layer": layer, **who} for path, layer in deciders.items()}
    return {
        "name": "a",
        "expected_version": 5,
        "problem": EVIL,
        "config": config,
        "guarantees": [EVIL],
        "provenance": provenance,
        "layers": [layer],
        "tasks": [{**TASK, "error": EVIL + "\nsecond line"}],
        **changes,
    }


A_CHANGE: dict[str, Any] = {
    "job": EVIL,
    "change": "complex",
    "changed": [{"path": EVIL, "old": EVIL, "new": [EVIL], "sync": "complex"}],
    "restarts": [EVIL] * 20,
    "tasks_after": 3,
    "state_kept": False,
    "reason": EVIL,
}
AN_AUDIT_ENTRY = {
    "id": 1,
    "at_ms": 1,
    "actor": EVIL,
    "role": EVIL,
    "action": EVIL,
    "subject": EVIL,
    "reason": EVIL,
}
A_TOKEN = {
    "id": EVIL,
    "name": EVIL,
    "role": EVIL,
    "issued_ms": 1,
    "issued_by": EVIL,
    "expires_ms": 9,
    "revoked_ms": 0,
}


@pytest.mark.parametrize(
    "table",
    [
        tables.status_tables(
            a_status(
                a_line(name=EVIL, state=EVIL, problem=EVIL, package={"version": EVIL}),
                a_line(scaler=EVIL),
                a_line(plan=EVIL),
                containers=(a_container(name=EVIL, state=EVIL),),
            ),
            EVIL,
        ),
        tables.job_tables(a_view()),
        change_tables.config_tables(a_view(), with_layers=True),
        change_tables.history_table(a_view()["layers"]),
        change_tables.plan_tables(A_CHANGE),
        change_tables.diff_table(A_CHANGE["changed"], "x"),
        change_tables.audit_table([AN_AUDIT_ENTRY]),
        change_tables.tokens_table([A_TOKEN], 5),
        change_tables.layer_kinds_table(
            [{"name": EVIL, "precedence": 1, "writers": [EVIL], "replaces_plan": True}]
        ),
        tables.journal_table(
            [{"at_ms": 1, "actor": EVIL, "subject": EVIL, "decision": EVIL, "reason": EVIL * 100}]
        ),
        change_tables.changes_table(
            [
                {
                    "job": EVIL,
                    "change": EVIL,
                    "changed": [{"path": EVIL, "old": EVIL, "new": [EVIL]}],
                    "restarts": [EVIL],
                    "reason": EVIL,
                    "state_kept": False,
                }
            ]
        ),
        tables.categories_table(
            [
                {
                    "spec": {
                        "name": EVIL,
                        "format": EVIL,
                        "watermark": EVIL,
                        "partitions": 1,
                        "columns": [[EVIL, EVIL]],
                    },
                    "end_offsets": [5],
                    "watermark": 2**62,
                }
            ]
        ),
        tables.error_text(EVIL, EVIL, EVIL),
    ],
    ids=[
        "status",
        "job",
        "config",
        "history",
        "plan",
        "diff",
        "audit",
        "tokens",
        "layers",
        "journal",
        "changes",
        "categories",
        "error",
    ],
)
def test_nobodys_text_steers_the_terminal(table: RenderableType):
    text = shown(table, width=200)
    assert "\x1b[2J" not in text and "\x07" not in text and "\u202e" not in text
    assert "[bold]" in plain(text)


def test_a_job_shows_each_field_with_the_layer_that_decided_it():
    text = " ".join(plain(shown(tables.job_tables(a_view()), width=160)).split())
    assert "slo.lag_s 3 default" in text and "inputs queries (earliest) provisioner" in text
    assert "outputs counts (out, 6) default" in text and "labels none default" in text
    assert "second line" not in text


def test_a_job_shows_what_it_promises():
    for promises in ([], ["dedup off: at least once"], ["weak productions: at least once", "poison skip"]):
        text = " ".join(
            plain(shown(tables.job_tables(a_view() | {"guarantees": promises}), width=160)).split()
        )
        assert text.count("guarantee:") == len(promises)
        assert all(f"guarantee: {promise}" in text for promise in promises)


def test_an_error_has_three_parts_one_under_the_other():
    text = tables.error_text("it broke", "line one\nline two", "mend it").plain
    assert text.splitlines() == [
        "it broke",
        "  why         line one",
        "              line two",
        "  what to do  mend it",
    ]


@pytest.mark.parametrize(
    ("watermark", "text"), [(-(2**62), "–"), (2**62, "end"), (1_700_000_000_000, "11-14 22:13:20")]
)
def test_a_watermark_is_a_time_or_the_end(watermark: int, text: str):
    spec = {"name": "a", "format": "json", "watermark": "injector", "partitions": 1, "columns": []}
    row = {"spec": spec, "end_offsets": [0], "watermark": watermark}
    assert text in plain(shown(tables.categories_table([row])))
