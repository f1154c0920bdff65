#!/bin/sh
# Finds a Python for the project and lets it do the rest (scripts/setup.py).
set -eu
cd "$(dirname "$0")/.."

# Order: what you ask for, what the environment was made with, then the versions the tests run on most.
for candidate in "${PYTHON:-}" .venv/bin/python python3.12 python3.11 python3.13 python3 python; do
    [ -n "$candidate" ] || continue
    # A version manager's shim may exist and still refuse to run, so each candidate is asked.
    if "$candidate" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
    then
        exec "$candidate" scripts/setup.py "$@"
    fi
done

cat >&2 <<'MESSAGE'
setup: no Python 3.11, 3.12 or 3.13 was found
Why: Penstock and PySpark 4.3 need one of them, and neither PYTHON, .venv nor PATH leads to one
What to do: install one, then type `make setup` again. For example
    Debian, Ubuntu:  sudo apt-get install -y python3 python3-venv
    Fedora:          sudo dnf install -y python3.12
    Alpine:          sudo apk add python3
    macOS:           brew install python@3.12
  or name one yourself:  make setup PYTHON=/path/to/python3.12
MESSAGE
exit 1
