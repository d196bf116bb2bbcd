"""Compiles the kernels ahead of the first start: `python -m quire_kernels.cpu.build`.

Promises: exit code 0 and what was built on stdout, or 1 and the compiler's complaint on stderr.
Must not know: tensors, models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from quire_kernels.cpu.compiler import KernelBuildError
from quire_kernels.cpu.library import build_prebuilt, load_library
from quire_kernels.cpu.variants import compilable_variants

_TEXT = "Compile the C++ kernels now, so that no start has to."
_PREBUILT = "for every instruction set, into the installed package: an image then needs no compiler to serve"


def main(argv: Sequence[str] | None = None) -> int:
    """Build for this machine, or with --prebuilt for all; the exit code."""
    parser = argparse.ArgumentParser(prog="quire build-kernels", description=_TEXT)
    parser.add_argument("--prebuilt", action="store_true", help=_PREBUILT)
    arguments = parser.parse_args(argv)
    try:
        if arguments.prebuilt:
            for variant in compilable_variants():
                print(build_prebuilt(variant))
        else:
            print(f"the kernels for {load_library().quire_variant().decode()} are ready")
    except (KernelBuildError, OSError) as error:
        print(f"quire build-kernels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
