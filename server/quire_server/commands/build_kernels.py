"""`quire build-kernels`: compiles the C++ kernels before the first start, or for all CPUs while an image is built.

Promises: the exit code of the compiling process: 0, or 1 after the compiler's error.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from pathlib import Path

from quire_engine.own_modules import module_command


def run(argv: Sequence[str]) -> int:
    """Do it in a process of its own: this half never loads kernels."""
    return subprocess.run(module_command("quire_kernels.cpu.build", *argv), check=False).returncode


def build_parser() -> argparse.ArgumentParser:
    """The flags that the other process has, which a test holds against these: this one only hands them on."""
    parser = argparse.ArgumentParser(prog="quire build-kernels")
    parser.add_argument("--prebuilt", action="store_true", help="for every instruction set, into the installed package")
    parser.add_argument("--cpu-variant", metavar="NAME", help="for this instruction set alone")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="with --prebuilt: this folder instead")
    parser.add_argument("--machine", metavar="NAME", help="with --prebuilt: another kind of machine")
    return parser
