# `make demo` and `make test` are complete on a machine that has only Python (3.11 or newer) and make.

PYTHON ?= python3
VENV := .venv
JOBS ?= 1
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, 1 + (os.cpu_count() or 1)))')
PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check --no-compile
PACKAGE := $(VENV)/.package

# Without bytecode on disk, each process would compile torch and pytest's rewritten asserts again: 15 seconds and more.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-integrations test-kernels test-exhaustive e2e check docs reproduce soak fuzz gpu-test gpu-e2e

help:
	@echo 'make demo      set up $(VENV) and train a tiny model on real text, in minutes on two CPU cores, with a report'
	@echo 'make test      set up $(VENV) and run the tests'
	@echo 'make test-integrations  with other packages: transformers, accelerate, trl, lightning, torchtitan, lm-eval, trackers, a browser'
	@echo 'make test-kernels       compile every kernel for an H200, without a GPU'
	@echo 'make test-exhaustive    the sweeps over every combination, which make test samples'
	@echo 'make e2e       all methods together in tiny runs on a CPU: resumed bits, losses, refusals, a table (E2E="--only 3": one)'
	@echo 'make check     ruff and mypy'
	@echo 'make docs      build the documentation site into site/, strictly and without a network'
	@echo 'make reproduce CLAIM=recipes  train the ladder of reproduce/recipes and write its report (LADDER=--tiny: a try on a CPU)'
	@echo 'make soak      kills, flipped bits, full disks, hostile input: a scoreboard, in under twenty minutes (SOAK="--scale 10": more)'
	@echo 'make fuzz      mutated input for every reader of files, guided by coverage, for a minute (FUZZ="--seconds 600": longer)'
	@echo 'make gpu-test  run the tests marked gpu with $(PYTHON) as it is, installing nothing (JOBS=8: in eight processes)'
	@echo 'make gpu-e2e   all methods together on a GPU, compared with the CPU: a table, in eight minutes with JOBS=16'

# A folder of its own each time: a demo shows training, and no run is ever overwritten.
demo: $(PACKAGE)
	out=runs/demo-$$(date +%Y%m%d-%H%M%S) && $(VENV)/bin/dither train --out $$out && $(VENV)/bin/dither report $$out

# One process per core and one more, since tests of ranks wait, each with one thread. The goal is eight minutes on two idle cores;
# cases marked `exhaustive` are left to test-exhaustive.
PYTEST := OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal

test: $(PACKAGE)-test
	$(PYTEST) --durations=15 --ignore=tests/integrations --ignore=tests/kernels

test-integrations: $(PACKAGE)-test-integrations
	$(PYTEST) --durations=15 tests/integrations

test-kernels: $(PACKAGE)-test
	$(VENV)/bin/python -m pytest tests/kernels

test-exhaustive: $(PACKAGE)-test-integrations
	DITHER_EXHAUSTIVE=1 $(PYTEST) -m exhaustive

# Compiled blocks take minutes on a CPU, and longer where its 16-bit products are slow.
e2e: $(PACKAGE)-test
	$(VENV)/bin/python tests/soak/e2e.py --device cpu --steps 8 --jobs $(JOBS) --timeout 3000 --minutes 600 $(E2E)

check: $(PACKAGE)-test-integrations $(PACKAGE)-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(PACKAGE)-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	! grep -rE '<(script|link|img)[^>]* (src|href)="?https?://' --include='*.html' site  # nothing is loaded from elsewhere

# Options of `dither ladder` go into LADDER, such as "--jobs 10 --minutes 8". Runs that have a result are not repeated, so the same
# command continues. A try (--tiny) leaves the committed report as it is.
reproduce: $(PACKAGE)-figures
	@test -f reproduce/$(CLAIM)/ladder.toml || { echo 'Set CLAIM to one of: $(notdir $(wildcard reproduce/*))'; exit 2; }
	-$(VENV)/bin/dither ladder reproduce/$(CLAIM)/ladder.toml $(LADDER)
	$(VENV)/bin/dither ladder reproduce/$(CLAIM)/ladder.toml --report \
		$(if $(filter --tiny,$(LADDER)),runs/$(CLAIM)-tiny --tiny,reproduce/$(CLAIM))

soak: $(PACKAGE)-test
	$(VENV)/bin/python tests/soak/soak.py $(SOAK)

fuzz: $(PACKAGE)-test
	$(VENV)/bin/python tests/soak/fuzz.py $(FUZZ)

gpu-test:
	seq $(JOBS) | PYTHONPATH=src xargs -P $(JOBS) -I{} env OMP_NUM_THREADS=1 DITHER_SHARE={}/$(JOBS) $(PYTHON) -m pytest -q -m 'gpu and not exhaustive' tests/gpu

gpu-e2e:
	PYTHONPATH=src $(PYTHON) tests/soak/e2e.py --device cuda --jobs $(JOBS) --minutes 8 $(E2E)

# torch comes first and by its exact version, the one that is tested; the second line then keeps it. A stamp is written last,
# so that an interrupted installation starts again. `make demo` needs the package alone; $(PACKAGE)-EXTRA adds an extra to it.
# Python compiles what is imported, when it is imported: to compile all of torch would take half a minute.
$(PACKAGE): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e .
	touch $@

$(PACKAGE)-%: $(PACKAGE)
	$(PIP) -e '.[$*]'
	touch $@
