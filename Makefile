# Every target sets up what it needs: `make serve` on a fresh clone is enough.
# Else every process that tests start would compile all of its modules again.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Processes that run the tests: one more than cores, since some tests wait.
JOBS ?= 3
CXX_FILES = $(shell find kernels tests -name '*.cpp' -o -name '*.h')

.PHONY: help serve test everything kernel-test kernel-matrix schema-test draft-test test-e2e e2e-matrix client-test image-test gpu-test gpu-bench gpu-first gpu-wheels kernel-sim \
  wheel wheel-test release \
  schedule-test property-test kill-test model-matrix emulated-test damage-test format-test token-test model-sweep hostile worker-walk replica-test rank-test batch-test models-test ray-test real-models real-test real-bench soak api-fuzz audit lock sbom check format bench headline \
  walls clean

# What most people need, and the other targets.
HELP_FIRST := \
  "serve          serve the embedded model, or ARGS=\"/models/X --port 9000\"" \
  "test           every test that needs neither outside programs nor a GPU; four minutes on two idle cores" \
  "check          formatters, linters, mypy and the architecture's rules" \
  "bench          the host's cost of a step" \
  "everything     what needs no GPU, no internet and no root, one after another; hours"

HELP_FURTHER := \
  "kernel-test    the kernels on every instruction set of this machine" \
  "kernel-matrix  the same with all rows of every cross product" \
  "test-e2e       real servers, the openai clients, Prometheus" \
  "e2e-matrix     further model families, signals, kills and commands, for which others stand in test-e2e" \
  "format         format the code" \
  "walls          where classes and modules reach into each other: private accesses, imports by name, circles" \
  "headline       against transformers' generate and static batches; an hour" \
  "model-sweep    every architecture of transformers, tiny and random, through the fallback; a quarter of an hour" \
  "client-test    SDKs, frameworks and coding agents that people use; installs them" \
  "schema-test    500 outputs under real JSON schemas, 10,000 valid texts walked through their grammars" \
  "draft-test     5,000 answers with guessed tokens and without" \
  "schedule-test  the scheduler under random calls, at length; forty minutes" \
  "kill-test      the engine of a big model killed under streams: expected and got, and the next token; two minutes" \
  "property-test  random replies, requests, logs and histories, at length; twenty minutes" \
  "model-matrix   further models, sizes, ranks, guesses, devices and waits, for which others stand in test" \
  "damage-test    100,000 damaged files of weights; a quarter of an hour" \
  "format-test    numbers of quantised formats, held against their own libraries; installs them" \
  "token-test     tokens of GGUF files, held against llama.cpp's; builds llama.cpp, a quarter of an hour" \
  "emulated-test  the kernels for instruction sets that this CPU lacks" \
  "kernel-sim     the GPU's kernels without a GPU; half an hour" \
  "gpu-test       what needs a GPU; installs nothing" \
  "gpu-bench      what a GPU's kernels and steps reach" \
  "gpu-first      what a GPU is to show first, in ten minutes; ARGS=--dry-run without one" \
  "gpu-wheels     what a machine with a GPU lacks of our dependencies, as wheels to carry there" \
  "hostile        hostile clients, and what others have meanwhile" \
  "worker-walk    every process, thread and task killed, stopped, failing, slow, without disk; twenty minutes" \
  "replica-test   streams on replicas and nodes that are killed, held against one engine; what routing finds cached" \
  "batch-test     10,000 lines of a batch over two kills of the server, held against direct requests" \
  "models-test    three models through a budget for two, under mixed clients and kills; twenty minutes" \
  "rank-test      models computed by several processes, in every format, and killed ranks; five minutes" \
  "ray-test       a cluster of Ray on this machine: lost nodes and actors, an update; installs Ray" \
  "real-models    fetch SmolLM2, a small trained model, or ARGS=gemma3-270m under its terms, into ~/.cache/quire/models" \
  "real-test      those of the trained models that were fetched, held against transformers' numbers; twelve minutes" \
  "real-bench     the README's rows of SmolLM2, beside llama.cpp's server, which it installs; six minutes" \
  "soak           mixed traffic with kills; twenty minutes" \
  "api-fuzz       requests made from our OpenAPI document; installs schemathesis" \
  "audit          published vulnerabilities of the pinned packages" \
  "lock           write constraints.txt again: the pins with the hashes of their files" \
  "sbom           list what is installed, as CycloneDX, in quire.cdx.json" \
  "wheel          the wheel with every instruction set's kernels, in dist/; ARGS=\"--machine aarch64\" by a cross compiler" \
  "wheel-test     the wheel's bits, tag and life without a compiler; five minutes" \
  "release        wheel, source, parts, changes and checksums in dist/, made and checked; TRIAL=1 to try" \
  "image-test     both container images, as root with buildah" \
  "clean          remove what the targets made"

