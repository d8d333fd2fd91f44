PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
NOTEBOOKS_STAMP := $(VENV)/.installed-notebooks
BROWSER_STAMP := node_modules/.installed

.PHONY: demo demo-page test test-full test-all test-tiers docs docs-in-browser notebooks families versions results-check quality style wheel clean
export OMP_NUM_THREADS ?= 1
export PYTHONDONTWRITEBYTECODE :=  # where it is set, every process of the tests would compile hf_freeze anew

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable ".[test,dev]"
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # pip compiles on one core, this on all; it fails on templates that are no Python
	touch $(STAMP)

demo: $(STAMP)  ## the freeze ablation of translation and language models on the built-in corpus, about 5 minutes on 2 cores
	$(BIN)/hf-freeze run recipes/freeze_ablation/recipe.yaml --out runs/demo --jobs 2
	$(BIN)/hf-freeze run recipes/freeze_ablation/lm.yaml --out runs/demo-lm --jobs 2
	@echo "Open runs/demo/report.html and runs/demo-lm/report.html in a browser."

demo-page: $(STAMP)  ## a small translator of the built-in language, and a web page that runs it in the browser, about two minutes; needs npm
	$(BIN)/hf-freeze run recipes/freeze_ablation/recipe.yaml --set 'only=["0"]' --out runs/demo-page
	$(BIN)/hf-freeze export runs/demo-page/row-0-seed-1/model --format transformers-js --quantization int8 --page --out runs/demo-page/site
	@echo "Run: python3 -m http.server --bind 127.0.0.1 --directory runs/demo-page/site"
	@echo "Then open http://127.0.0.1:8000 and type: simdi homor pyhiz nukostu."

PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist worksteal
# Where a cluster of Ray was started and has ended, Ray may end the process, later and without a word.
CLUSTER := tests/lab/test_ray_cluster.py

test: $(STAMP)  ## the short tier of the tests, which finds what is wrong with any method, family or command in minutes: tests/tiers.py
	-$(BIN)/python tests/transformers_suite/fetch.py
	$(PYTEST) --tier short --ignore $(CLUSTER)

test-full: $(STAMP)  ## all tests
	-$(BIN)/python tests/transformers_suite/fetch.py
	$(BIN)/python -m pytest $(CLUSTER)
	$(PYTEST) --ignore $(CLUSTER)

test-all: export HF_FREEZE_TESTS := all
test-all: test-full  ## the tests with every combination that they are drawn from: hours

test-tiers: $(STAMP)  ## runs all tests, records their durations, and prints what each tier holds
	-$(BIN)/python tests/transformers_suite/fetch.py
	$(BIN)/python tests/tiers.py record
	$(BIN)/python tests/tiers.py table

$(DOCS_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $(DOCS_STAMP)

docs: export NO_MKDOCS_2_WARNING := 1
docs: export PATH := $(abspath $(BIN)):$(PATH)  # ruff formats the signatures
docs: $(DOCS_STAMP)  ## the documentation site, in build/site; a warning, such as a link that leads nowhere, is an error
	$(BIN)/mkdocs build --strict

# node_modules stands at the root, where the two scripts find it.
$(BROWSER_STAMP): Makefile
	npm install --no-save --no-audit --no-fund --silent axe-core@4.14.1 puppeteer-core@25.16.0
	touch $(BROWSER_STAMP)

docs-in-browser: export CHROMIUM ?= $(shell command -v chromium chromium-browser google-chrome chrome | head -n 1)
docs-in-browser: docs $(BROWSER_STAMP)  ## every page of the site and the reports in Chromium: accessibility, dark colours, search; needs npm
	node docs/tooling/axe.mjs build/site
	node docs/tooling/reports.mjs docs/results

$(NOTEBOOKS_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[notebooks]"
	touch $(NOTEBOOKS_STAMP)

notebooks: $(NOTEBOOKS_STAMP)  ## executes the notebooks and keeps their outputs: under ten minutes each on 2 cores
	$(BIN)/python docs/tooling/notebooks.py

families: $(STAMP)  ## derive, prove and test every family of transformers, and write docs/families.md: about an hour
	$(BIN)/python tests/families/run.py docs

versions: $(STAMP)  ## a sample of the tests with the oldest and newest versions allowed, and docs/versions.md: several GB, about an hour
	$(BIN)/python tests/versions.py

results-check: $(STAMP)  ## whether every published table and statement is what the kept records give
	$(BIN)/python docs/tooling/results.py check

quality: $(STAMP)  ## what CI checks besides the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python docs/tooling/language/check.py
	$(BIN)/python docs/tooling/language/check.py --front-door README.md

style: $(STAMP)  ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(STAMP)  ## the package with its recipes, into dist/
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .ruff_cache
