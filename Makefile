# Every target builds .venv from nothing where it is missing, and brings it up to date where the requirements changed.
PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# compiled when it is imported: most of what comes along never is, and compiling it takes longer than installing it
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile

# or each of the hundreds of processes that tests and benchmarks start would compile torch and Lightning again
unexport PYTHONDONTWRITEBYTECODE

TEST_ARGS ?=
TEST_WORKERS ?= auto
DEMO_ARGS ?=
EXAMPLES_ARGS ?=
PROJECTS_ARGS ?= --length short medium --start amortized now --rounds 3

.PHONY: help install test node test-slow coverage demo digits examples lint format bench projects docs figures screenshots notebook conformance wheel clean distclean

help:
	@echo "make install | test | test-slow | coverage | demo | digits | examples | lint | format | bench | projects | docs | figures | screenshots | notebook | conformance | wheel | clean | distclean"
	@echo "variables: PYTHON=$(PYTHON) VENV=$(VENV) TEST_WORKERS=$(TEST_WORKERS) TEST_ARGS= DEMO_ARGS= EXAMPLES_ARGS= PROJECTS_ARGS="

install: $(INSTALLED)

# torch goes first, alone and pinned, so that a CPU build which pip is configured to find is the one that stays
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) "$(shell grep '^torch==' constraints.txt)"
	$(PIP_INSTALL) -c constraints.txt -e ".[cpu,test,dev,plot,docs]"
	touch $@

$(VENV)/.examples_installed: $(INSTALLED)
	$(PIP_INSTALL) -c constraints.txt -e ".[cpu,examples]"
	touch $@

test: $(INSTALLED) node
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m "not slow and not gpu" $(TEST_ARGS)

# for the runner in JavaScript: onnxruntime-web and onnxruntime-node, without the script that fetches CUDA
NODE_TESTS := tests/anywhere/node
node:
	@if command -v npm >/dev/null; then \
		test -d $(NODE_TESTS)/node_modules || npm install --prefix $(NODE_TESTS) --ignore-scripts --no-audit --no-fund \
			|| echo "npm installed nothing: the tests of the runner in JavaScript are skipped."; \
	else \
		echo "Node is not installed: the tests of the runner in JavaScript are skipped."; \
	fi

# takes an hour or more on two cores: all of torch's test database, kills by the hundred, thousands of random modules, real clusters
test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m "slow and not gpu" $(TEST_ARGS)

# without xdist and coverage.py: slipcover does not see xdist's workers, and under the other Python 3.11 takes three times
# as long; in two parts, since slipcover 1.1 fails at the end of the whole suite, which forks. What it adds to code cannot
# be traced by dynamo: two files that dynamo traces as source are left out, and a test in which it traces a strategy.
TRACED := lightning_ort/strategies/capture/shims.py,lightning_ort/compat/torchmetrics.py
SLIPCOVER := $(BIN)/python -m slipcover --source lightning_ort --omit "$(TRACED)"
coverage: $(INSTALLED)
	$(SLIPCOVER) --json --out .coverage.1.json -m pytest -m "not slow and not gpu" tests/strategies tests/cli \
		--deselect 'tests/strategies/test_gradient_features.py::test_feature[`loss.backward()` in the step]'
	$(SLIPCOVER) --json --out .coverage.2.json -m pytest -m "not slow and not gpu" \
		--ignore tests/strategies --ignore tests/cli
	$(SLIPCOVER) --merge .coverage.1.json .coverage.2.json --skip-covered --fail-under 90

demo: $(INSTALLED)
	$(BIN)/python examples/language_model/train.py $(DEMO_ARGS)

digits: $(INSTALLED)
	$(BIN)/python examples/digits/digits.py

# all of them, a few steps each; the two above have their own tables
EXAMPLES := $(wildcard examples/*/*.yaml)
examples: $(VENV)/.examples_installed
	$(BIN)/python examples/compare.py $(filter-out %/hyperparameters/config.yaml,$(EXAMPLES)) $(EXAMPLES_ARGS)
	$(BIN)/python examples/hello.py --steps 20
	$(BIN)/python examples/hyperparameters/main.py --config examples/hyperparameters/config.yaml --trials 3 --epochs 5
	$(BIN)/python examples/digits/digits.py --epochs 2
	$(BIN)/python examples/language_model/train.py --steps 20 --rounds 1 --validation-batches 2

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python benchmarks/hot_path.py
	$(BIN)/python benchmarks/compile_time.py

# Third-party packages, each in an environment of its own that sees this one's packages behind its own: `--no-deps`, since
# the lists are complete, and nothing may bring another torch. In a worktree with another's environment:
# make projects VENV=../main/.venv -o ../main/.venv/.installed
PROJECTS := $(patsubst benchmarks/projects/requirements/%.txt,.projects/%/.installed,$(wildcard benchmarks/projects/requirements/*.txt))
projects: $(PROJECTS)
	$(BIN)/python benchmarks/projects/run.py --json benchmarks/results/projects.json --page docs/test_reports/projects.md $(PROJECTS_ARGS)

.projects/%/.installed: benchmarks/projects/requirements/%.txt $(INSTALLED)
	$(BIN)/python -m venv --without-pip .projects/$*
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" \
		> "$$(.projects/$*/bin/python -c 'import site; print(site.getsitepackages()[0])')/behind.pth"
	.projects/$*/bin/python -m pip install --disable-pip-version-check --no-compile --no-deps -r $<
	touch $@

docs: $(INSTALLED)
	$(BIN)/python docs/check.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# the tables of speeds in README.md and docs, from the newest result files
figures: $(INSTALLED)
	$(BIN)/python benchmarks/front_page.py

# pictures of the report and the console; needs Chromium (CHROMIUM=path), and trains a small GPT
screenshots: $(INSTALLED)
	$(BIN)/python docs/screenshots.py

notebook: $(INSTALLED)
	$(BIN)/python -m pytest --nbmake docs/hello.ipynb

# the pages that are found out by running things; for the models, install the extra `conformance` first
conformance: $(INSTALLED)
	$(BIN)/python -m tests.conversion.conformance
	$(BIN)/python -m tests.conversion.opinfo
	$(BIN)/python -m tests.models.conformance
	$(BIN)/python tests/strategies/feature_table.py

# the wheel in dist/, unpacked away from the checkout: it trains, and has what is no module
wheel: $(INSTALLED)
	rm -rf dist build
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist .
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/wheel dist/*.whl
	cd build && PYTHONPATH=wheel $(abspath $(BIN))/python -c "import lightning_ort as ort; assert 'wheel' in ort.__file__"
	cd build && PYTHONPATH=wheel $(abspath $(BIN))/python -m lightning_ort doctor
	test -f build/wheel/lightning_ort/py.typed && test -f build/wheel/lightning_ort/compiler/report/pages/report.html.jinja && test -f build/wheel/lightning_ort/compiler/executors/mask_kernel.c

clean:
	rm -rf build dist site *.egg-info .coverage.* .pytest_cache .mypy_cache .ruff_cache lightning_logs
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -not -path './.projects/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .projects