help:
	@printf '%s\n' $(HELP_FIRST) '' 'Further targets:' '' $(HELP_FURTHER)

serve: $(VENV)/.serve
	$(BIN)/quire serve $(ARGS)

# What every change needs, beside `make check`, which has the architecture's rules. CI also runs
# kernel-test.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not kernels and not e2e and not gpu and not sim and not image and not schemas and not drafts and not matrix" \
	  --ignore=tests/architecture --ignore=tests/e2e $(ARGS)

# What needs no GPU, no internet once the environment is set up, and no root, one after another. It takes hours. A target that fails
# does not stop the ones behind it; the failed ones are named at the end. Some judge times, so leave the machine to it. Left out
# beside what installs further packages: kernel-sim, which fetches two versions of Triton, and model-sweep, which writes docs/models.md.
EVERYTHING = check test kernel-matrix model-matrix test-e2e e2e-matrix schema-test draft-test schedule-test property-test \
  damage-test hostile worker-walk replica-test rank-test batch-test models-test kill-test soak \
  $(if $(filter x86_64,$(shell uname -m)),emulated-test)

everything:
	@failed=; for target in $(EVERYTHING); do \
	  echo "make $$target"; $(MAKE) --no-print-directory $$target ARGS= || failed="$$failed $$target"; \
	done; if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

# The kernels on every instruction set that this machine has, and by Triton's interpreter.
kernel-test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "kernels and not matrix and not gpu and not sim" tests/kernels $(ARGS)

# The same with every row of every cross product, instead of rows that have every pair of values, and under sanitizers.
kernel-matrix: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "kernels and not gpu and not sim" tests/kernels $(ARGS)

# Models, sizes of chunks and batches, ranks, guesses, simulated devices, waits and refusals for which others stand in `make test`,
# and minutes of the reference kernels.
model-matrix: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "matrix and not gpu" tests/model tests/unit tests/property tests/api $(ARGS)

test-e2e: $(VENV)/.dev
	PYTHON=$(BIN)/python tests/e2e/peers.sh
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "e2e and not matrix" tests/e2e $(ARGS)

# What others stand for in `make test-e2e`: further families, formats, ranks, ten kills instead of four, the other signal at each
# moment of a start, minutes of commands.
e2e-matrix: $(VENV)/.dev
	$(BIN)/python -m pytest -m "e2e and matrix" tests/e2e $(ARGS)

# The SDKs, frameworks and coding agents that people use, unmodified and newest, against the embedded model; installs them.
# aider and LlamaIndex pin what others have newer, so each has an environment of its own.
client-test: $(VENV)/.serve .venv-clients/.complete
	SERVER_PYTHON=$(CURDIR)/$(BIN)/python .venv-clients/bin/python -m pytest --timeout 3600 tests/clients $(ARGS)

