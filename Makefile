# Everything runs from the project's own .venv; every path is relative, so the folder may have any name.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all check fast drills policies storm stress same steps sim sim-tasks fuzz bench format lock clean distclean
SHELL := /bin/sh
PY := .venv/bin/python
SEEDS ?= 100
EXAMPLES ?= 100
SECONDS ?= 60
MINUTES ?= 10
SAME_RECORDS ?= 1000000
CASES ?= 10000
# Compiled code is kept, whatever the shell says: tests start hundreds of Pythons, and each would compile all anew.
export PYTHONDONTWRITEBYTECODE :=
# Spark finds the Java that `make setup` found.
RUN = JAVA_HOME="$$(cat .venv/java-home)" PYTHONHASHSEED=0

help:  ## what can be typed here
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup:  ## .venv with the locked packages, and Java; does nothing when nothing changed
	@PYTHON="$(PYTHON)" sh scripts/setup.sh </dev/null

demo: setup  ## a fleet of plain processes, a whole pipeline, three jobs without state: kill, rescale, release, every record compared
	@$(RUN) PYTHONPATH=examples $(PY) examples/fleet/demo.py </dev/null
	@$(RUN) PYTHONPATH=examples $(PY) examples/zeitgeist/demo.py </dev/null
	@$(RUN) PYTHONPATH=examples $(PY) examples/orders/demo.py </dev/null

test: setup  ## what must hold, in minutes: check, fast tests, every store and bus, a job of every kind on Spark, a kill
	@# The Kafka broker is fetched meanwhile; tests that need it wait for it.
	@$(RUN) $(PY) -m tests.kafka </dev/null & $(RUN) $(PY) -m tests.suite test </dev/null

test-all: setup  ## the tests that `make test` leaves out: all of Spark, a short storm, one drill of each kind, more seeds
	@$(RUN) $(PY) -m tests.suite test-all </dev/null

check: setup  ## format, lint, types, and the project's own rules
	@echo "check: ruff format"
	@$(PY) -m ruff format --check --quiet . || { echo "check: type 'make format'"; exit 1; }
	@echo "check: ruff"
	@$(PY) -m ruff check --quiet .
	@echo "check: mypy"
	@$(PY) -m mypy --no-error-summary
	@echo "check: tidy"
	@$(PY) -m pytest -q --no-header tests/test_tidy.py </dev/null

fast: setup  ## the part of `make test` that needs neither Spark nor processes
	@$(RUN) $(PY) -m tests.suite fast </dev/null

drills: setup  ## kill -9, freeze, cut off and double real containers and the control plane; prints recovery times
	@$(RUN) $(PY) -m pytest -q -s -m "drill" tests/drills --ignore tests/drills/test_policies.py --ignore tests/drills/test_rebalance.py </dev/null

policies: setup  ## real jobs on Spark with a trouble each, made on purpose: what scaler and policies do about it
	@$(RUN) $(PY) -m pytest -q -s -m "drill" tests/drills/test_policies.py tests/drills/test_rebalance.py </dev/null

storm: setup  ## a pipeline on Spark under load for MINUTES=10 with a fault every few seconds; every result compared
	@$(RUN) $(PY) -m tests.e2e.storm --minutes $(MINUTES) </dev/null

stress: setup  ## 20 producers and 10 readers on the bus for SECONDS=60, on disk and on Kafka
	@$(RUN) $(PY) -m tests.streams.bus.stress --seconds $(SECONDS) </dev/null

same: setup  ## stream and batch, Python and SQL, disk and Kafka over SAME_RECORDS=1000000 records: identical rows
	@SAME_RECORDS=$(SAME_RECORDS) $(RUN) $(PY) -m pytest -q -s -m spark -k identical tests/spark/test_backfill.py </dev/null

steps: setup  ## CASES=10000 random cases of the stateful step: deaths, zombies, twins, caches; each ends as if nothing had been
	@STEP_CASES=$(CASES) $(RUN) $(PY) -m pytest -q --timeout 3600 tests/streams/test_random_steps.py </dev/null

sim: setup  ## simulations only, SEEDS=100 of them
	@$(RUN) $(PY) -m pytest -q -n 2 --seeds $(SEEDS) tests/sim </dev/null

sim-tasks: setup  ## SEEDS=100 of two hours each, 30 containers, 300 tasks; then which planted bugs are found
	@$(RUN) $(PY) -m penstock.sim --profile tasks --seeds $(SEEDS) </dev/null
	@$(RUN) $(PY) -m tests.support.planted_bugs </dev/null

fuzz: setup  ## the API against its own description: EXAMPLES=100 good and 100 broken requests per operation
	@FUZZ_EXAMPLES=$(EXAMPLES) $(RUN) $(PY) -m pytest -q -n 2 --timeout 900 tests/server/test_fuzz.py </dev/null
	@FUZZ_STORE=postgres FUZZ_EXAMPLES=$(EXAMPLES) $(RUN) $(PY) -m pytest -q -n 2 --timeout 900 tests/server/test_fuzz.py </dev/null

bench: setup  ## every bench/*.py: one claim each, a table and JSON
	@set -e; for file in bench/*.py; do echo "bench: $$file"; $(RUN) $(PY) -m "bench.$$(basename "$$file" .py)" </dev/null; done

format: setup  ## rewrite the code as ruff likes it
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix --quiet .

lock: setup  ## write the lock files again, after a change of dependencies
	@sh scripts/lock.sh

clean:  ## remove caches and build output; keeps .venv and the data in .penstock
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist spark-warehouse *.egg-info
	@find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## also remove .venv
	@rm -rf .venv
