"""The project's own rules; `test_tidy.py` runs each over all files.

What depends on the layout is data at the top of this file: who may import whom, where Spark is imported, which files may
wait or catch everything (with the reason; an entry that is no longer needed is a complaint).
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "penstock"
FUNCTION_LINES_MAX = 80

# --- who may import whom; `app` and the like are files right under `penstock/`
LOWER = {"core", "db", "jobs", "fleet", "scaling", "alarms", "streams"}
MAY_IMPORT: Mapping[str, set[str]] = {
    "core": set(),
    "db": {"core"},
    "jobs": {"core", "db"},
    "fleet": {"core", "db", "jobs"},
    "scaling": {"core", "db", "jobs", "fleet"},
    "alarms": {"core", "db", "jobs", "fleet", "scaling"},
    "streams": {"core", "db", "jobs"},
    "sim": {"core", "db", "jobs", "fleet", "scaling", "container"},
    "settings": {"core", "fleet"},
    "testing": {"core", "streams"},
    "former_names": set(),
    "policy_host": LOWER,
    "client": LOWER,
    "container": LOWER | {"client", "settings"},
    "server": LOWER | {"client", "container", "settings"},
    "app": LOWER | {"server", "settings"},
    "lender": LOWER | {"client", "container"},
    "installation": LOWER | {"app", "server", "container", "settings"},
    "cli": LOWER | {"client", "container", "installation", "lender", "settings", "sim"},
}
# Single modules above or beside an area that it may see all the same.
MAY_ALSO_IMPORT: Mapping[str, tuple[str, ...]] = {
    # The bus's contract and its memory twin, nothing else of the data plane.
    "sim": ("penstock.streams.bus.log", "penstock.streams.bus.memory"),
}

# --- what a module that calls itself pure must not reach, directly or through what it imports
EFFECTS = {
    "asyncio", "concurrent", "fastapi", "httpx", "logging", "multiprocessing", "os", "psutil", "pyspark",
    "random", "secrets", "shutil", "signal", "socket", "sqlalchemy", "sqlite3", "structlog", "subprocess",
    "tempfile", "threading", "time", "urllib", "uuid", "uvicorn",
}  # fmt: skip
CLOCKS = {"asyncio", "concurrent", "multiprocessing", "sched", "time"}
LOCKS = {"Lock", "RLock", "local"}  # they guard memory; everything else of `threading` runs or waits

MAY_WAIT: Mapping[str, str] = {
    "core/loop.py": "the one place for threads",
    "core/system_clock.py": "the one place for sleeps and the wall clock",
    "db/database.py": "a write waits for the transaction that it shares with others",
    "server/workers.py": "processes that end with the control plane",
    "container/process_runner.py": "one thread reads what all processes of a container print",
    "container/warden.py": "the watchdog is a process of its own: it waits for its engine and for its deadline",
    "cli/watching.py": "waits for the signal to stop",
    "server/serving.py": "serves HTTP beside the control plane's loops",
    "server/pools.py": "requests are answered beside the event loop",
    **dict.fromkeys(
        ("server/events.py", "server/routes/containers.py"), "news are waited for on the server's event loop"
    ),
    "container/engine.py": "an engine listens to its warden and starts Spark beside its rounds",
    "streams/spark/tasks.py": "a Spark query is awaited in a thread of its own",
    "streams/spark/worker.py": "measures how long a step was busy, inside Spark's Python worker",
}
MAY_CATCH_ALL: Mapping[str, str] = {
    "container/engine.py": "an engine that cannot start says why and ends, whatever it was",
    "db/database.py": "a bug in one of several writes is told to whoever asked for that one",
    "core/loop.py": "a bug in one round must not end the service",
    **dict.fromkeys(("policy_host.py", "scaling/policies/service.py"), "a policy's errors are told"),
    "streams/dsl/computation.py": "user code raises what it likes; the error says for whom it ran",
    "streams/spark/tasks.py": "a query ends with whatever the user's code raised; the run tells it and ends",
}

# --- what may import pyspark, and which modules need an extra of pyproject.toml; names are prefixes of modules
SPARK_HOMES = ("penstock.streams.spark",)
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "spark": SPARK_HOMES,
    "kafka": ("penstock.streams.bus.kafka.", "penstock.streams.bus.avro"),
    "alarms": ("penstock.alarms.channels",),
}
# What is imported by nobody but run as a script (by Alembic).
SCRIPTS = ("penstock.db.migrations.env", "penstock.db.migrations.versions.")
RE_EXPORTING = ("__init__.py", "core/__init__.py", "streams/__init__.py", "client/__init__.py")


@dataclass(frozen=True)
class Source:
    """One Python file, parsed."""

    path: str  # relative to the package, with slashes
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def docstring(self) -> str:
        return ast.get_docstring(self.tree) or ""

    @property
    def area(self) -> str:
        first = self.path.split("/")[0]
        return first.removesuffix(".py")

    @property
    def module(self) -> str:
        parts = ("penstock/" + self.path).removesuffix(".py").removesuffix("/__init__").split("/")
        return ".".join(parts)

    @property
    def is_pure(self) -> bool:
        return re.search(r"\bPure[:.]", self.docstring) is not None

    @cached_property
    def imports(self) -> frozenset[str]:
        """Everything imported anywhere in the file; `from a import b` is "a.b"."""
        return frozenset(self._imports(self.tree))

    @cached_property
    def runtime_imports(self) -> frozenset[str]:
        """The same, without what only the type checker reads."""
        only_types = {
            name
            for node in ast.walk(self.tree)
            if isinstance(node, ast.If)
            and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
            for statement in node.body
            for name in self._imports(statement)
        }
        return self.imports - only_types

    def _imports(self, tree: ast.AST) -> Iterator[str]:
        package = self.module.split(".") if self.path.endswith("__init__.py") else self.module.split(".")[:-1]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                origin = ".".join([*above, *([node.module] if node.module else [])])
                yield from (f"{origin}.{alias.name}" for alias in node.names)

    def uses(self) -> Iterator[str]:
        """Every `a.b` that is written, where `a` is a plain name."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                yield f"{node.value.id}.{node.attr}"


