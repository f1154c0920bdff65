#!/bin/sh
# Writes both lock files again: exact versions and hashes, no index address, no path of this machine.
# Usage: scripts/lock.sh [--upgrade]
set -eu
cd "$(dirname "$0")/.."
compile() {
    .venv/bin/python -m piptools compile --quiet --no-header --no-emit-options --no-emit-index-url \
        --no-emit-trusted-host --no-emit-find-links --generate-hashes --allow-unsafe --strip-extras "$@"
}
echo "lock: requirements-build.lock"
compile "$@" --output-file requirements-build.lock requirements-build.in
echo "lock: requirements.lock (downloads PySpark once to read its metadata: some minutes)"
compile "$@" --all-extras --constraint requirements-build.lock --output-file requirements.lock pyproject.toml
