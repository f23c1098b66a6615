# make run   a small piano GPT, trained here and now
# make test  everything that must hold
# make test-doctor  every disease of the catalogue, and its healthy twin with five seeds
# make test-fuzz  100,000 damaged inputs for every reader of foreign files; RUNG_FUZZ_EXAMPLES sets another number
# make test-faults  kills at every line that saves, appends, sends or moves, broken disks, a bad server, long and wide runs
# make test-lowest  core dependencies at their lower bounds; make lock, make audit: locked.txt, and what is known of it
# make test-slurm  sweeps on a real SLURM: Debian's daemons, started for the test; needs root
# make test-gpu  every recipe on a GPU, without pip; make gpu-carry puts what such a machine may lack into .gpu
# make transcripts  write anew what the verbs print, after a sentence was improved
# make bench ratios against peers, measured side by side
# make page  the web pages alone

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNNABLE := $(VENV)/.runnable
INSTALLED := $(VENV)/.installed
PAGE := rung/web/static/sources.sha256
PAGE_SOURCES := $(shell find rung/web/page -name node_modules -prune -o -type f -print)

# What a machine with torch and transformers may lack of rung's own packages and of what its tests need. PyAV is too
# large to be carried along; without it films are .webp.
GPU_PACKAGES := omegaconf msgspec symusic platformdirs pySmartDL pytest pytest-xdist execnet iniconfig pluggy packaging \
  pygments hypothesis sortedcontainers soundfile soxr cffi pycparser jiwer rapidfuzz gguf accelerate psutil

.PHONY: run test transcripts test-doctor test-fuzz test-faults test-lowest lock audit test-slurm test-gpu gpu-carry lint bench page clean

run: $(RUNNABLE) $(PAGE)
	$(BIN)/rung data show piano > /dev/null 2>&1 || $(BIN)/rung data piano
	$(BIN)/rung train piano

test: $(INSTALLED) $(PAGE) lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not doctor and not slurm and not faults"

transcripts: $(INSTALLED)
	RUNG_WRITE_TRANSCRIPTS=1 $(BIN)/python -m pytest -q tests/test_transcripts.py

test-doctor: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m doctor tests/cases

test-fuzz: $(INSTALLED)
	RUNG_FUZZ_EXAMPLES=$${RUNG_FUZZ_EXAMPLES:-100000} $(BIN)/python -m pytest -n 2 --dist worksteal tests/fuzz

# One process at a time: the counts are of all.
test-faults: $(INSTALLED)
	$(BIN)/python -m pytest -m faults --durations 12 tests/faults

test-slurm: $(INSTALLED)
	$(BIN)/python -m pytest -m slurm tests/sweep

# With the machine's own Python and torch, and nothing installed: what it lacks lies in .gpu/site.
test-gpu:
	$(PYTHON) -c 'import torch; print("torch", torch.__version__, "on", torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")'
	PYTHONPATH=$(CURDIR):$(CURDIR)/.gpu/site TORCHINDUCTOR_COMPILE_THREADS=2 \
	  $(PYTHON) -m pytest -n 8 --dist worksteal -p no:cacheprovider -rs --durations 12 tests/gpu

# In the versions of .venv, for Python 3.12; then take .gpu to the machine together with the checkout.
gpu-carry: $(INSTALLED)
	rm -rf .gpu && mkdir .gpu
	$(BIN)/pip freeze --exclude-editable > .gpu/versions.txt
	$(BIN)/pip install -q --no-deps --no-compile --python-version 3.12 --only-binary :all: --target .gpu/site -c .gpu/versions.txt $(GPU_PACKAGES)

# Of the packages in .venv: what `pip install --require-hashes` accepts on this kind of machine.
lock: $(INSTALLED)
	mkdir -p build
	$(BIN)/pip freeze --exclude-editable | grep -v '^torch==' > build/frozen.txt
	$(BIN)/pip install -q --dry-run --ignore-installed --no-deps --report build/report.json -r build/frozen.txt
	$(BIN)/python supply.py lock build/report.json

# Known weaknesses of what is locked; asks a public list of them.
audit: $(INSTALLED)
	$(PYTHON) -m venv build/audit
	build/audit/bin/pip install -q pip-audit
	build/audit/bin/pip-audit --require-hashes --disable-pip -r locked.txt

# The core dependencies at the lowest versions that are declared, laid before those of .venv; torch aside, which
# make test-gpu runs at its lower bound.
test-lowest: $(INSTALLED)
	rm -rf build/lowest
	$(BIN)/python supply.py lowest | grep -v '^torch==' > build/lowest.txt
	$(BIN)/pip install -q --target build/lowest -r build/lowest.txt
	PYTHONPATH=$(CURDIR)/build/lowest $(BIN)/python -m pytest tests/test_config.py tests/test_parse.py tests/runs/test_record.py \
	  tests/runs/test_metrics.py tests/runs/test_older.py tests/data/test_store.py tests/engine/test_step.py

lint: $(INSTALLED)
	$(BIN)/ruff check rung tests bench examples
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/pip install -q -c constraints.txt -e '.[bench]'
	for name in throughput overhead loader generation world_loader tokenising play logging script reading verdicts codec shakespeare; do $(BIN)/python -m bench.$$name || exit 1; done

page: $(PAGE)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis rung/web/static rung/web/page/node_modules

# What running needs. torch first and through the constraints file: an open range would bring several GB of CUDA
# packages. Not quiet: it takes a while, and one should see at what.
$(RUNNABLE): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] < (3, 13) else f"rung needs Python 3.11 or 3.12, $(PYTHON) is {sys.version.split()[0]}; set PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch and what rung needs into $(VENV)"
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[start]'
	touch $(RUNNABLE)

# What working on rung needs besides.
$(INSTALLED): $(RUNNABLE)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $(INSTALLED)

# An install builds the pages (hatch_build.py), with a node of its own where there is none, and only what is not built.
$(PAGE): $(PAGE_SOURCES) | $(RUNNABLE)
	$(BIN)/pip install -q --no-deps -e .
