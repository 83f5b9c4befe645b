# make demo   install, then show clustered federated learning on handwritten digits
# make test   install, then run everything that guards the project
# make docs   install, then build the documentation to build/docs; a warning is an error
# make test-deployment   only what starts a Flower deployment on loopback
# make test-reliability   kills, damaged files, floods and attacks; prints docs/reliability.md's table

PYTHON ?= python3
VENV ?= .venv
INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
BUILD_DOCS = $(VENV)/bin/python -m sphinx --builder html --fresh-env --fail-on-warning --keep-going --quiet docs build/docs

.PHONY: demo test docs test-deployment test-reliability format figure clean

demo: $(VENV)/installed
	$(VENV)/bin/fedbranch demo

test: $(VENV)/installed-dev
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy
	$(BUILD_DOCS)
	$(VENV)/bin/pytest --numprocesses 2 -m 'not deployment and not reliability'
	$(VENV)/bin/pytest -m deployment

docs: $(VENV)/installed-dev
	$(BUILD_DOCS)
	@echo "The documentation is in build/docs/index.html"

test-deployment: $(VENV)/installed-dev
	$(VENV)/bin/pytest -m deployment

test-reliability: $(VENV)/installed-dev
	rm -rf build/reliability
	FEDBRANCH_RELIABILITY=build/reliability $(VENV)/bin/pytest --numprocesses 2 tests/reliability
	$(VENV)/bin/python -m tests.reliability.table build/reliability

format: $(VENV)/installed-dev
	$(VENV)/bin/ruff format
	$(VENV)/bin/ruff check --fix

figure: $(VENV)/installed-dev
	$(VENV)/bin/python docs/figures/demo.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("fedbranch needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; run: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/installed: $(VENV)/python pyproject.toml constraints.txt
	@echo "Installing fedbranch into $(VENV) ..."
	$(INSTALL) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(INSTALL) --editable '.[dev]'
	@touch $@