.venv-clients/.complete: tests/clients/requirements.txt Makefile
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check uv
	.venv-clients/bin/uv pip install --quiet --python .venv-clients/bin/python -r tests/clients/requirements.txt
	.venv-clients/bin/uv venv --quiet --allow-existing --python '>=3.10,<3.13' .venv-clients/aider
	.venv-clients/bin/uv pip install --quiet --python .venv-clients/aider/bin/python aider-chat
	.venv-clients/bin/uv venv --quiet --allow-existing .venv-clients/llama-index
	.venv-clients/bin/uv pip install --quiet --python .venv-clients/llama-index/bin/python llama-index-llms-openai-like
	npm install --prefix tests/clients --no-save --no-package-lock --no-audit --no-fund --loglevel=error \
	  openai ai @ai-sdk/openai-compatible @anthropic-ai/sdk ollama zod @anthropic-ai/claude-code @openai/codex opencode-ai @continuedev/openai-adapters
	touch $@

# Every architecture of transformers, tiny and random, served by its code and held against it; writes docs/models.md.
model-sweep: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m sweep $(ARGS)

HOSTILE_ROWS ?= many-prompts many-texts many-strings stopped-tokenizer killed-template killed-spare \
  pipelined-garbage planted-modules planted-adapters early-signals stored-flood paused-14-1 paused-25-2 \
  wrong-batches file-quota foreign-pages keep-alive strict-values silent-strangers odd-frames \
  burst burst-raised burst-servers

# What hostile clients send, one by one, and what everybody else has of the server meanwhile.
hostile: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m hostile $(ARGS)
	PYTHONPATH=tests $(BIN)/python -m hostile.rows $(HOSTILE_ROWS)

# The table of workers in docs/operations.md: each is killed, stopped, raises, is slow and meets a full disk; twenty minutes.
worker-walk: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m walk $(ARGS)

# A thousand mixed streams on two replicas under ten kills, 600 on two nodes that are killed, stopped, cut off and
# replaced, and 1,200 with long prompts that one node computes for another, all as with one engine.
replica-test: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m replicas $(ARGS)
	PYTHONPATH=tests $(BIN)/python -m replicas.nodes
	PYTHONPATH=tests $(BIN)/python -m replicas.routing
	PYTHONPATH=tests $(BIN)/python -m replicas.prompts

# The engine of a model of 800M random parameters killed under four streams: their tokens, and the time to the next one.
kill-test: $(VENV)/.dev
	$(BIN)/python benchmarks/kill_engine.py $(ARGS)

# A batch of 10,000 lines over two kill -9 of the server, held against direct requests, and live requests beside it.
batch-test: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m batches $(ARGS)

# Three models with room for two: sixteen clients for ten minutes, streams over a swap and back, kill -9 at twelve phases.
models-test: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m several $(ARGS)

# Models that two and four processes compute, in every format of weights and pool, and a server whose rank is killed; five minutes.
rank-test: $(VENV)/.dev
	$(BIN)/python -m pytest tests/model/test_ranks.py tests/model/test_fallback_ranks.py tests/kernels/test_cpu_ranks.py \
	  tests/e2e/test_ranks.py tests/model/test_gpu_ranks.py tests/model/test_device_ranks.py tests/e2e/test_device_ranks.py \
	  $(ARGS)

# A cluster of Ray on this machine, in an environment of its own over ours: lost nodes and actors, an update; five minutes.
ray-test: $(VENV)/.dev .venv-ray/.complete
	.venv-ray/bin/python -m pytest tests/ray_serve $(ARGS)

.venv-ray/.complete: Makefile | $(VENV)/.dev
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check "ray[serve]>=2.50"
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
	  > "$$(.venv-ray/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/quire.pth"
	touch $@

# Small trained models, from packages of the Python index, held against their hashes: SmolLM2, or ARGS="smollm2 gemma3-270m",
# of which the second has terms of its own.
real-models: $(VENV)/.serve
	$(BIN)/python -m quire_server.checkpoint.trained $(ARGS)

# Trained models in every form of weights against transformers' numbers in float32, every way of serving them against every
# other, tools and schemas, and a killed engine; twelve minutes. Models that were not fetched are skipped.
real-test: $(VENV)/.dev
	$(BIN)/python -m pytest --timeout 3600 tests/real $(ARGS)

