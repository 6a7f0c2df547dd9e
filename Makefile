# The commands of README.md and CONTRIBUTING.md. Each is quick the second time: .venv is made once for each pyproject.toml.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Processes of pytest. Tests wait for events a third of their time, so three keep two cores busy.
PROCESSES ?= 3

.DEFAULT_GOAL := demo
.PHONY: demo test test-slow test-more simulate check chaos figures clients docs release stack clean

demo: $(READY)  ## score the shipped example with the shipped model, and show the best passages
	@$(BIN)/python examples/demo.py

test: $(READY)  ## the test suite, but for the slow tests
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist worksteal -m "not long and not slow"

test-slow: $(READY)  ## the slow tests: real faults at length, many processes
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist worksteal -m "slow and not long"

test-more: $(READY)  ## slow tests and all that compares scores; TESTS_AUTO=fp32 or bf16 is what `auto` means then
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist worksteal -m "(slow or scores) and not long"

simulate: $(READY)  ## clusters in virtual time, under all faults, an hour on all cores; a failure names its seed
	$(BIN)/python -m tests.simulation --seeds 1000000 --seconds 3600 --processes 0 --report --keep-going
	$(BIN)/python -m tests.simulation.every_write
	$(BIN)/python -m tests.simulation.reached

check: $(READY)  ## linter, formatter, types; tables of the first screen that are too old are told
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	-@$(BIN)/python -m benchmarks.ages

chaos: $(READY)  ## what is lost when things die, at full size; docs/explanation/benchmarks.md has its figures
	$(BIN)/python -m pytest -m long
	set -e; for each in producer worker rq-worker redis-aof redis-bare redis-flush redis-behind redis-lists \
		redis-failover redis-full submitted batch; do $(BIN)/python -m benchmarks.faults.chaos $$each; done
	$(BIN)/python -m benchmarks.faults.fuzz --minutes 10

# Goes on at the same commit: PARTS="compare feed" are some of its parts, OPTIONS="--sample 2000" more options.
figures: $(READY)  ## measure the documents' figures on this machine: MODEL=… PAIRS=… QRELS=…
	$(BIN)/python -m benchmarks.figures $(PARTS) --model $(MODEL) --pairs $(PAIRS) $(QRELS:%=--qrels %) $(OPTIONS)

clients: $(READY)  ## the gateway: real clients of other services, in an environment of their own; its OpenAPI document
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --no-deps --requirement tests/harness/clients.txt
	$(BIN)/python -m pytest -m long tests/extensions/gateway/test_clients.py

docs: $(READY)  ## the site, in build/docs: open index.html; it needs no network
	$(BIN)/python -m tests.harness.reference
	$(BIN)/python -m docs.figures
	$(BIN)/python -m sphinx --quiet --fail-on-warning --builder html --doctree-dir build/doctrees docs build/docs
	@echo "build/docs/index.html"

release: $(READY)  ## wheel, sdist, checksums, SBOM of the last commit, in dist: built twice, tried where nothing is
	$(BIN)/python -m benchmarks.ages
	$(BIN)/python -m tests.harness.release dist

stack: secrets/redis_password secrets/grafana_password  ## server, workers, runner, gateway, page, Prometheus, Alertmanager, Grafana, in containers
	docker compose up --build --detach

# Readable for the containers, which run as other users; the folder is yours alone.
secrets/%:
	@install -d -m 700 secrets
	@od -An -N24 -tx1 /dev/urandom | tr -d ' \n' > $@
	@chmod 644 $@

clean:
	rm -rf $(VENV) .venv-clients

# pip runs with the constraints file only: torch in another build pulls gigabytes.
# From nothing: else tests may pass with a package that the project has dropped.
# Python brings an old pip, which takes three times as long to choose what fits.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@
