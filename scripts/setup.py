"""Makes the project ready to run: `.venv`, the locked packages, Java. Does nothing when nothing changed.

Runs on the standard library alone, with whatever Python `scripts/setup.sh` found. A stamp in `.venv` holds
a hash of everything the result depends on; it is written last, so an interrupted run is simply repeated.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "penstock-setup.json"
JAVA_HOME_FILE = VENV / "java-home"  # the Makefile reads it
INPUTS = ("requirements-build.lock", "requirements.lock", "pyproject.toml", "scripts/setup.py")
JAVA_VERSIONS = (17, 21)
JAVA_PLACES = (
    "usr/lib/jvm/*",
    "usr/java/*",
    "opt/java/*",
    "opt/homebrew/opt/openjdk*",
    "usr/local/opt/openjdk*",
    "Library/Java/JavaVirtualMachines/*/Contents/Home",
)

# What to type for a headless Java, per package manager; tried in turn, since hardly any release has both.
JAVA_INSTALL: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "apt-get": (
        ("apt-get", "install", "-y", "--no-install-recommends", "openjdk-21-jre-headless"),
        ("apt-get", "install", "-y", "--no-install-recommends", "openjdk-17-jre-headless"),
    ),
    "dnf": (
        ("dnf", "install", "-y", "java-21-openjdk-headless"),
        ("dnf", "install", "-y", "java-17-openjdk-headless"),
    ),
    "apk": (("apk", "add", "openjdk21-jre-headless"), ("apk", "add", "openjdk17-jre-headless")),
    "brew": (("brew", "install", "openjdk@21"), ("brew", "install", "openjdk@17")),
}


class SetupProblem(Exception):
    """What happened, why, and what to type."""

    def __init__(self, what: str, *, why: str, fix: str) -> None:
        super().__init__(f"{what}\nWhy: {why}\nWhat to do: {fix}")


def say(text: str) -> None:
    """Tell what is going on, at once."""
    print(f"setup: {text}", flush=True)


def main() -> int:
    """Bring everything up to date."""
    key = stamp_key(ROOT, python_of(VENV) or sys.version)
    stamp = read_stamp(STAMP)
    if stamp.get("key") == key and Path(stamp.get("java_home", "/nowhere"), "bin", "java").exists():
        return 0
    try:
        say("1/5 Java")
        java_home = find_java() or install_java()
        say(f"    {java_home}")
        say("2/5 virtual environment in .venv")
        make_venv(moved=stamp.get("venv", str(VENV)) != str(VENV))
        say("3/5 locked packages (the first time some hundred MB, most of it PySpark: minutes)")
        for lock in ("requirements-build.lock", "requirements.lock"):
            # No build isolation: a build inside pip would fetch build tools that no lock names.
            pip("--require-hashes", "--no-build-isolation", "-r", lock, total=count_pins(ROOT / lock))
        say("4/5 penstock itself, editable")
        pip("--no-deps", "--no-build-isolation", "-e", ".", total=1)
        say("5/5 an archive of Spark's classes, so that Spark starts sooner (half a minute)")
        archive_classes(java_home)
    except SetupProblem as problem:
        print(f"setup: {problem}", file=sys.stderr, flush=True)
        return 1
    JAVA_HOME_FILE.write_text(f"{java_home}\n", encoding="utf-8")
    key = stamp_key(ROOT, python_of(VENV) or "")
    STAMP.write_text(
        json.dumps({"key": key, "venv": str(VENV), "java_home": str(java_home)}), encoding="utf-8"
    )
    say("done")
    return 0


# --- the stamp


def stamp_key(root: Path, python: str) -> str:
    """A hash of everything the environment is made from."""
    digest = hashlib.sha256(f"{root}\n{python}\n".encode())
    for name in INPUTS:
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def read_stamp(path: Path) -> dict[str, str]:
    """What the last complete run left; empty if there was none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def python_of(venv: Path) -> str | None:
    """The version line of an environment's Python, None if it does not run."""
    try:
        return output_of([str(venv / "bin" / "python"), "--version"]).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


# --- Python


def make_venv(*, moved: bool) -> None:
    """Create `.venv`, or keep the one that is there if it still works where it is."""
    if python_of(VENV) is not None and not moved:
        if (VENV / "bin" / "pip").exists():
            return
    elif VENV.exists():
        say("    the old one is broken or was moved: making it anew")
    if importlib.util.find_spec("ensurepip") is None:
        install_ensurepip()
    # Running from the environment that is about to be replaced, the new one must hang on the Python below it.
    python = getattr(sys, "_base_executable", sys.executable)
    run([python, "-m", "venv", "--clear", str(VENV)], what="could not create .venv")


def install_ensurepip() -> None:
    """Debian ships Python without `ensurepip`; without it there are no virtual environments."""
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupProblem(
            f"{sys.executable} cannot create virtual environments",
            why="its `ensurepip` module is missing; Debian and Ubuntu package it separately",
            fix=f"type: sudo apt-get install -y {package}   and then `make setup` again",
        )
    say(f"    installing {package}")
    apt_update()
    run(["apt-get", "install", "-y", package], what=f"could not install {package}")


