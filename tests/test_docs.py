"""Are the documents true? Every command, file, function and link they name exists, and their pipelines run."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import program
from penstock.jobs.config import validate_config
from penstock.streams.bus.embedded.log import EmbeddedLog
from penstock.streams.bus.log import CategorySpec
from penstock.streams.catalogue import StaticCatalogue
from penstock.streams.compile.packages import build_package, load_entry, load_pipeline
from penstock.streams.compile.plan import compile_pipeline
from penstock.streams.step.keyed_work import try_computation
from tests.suite import SUITES
from tests.tidy_rules import UNDONE

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
INVARIANTS = 22
PLACEHOLDERS = {"shops.py", "docs/decisions/NNNN-title.md"}  # files the reader makes

CODE_BLOCK = re.compile(r"^```.*?^```", re.S | re.M)
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FUNCTION = re.compile(r"`([\w/]+\.py): ([\w.]+)`")
FILE = re.compile(r"`([\w./-]+/[\w.-]+\.(?:py|md|json|toml)|\w+\.py)`")
SALES = CategorySpec(
    name="sales",
    partitions=4,
    columns=(("shop", "string"), ("amount", "double"), ("ts", "bigint")),
    format="json",
    watermark="event_time",
    lateness_ms=1000,
    ts_column="ts",
)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def readme_code(number: int) -> str:
    return PYTHON_BLOCK.findall(text_of(ROOT / "README.md"))[number]


def find_file(name: str) -> Path | None:
    """A file named in a document: in the package, or in the project."""
    return next((path for path in (ROOT / "penstock" / name, ROOT / name) if path.is_file()), None)


@lru_cache
def definitions_of(path: Path) -> frozenset[str]:
    """Functions and classes of a module, and `Class.method`."""
    found = set()
    for node in ast.parse(text_of(path)).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return frozenset(found)


def section(path: Path, heading: str) -> str:
    """The text below a heading, up to the next one of its level."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text_of(path), re.S | re.M)
    assert found is not None, f"{path.name} has no section {heading!r}"
    return found[1]


def rows_of(text: str) -> Iterator[list[str]]:
    """Cells of every table row that is neither head nor rule."""
    for before, line in zip(["", *text.splitlines()], text.splitlines(), strict=False):
        if line.startswith("|") and before.startswith("|") and not line.startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split(" |")]


# --- the README


@pytest.fixture
def shops(tmp_path: Path) -> Path:
    path = tmp_path / "shops.py"
    path.write_text(readme_code(0), encoding="utf-8")
    return path


def test_the_pipeline_of_the_readme_has_ten_lines_and_compiles_to_valid_jobs(shops: Path):
    assert len([line for line in readme_code(0).splitlines() if line.strip()]) == 10
    package = build_package(shops)
    compiled = compile_pipeline(load_pipeline(shops), StaticCatalogue([SALES]), package.ref())
    bodies = compiled.to_json()["jobs"]
    configs = [validate_config(body["name"], body) for body in bodies]
    assert [(config.name, config.kind) for config in configs] == [
        ("shops.by_shop", "stateless"),
        ("shops.running_total", "stateful"),
    ]
    assert configs[1].outputs[0].category == "shop_totals"


def test_the_computation_of_the_readme_does_what_it_says(shops: Path):
    module = load_entry(shops.parent, shops.name, "readme")
    sales = [
        ("north", 1000, {"amount": 2.5}),
        ("south", 1500, {"amount": 1.0}),
        ("north", 2000, {"amount": 4.0}),
    ]
    produced = try_computation(module.RunningTotal(), sales)
    assert [(row["shop"], row["total"]) for _, _, _, row in produced] == [
        ("north", 2.5),
        ("south", 1.0),
        ("north", 6.5),
    ]


def test_the_readme_writes_and_reads_records_as_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    log = EmbeddedLog(tmp_path / ".penstock" / "bus")
    log.create(SALES)
    exec(compile(readme_code(1), "README.md", "exec"), {})
    assert sum(log.end_offsets("sales")) == 2
    # What reads the sink reads any category; there is no sink before the pipeline has run.
    reading = readme_code(2).replace("shop_totals", "sales")
    exec(compile(reading, "README.md", "exec"), {})
    assert "north" in capsys.readouterr().out


# --- the page on pipelines


