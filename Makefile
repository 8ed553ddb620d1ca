# `make sft` and `make test` each start from nothing: they make .venv, install, and run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest

# DeepSpeed looks for ninja on the PATH.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Where it is set, every process of every launch compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE
CORES := $(shell nproc 2>/dev/null || echo 1)

# Launches of two processes wait for each other and for imports most of the time: two files of tests at once.
WORKERS ?= 2

.PHONY: sft pretrain dpo kto grpo reward test test-fast coverage soak lint format docs clean debian ops

sft: $(STAMP)  ## Fine-tune the embedded model on the embedded data and report exact match before and after
	OMP_NUM_THREADS=$(CORES) $(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml recipes/sft.py

pretrain: $(STAMP)  ## Pretrain the embedded model's shape on the embedded text, from nothing
	OMP_NUM_THREADS=$(CORES) $(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml recipes/pretrain.py

dpo: $(STAMP)  ## Tune the embedded model to pairs of a right and a wrong answer
	OMP_NUM_THREADS=$(CORES) $(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml recipes/dpo.py

kto: $(STAMP)  ## Tune the embedded model to single answers that are labelled right or wrong
	OMP_NUM_THREADS=$(CORES) $(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml recipes/kto.py

grpo: $(STAMP)  ## Fine-tune the embedded model for a few steps, then reward its right answers
	OMP_NUM_THREADS=$(CORES) $(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml recipes/sft.py \
		--max_steps 15 --output_dir outputs/little-tuned
	OMP_NUM_THREADS=$(CORES) $(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml recipes/grpo.py \
		--model_name_or_path outputs/little-tuned

reward: $(STAMP)  ## Train a reward model from the embedded model, on pairs of a right and a wrong answer
	OMP_NUM_THREADS=$(CORES) $(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml recipes/reward.py

test: $(STAMP) debian ops  ## Every test except the soaks
	$(PYTEST) tests -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-fast: $(STAMP)  ## Unit tests that take milliseconds
	$(PYTEST) tests/unit -m "not slow and not soak" -x -n $(WORKERS) --dist loadfile

coverage: $(STAMP)  ## Lines that the fast tests run: prints them and writes the figure to docs/contributing.md
	$(PYTEST) tests/unit -m "not slow and not soak" -n $(WORKERS) --dist loadfile --cov \
	  --cov-report=term:skip-covered --cov-report=json:coverage.json
	$(BIN)/python docs/refresh.py --coverage coverage.json

soak: $(STAMP) debian ops  ## Long proofs: kill loops, full benchmarks
	$(PYTEST) tests -m soak --timeout 3600

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/layout.py --check

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)  ## Build the documentation site into site/; any warning is an error
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# DeepSpeed compiles CPU Adam (needs g++ and ninja) and asynchronous I/O (needs libaio) at the first run. Pages are tested
# in Chromium where it is there: half a minute to install.
debian:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v chromium >/dev/null; then \
	  echo "Installing chromium, for the tests of pages"; \
	  (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium) >/dev/null 2>&1 || \
	    echo "chromium could not be installed: tests of pages are skipped"; \
	fi
	@missing=""; \
	command -v g++ >/dev/null || missing="$$missing g++"; \
	[ -e /usr/include/libaio.h ] || missing="$$missing libaio-dev"; \
	if [ -n "$$missing" ]; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "Installing what DeepSpeed needs:$$missing"; \
	    apt-get update -qq && apt-get install -y -qq $$missing >/dev/null; \
	  else \
	    echo "DeepSpeed needs Debian packages that are missing. Run: sudo apt-get install$$missing"; exit 1; \
	  fi; \
	fi

# Minutes the first time, a second later; built here so that no test waits for a compiler: besides what is asked for,
# what gloo's launches (ShareMemComm) and offloading (PinMemory) load. A build that was killed leaves a lock that torch
# waits for forever.
OPS := CPUAdam AsyncIO ShareMemComm PinMemory
ops: $(STAMP) debian
	@$(BIN)/python -m accel_scale.launching.build_locks
	@DS_ACCELERATOR=cpu $(BIN)/python -c "from deepspeed import get_accelerator as chosen; \
	[chosen().create_op_builder(f'{name}Builder').load(verbose=False) for name in '$(OPS)'.split()]" >/dev/null

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed: make PYTHON=python3.11 …"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip setuptools wheel
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[deepspeed,fp8,tune,dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info outputs site .coverage coverage.json
