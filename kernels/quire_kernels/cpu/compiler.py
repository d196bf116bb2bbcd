"""Compiles the C++ kernels with the system's compiler.

Promises: a complete shared library or a KernelBuildError with the compiler's first error; never a partial file. An
OSError if the disk is full.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

_COMPILERS = ("c++", "g++", "clang++")
TIMEOUT = 300.0  # seconds for one translation unit, for which a server's start waits
PATIENCE = 3600.0  # the same ahead of any start: cross compilers take minutes
_SHOWN = 2000  # characters of a failing compiler's output
# Messages of compilers and linkers about a full disk, a quota or a limit on files.
_NO_ROOM = ("No space left on device", "Disk quota exceeded", "File too large", "File size limit exceeded")

# Contraction off: the source decides whether a * b + c is rounded once or twice, so that all tile heights agree.
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
    """The kernels cannot be compiled here; the text has the reason."""


class CompilationError(KernelBuildError):
    """The compiler refuses the sources, perhaps only for an instruction set that it is too old for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """A working C++ compiler."""

    path: str
    version: str


def find_compiler(machine: str | None = None) -> Compiler:
    """The first working compiler on the PATH, for this machine or another kind of machine. Raises KernelBuildError."""
    is_ours = machine is None or machine == platform.machine()
    names = _COMPILERS if is_ours else (f"{machine}-linux-gnu-g++",)
    for name in names:
        path = shutil.which(name)
        if path is None:
            continue
        try:
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=30)
        except (OSError, subprocess.SubprocessError):
            continue
        return Compiler(path=path, version=answer.stdout.strip())
    raise KernelBuildError(f"no C++ compiler on the PATH (looked for {', '.join(names)})")


def compile_library(
    compiler: Compiler,
    sources: Sequence[Path],
    flags: Sequence[str],
    output: Path,
    *,
    jobs: int,
    on_compiled: Callable[[int], None] | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Compile `sources` into the shared library `output`, `jobs` translation units at a time.

    `on_compiled` is called after each with the number of compiled ones. A unit may take `timeout` seconds.
    """
    # The longest first, so that no core compiles a long one while the others are idle.
    sources = sorted(sources, key=lambda source: source.stat().st_size, reverse=True)
    # In the folder of the result, which the caller has checked.
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".objects-") as directory:
        objects = [Path(directory) / f"{source.stem}.o" for source in sources]

        def build(source: Path, target: Path) -> None:
            _run([compiler.path, *flags, "-c", str(source), "-o", str(target)], timeout)

        with ThreadPoolExecutor(max(1, min(jobs, len(sources))), "compiler") as pool:
            builds = [pool.submit(build, source, target) for source, target in zip(sources, objects, strict=True)]
            try:
                for num_done, built in enumerate(as_completed(builds), start=1):
                    built.result()
                    if on_compiled is not None:
                        on_compiled(num_done)
            finally:  # report a failure at once, without compiling the others
                pool.shutdown(cancel_futures=True)
        _run([compiler.path, *flags, "-shared", *map(str, objects), "-o", str(output)], timeout)


def _run(command: Sequence[str], timeout: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelBuildError(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        said = done.stderr or done.stdout
        if any(words in said for words in _NO_ROOM):
            raise OSError(f"{command[0]} finds no room to write to")
        raise CompilationError(f"{command[0]} failed:\n{said[:_SHOWN]}")