# SmolLM2 beside llama.cpp's own server, from a wheel in an environment of its own, and with guessed tokens: the README's rows.
real-bench: $(VENV)/.serve .venv-llama-server/.complete
	LLAMA_SERVER_PYTHON=.venv-llama-server/bin/python $(BIN)/python benchmarks/trained_model.py $(ARGS)

.venv-llama-server/.complete: Makefile
	$(PYTHON) -m venv .venv-llama-server
	.venv-llama-server/bin/python -m pip install --quiet --disable-pip-version-check --only-binary :all: xllamacpp==2026.10.11549
	touch $@

# Mixed traffic for twenty minutes, or ARGS="--minutes 5": memory, handles, answers and times must stay as they are.
soak: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m hostile.soak $(ARGS)

# Thousands of requests made from our OpenAPI document by schemathesis, right and wrong; a few minutes.
api-fuzz: $(VENV)/.serve .venv-fuzz/.complete
	SERVER_PYTHON=$(CURDIR)/$(BIN)/python PYTHONPATH=tests .venv-fuzz/bin/python -m hostile.api_fuzz $(ARGS)

.venv-fuzz/.complete: Makefile
	$(PYTHON) -m venv .venv-fuzz
	.venv-fuzz/bin/python -m pip install --quiet --disable-pip-version-check schemathesis httpx psutil
	touch $@

# Whether anybody has published a vulnerability of a version in constraints.txt; strict, as "not found" is no "clean".
audit: .venv-audit/.complete
	.venv-audit/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip $(ARGS)

.venv-audit/.complete: Makefile
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	touch $@

# The tested set with the hashes of all its files; ARGS=--upgrade for the newest. Pins that still hold stay.
lock: .venv-lock/.complete
	$(PYTHON) release/locked.py names | UV_CUSTOM_COMPILE_COMMAND="make lock" .venv-lock/bin/uv pip compile --quiet \
	  --universal --generate-hashes --no-annotate --python-version 3.11 --output-file constraints.txt $(ARGS) -

.venv-lock/.complete: Makefile
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet --disable-pip-version-check uv
	touch $@

# What is installed here, package by package, as CycloneDX; the image has its own.
sbom: $(VENV)/.serve .venv-sbom/.complete
	.venv-sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	  --output-format JSON --output-file quire.cdx.json $(BIN)/python

.venv-sbom/.complete: pyproject.toml constraints.txt release/locked.py
	$(PYTHON) -m venv .venv-sbom
	.venv-sbom/bin/python release/locked.py install sbom
	touch $@

# The wheel with the kernels of all instruction sets of this machine, or ARGS="--machine aarch64" of another one by its cross
# compiler, in dist/; six minutes on two cores. In a container: release/wheel.Dockerfile.
wheel: .venv-release/.complete
	.venv-release/bin/python release/wheels.py wheel $(ARGS)

# What is in the wheels of dist/, their tags, the bits of their kernels, and an empty environment without a compiler that is
# served from one; the wheels of what it depends on are fetched first, once.
wheel-test: $(VENV)/.dev wheel .venv-release/wheels/.complete
	PYTHONPATH=tests $(BIN)/python -m pytest tests/wheels -s

# A release in dist/, made and checked without a network once the tools are there: the wheel, the source distribution, the parts,
# the changelog's entry, checksums. TRIAL=1 where the changelog has no entry for the version yet.
release: $(VENV)/.dev wheel sbom wheel-test
	PYTHONPATH=tests $(BIN)/python -m support.stable_names --check
	.venv-release/bin/python release/releasing.py $(if $(TRIAL),--trial)
	cd dist && sha256sum --check --quiet SHA256SUMS

.venv-release/.complete: pyproject.toml constraints.txt release/locked.py
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python release/locked.py install build release
	touch $@

.venv-release/wheels/.complete: pyproject.toml constraints.txt release/locked.py | .venv-release/.complete
	.venv-release/bin/python release/locked.py download .venv-release/wheels project
	touch $@

# Both images from nothing, as root, with buildah: ten minutes on two cores, which is why CI leaves it out.
image-test: $(VENV)/.dev
	$(BIN)/python -m pytest -m image tests/e2e/test_image.py -s $(ARGS)

