"""`quire build-kernels`: compiles the C++ kernels before the first start, or for all CPUs while an image is built.

Promises: the exit code of the compiling process: 0, or 1 after the compiler's error.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    """Run it in a process of its own, since the server's side never loads kernels."""
    return subprocess.run([sys.executable, "-m", "quire_kernels.cpu.build", *argv], check=False).returncode
