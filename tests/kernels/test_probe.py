"""The probe of the machine's limits: every variant that this CPU runs gives positive, plausible rates."""

import json
import subprocess
import sys

import pytest

from quire_kernels.cpu.compiler import KernelBuildError, find_compiler
from quire_kernels.cpu.library import load_library
from quire_kernels.cpu.probe import cache_bytes, measure
from quire_kernels.cpu.rates import core_rates, instruction
from quire_kernels.cpu.variants import usable_variants

TINY = {"seconds": 0.005, "bytes_per_worker": 1 << 20, "passes": 1}
BF16 = {"amx": "TDPBF16PS", "avx512_bf16": "VDPBF16PS", "neon_bf16": "BFDOT"}
INT8 = {
    "amx": "TDPBUSD",
    "avx512_bf16": "VPDPBUSD",
    "avx512_vnni": "VPDPBUSD",
    "avx512": "VPMADDWD",
    "avx2": "VPMADDWD",
}


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    try:
        find_compiler()
    except KernelBuildError as error:
        pytest.skip(str(error))


def all_variants():
    """The fastest with every change, the others with the kernels' tests, for which they are compiled anyway."""
    for place, variant in enumerate(usable_variants()):
        yield pytest.param(variant, id=variant.name, marks=pytest.mark.kernels if place else [])


@pytest.mark.parametrize("variant", list(all_variants()))
def test_rates(variant):
    limits = measure(1, load_library(variant), **TINY)
    assert limits.variant == variant.name
    assert limits.threads == 1
    assert 1e7 < limits.fp32_per_second < 1e13
    assert 1e7 < limits.read_bytes_per_second < 1e13
    assert (limits.bf16_per_second > 0) == (variant.name in BF16)
    assert limits.bf16_instruction == BF16.get(variant.name, "")
    assert limits.int8_instruction == INT8.get(variant.name, limits.int8_instruction) != ""
    assert limits.fp32_instruction
    assert 1e7 < limits.int8_per_second < 1e13


def test_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "quire_kernels.cpu.probe", "--threads", "1", "--seconds", "0.005"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout)["threads"] == 1


def test_caches_that_cores_share_count_once(tmp_path):
    for cpu in range(4):
        for index, (level, size, shared) in enumerate(
            [(1, "32K", str(cpu)), (3, "16384K", "0-1" if cpu < 2 else "2-3")]
        ):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, value in (("level", level), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(f"{value}\n")
    assert cache_bytes(tmp_path) == 32 << 20
    assert cache_bytes(tmp_path / "absent") == 0


@pytest.mark.parametrize("variant", list(all_variants()))
def test_rates_of_one_core(variant):
    """What the choice of a variant looks at: in milliseconds, and 0 where there is no instruction."""
    library = load_library(variant)
    found = core_rates(library)
    assert 1e7 < found.fp32 < 1e12
    assert (found.bf16 > 0) == bool(instruction(library, "bf16"))


def test_a_named_variant_that_cannot_run_here_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "quire_kernels.cpu.probe", "--cpu-variant", "sse9"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("probe: the kernels are not made for sse9")
