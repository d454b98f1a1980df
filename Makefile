# The one place where kvpool is built, shown, tested and measured. `make` prints what there is.
#
# Every target first runs .ci/setup, which installs what is missing and costs well under a second
# when nothing is. Ninja and the stamps of .ci/setup decide what is rebuilt, so the targets here are
# names, not files. ARGS passes words on: make test ARGS='-k temperature'.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.SUFFIXES:
MAKEFLAGS += --no-print-directory
# The C++ tests build with the flags of the extension, in another folder: a cache saves a third.
export CMAKE_CXX_COMPILER_LAUNCHER ?= $(shell command -v ccache)
export CCACHE_NOHASHDIR ?= 1

python   = .venv/bin/python
kvpool   = .venv/bin/kvpool
cores   := $(shell nproc)
# So many files of tests with engines run at once: an engine takes a core and 2 GB, and a file up
# to three of them.
engine_workers := $(shell awk '/^MemTotal/ { print ($$2 > 12e6 && $(cores) > 1 ? 2 : 1) }' /proc/meminfo)
cpp      = $(shell find csrc tests/core -name '*.h' -o -name '*.inl' -o -name '*.cc')
examples = $(wildcard examples/*.py)
stub     = kvpool/_core.pyi

.PHONY: help
help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

.PHONY: setup-tests
setup-tests:
	@.ci/setup --tests

.PHONY: setup
setup:  ## install what is missing, build the extension: then .venv/bin/kvpool works
	@.ci/setup

.PHONY: demo
demo: setup  ## a daemon with two clients, then an embedded pool; every byte verified
	@$(kvpool) demo $(ARGS)

.PHONY: test
test: setup-tests core-tests  ## every test: Python, and C++ as shipped, under ASan+UBSan and under TSan
	@$(python) -m pytest $(ARGS)

.PHONY: test-engines
test-engines: setup  ## real vLLM engines on one pool; the first time 600 MB to download, 2.5 GB on disk
	@.ci/setup-engines
	@$(python) -m pytest tests/engines -n $(engine_workers) --dist loadfile $(ARGS)

.PHONY: test-cluster
test-cluster: setup-tests  ## members of a cluster on a real etcd, which is stopped, wiped and silenced
	@$(python) -m pytest tests/cluster $(ARGS)

.PHONY: check
check: check-format check-lint check-types check-stub check-tidy  ## formats, lint, types, stub, tidy

.PHONY: bench
bench: setup  ## speed beside memcpy in the same run, for every part
	@$(kvpool) bench $(or $(ARGS),all)

.PHONY: format
format: setup  ## rewrite the sources in the house format
	@.venv/bin/ruff format -q . && .venv/bin/ruff check -q --fix-only .
	@.venv/bin/clang-format -i $(cpp)

.PHONY: stubs
stubs: setup  ## write kvpool/_core.pyi again, after a change of csrc/bindings
	$(call write_stub,$(stub))

.PHONY: clean
clean:  ## remove what was built; .venv stays
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis

# --- the parts of `test` and `check` ----------------------------------------------------------------

# $(call build_core,FOLDER,CMAKE OPTIONS): the C++ tests in build/FOLDER; quick when up to date.
define build_core
@test build/$(1)/build.ninja -nt Makefile || \
  cmake --fresh -S csrc -B build/$(1) -G Ninja -DKVPOOL_PYTHON=OFF -DKVPOOL_TESTS=ON $(2) >/dev/null
@echo "build: C++ tests in build/$(1)" && cmake --build build/$(1) --parallel $(cores)
endef

# The sanitizers' builds keep the debug checks, and little optimization: they compile fast.
debug := -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG='-O1 -g1'

.PHONY: core-tests
core-tests: setup
	$(call build_core,core,-DCMAKE_BUILD_TYPE=RelWithDebInfo)
	$(call build_core,asan,$(debug) -DKVPOOL_SANITIZE=address)
	$(call build_core,tsan,$(debug) -DKVPOOL_SANITIZE=thread)

.PHONY: check-format check-lint check-types check-stub check-tidy
check-format: setup
	@echo 'check: format of Python and C++'
	@status=0; .venv/bin/ruff format --check -q . || status=1; \
	  .venv/bin/clang-format --dry-run -Werror $(cpp) || status=1; exit $$status
check-lint: setup
	@echo 'check: lint'
	@.venv/bin/ruff check -q .
check-types: setup
	@echo 'check: types'
	@$(python) -m mypy --no-error-summary kvpool $(examples)
check-tidy: setup
	@echo 'check: tidy'
	@$(python) -m pytest -q tests/tidy

# $(call write_stub,FILE): the types of the extension, in the house format.
define write_stub
@$(python) -m nanobind.stubgen -q -m kvpool._core -o $(1) && .venv/bin/ruff format -q $(1)
endef
check-stub: setup
	@echo 'check: $(stub) is what the extension says'
	$(call write_stub,build/_core.pyi)
	@diff -u $(stub) build/_core.pyi || { echo '$(stub) is stale: run make stubs'; exit 1; }
