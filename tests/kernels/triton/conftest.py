"""The Triton kernels' tests run in a process of their own, in one of three ways; elsewhere they are not collected.

`TRITON_INTERPRET=1 pytest tests/kernels/triton` by Triton's interpreter on the CPU (part of `make test`),
`tests/kernels/triton/sanitize.sh` with every access checked (part of `make kernel-sim`), and
`QUIRE_TRITON_DEVICE=cuda pytest tests/kernels/triton` on a GPU (part of `make gpu-test`).
"""

from __future__ import annotations

import importlib.util
import os
import sys

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SIMULATED = INTERPRETED or "ttsem" in sys.modules

if importlib.util.find_spec("triton") is None or not (SIMULATED or os.environ.get("QUIRE_TRITON_DEVICE")):
    collect_ignore_glob = ["test_*.py"]
elif INTERPRETED:
    from support.triton_interpreter import repair

    repair()
