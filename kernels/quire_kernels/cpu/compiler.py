"""Compiles the C++ kernels with the system's compiler.

Promises: a complete shared library or a KernelBuildError with the compiler's first complaint; never a partial file. An
OSError where the disk has no room.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT = 300.0  # seconds for one translation unit
_SHOWN = 2000  # characters of a failing compiler's output
# What compilers and linkers say where a disk, a quota or a limit on files ends.
_NO_ROOM = ("No space left on device", "Disk quota exceeded", "File too large", "File size limit exceeded")

# Contraction off: whether a * b + c is one rounding or two is written out, so that all tile heights compute alike.
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-Wno-ignored-attributes",
)


class KernelBuildError(RuntimeError):
    """The kernels cannot be compiled here; the text says why."""


class CompilationError(KernelBuildError):
    """The compiler refuses them, perhaps only for one instruction set, which it may be too old for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """A C++ compiler that answered."""

    path: str
    version: str


def find_compiler() -> Compiler:
    """The first working compiler on the PATH. Raises KernelBuildError."""
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        try:
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=30)
        except (OSError, subprocess.SubprocessError):
            continue
        return Compiler(path=path, version=answer.stdout.strip())
    raise KernelBuildError(f"no C++ compiler on the PATH (looked for {', '.join(_COMPILERS)})")


def compile_library(
    compiler: Compiler,
    sources: Sequence[Path],
    flags: Sequence[str],
    output: Path,
    *,
    jobs: int,
    on_compiled: Callable[[int], None] | None = None,
) -> None:
    """Compile `sources` into the shared library `output`, `jobs` translation units at a time.

    `on_compiled` is told after each how many are done.
    """
    # The longest first, so that none of them is left over when the other processors have nothing more to do.
    sources = sorted(sources, key=lambda source: source.stat().st_size, reverse=True)
    # Beside the result: who was careful about that folder should not have to be about another.
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".objects-") as directory:
        objects = [Path(directory) / f"{source.stem}.o" for source in sources]

        def build(source: Path, target: Path) -> None:
            _run([compiler.path, *flags, "-c", str(source), "-o", str(target)])

        with ThreadPoolExecutor(max_workers=max(1, min(jobs, len(sources)))) as pool:
            builds = [pool.submit(build, source, target) for source, target in zip(sources, objects, strict=True)]
            try:
                for num_done, built in enumerate(as_completed(builds), start=1):
                    built.result()
                    if on_compiled is not None:
                        on_compiled(num_done)
            finally:  # a failure is told at once, not when all others have been compiled too
                pool.shutdown(cancel_futures=True)
        _run([compiler.path, *flags, "-shared", *map(str, objects), "-o", str(output)])


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelBuildError(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        said = done.stderr or done.stdout
        if any(words in said for words in _NO_ROOM):
            raise OSError(f"{command[0]} finds no room to write to")
        raise CompilationError(f"{command[0]} failed:\n{said[:_SHOWN]}")
