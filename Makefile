# Everything a developer runs. `make test` sets up by itself.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup quickstart test check format bench

setup: .venv/ready

# The constraints pin every package, so that an install can be repeated.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

quickstart: setup
	$(BIN)/perceiver-ar presets

test: setup
	$(BIN)/pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m benchmarks
