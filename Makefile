# The commands of README.md and CONTRIBUTING.md. The first one makes .venv; a change of pyproject.toml makes it anew.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Number of pytest processes. Tests wait for a third of their time, so three processes keep two cores busy.
PROCESSES ?= 3

.DEFAULT_GOAL := demo
.PHONY: demo test test-slow test-more simulate check chaos figures clients docs release stack clean

demo: $(READY)  ## score the shipped example with the shipped model, and show the best passages
	@$(BIN)/python examples/demo.py

test: $(READY)  ## the test suite without the slow tests
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist worksteal -m "not long and not slow"

test-slow: $(READY)  ## the slow tests: long faults, many processes
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist worksteal -m "slow and not long"

test-more: $(READY)  ## the slow tests and all tests that compare scores; TESTS_AUTO=fp32 or bf16 sets what `auto` chooses
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist worksteal -m "(slow or scores) and not long"

simulate: $(READY)  ## simulate clusters under all faults, for an hour on all cores; a failure names its seed
	$(BIN)/python -m tests.simulation --seeds 1000000 --seconds 3600 --processes 0 --report --keep-going
	$(BIN)/python -m tests.simulation.every_write
	$(BIN)/python -m tests.simulation.reached

check: $(READY)  ## linter, formatter, types; names tables of the first screen that are too old
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	-@$(BIN)/python -m benchmarks.ages

chaos: $(READY)  ## measure what is lost when processes and servers die; docs/explanation/benchmarks.md has the figures
	$(BIN)/python -m pytest -m long
	set -e; for each in producer worker rq-worker redis-aof redis-bare redis-flush redis-behind redis-lists \
		redis-failover redis-full submitted batch; do $(BIN)/python -m benchmarks.faults.chaos $$each; done
	$(BIN)/python -m benchmarks.faults.fuzz --minutes 10

# An interrupted measurement continues if the commit is the same. PARTS="compare feed" measures only these parts;
# OPTIONS="--sample 2000" passes further options on.
figures: $(READY)  ## measure the documents' figures on this machine: MODEL=… PAIRS=… QRELS=…
	$(BIN)/python -m benchmarks.figures $(PARTS) --model $(MODEL) --pairs $(PAIRS) $(QRELS:%=--qrels %) $(OPTIONS)

clients: $(READY)  ## test the gateway with real clients of other services (in .venv-clients), and its OpenAPI document
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --no-deps --requirement tests/harness/clients.txt
	$(BIN)/python -m pytest -m long tests/extensions/gateway/test_clients.py

docs: $(READY)  ## build the site: open build/docs/index.html, which needs no network
	$(BIN)/python -m tests.harness.reference
	$(BIN)/python -m docs.figures
	$(BIN)/python -m sphinx --quiet --fail-on-warning --builder html --doctree-dir build/doctrees docs build/docs
	@echo "build/docs/index.html"

release: $(READY)  ## build wheel, sdist, checksums and SBOM of the last commit in dist, twice, and try them in an empty environment
	$(BIN)/python -m benchmarks.ages
	$(BIN)/python -m tests.harness.release dist

stack: secrets/redis_password secrets/grafana_password  ## start server, workers, runner, gateway, page, Prometheus, Alertmanager and Grafana in containers
	docker compose up --build --detach

# Containers run as other users, so the files are readable for all; only you can open the folder.
secrets/%:
	@install -d -m 700 secrets
	@od -An -N24 -tx1 /dev/urandom | tr -d ' \n' > $@
	@chmod 644 $@

clean:
	rm -rf $(VENV) .venv-clients

# pip always gets the constraints file: another version of torch would pull gigabytes.
# --clear removes packages that the project no longer needs: with them, tests could pass that fail elsewhere.
# Python's own pip is old, and takes three times as long to choose versions.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@
