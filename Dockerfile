# syntax=docker/dockerfile:1
# CPU:  docker build -t quire .
# GPU:  docker build -t quire:cuda --build-arg DEVICE=cuda .
# Run:  docker run --rm -p 8000:8000 quire                          (add --gpus all for the second)
#       docker run --rm -p 8000:8000 -v /models/my-model:/model:ro quire /model
ARG DEVICE=cpu

FROM python:3.12-slim-bookworm AS base-cpu

# The wheels bring the CUDA libraries; this base brings what the container runtime looks for.
FROM nvidia/cuda:12.8.1-base-ubuntu24.04 AS base-cuda
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM base-${DEVICE} AS build
# For example "--extra-index-url URL" of an index with torch built without CUDA: a much smaller CPU image.
ARG PIP_ARGS=""
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python3 -m venv /opt/quire
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY server server
COPY engine engine
COPY kernels kernels
COPY benchmarks/quire_bench benchmarks/quire_bench
RUN /opt/quire/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt ${PIP_ARGS} .
# For every instruction set: the image itself has no compiler, and starts on whatever it is given.
RUN /opt/quire/bin/quire build-kernels --prebuilt

FROM base-${DEVICE}
LABEL org.opencontainers.image.title="quire" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/quire /opt/quire
# Any other uid works as well: nothing is written outside /tmp.
RUN useradd --uid 2000 --no-create-home --shell /usr/sbin/nologin quire
USER 2000
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    QUIRE_HOST=0.0.0.0
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ.get('QUIRE_PORT', '8000') + '/health/ready', timeout=2)"]
ENTRYPOINT ["quire", "serve"]