Rule = Callable[[Source], Iterator[str]]


def tops(names: frozenset[str]) -> set[str]:
    """The top-level packages of imported names."""
    return {name.split(".")[0] for name in names}


def imports_only_downwards(source: Source) -> Iterator[str]:
    """Areas import what lies below them, never back, and tasks and streams never each other."""
    if source.area in ("__init__", "__main__"):
        return
    allowed = MAY_IMPORT.get(source.area)
    if allowed is None:
        yield f"{source.area} is no area of the layout: name it in MAY_IMPORT, with what it may import"
        return
    for name in sorted(source.imports):
        parts = name.split(".")
        if parts[0] != "penstock" or len(parts) == 1 or parts[1] in (source.area, "__version__"):
            continue
        also = MAY_ALSO_IMPORT.get(source.area, ())
        if any(name == module or name.startswith(module + ".") for module in also):
            continue
        if parts[1] not in allowed:
            yield f"{source.area} may not import {parts[1]} ({name})"


def spark_stays_in_its_folder(source: Source) -> Iterator[str]:
    """The control plane and every simulation start without a JVM."""
    if not source.module.startswith(SPARK_HOMES) and tops(source.imports) & {"pyspark", "py4j"}:
        yield f"imports pyspark, which only {' and '.join(SPARK_HOMES)} may"


def waits_only_in_the_loop(source: Source) -> Iterator[str]:
    """Time is an argument; threads live in core/loop.py, sleeps and clocks in core/system_clock.py."""
    found = [f"imports {name}" for name in sorted(tops(source.imports) & CLOCKS)]
    found += [
        f"uses {name}"
        for name in sorted(set(source.uses()) | {n for n in source.imports if n.startswith("threading.")})
        if name.startswith("threading.") and name.split(".")[1] not in LOCKS
    ]
    found += [
        f"uses {name}"
        for name in sorted(source.uses())
        if name in ("datetime.now", "datetime.utcnow", "date.today")
    ]
    yield from _unless_allowed(source, found, MAY_WAIT, "time is an argument, threads belong in core/loop.py")


def catches_only_what_it_knows(source: Source) -> Iterator[str]:
    """An error nobody expected is a bug, and must be seen."""
    found = [
        f"line {node.lineno}: catches everything"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type)
    ]
    yield from _unless_allowed(source, found, MAY_CATCH_ALL, "name the errors you expect")


def _is_broad(kind: ast.expr | None) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(item is None or ast.unparse(item) in ("Exception", "BaseException") for item in kinds)