# More than 500 outputs of the embedded model under real JSON schemas, held against a validator, and 10,000 valid texts
# and as many broken ones walked through the grammars of schemas along four tokenizers: three minutes.
schema-test: $(VENV)/.dev
	$(BIN)/python -m pytest -m schemas tests/model/test_structured_outputs.py \
	  tests/unit/server/answering/test_schema_walks.py -s $(ARGS)

# More than 5,000 answers of the embedded model with guessed tokens, held against those without; three minutes.
draft-test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) -m drafts tests/model/test_speculation_matrix.py $(ARGS)

# On a machine with a GPU, without installing anything: GPU_PYTHON needs torch, triton, transformers and pytest.
# Under nine minutes each.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu-test:
	PYTHONPATH=tests $(GPU_PYTHON) -m support.gpu_run

# What a GPU is to show first, in ten minutes at most, each part with its own limit; a second run takes up what is missing.
# ARGS="--dry-run" does without a GPU, ARGS=--plan prints the parts.
gpu-first:
	PYTHONPATH=server:engine:kernels:benchmarks:tests $(GPU_PYTHON) -m gpu_first $(ARGS)

# What such a machine usually lacks of our dependencies, as wheels that travel to it: 20 MB in build/gpu-wheels.
GPU_MACHINE ?= --python-version 3.12 --platform manylinux2014_x86_64 \
  $(foreach glibc,17 24 26 27 28 31 34,--platform manylinux_2_$(glibc)_x86_64)
gpu-wheels: $(VENV)/.serve
	$(BIN)/python release/locked.py download build/gpu-wheels gpu-machine -- --no-deps $(GPU_MACHINE)

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

# The scheduler under random calls and against adversaries, at length: 300,000 steps and 40,000 runs, forty minutes.
schedule-test: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m pytest -p support.at_length --times 288 --timeout 3600 tests/property/test_*schedul*.py \
	  tests/property/test_elder_bound.py tests/property/test_fair_machine.py tests/property/test_block_pool_machine.py \
	  tests/property/test_cache_shares.py tests/property/test_swapping.py \
	  tests/unit/engine/scheduling/test_forecast.py tests/unit/engine/scheduling/test_tenant_shares.py $(ARGS)

# Random replies in every format of tool calls, random requests, random schedules whose logs replay, with windows and with
# guesses, and 10,000 histories with decodes in columns and without, at length; twenty minutes.
property-test: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m pytest -p support.at_length --times 60 --timeout 3600 tests/property/test_reply_parser.py \
	  tests/property/test_step_log_replay.py tests/property/test_beams.py tests/property/test_windows.py \
	  tests/property/test_speculation.py tests/property/test_leap.py tests/property/test_responses_input.py \
	  tests/property/test_messages_input.py tests/property/test_cache_reset.py tests/property/test_kept_prefixes.py \
	  tests/property/test_class_shares.py tests/property/test_resumed_first.py \
	  tests/unit/engine/execution/test_masked_argmax.py $(ARGS)
	PYTHONPATH=tests $(BIN)/python -m pytest -p support.at_length --times 120 --timeout 3600 \
	  tests/property/test_recorded_pool.py $(ARGS)
	PYTHONPATH=tests $(BIN)/python -m pytest -p support.at_length --times 250 --timeout 3600 \
	  tests/property/test_decode_columns.py $(ARGS)

# Damaged files of weights: 100,000 of GGUF and of safetensors, each read or refused in one line; a quarter of an hour.
damage-test: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m pytest -p support.at_length --times 500 --timeout 3600 \
	  tests/property/test_damaged_files.py $(ARGS)

# The numbers of every format of quantised matrices, held against what its own library finds in the same tensors. The
# libraries come without what they depend on, which would be another torch, and GPTQModel as sources, since nothing of it is compiled.
format-test: $(VENV)/.dev .venv-formats/.complete
	PYTHONPATH=.venv-formats $(BIN)/python -m pytest tests/formats $(ARGS)

