"""What Spark needs to start: PySpark, a fit Java, a master that answers. What is missing is said."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from penstock.core.errors import ConfigError, EnvironmentProblem

JAVA_VERSIONS = (17, 21)
MODULES = ("pyspark", "pandas")  # the extra `spark`
MASTER_S = 5.0  # so long a master has to answer
# What Spark takes; only of a standalone one the address is all there is to ask.
MASTER_FORMS = re.compile(
    r"local(-cluster)?(\[.*\])?|yarn|k8s://.+|spark://(?P<hosts>[^/,]+:\d+(,[^/,]+:\d+)*)"
)


def require_spark(master: str = "") -> None:
    """Refuse if Spark cannot start here; `master`: another Spark for its tasks, "" for none."""
    for module in MODULES:
        if not _is_installed(module):
            raise EnvironmentProblem(
                "Spark is not installed for this Python",
                why=f"{sys.executable} has no module {module!r}",
                fix="install penstock with the extra `spark`; --engine process runs commands without it",
            )
    require_java()
    require_master(master)


def require_master(master: str) -> None:
    """Refuse a master that is none, or that nobody answers for. "": each container has its own Spark."""
    form = MASTER_FORMS.fullmatch(master)
    if master and form is None:
        raise ConfigError(
            f"no such master: {master!r}",
            why="known forms: spark://host:port, yarn, k8s://…, local[threads]",
            fix="write it as spark://host:7077, or leave --master out",
        )
    hosts = form.group("hosts") if form is not None else None
    if not hosts:
        return
    problems = []
    for address in hosts.split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=MASTER_S).close()
        except (OSError, OverflowError) as error:
            problems.append(f"{address}: {error}")
        else:
            return  # of several, one that is there is enough
    raise EnvironmentProblem(
        f"no Spark master answers at {master}",
        why="; ".join(problems),
        fix="start it, or correct --master; without --master each container has a Spark of its own",
    )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def require_java() -> str:
    """Find Java 17 or 21 and return what it says of itself, or say what to install."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        raise EnvironmentProblem(
            "there is no Java on this machine",
            why="Spark runs on it: no `java` on the PATH, and JAVA_HOME does not name one",
            fix="install Java 17 or 21 (Debian: apt-get install openjdk-17-jre-headless; macOS: brew install "
            "openjdk@17), or run `make setup`",
        )
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    said = answer.stderr + answer.stdout
    version = java_version(said)
    if version not in JAVA_VERSIONS:
        raise EnvironmentProblem(
            f"this Java is version {version}",
            why=f"{java} answers so; Spark 4.3 runs on Java 17 or 21",
            fix="install Java 17 or 21 and set JAVA_HOME to it",
        )
    return said


def java_version(text: str) -> int:
    """The major version in the output of `java -version`, 0 if there is none."""
    _, _, rest = text.partition('version "')
    digits = rest.split('"')[0].split(".")
    try:
        return int(digits[1] if digits[0] == "1" else digits[0])
    except (ValueError, IndexError):
        return 0
