# syntax=docker/dockerfile:1
# CPU:  docker build -t quire .
# GPU:  docker build -t quire:cuda --build-arg DEVICE=cuda .
# Run:  docker run --rm -p 8000:8000 quire                          (add --gpus all for the second)
#       docker run --rm -p 8000:8000 -v /models/my-model:/model:ro quire /model
# Nothing is written outside /tmp: --read-only --tmpfs /tmp works, and so does any --user.
#
# Without the internet: --build-arg BASE_CPU=IMAGE, --secret id=pip,src=pip.conf (an index of your own, with its
# password), --build-context wheels=FOLDER (wheels that are taken from there), --build-arg TORCH_CPU_INDEX= (none).
ARG DEVICE=cpu
# The toolkit that constraints.txt's torch is built with; tests/unit/test_image_files.py fails when the two part.
ARG CUDA=13.0.3
ARG BASE_CPU=python:3.12-slim-bookworm
ARG BASE_CUDA=nvidia/cuda:${CUDA}-base-ubuntu24.04

FROM ${BASE_CPU} AS base-cpu

# The wheels bring the CUDA libraries; this base brings what the container runtime looks for. Triton compiles the
# launchers of its kernels when they are first used: a C compiler and Python's headers stay.
FROM ${BASE_CUDA} AS base-cuda
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# Stands in for the folder of --build-context wheels=FOLDER.
FROM scratch AS wheels
COPY LICENSE /

FROM base-${DEVICE} AS build
ARG DEVICE
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# What builds the wheel and lists the parts stays behind in an environment of its own.
RUN python3 -m venv /opt/quire && python3 -m venv /opt/tools
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY release release
COPY server server
COPY engine engine
COPY kernels kernels
COPY benchmarks/quire_bench benchmarks/quire_bench
COPY lab lab
# PyPI's torch carries gigabytes of CUDA; a CPU needs none of them. The last line is there to notice if they come.
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
ARG PIP_ARGS=""
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=bind,from=wheels,target=/wheels \
    if [ "${DEVICE}" = cpu ] && [ -n "${TORCH_CPU_INDEX}" ]; then torch="--extra-index-url ${TORCH_CPU_INDEX}"; fi \
    && arguments="--find-links /wheels ${torch:-} ${PIP_ARGS}" \
    && /opt/quire/bin/python release/locked.py install project -- ${arguments} \
    && /opt/tools/bin/python release/locked.py install build sbom -- ${arguments} \
    && /opt/tools/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /dist . \
    && /opt/quire/bin/pip install --no-deps --no-index --find-links /dist quire \
    && /opt/quire/bin/python -c "from torch.version import cuda; assert bool(cuda) == ('${DEVICE}' == 'cuda'), cuda"
# For every instruction set: the image itself has no C++ compiler, and starts on whatever it is given.
RUN /opt/quire/bin/quire build-kernels --prebuilt
# The parts that the image has, for who must know them: CycloneDX.
RUN /opt/tools/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-format JSON \
    --output-file /opt/quire/quire.cdx.json /opt/quire/bin/python

FROM base-${DEVICE}
# Of the package; tests/unit/test_image_files.py holds it against pyproject.toml. --build-arg REVISION=$(git rev-parse HEAD)
ARG VERSION=0.1.0
ARG REVISION=""
ARG DEVICE
LABEL org.opencontainers.image.title="quire" \
    org.opencontainers.image.description="An OpenAI-compatible LLM serving daemon (${DEVICE})" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/quire /opt/quire
RUN useradd --uid 2000 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin quire
USER 2000
# Triton keeps what it compiled under HOME.
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    QUIRE_HOST=0.0.0.0
EXPOSE 8000
STOPSIGNAL SIGTERM
# Asks where the server really listens, however that was set.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["quire", "health"]
ENTRYPOINT ["quire", "serve"]
