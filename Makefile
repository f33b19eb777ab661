# make demo: install, fetch a real target, train a drafter on its own text on the CPU, draft with it
# make test: the whole test suite          make check: format, lint, types, import rules
# make bench: time the training step (GPU) make clean: remove the demo's run and data (not the environment)
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
RUN    ?= runs/demo
TARGET ?= $(HOME)/.cache/dflash-train/SmolLM2-135M-Instruct
DEMO   := config=tools/configs/demo.yaml target.path=$(TARGET)
STEPS  := $(shell sed -n 's/^trainer: {steps: \([0-9]*\).*/\1/p' tools/configs/demo.yaml)

.PHONY: install demo test check bench clean

install: $(VENV)/.installed

$(VENV)/.installed: constraints.txt pyproject.toml $(wildcard packages/*/pyproject.toml)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "pip>=25.1"
	$(BIN)/pip install --quiet -c constraints.txt torch -e packages/dflash-model -e packages/dflash-data \
		-e packages/dflash-train --group dev --group demo
	$(BIN)/pip install --quiet --no-deps -c constraints.txt dflash   # the reference; its pins contradict torchtitan's
	touch $@

demo: install
	$(BIN)/python tools/demo_target.py out=$(TARGET)
	$(BIN)/python tools/prepare.py $(DEMO)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 3 tools/train.py $(DEMO) run.dir=$(RUN)
	OMP_NUM_THREADS=1 $(BIN)/python tools/generate.py target.path=$(TARGET) target.dtype=float32 max_new_tokens=96 \
		drafter.path=$(RUN)/checkpoints/step-$(STEPS)/dflash prompt="List five things you can find in a kitchen."
	@grep -h 'held-out acceptance' $(RUN)/log.txt | tail -n 1

test: install
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 tests/unit; unit=$$?; \
	$(BIN)/python -m pytest tests/distributed tests/gpu && exit $$unit   # jobs of several ranks, one at a time

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports

bench: install
	$(BIN)/python tools/bench.py step preset=qwen3-8b
	$(BIN)/python tools/bench.py step preset=qwen3.6-27b

clean:
	rm -rf runs/demo data/demo
