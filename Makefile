# make demo   install, then show clustered federated learning on handwritten digits
# make test   install, then run everything that guards the project
# make docs   install, then build the documentation to build/docs; a warning is an error
# make test-deployment   only what starts a Flower deployment on loopback
# make test-browser   only what opens the report in Chromium; on Debian, root gets it installed
# make test-datasets   only what reads datasets of Hugging Face and Flower, in an environment of its own
# make test-reliability   kills, damaged files, floods and attacks; prints docs/reliability.md's table

PYTHON ?= python3
VENV ?= .venv
DATASETS_VENV ?= $(VENV)-datasets
INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
BUILD_DOCS = $(VENV)/bin/python -m sphinx --builder html --fresh-env --fail-on-warning --keep-going --quiet docs build/docs

CHROMIUM ?= chromium
export CHROMIUM
HAS_CHROMIUM = command -v "$(CHROMIUM)" >/dev/null
INSTALL_CHROMIUM = { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get -qq update && apt-get -qq install -y chromium >/dev/null && $(HAS_CHROMIUM); }
NO_CHROMIUM = The tests of the report need Chromium: install it (as root: apt-get install chromium), or name one: make test-browser CHROMIUM=/path/to/chromium

.PHONY: demo test docs test-deployment test-browser test-datasets test-reliability format figure clean

demo: $(VENV)/installed
	$(VENV)/bin/fedbranch demo

test: $(VENV)/installed-dev
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy
	$(BUILD_DOCS)
	$(VENV)/bin/pytest --numprocesses 2 -m 'not deployment and not reliability and not browser'
	$(VENV)/bin/pytest -m deployment
	$(MAKE) test-browser

docs: $(VENV)/installed-dev
	$(BUILD_DOCS)
	@echo "The documentation is in build/docs/index.html"

test-deployment: $(VENV)/installed-dev
	$(VENV)/bin/pytest -m deployment

test-browser: $(VENV)/installed-dev
	@$(HAS_CHROMIUM) || $(INSTALL_CHROMIUM) || { echo "$(NO_CHROMIUM)" >&2; exit 1; }
	$(VENV)/bin/pytest -m browser tests/report

test-datasets: $(DATASETS_VENV)/installed
	$(DATASETS_VENV)/bin/python -m pytest -m datasets tests/data/test_hugging_face.py

test-reliability: $(VENV)/installed-dev
	$(INSTALL) --editable '.[fuzz]'
	rm -rf build/reliability
	FEDBRANCH_RELIABILITY=build/reliability $(VENV)/bin/pytest --numprocesses 2 tests/reliability
	$(VENV)/bin/python -m studies.reliability_table build/reliability

format: $(VENV)/installed-dev
	$(VENV)/bin/ruff format
	$(VENV)/bin/ruff check --fix

figure: $(VENV)/installed-dev
	$(VENV)/bin/python docs/figures/demo.py

clean:
	rm -rf $(VENV) $(DATASETS_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

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

# Flower Datasets wants other versions of datasets and fsspec than our own environment has.
$(DATASETS_VENV)/installed: pyproject.toml constraints-datasets.txt
	@echo "Installing fedbranch, datasets and flwr-datasets into $(DATASETS_VENV) ..."
	$(PYTHON) -m venv $(DATASETS_VENV)
	$(DATASETS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-datasets.txt --editable . datasets flwr-datasets hypothesis pytest
	@touch $@