def _unless_allowed(source: Source, found: list[str], allowed: Mapping[str, str], rule: str) -> Iterator[str]:
    if source.path not in allowed:
        yield from (f"{complaint}: {rule}" for complaint in found)
    elif not found:
        yield "is on an allow-list in tests/tidy_rules.py that it no longer needs"


def functions_fit_a_screen(source: Source) -> Iterator[str]:
    """A function is read in one look."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"line {node.lineno}: {node.name} has {lines} lines, more than {FUNCTION_LINES_MAX}"


def packages_only_re_export(source: Source) -> Iterator[str]:
    """An __init__.py has a docstring, imports and names; below the top three it is only a docstring."""
    if not source.path.endswith("__init__.py"):
        return
    exports = source.path in RE_EXPORTING
    for node in source.tree.body[1:]:
        if ast.unparse(node) != "from __future__ import annotations" and not (exports and _re_exports(node)):
            yield f"line {node.lineno}: an __init__.py re-exports at most, and only in penstock/, core/, streams/"


def _re_exports(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name == "__getattr__"  # looks a name up when it is first used
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    return isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign)


def nothing_is_left_undone(source: Source) -> Iterator[str]:
    """What is not there yet is not pretended."""
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.Raise)
            and node.exc is not None
            and "NotImplementedError" in ast.unparse(node.exc)
        ):
            yield f"line {node.lineno}: raises NotImplementedError"


@cache
def declared(extras: tuple[str, ...]) -> frozenset[str]:
    """The modules that the package's dependencies and these extras bring."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [
        *project["dependencies"],
        *(line for name in extras for line in project["optional-dependencies"][name]),
    ]
    names = {re.split(r"[<>=!~\[; ]", line)[0].replace("-", "_").lower() for line in lines}
    # FastAPI brings Starlette, PySpark brings Py4J: importing them by name is part of using the two.
    # PyYAML's module has another name.
    return frozenset(names | {"starlette", "py4j"} | ({"yaml"} if "pyyaml" in names else set()))


def imports_only_what_is_declared(source: Source) -> Iterator[str]:
    """The installed package has what it imports: the control plane without extras, other modules with theirs."""
    extras = tuple(name for name, modules in EXTRAS.items() if source.module.startswith(modules))
    known = declared(extras) | sys.stdlib_module_names | {"penstock", "__future__"}
    for top in sorted(tops(source.imports)):
        if top.lower() not in known and top not in known:
            yield f"imports {top}, which pyproject.toml does not declare for {extras or 'the control plane'}"


RULES: tuple[Rule, ...] = (
    imports_only_downwards,
    spark_stays_in_its_folder,
    waits_only_in_the_loop,
    catches_only_what_it_knows,
    functions_fit_a_screen,
    packages_only_re_export,
    nothing_is_left_undone,
    imports_only_what_is_declared,
)


# --- rules over the whole package


