# One word per chore, the same here and in continuous integration.
#   make demo    set up, build a full-size MobileNetV2, tune it for a few minutes, compare it with ONNX Runtime
#   make test    set up, run the tests on all cores (PYTEST_ARGS='-m "not slow"' leaves the slow ones out)
#   make quick ROLE=e2e/step         run the tests of one path below tests/, the slow ones left out
#   make thorough                    the tests that `make test` leaves out: further cases, real tables, kills, damaged files, tutorials, peers
#   make coverage                    all tests, and which share of each package's lines they run (about twice as long)
#   make mutants [MUTANTS_ARGS=...]  small faults in the modules that decide most (mutmut): how many do tests see?
#   make lint    ruff        make types   mypy        make clean   remove what demo built
#   make docs    the documentation as a site, in build/site; a warning is an error
#   make browser a headless browser for the tests that look at pages (Debian, as root); without it they are skipped
#   make lock    write requirements.lock from what is installed in .venv

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EXTRAS := fusion,e2e,peers,models,docs,dev
DEMO   := build/demo
# Test files are handed out whole: captures and builds that a file shares are made once. One worker more than cores:
# a quarter of the time tests wait, for processes that they start and end and for clocks. A test that ends its worker ends
# the run: the files of that worker would be waited for without an end.
WORKERS := -n $(shell expr $$(nproc) + 1) --maxprocesses 8 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder
# Budget of the demo's tuning, in minutes and candidates per kernel.
MINUTES ?= 3.5
TRIALS  ?= 32

PACKAGES := costmodel schedules fusion e2e

.DELETE_ON_ERROR:
.PHONY: demo test quick thorough coverage mutants lint types docs browser setup lock clean

setup: $(STAMP)

# torch first and by itself: no other package may choose a different build of it.
$(STAMP): pyproject.toml requirements.lock
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed (set PYTHON=...)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' requirements.lock)"
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable '.[$(EXTRAS)]'
	@touch $@

$(DEMO)/mobilenet_v2.onnx: | $(STAMP)
	@mkdir -p $(DEMO)
	$(BIN)/python -m fusion.modelzoo mobilenet_v2 -o $@

demo: $(STAMP) $(DEMO)/mobilenet_v2.onnx
	$(BIN)/python -m fusion tune $(DEMO)/mobilenet_v2.onnx -o $(DEMO)/mobilenet_v2 --minutes $(MINUTES) --trials $(TRIALS)
	$(BIN)/python -m fusion compare $(DEMO)/mobilenet_v2 --against onnxruntime,tvm-unfused

test: $(STAMP)
	$(BIN)/python -m pytest -q $(WORKERS) $(PYTEST_ARGS)

quick: $(STAMP)
	@test -n "$(ROLE)" || { echo "make quick ROLE=path below tests/, such as e2e/step or e2e/step/test_memory.py" >&2; exit 2; }
	$(BIN)/python -m pytest -q -m 'not slow and not thorough' tests/$(ROLE) $(PYTEST_ARGS)

thorough: $(STAMP)
	$(BIN)/python -m pytest -q $(WORKERS) -m thorough $(PYTEST_ARGS)

coverage: $(STAMP)
	$(BIN)/coverage erase
	$(BIN)/python -m pytest -q $(WORKERS) -m '' --cov --cov-report= $(PYTEST_ARGS)
	@$(BIN)/coverage report
	@for package in $(PACKAGES); do \
	  printf "%-12s" $$package; echo "$$($(BIN)/coverage report --format total --include "$$package/*") %"; done

mutants: $(STAMP)
	$(BIN)/python -m mutmut run $(MUTANTS_ARGS)

browser:
	@for name in chromium-headless-shell chromium google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium-headless-shell fonts-liberation; } >/dev/null

lock: $(STAMP)
	{ sed '/^[^#]/,$$d' requirements.lock; \
	  $(BIN)/python -m pip freeze --exclude-editable | sed -E 's/\+[a-z0-9.]+$$//' | grep -vE '^(nvidia|cuda)-'; } > requirements.lock.new
	mv requirements.lock.new requirements.lock

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(DEMO)
