# make demo    set up, build, then fine-tune, merge, export and ask SmolLM2-135M (QUICK=1: half; ARGS for demo.py)
# make test    set up, build, then run the whole CPU test-suite (ARGS='-k packing' goes to pytest)
# make native  rebuild the native code after a change
# make sanitize  run every CUDA kernel at small sizes under compute-sanitizer
# make clean   remove everything that the above made, the virtual environment included
#
# Needed beforehand, and named when missing: Python 3.11 or later with venv and headers, and a C++20 compiler. Where nvcc 13
# is found, the CUDA backend is built too, for the GPUs of this machine (for Hopper where there is none).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help demo test native sanitize clean

VENV := .venv
PY := $(VENV)/bin/python
BUILD := build/editable
PLUGINS := $(sort $(dir $(wildcard plugins/*/pyproject.toml)))
PROJECTS := pyproject.toml $(addsuffix pyproject.toml,$(PLUGINS))
NATIVE_SETUP := CMakeLists.txt $(wildcard cmake/*) $(wildcard native/*/CMakeLists.txt native/*/*/CMakeLists.txt)
LLAMA_CPP := @node-llama-cpp/linux-x64@3.22.1
PIP := $(PY) -m pip --disable-pip-version-check install --quiet --quiet
# A list of requirements out of pyproject.toml, where each is written once: $(call LISTED,table key ...)
LISTED = $(PY) -c 'import functools, sys, tomllib; print(*functools.reduce(dict.get, sys.argv[1:], \
  tomllib.load(open("pyproject.toml", "rb"))), sep="\n")' $(1)

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: native
	@$(PY) examples/notes/demo.py $(if $(QUICK),--quick) $(ARGS)

test: native $(VENV)/.test-ready
	@$(PY) -m pytest -n 2 tests $(addsuffix tests,$(PLUGINS)) $(ARGS)

# ninja does not lock its folder, so two makes at once wait for each other here.
native: $(VENV)/.core-ready
	@flock $(BUILD)/.make-lock $(VENV)/bin/cmake --build $(BUILD) -- --quiet

# Also made anew where only the build folder was removed.
ifeq ($(wildcard $(BUILD)/build.ninja),)
.PHONY: $(VENV)/.core-ready
endif
$(VENV)/.core-ready: $(PY) $(PROJECTS) $(NATIVE_SETUP)
	@echo "== installing what the core needs, building it, and installing the plugins (a minute or two)"
	$(call LISTED,build-system requires) > $(VENV)/requirements.txt
	$(PIP) -r $(VENV)/requirements.txt 'cmake>=3.26' 'flit-core>=3.11,<4'
	$(PY) cmake/build_backend.py > $(VENV)/requirements-cuda.txt
	if [ -s $(VENV)/requirements-cuda.txt ]; then
	  $(call LISTED,project optional-dependencies cuda) >> $(VENV)/requirements-cuda.txt
	  sort -u -o $(VENV)/requirements-cuda.txt $(VENV)/requirements-cuda.txt
	  $(PIP) -r $(VENV)/requirements-cuda.txt
	fi
	$(PIP) --no-build-isolation -e . -C cmake.define.SUROGATE_CUDA_ARCHITECTURES=native
	$(PIP) --no-build-isolation $(addprefix -e ./,$(PLUGINS))
	touch $@

# cuDNN's kernels order shared memory by barriers that racecheck does not follow.
sanitize: NOT_OURS := --kernel-name-exclude kernel_substring=cudnn_generated
sanitize: native
	@for tool in memcheck "racecheck $(NOT_OURS)"; do
	  compute-sanitizer --tool $$tool --error-exitcode 1 --print-limit 20 $(PY) tests/cuda/sanitize.py $(ARGS)
	done

$(VENV)/.test-ready: $(VENV)/.core-ready
	@echo "== installing what the tests compare with (torch, transformers, peft)"
	$(call LISTED,project optional-dependencies test) > $(VENV)/requirements-test.txt
	$(PIP) -r $(VENV)/requirements-test.txt
	if command -v npm >/dev/null; then  # llama.cpp, built; its tests say so when it is missing
	  npm install --prefix $(VENV) --ignore-scripts --no-audit --no-fund --no-save --loglevel=error $(LLAMA_CPP)
	fi
	touch $@

$(PY):
	@need() { echo "make: $$1. On Debian: apt-get install $$2" >&2; exit 1; }
	python=""
	for candidate in python3.11 python3.12 python3.13 python3.14 python3; do
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python="$$candidate"; break; fi
	done
	[ -n "$$python" ] || need "no Python 3.11 or later was found" "python3 python3-venv python3-dev"
	"$$python" -c 'import ensurepip, venv' 2>/dev/null || need "$$python cannot make virtual environments" "python3-venv"
	header="$$("$$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"
	[ -f "$$header" ] || need "there is no $$header" "python3-dev"
	command -v c++ >/dev/null || need "no C++ compiler was found" "g++"
	"$$python" -m venv --clear $(VENV)

clean:
	rm -rf $(VENV) build surogate_core/lib surogate_core/include surogate_core/_native*.so
