"""Compiles the kernels ahead of the first start: `python -m quire_kernels.cpu.build`.

Promises: exit code 0 with the result on stdout, or 1 with the compiler's error on stderr; for this machine one line
with the variant and the reason for it. Must not know: tensors, models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from quire_kernels.cpu.choice import UnusableVariant, load_chosen
from quire_kernels.cpu.compiler import KernelBuildError
from quire_kernels.cpu.library import build_prebuilt
from quire_kernels.cpu.variants import compilable_variants

_TEXT = "Compile the C++ kernels now, so that no start has to."
_PREBUILT = "for every instruction set, into the installed package: an image then needs no compiler to serve"
_INTO = "with --prebuilt: this folder instead, for a wheel of another machine"
_MACHINE = "with --prebuilt: another kind of machine, such as aarch64, by its cross compiler; default: this one"
_VARIANT = "instruction set, as `quire serve --set cpu_variant=NAME` takes it; default: the fastest of this CPU's"


def main(argv: Sequence[str] | None = None) -> int:
    """Build for this machine, or with --prebuilt for all variants; returns the exit code."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if (arguments.into or arguments.machine) and not arguments.prebuilt:
        parser.error("--into and --machine are of --prebuilt")
    try:
        if arguments.prebuilt:
            for variant in compilable_variants(arguments.machine):
                print(build_prebuilt(variant, arguments.into, machine=arguments.machine), flush=True)
        else:
            chosen = load_chosen(arguments.cpu_variant)
            print(f"the kernels for {chosen.variant.name} are ready ({chosen.why})")
    except UnusableVariant as error:
        print(f"quire build-kernels: the kernels {error}", file=sys.stderr)
        return 1
    except (KernelBuildError, OSError) as error:
        print(f"quire build-kernels: {error}", file=sys.stderr)
        return 1
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(prog="quire build-kernels", description=_TEXT)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--prebuilt", action="store_true", help=_PREBUILT)
    which.add_argument("--cpu-variant", metavar="NAME", help=_VARIANT)
    parser.add_argument("--into", type=Path, metavar="FOLDER", help=_INTO)
    parser.add_argument("--machine", metavar="NAME", help=_MACHINE)
    return parser


if __name__ == "__main__":
    sys.exit(main())
