# syntax=docker/dockerfile:1
# The wheel, built in a container: docker build -f release/wheel.Dockerfile --output dist .
# For another kind of machine: --platform linux/arm64, where the builder can run it.
# Without the internet: --build-arg BASE=IMAGE, --secret id=pip,src=pip.conf.
#
# The base's C library is the oldest on which the wheel is sure to run; auditwheel writes down what it really needs.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python3 -m venv /opt/tools
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY release release
COPY server server
COPY engine engine
COPY kernels kernels
COPY benchmarks/quire_bench benchmarks/quire_bench
COPY lab lab
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/tools/bin/python release/locked.py install build release \
    && /opt/tools/bin/python release/wheels.py wheel --out /dist

FROM scratch
COPY --from=build /dist /
