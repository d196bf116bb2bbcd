# Every target sets up what it needs: `make serve` on a fresh clone is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Processes that run the tests, on a core each.
JOBS ?= 2
CXX_FILES = $(shell find kernels tests -name '*.cpp' -o -name '*.h')

.PHONY: serve test schema-test test-e2e client-test image-test gpu-test gpu-bench kernel-sim schedule-test emulated-test check format bench headline clean

serve: $(VENV)/.serve
	$(BIN)/quire serve $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not e2e and not gpu and not sim and not image and not schemas" $(ARGS)

test-e2e: $(VENV)/.dev
	PYTHON=$(BIN)/python tests/e2e/peers.sh
	$(BIN)/python -m pytest -m e2e $(ARGS)

# The SDKs and frameworks that people use, unmodified and newest, against the embedded model; installs them.
client-test: $(VENV)/.serve .venv-clients/.complete
	SERVER_PYTHON=$(CURDIR)/$(BIN)/python .venv-clients/bin/python -m pytest tests/clients $(ARGS)

.venv-clients/.complete: tests/clients/requirements.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check uv
	.venv-clients/bin/uv pip install --quiet --python .venv-clients/bin/python -r tests/clients/requirements.txt
	npm install --prefix tests/clients --no-save --no-package-lock --no-audit --no-fund --loglevel=error \
	  openai ai @ai-sdk/openai-compatible @anthropic-ai/sdk zod
	touch $@

# Both images from nothing, as root, with buildah: ten minutes on two cores, which is why CI leaves it out.
image-test: $(VENV)/.dev
	$(BIN)/python -m pytest -m image tests/e2e/test_image.py -s $(ARGS)

# More than 500 outputs of the embedded model under real JSON schemas, held against a validator: half a minute.
schema-test: $(VENV)/.dev
	$(BIN)/python -m pytest -m schemas tests/model/test_structured_outputs.py -s $(ARGS)

# On a machine with a GPU, without installing anything: GPU_PYTHON needs torch, triton, transformers and pytest.
# Under nine minutes each.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu-test:
	$(GPU_PYTHON) tests/support/gpu_run.py

gpu-bench:
	PYTHONPATH=server:engine:kernels:benchmarks $(GPU_PYTHON) -m gpu $(ARGS)

# The GPU's kernels without a GPU, at length: in Triton's interpreter, then with every access checked. Half an hour.
kernel-sim: $(VENV)/.dev .venv-oldest/.complete
	OLDEST_TRITON=$(CURDIR)/.venv-oldest $(BIN)/python -m pytest -m sim $(ARGS)
	PYTHON=$(BIN)/python FOLDER=.venv-sim tests/kernels/triton/sanitize.sh $(ARGS)

# The oldest Triton that the kernels are for, to audit what it makes of them.
.venv-oldest/.complete: | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv-oldest triton==3.6.0
	touch $@

# The scheduler under random calls and against adversaries, at length: 300,000 steps and 40,000 runs, half an hour.
schedule-test: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m pytest -p support.at_length --times 16 --timeout 3600 tests/property/test_*schedul*.py \
	  tests/property/test_elder_bound.py tests/property/test_fair_machine.py $(ARGS)

# The kernels for instruction sets that this x86-64 CPU may lack, a minute or two each.
EMULATED ?= avx512_bf16 avx512_vnni avx512 avx2_vnni
emulated-test: $(VENV)/.dev
	set -e; for set in $(EMULATED); do \
	  PYTHONPATH=tests $(BIN)/python -m pytest -p support.emulated --emulate $$set $(ARGS) tests/kernels/test_probe.py \
	    tests/kernels/test_cpu_attention*.py tests/kernels/test_cpu_[cg]*.py tests/kernels/test_cpu_layers.py; \
	done

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/python -m pytest tests/architecture

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CXX_FILES)

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.host_cost $(ARGS)

# Against transformers' generate and static batches of our own, on a model of 0.6 billion parameters; an hour on two cores.
headline: $(VENV)/.serve
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	PYTHONPATH=benchmarks $(BIN)/python -m headline $(ARGS)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.serve

clean:
	rm -rf $(VENV) .venv-sim .venv-oldest .venv-clients .mypy_cache .ruff_cache .pytest_cache .hypothesis
