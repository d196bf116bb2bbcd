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
PREFILL_PRODUCT = {80: "HMMA.", 89: "HMMA.", 90: "HGMMA.", 100: "UTCHMMA", 120: "HMMA."}
# What streams: most of what it loads comes 16 bytes at a time. The others look up positions, tables and a few sums.
STREAMS = {
    *("rms_norm_kernel", "gate_mul_kernel", "mul_sigmoid_kernel", "product_kernel", "gate_up_kernel", "down_kernel"),
    "gated_product_kernel",
    *("peak_kernel", "prefill_tile", "decode_parts"),
}
TALL = {
    "product_kernel",
    "gated_product_kernel",
    "stored_product_kernel",
    "gate_up_kernel",
    "down_kernel",
    "prefill_tile",
}
MATRIX_ROWS = 64  # of a tile from which the wide instructions are to be used
# One value put aside before a loop and fetched behind it: so ptxas fits a further block on a multiprocessor, now and
# then, another kernel with each release. Nothing is ever spilled in a loop, nor more than this.
SLOT = 8  # bytes a thread
LOGITS_AT_ONCE = {"digit_kernel": 512}  # tokens of a program in one turn; of the other kernels of a choice: CHUNK
QUICK = ("norm", "activation", "greedy", "product quick")


def audited(
    *cases: str,
    module: str = "support.triton_calls",
    capabilities: tuple[int, ...] = tuple(PREFILL_PRODUCT),
    triton: tuple[str, ...] = (),
):
    """`triton`: the folder of another one than the installed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*triton, *(path for path in sys.path if path)])
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
        f" {r.shared:7} B shared {r.stack} B stack {r.spills} spills ({r.looped_spills} in loops)"
        f" {' '.join(r.matrix)} loads [{loads}] {r.constants}"
    )


def faults(r: Report) -> list[str]:
    """What is wrong with a kernel's code."""
    found = []
    if r.looped_spills or r.stack > SLOT:
        found.append(f"{r.stack} bytes of stack, {r.spills} accesses to local memory, {r.looped_spills} in loops")
    if r.blocks < 1 or r.shared > GPUS[r.capability].shared_of_block:
        found.append(f"{r.registers} registers and {r.shared} bytes of shared memory do not fit a multiprocessor")
    constants = dict(pair.split("=") for pair in r.constants.split())
    at_a_time, due = _wide_bytes(r.kernel, constants)
    wide = sum(count for width, count in r.load_bytes.items() if int(width) >= at_a_time)
    if due and wide * 32 * r.warps < due:
        found.append(f"only {wide} bytes a thread are loaded {at_a_time} at a time, not {due // 32 // r.warps}")
    if not due and r.kernel in STREAMS and r.wide_share < 0.5:
        found.append(f"only {r.wide_share:.0%} of the bytes are loaded 16 at a time")
    rows = int(constants.get("BLOCK_M", constants.get("ROWS", 0)))
    product = PREFILL_PRODUCT[r.capability]
    tall = r.kernel in TALL and rows >= MATRIX_ROWS
    if tall and not any(op.startswith(product) for op in r.matrix):
        found.append(f"no {product} in {r.matrix}")
    return found


def _wide_bytes(kernel: str, constants: dict[str, str]) -> tuple[int, int]:
    """What one turn of a program has to load wide where a share would say little: the width, the bytes at least.

    An fp8 tile is half as many bytes beside the same tables, and scales that each thread loads for the columns of its
    matrix fragments, 4 bytes at a time and again from the cache; its codes come 8 or 16 at a time (16 threads of 8
    bytes are whole lines too). The kernels of a choice load the logits of their chunk beside scalars of the row, bins
    and the sums of other chunks, which are few but each an instruction.
    """
    if constants.get("FP8") == "True" and "TILE" in constants:
        return 8, 2 * int(constants["TILE"]) * int(constants["BLOCK_D"])
    if "CHUNK" in constants and constants.get("DRAWS") != "False":
        return 16, 4 * LOGITS_AT_ONCE.get(kernel, int(constants["CHUNK"]))
    return 16, 0


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
@pytest.mark.timeout(1800)
@pytest.mark.skipif("OLDEST_TRITON" not in os.environ, reason="make kernel-sim says where the oldest Triton lies")
@pytest.mark.parametrize("case", CASES)
def test_the_code_is_as_intended_with_the_oldest_triton(case):
    _check(audited(case, capabilities=(80, 90, 100), triton=(os.environ["OLDEST_TRITON"],)))


@pytest.mark.sim
@pytest.mark.parametrize("case", ["product bf16", "product fp16", "stored nibbles", "stored bytes", "stored e4m3"])
def test_few_and_many_rows_take_the_same_matrix_instruction(case):
    """Bitwise a row alone is that row in a batch only if the same instruction adds up both."""
    by_columns: dict[tuple[int, str], set[tuple[str, ...]]] = {}
    for one in audited(case, capabilities=(80, 90)):
        if "BLOCK_M=16 " in one.constants:  # of one row where bits may depend on the number of rows
            continue
        columns = next(part for part in one.constants.split() if part.startswith("BLOCK_N="))
        by_columns.setdefault((one.capability, columns), set()).add(tuple(one.matrix))
    assert by_columns
    assert all(len(found) == 1 for found in by_columns.values()), by_columns


@pytest.mark.sim
@pytest.mark.parametrize("case", [name for name in CASES if name.endswith(" deterministic")])
def test_deterministic_decode_and_prefill_take_the_same_matrix_instructions(case):
    """Or a prompt would not have the bits of its tokens one by one."""
    by_gpu: dict[int, list[tuple[str, ...]]] = {}
    for one in audited(case):
        if one.kernel in ("decode_parts", "prefill_tile"):
            by_gpu.setdefault(one.capability, []).append(one.matrix)
    assert set(by_gpu) == set(PREFILL_PRODUCT)
    assert all(len(each) > 1 and len({tuple(matrix) for matrix in each}) == 1 for each in by_gpu.values()), by_gpu


@pytest.mark.sim
def test_planted_faults_are_found():
    """A kernel that spills, some that load element by element, and 16-row tiles where wider ones are due."""
    found: dict[str, list[str]] = {}
    for one in audited(module="support.triton_faults", capabilities=(90,)):
        found.setdefault(one.case, []).extend(faults(one))
    assert any("local memory" in fault for fault in found["spills"])
    assert all("memory, 0 in loops" in fault for fault in found["spills"] if "memory" in fault)
    assert any("memory" in fault and "memory, 0 in loops" not in fault for fault in found["spills in a loop"])
    assert any("16 at a time" in fault for fault in found["unaligned"])
    assert any("8 at a time" in fault for fault in found["unaligned fp8"])
    assert any("16 at a time" in fault for fault in found["odd vocabulary"])
    assert any("HGMMA" in fault for fault in found["few warps"])