NOTES = CategorySpec(
    name="notes", partitions=2, columns=(("body", "string"), ("at", "bigint")), format="json"
)
QUERIES = CategorySpec(
    name="queries",
    partitions=3,
    columns=(("query", "string"), ("lang", "string"), ("ts", "bigint")),
    format="json",
    ts_column="ts",
)


def test_every_example_of_the_page_on_pipelines_compiles_and_the_first_two_are_the_same(tmp_path: Path):
    text, catalogue = text_of(DOCS / "pipelines.md"), StaticCatalogue([NOTES, QUERIES])
    graphs = []
    for number, (kind, code) in enumerate(re.findall(r"^```(python|sql)\n(.*?)^```", text, re.S | re.M)):
        path = tmp_path / f"example{number}.{'py' if kind == 'python' else 'sql'}"
        path.write_text(code, encoding="utf-8")
        compiled = compile_pipeline(load_pipeline(path), catalogue, build_package(path).ref())
        graphs.append(compiled.to_json()["graph"])
    assert len(graphs) == 3 and graphs[0] == graphs[1]


def test_every_example_of_the_page_on_testing_runs():
    names: dict[str, Any] = {}
    for code in PYTHON_BLOCK.findall(text_of(DOCS / "testing.md")):
        exec(compile(code, "testing.md", "exec"), names)
    claims = [made for name, made in names.items() if name.startswith("test_")]
    assert len(claims) == 3
    for claim in claims:
        claim()


def test_every_command_of_the_readme_has_options_that_exist():
    lines = re.findall(r"^    penstock ([^#\n]*)", text_of(ROOT / "README.md"), re.M)
    named = {name_in(line) for line in lines}
    assert named >= {"up", "category", "submit", "status", "oncall set", "config show", "journal"}
    for line in lines:
        given, name = set(re.findall(r"(?<=\s)--[\w-]+", line)), name_in(line)
        assert given <= options_of(name), f"penstock {name}: {given - options_of(name)}"


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([\w-]+):", text_of(ROOT / "Makefile"), re.M))
    for path in DOCUMENTS:
        named = set(re.findall(r"(?:`|^    )make ([\w-]+)", text_of(path), re.M))
        assert named <= targets, f"{path.name} names {named - targets}"


# --- the command line


def every_command(group: Any, words: str = "") -> dict[str, Any]:
    """Every command by its words, those of groups too."""
    if not hasattr(group, "commands"):
        return {words.strip(): group}
    return {
        name: command
        for word, below in group.commands.items()
        for name, command in every_command(below, f"{words} {word}").items()
    }


def commands() -> dict[str, bool]:
    """Name -> whether `--help` shows it."""
    return {name: not command.hidden for name, command in every_command(program()).items()}


def name_in(line: str) -> str:
    """The command that a line begins with."""
    return max((name for name in commands() if f"{line} ".startswith(f"{name} ")), key=len, default=line)


def options_of(command: str) -> set[str]:
    found = every_command(program())[command].params
    given = {text for parameter in found for text in (*parameter.opts, *parameter.secondary_opts)}
    return {"--help"} | {text for text in given if text.startswith("-")}  # arguments have no dash


def cli_sections() -> dict[str, str]:
    text = text_of(DOCS / "cli.md")
    parts = re.findall(r"^## `penstock ([\w ]+)`\n(.*?)(?=^## |\Z)", text, re.S | re.M)
    return dict(parts)


def test_every_command_is_documented_and_every_documented_command_exists():
    assert set(cli_sections()) == {name for name, shown in commands().items() if shown}
    hidden = section(DOCS / "cli.md", "Started by Penstock itself")
    assert all(f"`penstock {name}`" in hidden for name, shown in commands().items() if not shown)


@pytest.mark.parametrize("command", sorted(name for name, shown in commands().items() if shown))
def test_a_command_has_an_example_and_all_of_its_options(command: str):
    text = cli_sections()[command]
    assert re.search(rf"^    penstock {command}\b", text, re.M), "no example"
    everywhere = {"--help", "--folder", "--output", "-o"}
    named = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text))
    assert options_of(command) - everywhere - named == set(), "options that are not documented"
    own = {name for name in named if name.startswith("--")}
    assert own - options_of(command) == set(), "no such option"


