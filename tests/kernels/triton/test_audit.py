"""The machine code of every Triton kernel, for GPUs that are not here: registers, spills, loads, matrix instructions.

Compiled in a process of its own, since here Triton may be its interpreter. `-s` shows the table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from support.triton_audit import GPUS, Report
from support.triton_calls import CASES

pytestmark = pytest.mark.skipif("ttsem" in sys.modules, reason="nothing runs here that could be sanitized")

# sm_80 has mma.sync alone; sm_90 takes warp group products, sm_100 those of the fifth generation.
PREFILL_PRODUCT = {80: "HMMA.", 90: "HGMMA.", 100: "UTCHMMA"}
# What streams: nearly all it loads comes 16 bytes at a time. The others look up positions, tables and a few sums.
STREAMS = {"rms_norm_kernel", "silu_mul_kernel", "product_kernel", "peak_kernel", "prefill_tile", "decode_parts"}
MATRIX_ROWS = 64  # of a tile from which the wide instructions are to be used
# Deterministic attention keeps two states and fills the registers: each of Triton 3.6 to 3.8 spills some of them in one
# of these on some GPU, another one each time. To be weighed against smaller tiles where there is a GPU to time both.
AT_THE_EDGE = {
    "attention 32/8x128 deterministic",
    "attention 24/8x128 fp8 deterministic",
    "attention 16/8x256 deterministic",
}
MOST_STACK = 256  # bytes a thread, of these
QUICK = ("norm", "activation", "greedy", "product quick")


def audited(*cases: str, module: str = "support.triton_calls", capabilities: tuple[int, ...] = (80, 90, 100)):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "support.triton_audit", module, *cases, "--capabilities"]
    run = subprocess.run(
        [*command, *map(str, capabilities)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = [Report(**json.loads(line)) for line in run.stdout.splitlines()]
    for one in found:
        print(_line(one))
    return found


def _line(r: Report) -> str:
    loads = " ".join(f"{width} B: {count}" for width, count in sorted(r.load_bytes.items()))
    return (
        f"{r.kernel:17} sm_{r.capability:<4}{r.registers:4} registers {r.warps:2} warps {r.blocks:2} blocks/SM"
        f" {r.shared:7} B shared {r.stack} B stack {r.spills} spills {' '.join(r.matrix)} loads [{loads}] {r.constants}"
    )


def faults(r: Report) -> list[str]:
    """What is wrong with a kernel's code."""
    found = []
    if r.stack > MOST_STACK if r.case in AT_THE_EDGE else r.stack or r.spills:
        found.append(f"{r.stack} bytes of stack, {r.spills} accesses to local memory")
    if r.blocks < 1 or r.shared > GPUS[r.capability].shared_of_block:
        found.append(f"{r.registers} registers and {r.shared} bytes of shared memory do not fit a multiprocessor")
    if r.kernel in STREAMS and "FP8=True" not in r.constants and r.wide_share < 0.5 and "CHUNKS" not in r.constants:
        found.append(f"only {r.wide_share:.0%} of the bytes are loaded 16 at a time")
    constants = dict(pair.split("=") for pair in r.constants.split())
    rows = int(constants.get("BLOCK_M", constants.get("ROWS", 0)))
    wide = PREFILL_PRODUCT[r.capability]
    due = r.kernel in ("product_kernel", "prefill_tile") and rows >= MATRIX_ROWS
    if due and not any(op.startswith(wide) for op in r.matrix):
        found.append(f"no {wide} in {r.matrix}")
    return found


def _check(found: list[Report]) -> None:
    wrong = [f"{_line(one)}\n    {fault}" for one in found for fault in faults(one)]
    assert not wrong, "\n".join(wrong)


def test_the_code_is_as_intended():
    _check(audited(*QUICK, capabilities=(80, 90)))


@pytest.mark.sim
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
def test_the_code_is_as_intended_everywhere(case):
    _check(audited(case))


@pytest.mark.sim
@pytest.mark.parametrize("case", ["product bf16", "product fp16"])
def test_few_and_many_rows_take_the_same_matrix_instruction(case):
    """Bitwise a row alone is that row in a batch only if the same instruction adds up both."""
    by_columns: dict[tuple[int, str], set[tuple[str, ...]]] = {}
    for one in audited(case, capabilities=(80, 90)):
        columns = next(part for part in one.constants.split() if part.startswith("BLOCK_N="))
        by_columns.setdefault((one.capability, columns), set()).add(tuple(one.matrix))
    assert by_columns
    assert all(len(found) == 1 for found in by_columns.values()), by_columns


def test_planted_faults_are_found():
    """A kernel that spills, one that loads element by element, and 16-row tiles where wider ones are due."""
    found = {one.case: faults(one) for one in audited(module="support.triton_faults", capabilities=(90,))}
    assert any("local memory" in fault for fault in found["spills"])
    assert any("16 at a time" in fault for fault in found["unaligned"])
    assert any("HGMMA" in fault for fault in found["few warps"])