.venv-formats/.complete: tests/formats/requirements.txt Makefile
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv-formats \
	  -r tests/formats/requirements.txt
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest .venv-formats/sources gptqmodel==7.7.0
	tar --extract --gzip --strip-components=1 --directory .venv-formats --wildcards \
	  --file .venv-formats/sources/gptqmodel-7.7.0.tar.gz '*/gptqmodel/*'
	touch $@

# Tokens of GGUF files, held against llama.cpp's on the very same files: one of every way of splitting, and the vocabularies
# of real models that come with llama.cpp's sources. Those are built first, a quarter of an hour; then ten minutes.
token-test: $(VENV)/.dev .venv-llama/.complete
	LLAMA_PYTHON=.venv-llama/bin/python PYTHONPATH=tests $(BIN)/python -m llama_tokens $(ARGS)
	LLAMA_PYTHON=.venv-llama/bin/python PYTHONPATH=tests $(BIN)/python -m llama_tokens $(ARGS) .venv-llama/vocabularies/*.gguf

# Its vocabularies of models that we do not read stay away, and the one of Qwen 3.5, which has Qwen 2's tokens.
.venv-llama/.complete: Makefile
	$(PYTHON) -m venv .venv-llama
	.venv-llama/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: \
	  --dest .venv-llama/sources llama-cpp-python
	.venv-llama/bin/python -m pip install --quiet --disable-pip-version-check .venv-llama/sources/llama_cpp_python-*.tar.gz
	mkdir -p .venv-llama/vocabularies
	tar -xzf .venv-llama/sources/llama_cpp_python-*.tar.gz -C .venv-llama/vocabularies --strip-components 4 --wildcards \
	  $(foreach name,$(VOCABULARIES),'*/llama.cpp/models/ggml-vocab-$(name).gguf*')
	touch $@

VOCABULARIES := baichuan command-r deepseek-coder gpt-2 llama-bpe llama-spm mpt nomic-bert-moe phi-3 qwen2 refact starcoder

# The kernels for instruction sets that this x86-64 CPU may lack, a minute or two each.
EMULATED ?= amx avx512_bf16 avx512_vnni avx512 avx2_vnni
emulated-test: $(VENV)/.dev
	set -e; for set in $(EMULATED); do \
	  PYTHONPATH=tests $(BIN)/python -m pytest -p support.emulated --emulate $$set $(ARGS) tests/kernels/test_probe.py \
	    tests/kernels/test_cpu_attention*.py tests/kernels/test_cpu_[cg]*.py tests/kernels/test_cpu_layers.py \
	    tests/kernels/test_cpu_many_workers.py; \
	done

check: $(VENV)/.dev
	@if git ls-files --cached --ignored --exclude-standard 2>/dev/null | grep .; then echo "these files are ignored, and yet committed" >&2; exit 1; fi
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/python -m pytest tests/architecture

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CXX_FILES)

# Needs nothing but Python. tests/architecture/test_walls.py holds the totals.
walls:
	@PYTHONPATH=tests $(PYTHON) -m architecture.walls

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.host_cost $(ARGS)

# Against transformers' generate and static batches of our own, on a model of 0.6 billion parameters; an hour on two cores.
headline: $(VENV)/.serve
	$(BIN)/python release/locked.py install bench
	PYTHONPATH=benchmarks $(BIN)/python -m headline $(ARGS)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Every file is held against its hash. The build backend is among them: pip would fetch one by itself, and not look.
LOCKED = $(BIN)/python release/locked.py install build project
EDITABLE = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .

$(VENV)/.serve: pyproject.toml constraints.txt | $(BIN)/python
	$(LOCKED)
	$(EDITABLE)
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(LOCKED) dev
	$(EDITABLE)
	touch $@ $(VENV)/.serve

clean:
	rm -rf $(VENV) .venv-sim .venv-oldest .venv-clients .venv-fuzz .venv-audit .venv-lock .venv-sbom .venv-llama .venv-llama-server .venv-release .mypy_cache .ruff_cache .pytest_cache .hypothesis
