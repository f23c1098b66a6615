# make run   a small piano GPT, trained here and now
# make test  everything that must hold
# make test-doctor  every disease of the catalogue, and its healthy twin with five seeds
# make test-slurm  sweeps on a real SLURM: Debian's daemons, started for the test; needs root
# make bench ratios against peers, measured side by side
# make page  the web pages alone

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PAGE := rung/web/static/sources.sha256
PAGE_SOURCES := $(shell find rung/web/page -name node_modules -prune -o -type f -print)

.PHONY: run test test-doctor test-slurm lint bench page clean

run: $(INSTALLED) $(PAGE)
	$(BIN)/rung data show piano > /dev/null 2>&1 || $(BIN)/rung data piano
	$(BIN)/rung train piano

test: $(INSTALLED) $(PAGE) lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not doctor and not slurm"

test-doctor: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m doctor tests/cases

test-slurm: $(INSTALLED)
	$(BIN)/python -m pytest -m slurm tests/sweep

lint: $(INSTALLED)
	$(BIN)/ruff check rung tests bench examples
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/pip install -q -c constraints.txt -e '.[bench]'
	for name in throughput overhead loader world_loader tokenising play logging own_loop reading verdicts shakespeare; do $(BIN)/python -m bench.$$name || exit 1; done

page: $(PAGE)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis rung/web/static rung/web/page/node_modules

# torch first and through the constraints file: an open range would bring several GB of CUDA packages.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] < (3, 13) else f"rung needs Python 3.11 or 3.12, $(PYTHON) is {sys.version.split()[0]}; set PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $(INSTALLED)

# An install builds the pages (hatch_build.py), with a node of its own where there is none, and only what is not built.
$(PAGE): $(PAGE_SOURCES) | $(INSTALLED)
	$(BIN)/pip install -q --no-deps -e .
