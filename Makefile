# make demo   four short trainings on two processes and their comparison, in demo_results/
# make test   lint and test suite
# make lint   the static checks alone
# make test-doors   the doors to transformers, Accelerate and Ray, with the real packages, in .venv-doors
# make docs   the generated pages in docs/, and the documentation site, in site/; warnings are errors
# make gpu    what only an NVIDIA GPU can answer, within ten minutes: a table, and JSON in gpu_results/ (docs/developers/gpu-checks.md)
# make clean  remove outputs and caches; the environment stays (rm -rf .venv)
#
# All but gpu work in .venv, made by $(PYTHON) on first use and kept up to date with pyproject.toml and constraints.txt.
# gpu takes $(PYTHON) as it is, with the torch for CUDA that is installed there, and downloads nothing.

PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
# -qq: errors only. The install is editable, so a change of the sources needs no reinstall, but for those it compiles.
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
COMPILED := hatch_build.py $(wildcard lightning_sparse/ops/c/*.[ch]) lightning_sparse/ops/c/library.py

.DELETE_ON_ERROR:
.PHONY: demo test test-doors lint docs gpu clean

demo: $(VENV)/.installed-all
	@$(BIN)/python examples/demo.py

test: lint
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

# Gigabytes to install, and seconds to import: apart from all else.
test-doors:
	@$(MAKE) VENV=.venv-doors .venv-doors/.installed-doors
	@.venv-doors/bin/python -m pytest --timeout 400 tests/doors

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

# The variable silences a notice about versions of MkDocs to come.
docs: $(VENV)/.installed-docs
	@$(BIN)/python docs/site/generate.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "Open site/index.html"

gpu:
	@PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m tests.gpu

clean:
	rm -rf site demo_results gpu_results lightning_logs wandb dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone: the constraint then decides its version, and the second step finds it in place.
$(VENV)/.installed-torch: constraints.txt
	@echo "Installing torch into $(VENV), which takes minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) torch
	@touch $@

$(VENV)/.installed-%: pyproject.toml constraints.txt $(COMPILED) $(VENV)/.installed-torch
	@echo "Installing lightning-sparse[$*] into $(VENV)"
	@$(PIP_INSTALL) -e ".[$*]"
	@touch $@