def pip(*arguments: str, total: int) -> None:
    """`pip install`, with one line per package that is new; everything it said if it fails."""
    command = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--progress-bar", "off", *arguments]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    said: list[str] = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        seen = 0
        for line in process.stdout:
            said.append(line)
            seen += line.startswith(("Collecting ", "Requirement already satisfied: "))
            if line.startswith("Collecting "):
                say(f"    {min(seen, total)}/{total} {line.split()[1]}")
            elif line.lstrip().startswith(("Building wheel", "Installing collected")):
                say(f"    {line.strip().split(':')[0]}")
    if process.returncode != 0:
        sys.stderr.write("".join(said[-40:]))
        raise SetupProblem(
            "pip could not install the locked packages",
            why="its last lines are above; most often the index cannot be reached or the disk is full",
            fix="look at them, then type `make setup` again: it goes on where it stopped",
        )


def count_pins(lock: Path) -> int:
    """How many packages a lock file names."""
    return len(re.findall(r"^[A-Za-z0-9][\w.\-]*==", lock.read_text(encoding="utf-8"), flags=re.MULTILINE))


# --- Java


def archive_classes(java_home: Path) -> None:
    """Let Java write Spark's classes as it maps them. Nothing depends on it: without, Spark starts later."""
    command = [str(VENV / "bin" / "python"), "-m", "penstock.streams.spark.java"]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "JAVA_HOME": str(java_home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        say("    not made; everything works without it, Spark starts some seconds later. What it said:")
        sys.stdout.write("".join(result.stdout.splitlines(keepends=True)[-5:]))


def find_java(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Path | None:
    """The home of a Java that Spark 4.3 runs on: what you set first, then PATH, then the usual places."""
    for home in java_candidates(environment, root):
        if java_version(home) in JAVA_VERSIONS:
            return home
    return None


def java_candidates(environment: Mapping[str, str], root: Path) -> Iterator[Path]:
    """Folders that hold a `bin/java`, each once, in the order they should be tried."""
    seen: set[Path] = set()
    for home in _java_guesses(environment, root):
        real = home.resolve()
        if real not in seen and (real / "bin" / "java").exists():
            seen.add(real)
            yield real


def _java_guesses(environment: Mapping[str, str], root: Path) -> Iterator[Path]:
    if environment.get("JAVA_HOME"):
        yield Path(environment["JAVA_HOME"])
    on_path = shutil.which("java", path=environment.get("PATH", ""))
    if on_path is not None:
        yield Path(on_path).resolve().parent.parent
    for pattern in JAVA_PLACES:
        yield from sorted(root.glob(pattern))


def java_version(home: Path) -> int | None:
    """The major version, None if it does not run."""
    try:
        return parse_java_version(output_of([str(home / "bin" / "java"), "-version"]))
    except (OSError, subprocess.CalledProcessError):
        return None


def parse_java_version(text: str) -> int | None:
    """`openjdk version "17.0.15"` is 17; the old `"1.8.0_392"` is 8."""
    found = re.search(r'version "(\d+)(?:\.(\d+))?', text)
    if found is None:
        return None
    major = int(found[1])
    return int(found[2] or 0) if major == 1 else major


def install_java() -> Path:
    """Install Java with the system's package manager, or say exactly what to type."""
    manager = next((name for name in JAVA_INSTALL if shutil.which(name)), None)
    # Homebrew refuses to run as root and needs no root; the others are the other way round.
    if manager is None or (os.geteuid() == 0) == (manager == "brew"):
        raise no_java(
            manager,
            "Spark 4.3 runs on Java 17 or 21, and neither JAVA_HOME, PATH nor /usr/lib/jvm leads to one",
        )
    if manager == "apt-get":
        apt_update()
    for command in JAVA_INSTALL[manager]:
        say(f"    none found, installing: {' '.join(command)}")
        if subprocess.run(command, env=unattended(), stdin=subprocess.DEVNULL, check=False).returncode == 0:
            home = find_java()
            if home is not None:
                return home
    raise no_java(manager, f"{manager} could not install it; what it said is above")


def no_java(manager: str | None, why: str) -> SetupProblem:
    """The message about a missing Java, with the line to type on this machine."""
    commands = [
        command for name, tries in JAVA_INSTALL.items() if manager in (None, name) for command in tries
    ]
    lines = "\n    or ".join(
        ("" if command[0] == "brew" else "sudo ") + " ".join(command) for command in commands
    )
    return SetupProblem(
        "no Java 17 or 21 was found",
        why=why,
        fix=f"type\n       {lines}\n  or set JAVA_HOME to one you have, and then type `make setup` again",
    )


# --- running things


def apt_update() -> None:
    """Fresh package lists; a container image has none."""
    subprocess.run(["apt-get", "update", "-q"], env=unattended(), stdin=subprocess.DEVNULL, check=False)


def unattended() -> dict[str, str]:
    """An environment in which package managers ask no questions."""
    return {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "NONINTERACTIVE": "1"}


def run(command: Iterable[str], *, what: str) -> None:
    """Run a command and let it speak."""
    command = list(command)
    result = subprocess.run(command, cwd=ROOT, env=unattended(), stdin=subprocess.DEVNULL, check=False)
    if result.returncode != 0:
        raise SetupProblem(
            what,
            why=f"`{' '.join(command)}` ended with code {result.returncode}; what it said is above",
            fix="repair that, then type `make setup` again",
        )


def output_of(command: list[str]) -> str:
    """What a command says; Java says its version on standard error."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=60,
    ).stdout


if __name__ == "__main__":
    raise SystemExit(main())
