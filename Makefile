# SPDX-License-Identifier: Apache-2.0
# `make test` and `make demo` need Python 3.11 or newer, a package index and nothing else: each
# makes its own environment from constraints.txt the first time and uses it again afterwards.

PYTHON ?= python3
VENV ?= .venv
DEMO_VENV ?= .venv-demo
CACHE ?= .cache
# Where lint takes ruff and mypy from; `BIN=` takes them from PATH.
BIN ?= $(VENV)/bin/
# One worker a core of a small machine, and one thread a worker.
WORKERS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS ?=

export HF_HUB_OFFLINE = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

# Releases beside those of constraints.txt: the tests that depend on them run on these, too.
TRANSFORMERS = transformers-4.57 transformers-5.17
TRITON = triton-3.9
OTHERS = $(TRANSFORMERS:%=test-%) $(TRITON:%=test-%)

.PHONY: test test-others $(OTHERS) lint typecheck bench demo clean

test: lint
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)
	$(MAKE) --no-print-directory -j $(WORKERS) --output-sync test-others

test-others: $(OTHERS)

$(TRANSFORMERS:%=test-%): TESTS = tests/test_families.py tests/test_stream.py tests/test_patching.py
$(TRITON:%=test-%): TESTS = -n $(WORKERS) tests/test_compile.py tests/test_launcher.py \
	tests/test_operators.py

# One process for each release of transformers, so that the count of families is checked.
$(OTHERS): test-%: build/%/.ready
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(<D) $(VENV)/bin/python -m pytest -q -rfE \
		-p no:cacheprovider $(TESTS) $(PYTEST_ARGS)

lint: $(VENV)/.ready
	$(BIN)ruff check .
	$(BIN)ruff format --check .
	$(MAKE) --no-print-directory typecheck

# mypy knows a package by its folder. kernels/ and integrations/ are parts of fusedops by setup.cfg
# only, so it is shown a folder of links in which they are so by place.
TYPED = build/typecheck
typecheck:
	rm -rf $(TYPED) && mkdir -p $(TYPED)/fusedops
	ln -s $(CURDIR)/fusedops/*.py $(CURDIR)/fusedops/py.typed $(TYPED)/fusedops
	ln -s $(CURDIR)/kernels $(CURDIR)/integrations $(TYPED)/fusedops
	cd $(TYPED) && $(if $(findstring /,$(BIN)),$(abspath $(BIN))/)mypy \
		--config-file $(CURDIR)/setup.cfg --cache-dir $(CURDIR)/.mypy_cache -p fusedops

demo:
	@PYTHON=$(PYTHON) DEMO_VENV=$(DEMO_VENV) CACHE=$(CACHE) MAKE="$(MAKE) --no-print-directory" \
		sh examples/demo.sh

# In the environment at hand, whose torch and whose contestants are what is measured.
bench:
	@$(PYTHON) -c 'import importlib.util as u, sys; u.find_spec("torch") or sys.exit("make bench: \
	no torch in $(PYTHON) (PYTHON=... names another)"); import torch; torch.cuda.is_available() \
	or sys.exit("make bench needs a CUDA GPU: torch finds none here")'
	PYTHONPATH=$(CURDIR) $(PYTHON) bench/run.py $(BENCH_ARGS)
	PYTHONPATH=$(CURDIR) $(PYTHON) bench/launch.py
	$(PYTHON) bench/plot.py

clean:
	rm -rf $(VENV) $(DEMO_VENV) $(CACHE) build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The build backend is installed first and from the same pins, so that building fetches nothing.
define environment
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("the pinned versions need \
	Python 3.11 or newer; this is " + sys.version.split()[0] + " (PYTHON=... names another)")'
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet -c constraints.txt setuptools
	$(@D)/bin/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[$(1),$(2)]'
	touch $@
endef

$(VENV)/.ready: setup.cfg pyproject.toml constraints.txt
	$(call environment,test,dev)

# No environment of its own: a folder with what differs, ahead of $(VENV) on the path.
build/%/.ready: constraints-%.txt $(VENV)/.ready
	rm -rf $(@D)
	$(VENV)/bin/python -m pip install --quiet --no-deps --target $(@D) -r $<
	touch $@

$(DEMO_VENV)/.ready: setup.cfg pyproject.toml constraints.txt
	$(call environment,hf,cli)
