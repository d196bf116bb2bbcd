"""Continuous batching over a paged cache against what people write first: transformers' `generate`, static batches.

    make headline         (ARGS for more flags of `quire bench`)

A checkpoint of random weights in the shape of Qwen3-0.6B is written to a temporary folder and measured by `quire bench`
at 8 and 32 streams, everything in turns in one run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu.shapes import QWEN3_06B, write_checkpoint
from quire_engine.demo import demo_model_path

# Lengths differ, as requests' do: a static batch waits for its longest member.
LOAD = ("--concurrency", "8,32", "--input", "32-256", "--output", "8-128", "--vocab", "2560")
BASELINES = ("--baseline", "static", "--baseline", "hf-generate")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")  # of the embedded model: the load is token ids


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="quire-headline-") as folder:
        model = write_checkpoint(QWEN3_06B, Path(folder))
        for name in TOKENIZER:
            shutil.copy(demo_model_path() / name, model / name)
        command = [
            sys.executable,
            "-P",
            "-m",
            "quire_server.cli",
            "bench",
            *LOAD,
            *BASELINES,
            *sys.argv[1:],
            "--",
            str(model),
        ]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
