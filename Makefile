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

# Learns to copy 32 tokens in reverse: half a minute on two cores. Once done, it only evaluates.
quickstart: setup
	$(BIN)/perceiver-ar train copy-32 --out runs/quickstart --resume \
		--model.channels 128 --model.heads 4 --model.cross-dropout 0 --model.residual-dropout 0 \
		--train.steps 600 --train.batch-size 64 --train.learning-rate 2e-3 --train.warmup-steps 20 \
		--train.log-every 50
	$(BIN)/perceiver-ar evaluate runs/quickstart

test: setup
	$(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m benchmarks
