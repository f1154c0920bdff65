"""Which Java Spark will run on: found and fit, or a message that says what to install."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from penstock.core.errors import EnvironmentProblem

JAVA_VERSIONS = (17, 21)


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
