"""The tests of the C++ kernels under AddressSanitizer and UBSan, and of their workers under ThreadSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire_kernels.cpu.compiler import Compiler, KernelBuildError, find_compiler
from quire_kernels.cpu.variants import usable_variants

ROOT = Path(__file__).parents[2]
# One of each kind of work, odd sizes first: checked code is many times slower.
SELECTED = (
    *("poisoned", "33-7]", "16-1]", "8352-7]", "definition", "unused_slots", "copied", "turned", "outside"),
    *("no_rows", "meet_in_one", "extreme", "bit_for_bit and 769", "stay_as_they_are", "decode_alike"),
    *("nan_stays_alone", "every_code", "last_bit and 130-96"),
)
TOO_FAR = """
import sys
from support import sanitized
from support.cpu_linear import kernel_set, operands

given = operands(64, 32, 3)
kernels = kernel_set("portable", threads=1)
ops, w = kernels.linear_add.__self__, kernels.pack_linear(given.weight, None)
print("ready", flush=True)
out = given.residual.data_ptr()
ops._linear_add(ops._handle, w.address, given.x.data_ptr(), 3 + int(sys.argv[1]), 1.0, out, out, None, 0)
print("done", flush=True)
"""


def compiler_or_skip() -> Compiler:
    try:
        return find_compiler()
    except KernelBuildError as error:
        pytest.skip(str(error))


def run_checked(*argv: str) -> subprocess.CompletedProcess[str]:
    """Python under the sanitizers' runtime, which must be loaded before anything else."""
    compiler = compiler_or_skip()
    names = ("libasan.so", "libubsan.so")
    found = [
        subprocess.run([compiler.path, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        for name in names
    ]
    paths = [Path(answer.stdout.strip()) for answer in found]
    if not all(path.is_absolute() for path in paths):
        pytest.skip(f"{compiler.path} has no sanitizer runtime")
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(map(str, paths)),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter keeps what it allocates
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": ":".join(str(ROOT / folder) for folder in ("tests", "kernels", "engine")),
    }
    return subprocess.run(
        [sys.executable, *argv], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


# Compiling one file with both sanitizers takes minutes, so that `make kernel-matrix` has these.
VARIANTS = dict.fromkeys(variant.name for variant in (usable_variants()[0], usable_variants()[-1]))


@pytest.mark.matrix
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_kernels_touch_nothing_they_should_not(variant):
    chosen = f"({variant} and ({' or '.join(SELECTED)}))"
    if variant == usable_variants()[0].name:
        chosen += " or bound_layers"
    options = ("-p", "support.sanitized", "-p", "no:cacheprovider", "-x", "-k", chosen)
    result = run_checked(
        "-m", "pytest", *options, *map(str, sorted(Path(__file__).parent.glob("test_cpu_[acegl]*.py")))
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "[100%]" in result.stdout
    assert "runtime error" not in result.stdout + result.stderr


def test_the_sanitizer_sees_a_read_past_the_end():
    good, bad = run_checked("-c", TOO_FAR, "0"), run_checked("-c", TOO_FAR, "1")
    assert good.stdout == "ready\ndone\n", good.stderr[-2000:]
    assert bad.stdout == "ready\n"
    assert "AddressSanitizer: heap-buffer-overflow" in bad.stderr


def test_the_workers_race_for_nothing(tmp_path):
    compiler = compiler_or_skip()
    program = tmp_path / "pool_stress"
    runtime = ROOT / "kernels" / "csrc" / "runtime"
    sources = [ROOT / "tests" / "kernels" / "pool_stress.cpp", runtime / "pool.cpp", runtime / "core_handover.cpp"]
    flags = ["-std=c++17", "-O1", "-g", "-pthread", "-fsanitize=thread", f"-I{ROOT / 'kernels' / 'csrc'}"]
    built = subprocess.run(
        [compiler.path, *flags, *sources, "-o", program], capture_output=True, text=True, check=False
    )
    if "cannot find" in built.stderr:
        pytest.skip(f"{compiler.path} has no ThreadSanitizer runtime")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True, check=False, timeout=300)
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stdout + ran.stderr
