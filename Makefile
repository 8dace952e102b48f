# One word per chore, the same here and in continuous integration.
#   make demo    set up, build a full-size MobileNetV2, tune it for a few minutes, compare it with ONNX Runtime
#   make test    set up, run the tests
#   make lint    ruff        make types   mypy        make clean   remove what demo built

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EXTRAS := fusion,e2e,peers,models,dev
DEMO   := build/demo
# Budget of the demo's tuning, in minutes and candidates per kernel.
MINUTES ?= 3.5
TRIALS  ?= 32

.DELETE_ON_ERROR:
.PHONY: demo test lint types setup clean

setup: $(STAMP)

# torch first and by itself: no other package may choose a different build of it.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed (set PYTHON=...)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $@

$(DEMO)/mobilenet_v2.onnx: | $(STAMP)
	@mkdir -p $(DEMO)
	$(BIN)/python -m fusion.modelzoo mobilenet_v2 -o $@

demo: $(STAMP) $(DEMO)/mobilenet_v2.onnx
	$(BIN)/python -m fusion tune $(DEMO)/mobilenet_v2.onnx -o $(DEMO)/mobilenet_v2 --minutes $(MINUTES) --trials $(TRIALS)
	$(BIN)/python -m fusion compare $(DEMO)/mobilenet_v2 --against onnxruntime,tvm-unfused

test: $(STAMP)
	$(BIN)/python -m pytest -q $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

clean:
	rm -rf $(DEMO)