def effects_reached(sources: Mapping[str, Source]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Per module: each effect it reaches at import, with the chain of modules that leads to it."""
    reached: dict[str, dict[str, tuple[str, ...]]] = {
        name: {effect: (name,) for effect in tops(source.runtime_imports) & EFFECTS}
        for name, source in sources.items()
    }
    changed = True
    while changed:
        changed = False
        for name, source in sources.items():
            for below in modules_imported(source, sources):
                for effect, chain in reached[below].items():
                    if effect not in reached[name]:
                        reached[name][effect] = (name, *chain)
                        changed = True
    return reached


def modules_imported(source: Source, sources: Mapping[str, Source]) -> Iterator[str]:
    """The modules of the package that this one imports; `penstock.a.b.name` is the module `penstock.a.b`."""
    for name in sorted(source.runtime_imports):
        module = name if name in sources else name.rpartition(".")[0]
        if module in sources and module != source.module:
            yield module


def impure(sources: Mapping[str, Source]) -> Iterator[str]:
    """Complaints about modules that say `Pure:` and reach an effect."""
    for name, effects in effects_reached(sources).items():
        if sources[name].is_pure:
            for effect, chain in sorted(effects.items()):
                yield f"{name} says it is pure, but reaches {effect}: {' -> '.join(chain)}"


# --- rules over every text file. The words are put together so that this file does not complain about itself.

UNDONE = re.compile(r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK")) + r")\b")
MACHINE_PATH = re.compile(
    r"(?<![\w.>~}*$])/(?:"
    + "|".join(("ho" + "me", "ro" + "ot", "Us" + "ers", "wo" + "rk", "t" + "mp"))
    + r")/\w"
)
REGISTRIES = re.compile(
    "|".join(
        ("py" + r"pi\.(?:org|python\.org)", "pythonho" + r"sted\.org", "anaconda" + r"\.(?:org|com)/", "npm" + r"js\.org",
         "maven" + r"\.(?:org|apache\.org)", "arti" + "factory", "(?:--|^)(?:extra-)?index" + "-url", "--find" + "-links [^$]", "--trusted" + "-host ")
    ),
    flags=re.MULTILINE,
)  # fmt: skip
# Ten seconds are short on a busy machine, and a bound on what something took is a claim about the machine.
OWN_LIMITS = re.compile(
    r"monotonic\(\) ?[+<]|assert .*(?:monotonic|perf_counter|time)\(\) - \w+ <"
    r"|\.(?:wait|join|result|exception|communicate)\((?:timeout=)?[0-9.]+\)|\btimeout=[0-9]{1,2}\b"
)
# Drills and storms measure recoveries, and say how long they may take.
MAY_TIME = (
    "tests/drills/",
    "tests/e2e/storm.py",
    "tests/streams/bus/stress.py",
    "tests/kafka.py",
    "tests/waiting.py",
)
PATCHES = re.compile(r"\bmock\.patch\b|\bfrom unittest import mock\b|\bimport unittest\.mock\b|\bmocker\b")
LOCK_LINE = re.compile(
    r"^(?:[a-z0-9][a-z0-9.-]*==[0-9][0-9a-z.+]*(?: ; [^/]+)? \\|    --hash=sha256:[0-9a-f]{64}(?: \\)?| *#[^/\\]*|)$"
)


@dataclass(frozen=True)
class TextRule:
    """What no file of a kind may contain."""

    name: str
    complaint: str
    pattern: re.Pattern[str]
    only_tests: bool = False
    but_not: tuple[str, ...] = ()  # prefixes of paths

    def complaints(self, path: str, text: str) -> Iterator[str]:
        """The lines of a file, named from the root of the project, that break this rule."""
        if self.only_tests and not (path.startswith("tests/") and path.endswith(".py")):
            return
        if path.startswith(self.but_not) or self.pattern.search(text) is None:
            return
        for number, line in enumerate(text.splitlines(), start=1):
            if self.pattern.search(line):
                yield f"{path}:{number} {self.complaint}: {line.strip()[:100]}"


RULES_THEMSELVES = ("tests/tidy_rules.py", "tests/test_tidy.py")
TEXT_RULES: tuple[TextRule, ...] = (
    TextRule("undone", "leaves something undone", UNDONE),
    TextRule("machine path", "names a path of one machine", MACHINE_PATH),
    TextRule("registry", "names a package registry", REGISTRIES),
    TextRule("patch", "patches what it tests: pass a fake instead", PATCHES, True, RULES_THEMSELVES),
    TextRule(
        "limit of its own",
        "has a limit in seconds of its own: wait with tests/waiting.py",
        OWN_LIMITS,
        True,
        (*RULES_THEMSELVES, *MAY_TIME),
    ),
)
SKIPPED = {
    ".git", ".venv", ".cache", ".hypothesis", ".penstock", "build", "dist", "spark-warehouse", "__pycache__",
}  # fmt: skip
TEXT_SUFFIXES = {
    "", ".cfg", ".in", ".ini", ".json", ".lock", ".md", ".py", ".sh", ".sql", ".toml", ".txt", ".yaml", ".yml",
    ".css", ".html", ".js",
}  # fmt: skip


def text_files(root: Path = ROOT) -> Iterator[Path]:
    """Every file people write, in order."""
    for path in sorted(root.iterdir()):
        hidden_cache = path.name.startswith(".") and path.name.endswith("_cache")
        if path.name in SKIPPED or hidden_cache or path.name.endswith(".egg-info"):
            continue
        if path.is_dir():
            yield from text_files(path)
        elif path.suffix in TEXT_SUFFIXES and path.name != "LICENSE":
            yield path


def package_sources() -> dict[str, Source]:
    """Every module of the package by its dotted name."""
    found = [
        Source(path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    ]
    return {source.module: source for source in found}