# --- files, functions, links


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_names_only_files_and_functions_that_exist(path: Path):
    text = CODE_BLOCK.sub("", text_of(path))
    wrong = [name for name in FILE.findall(text) if find_file(name) is None and name not in PLACEHOLDERS]
    for name, function in FUNCTION.findall(text):
        file = find_file(name)
        if file is None or function not in definitions_of(file):
            wrong.append(f"{name}: {function}")
    assert not wrong


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_has_no_dead_links_and_leaves_nothing_undone(path: Path):
    text = text_of(path)
    relative = [
        link.partition("#")[0] for link in LINK.findall(CODE_BLOCK.sub("", text)) if "://" not in link
    ]
    assert [link for link in relative if link and not (path.parent / link).exists()] == []
    assert UNDONE.search(text) is None


@pytest.mark.parametrize(
    ("heading", "files_max"),
    [("A record's way through the code", 20), ("A config change's way through the code", 25)],
)
def test_a_way_through_the_code_is_a_short_numbered_list_of_functions(heading: str, files_max: int):
    steps = re.findall(r"^(\d+)\. (.*)$", section(DOCS / "code.md", heading), re.M)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    assert all(FUNCTION.match(text) for _, text in steps)
    named = {name for _, text in steps for name, _ in FUNCTION.findall(text)}
    assert 10 <= len(named) <= files_max


def test_every_invariant_is_told_with_its_state_and_tests_that_exist():
    rows = {cells[0]: cells for cells in rows_of(section(DOCS / "invariants.md", "Invariants"))}
    assert list(rows) == [f"I{number}" for number in range(1, INVARIANTS + 1)]
    for name, cells in rows.items():
        _, _, state, tests, *_ = cells
        assert state.startswith(("holds", "in part:", "later:")), name
        assert bool(FILE.findall(tests)) == (not state.startswith("later")), name


def test_make_test_shows_every_invariant():
    """Plan: ask pytest which tests of the files that the table names `make test` selects."""
    invariants = section(DOCS / "invariants.md", "Invariants")
    shown = {cells[0]: FILE.findall(cells[3]) for cells in rows_of(invariants)}
    files = sorted({file for named in shown.values() for file in named})
    marks = " or ".join(f"({group.marks})" for groups in SUITES["test"] for group in groups if group.marks)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-m", marks]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    selected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert [name for name, named in shown.items() if not selected & {*named}] == []


def test_every_test_is_in_one_group_of_make_test_or_of_make_test_all():
    """But for the drills that are not slow: `make drills` runs those."""
    stages = [*SUITES["test"], *SUITES["test-all"]]
    groups = [group for stage in stages for group in stage if group.marks]
    for present in itertools.product([False, True], repeat=4):
        marks = dict(zip(("spark", "e2e", "slow", "drill"), present, strict=True))
        found = [group.name for group in groups if eval(group.marks, {}, marks)]
        assert len(found) == (0 if marks["drill"] and not marks["slow"] else 1), (marks, found)


def test_every_part_of_the_protocols_names_the_tests_that_show_it():
    parts = re.split(r"^## ", text_of(DOCS / "protocols.md"), flags=re.M)[1:]
    assert len(parts) == 9
    for part in parts:
        shown = part.partition("hown by")[2]
        assert any(name.startswith("tests/") for name in FILE.findall(shown)), part.splitlines()[0]


def test_every_model_is_named_in_the_protocols():
    text = text_of(DOCS / "protocols.md")
    models = {path.name for path in (ROOT / "tests" / "models").glob("test_*_model.py")}
    assert {name for name in models if f"tests/models/{name}" not in text} == set()


def test_the_glossary_names_a_file_for_every_word_that_has_code():
    rows = list(rows_of(text_of(DOCS / "glossary.md")))
    assert len(rows) > 60
    for term, ours, file, *_ in rows:
        assert FILE.fullmatch(file) or "not yet" in ours, term


def test_every_table_of_the_store_is_described():
    from penstock.db.database import METADATA

    described = set(re.findall(r"`(\w+)`", section(DOCS / "storage.md", "The store")))
    assert set(METADATA.tables) - described == set()


def test_decision_records_are_numbered_and_have_their_three_parts():
    records = sorted((DOCS / "decisions").glob("*.md"))
    assert [int(path.name[:4]) for path in records] == list(range(1, len(records) + 1))
    for path in records:
        text = text_of(path)
        assert text.startswith(f"# {int(path.name[:4])}. "), path.name
        assert re.findall(r"^## (.*)$", text, re.M) == ["Context", "Decision", "Consequences"], path.name
