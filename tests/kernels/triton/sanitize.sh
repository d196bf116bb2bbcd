#!/usr/bin/env bash
# The Triton kernels' tests with every access checked: bounds and races, by running Triton's IR on the CPU.
# ttsem needs triton 3.8.0, another one than the project's, so both live in a folder of their own: FOLDER=.venv-sim.
# PYTHON: an interpreter with the project's other dependencies. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../../.."
PYTHON=${PYTHON:-.venv/bin/python}
FOLDER=${FOLDER:-.venv-sim}
TRITON=3.8.0 TTSEM=0.1.0

if [ ! -e "$FOLDER/.complete" ]; then
  echo "fetching triton $TRITON and ttsem $TTSEM into $FOLDER" >&2
  rm -rf "$FOLDER"
  mkdir -p "$FOLDER"
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --target "$FOLDER" "triton==$TRITON" || {
    echo "triton $TRITON could not be installed: it has wheels for Linux on x86-64 and aarch64" >&2
    exit 1
  }
  # It asks for Python 3.12 and runs on 3.11: the wheel is pure Python, so it is unpacked as it is.
  "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --python-version 3.12 \
    --only-binary=:all: --dest "$FOLDER" "ttsem==$TTSEM" || {
    echo "ttsem $TTSEM could not be downloaded" >&2
    exit 1
  }
  "$PYTHON" -m zipfile -e "$FOLDER/ttsem-$TTSEM-py3-none-any.whl" "$FOLDER"
  touch "$FOLDER/.complete"
fi
unset TRITON_INTERPRET
PYTHONPATH="$FOLDER${PYTHONPATH:+:$PYTHONPATH}" \
  exec "$PYTHON" -m ttsem.sanitize pytest tests/kernels/triton "$@"
