# Everything a developer runs. `make test` sets up by itself.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup quickstart test check format bench

setup: .venv/ready

# The constraints pin every package, so that an install can be repeated.
.venv/ready: pyproject.toml constraints.txt $(wildcard plugins/*/*.*)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]' ./plugins/lm_eval
	touch $@

# Learns to copy 32 tokens in reverse: a minute on two cores, busy ones too, since its threads sleep while they wait. Once done, it only evaluates and generates.
# Then composes twenty seconds of piano with the model in the box.
quickstart: export OMP_WAIT_POLICY = passive
quickstart: setup
	$(BIN)/perceiver-ar train copy-32 --out runs/quickstart --resume \
		--model.channels 128 --model.heads 4 --model.cross-dropout 0 --model.residual-dropout 0 \
		--train.steps 600 --train.batch-size 64 --train.learning-rate 2e-3 --train.warmup-steps 20 \
		--train.log-every 50
	$(BIN)/perceiver-ar evaluate runs/quickstart
	$(BIN)/perceiver-ar generate runs/quickstart --prompt '00 11 22 33 44 55 66 77 88 99 aa bb cc dd ee'
	$(BIN)/perceiver-ar generate piano --out runs/piano --overwrite

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
