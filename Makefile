# `make train` and `make test` need nothing but Python: they make .venv, install into it once, and run.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: train test test-all quality format benchmark clean help

help:
	@echo "make train      train 3x2-digit multiplication with implicit chain-of-thought (ARGS='--flag value' override)"
	@echo "make test       run the tests; make test-all includes the slow ones"
	@echo "make quality    check formatting and lint; make format applies them"
	@echo "make benchmark  measure the training step, evaluation and data"

# Reinstalled only when what is installed changed; the package itself is editable.
$(STAMP): setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev,analysis]'
	touch $(STAMP)

train: $(STAMP)
	$(BIN)/accelerate launch training/train.py $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

quality: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

benchmark: $(STAMP)
	$(BIN)/python benchmarks/train_step.py $(ARGS)
	$(BIN)/python benchmarks/evaluate.py
	$(BIN)/python benchmarks/data.py

clean:
	rm -rf $(VENV) build *.egg-info
