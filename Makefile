# Everything starts here. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DATA ?= ../shared/data

.DEFAULT_GOAL := help
.PHONY: help setup setup-run up test test-failed test-long test-ci check lock format compat bench clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Exact releases whose files have the hashes of requirements.lock; nothing else is fetched to serve.
$(VENV)/.run: pyproject.toml requirements.lock
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing shardcompute into $(VENV) …"
	@$(PIP) --require-hashes --requirement requirements.lock \
	  && $(PIP) --no-deps --no-build-isolation --editable . && touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing what the tests need …"
	@$(PIP) "torch==2.13.0" && $(PIP) --editable ".[torch,dev]" && touch $@
	@$(PIP) --editable ".[mlx]" || echo "there is no mlx for this machine: its tests are skipped"
	@$(PIP) --editable ".[llamacpp]" || echo "there is no xllamacpp for this machine: its tests are skipped"

setup-run: $(VENV)/.run ## Make .venv with what serving needs (no torch)

setup: $(VENV)/.dev ## Make .venv with everything for development

up: $(VENV)/.run ## Serve the embedded default model
	@$(BIN)/shardcompute up

test: $(VENV)/.dev ## Run the tests (up to half an hour on two cores)
	@$(BIN)/python scripts/suite.py

test-failed: $(VENV)/.dev ## Run once more what failed last time
	@$(BIN)/python -m pytest tests --last-failed --last-failed-no-failures none

test-long: $(VENV)/.dev ## Run the long suites too (more than an hour)
	@$(BIN)/python scripts/suite.py --long

test-ci: $(VENV)/.dev ## Run the tests and the long suites in a small form, as .ci/run does
	@$(BIN)/python scripts/suite.py --ci

check: $(VENV)/.dev ## Lint, types, import directions, the house, unit tests
	@$(BIN)/ruff check src tests
	@$(BIN)/ruff format --check src tests
	@$(BIN)/mypy
	@$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin
	@$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/file_map.py --check
	@$(BIN)/python scripts/docs_reference.py --check
	@$(BIN)/python scripts/house.py
	@$(BIN)/python scripts/lock.py --check
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit tests/property -n 2 --dist loadfile

lock: $(VENV)/.dev ## Write requirements.lock anew (needs uv)
	@$(BIN)/python scripts/lock.py

format: $(VENV)/.dev ## Format the code
	@$(BIN)/ruff check --fix src tests
	@$(BIN)/ruff format src tests

compat: $(VENV)/.dev ## Try unmodified clients, each in an environment of its own, against real servers (CLIENTS="openai llm")
	@$(BIN)/python scripts/compat.py --data $(DATA) $(CLIENTS)

bench: $(VENV)/.dev ## Measure the engine and its weight forms; results under bench/results
	@$(BIN)/shardcompute bench engine --json bench/results/engine.json
	@$(BIN)/shardcompute bench quality --data $(DATA)/lambada.jsonl --json bench/results/quality.json

clean: ## Remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
