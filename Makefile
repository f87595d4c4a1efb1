# The README's two commands are `make demo` and `make test`. Each works alone on a
# fresh clone; all it needs is Python >= 3.10 with headers and a C++17 compiler.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
MATRIX_ARGS ?=
BENCH_ARGS ?=
DOCS_ARGS ?=

BIN := $(VENV)/bin
ASV = $(abspath $(BIN))/asv
# What a build depends on; an edit of any of these reinstalls the package.
SOURCES := setup.py pyproject.toml MANIFEST.in $(wildcard csrc/*.cpp csrc/*.h) \
  $(filter-out %.so %.c %.pyc,$(wildcard src/*.py src/mlxmem/*.* src/mlxmem/*/*.*))
CXX_FILES := $(wildcard csrc/*.cpp csrc/*.h src/mlxmem/*.h src/mlxmem/*/*.h \
  benchmarks/*.cpp)

.DEFAULT_GOAL := help
.PHONY: help demo test test-macos test-matrix bench bench-commits dashboard docs \
  docs-output picture lint format clean venv

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' \
	  $(firstword $(MAKEFILE_LIST))
	@echo "Variables: PYTHON (python3), VENV (.venv), PYTEST_ARGS, MATRIX_ARGS," \
	  "BENCH_ARGS, DOCS_ARGS"

demo: $(VENV)/.cpu ## train a small transformer under recording: out.pickle
	$(BIN)/python examples/train_transformer.py --out out.pickle

test: $(VENV)/.test ## run the tests (PYTEST_ARGS="-k name")
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-macos: $(VENV)/.macos ## check what is for macOS, and what is packed, without a Mac
	MLXMEM_MACOS_CHECKS=required $(BIN)/python -m pytest tests/macos tests/packaging \
	  $(PYTEST_ARGS)

test-matrix: ## run the tests on every supported MLX and Python found
	$(PYTHON) scripts/test_matrix.py $(MATRIX_ARGS)

bench: $(VENV)/.bench ## run the asv suite once, quickly, on this checkout
	cd benchmarks && $(ASV) machine --yes >/dev/null
	cd benchmarks && MLXMEM_BENCH_QUICK=1 $(ASV) run --quick \
	  --python=same $(BENCH_ARGS)

bench-commits: $(VENV)/.bench ## run it whole on commits: BENCH_ARGS="v0.1..main"
	cd benchmarks && $(ASV) machine --yes >/dev/null
	cd benchmarks && $(ASV) run --skip-existing-successful \
	  $(or $(BENCH_ARGS),HEAD^!)

dashboard: $(VENV)/.bench ## publish what bench-commits found as HTML
	cd benchmarks && $(ASV) publish
	@echo "The dashboard is build/asv/html/index.html; to look at it:"
	@echo "  $(BIN)/python -m http.server -b 127.0.0.1 -d build/asv/html 8080"

docs: $(VENV)/.docs ## build the documentation as HTML: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "The documentation is build/site/index.html"

docs-output: $(VENV)/.docs ## run the commands of the documentation again
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python scripts/docs_output.py $(DOCS_ARGS)

picture: $(VENV)/.dev ## draw docs/images/recording.png
	$(BIN)/python examples/train_transformer.py --steps 3 --out build/picture.pickle
	$(BIN)/python scripts/plot_recording.py build/picture.pickle \
	  docs/images/recording.png

lint: $(VENV)/.dev ## ruff, mypy and clang-format, without changing a file
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(if $(CXX_FILES),$(BIN)/clang-format --dry-run --Werror $(CXX_FILES))

format: $(VENV)/.dev ## let ruff and clang-format rewrite the files
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .
	$(if $(CXX_FILES),$(BIN)/clang-format -i $(CXX_FILES))

clean: ## remove the venvs and everything that was built
	rm -rf $(VENV) .venv-matrix build dist src/*.egg-info .hypothesis
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv: $(VENV)/.test ## only make the venv that the tests use

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
	  "mlxmem needs Python >= 3.10; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	touch $@

# Not editable: what is tested is what a user installs. setuptools would pack files
# from build/lib* that the source no longer has, so all but the compiled ones go
# first; those compile again only where their sources changed.
INSTALL = @echo "Installing into $(VENV): C++ compiles for a few minutes, quietly"; \
  find build -path 'build/lib*' -type f ! -name '*.so' -delete 2>/dev/null; \
  rm -rf build/bdist* && $(BIN)/python -m pip install -q

$(VENV)/.cpu: $(VENV)/.made $(SOURCES)
	$(INSTALL) '.[cpu]'
	touch $@

$(VENV)/.test: $(VENV)/.made $(SOURCES)
	$(INSTALL) '.[cpu,test]'
	touch $@ $(VENV)/.cpu

$(VENV)/.bench: $(VENV)/.made $(SOURCES)
	$(INSTALL) '.[cpu,bench]'
	touch $@ $(VENV)/.cpu

$(VENV)/.docs: $(VENV)/.made $(SOURCES)
	$(INSTALL) '.[cpu,docs]'
	touch $@ $(VENV)/.cpu

$(VENV)/.macos: $(VENV)/.made $(SOURCES)
	$(INSTALL) '.[cpu,test,macos-checks]'
	touch $@ $(VENV)/.test $(VENV)/.cpu

$(VENV)/.dev: $(VENV)/.made $(SOURCES)
	$(INSTALL) '.[cpu,test,dev]'
	touch $@ $(VENV)/.test $(VENV)/.cpu
