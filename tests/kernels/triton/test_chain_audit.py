"""What compilers make of launches that begin early: nothing but weights before the wait, room for the next launch.

Compiled in a process of its own, since here Triton may be its interpreter. `-s` shows the table.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from itertools import pairwise

import pytest

from support.triton_audit import GPUS, Report
from support.triton_chain import CASES, FAULTS, Early

pytestmark = pytest.mark.skipif("ttsem" in sys.modules, reason="nothing runs here that could be sanitized")

QUICK = "q06 1 x 1024"
MULTIPROCESSORS = {90: 132, 100: 148, 120: 170}
SLOT = 8  # bytes of stack a thread: one value that ptxas puts aside, as in the audit of the other kernels


def audited(*arguments: str, triton: tuple[str, ...] = ()) -> list[Early]:
    """`triton`: the folder of another one than the installed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*triton, *(path for path in sys.path if path)])
    command = [sys.executable, "-m", "support.triton_chain", *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    found = []
    for line in run.stdout.splitlines():
        values = json.loads(line)
        found.append(Early(**values | {"report": Report(**values["report"])}))
    for one in found:
        print(_line(one))
    return found


def _line(one: Early) -> str:
    r = one.report
    programs = math.prod(one.grid)
    return (
        f"{r.case:22} {r.kernel:17} sm_{r.capability:<4}{programs:6} programs {r.registers:4} registers {r.warps} warps"
        f" {r.shared:7} B shared {r.blocks:2} blocks/SM {' '.join(r.matrix)} before the wait:"
        f" {one.machine_loads[1]} loads of {', '.join(one.loaded_before) or 'nothing'}"
    )


def faults(found: list[Early]) -> list[str]:
    """What is wrong with launches that follow each other in this order."""
    wrong = [f"{one.report.kernel}: {fault}" for one in found for fault in _faults(one)]
    for one, following in pairwise(found):
        gpu = GPUS[one.report.capability]
        shared = one.report.shared + following.report.shared + 2 * 1024
        registers = sum(each.report.warps * 32 * -(-each.report.registers // 8) * 8 for each in (one, following))
        if shared > gpu.shared or registers > gpu.registers:
            names = f"{one.report.kernel} and {following.report.kernel}"
            wrong.append(f"{names} do not fit a multiprocessor: {shared} bytes, {registers} registers")
    return wrong


def _faults(one: Early) -> list[str]:
    r, found = one.report, []
    if (one.waits, one.releases) != (1, 1):
        found.append(f"{one.waits} waits, {one.releases} releases of the next launch")
    if set(one.loaded_before) - {"weight"} or one.unknown_before:
        found.append(f"reads {one.loaded_before} and {one.unknown_before} unknown before the wait")
    if one.stored_before or one.machine_stores:
        found.append("stores before the wait")
    if one.left_before or one.machine_exits:
        found.append("leaves without waiting")
    if one.machine_loads[0] != one.machine_loads[1]:
        found.append(f"{one.machine_loads[1]} loads are before the wait in place of {one.machine_loads[0]}")
    if r.kernel.startswith("chained") and not one.machine_loads[1]:
        found.append("no weights are loaded before the wait")
    if r.looped_spills or r.stack > SLOT:
        found.append(f"{r.stack} bytes of stack, {r.looped_spills} accesses to it in loops")
    if r.kernel in ("chained_qkv", "chained_gate_up", "chained_add"):
        # The same instruction for any number of rows: a row alone has the bits that it has in a batch.
        if {op.split(".")[0] for op in r.matrix} != {"HMMA"}:
            found.append(f"{r.matrix} in place of HMMA")
        if r.wide_share < 0.5:
            found.append(f"only {r.wide_share:.0%} of the bytes are loaded 16 at a time")
    return found


@pytest.mark.sim
def test_nothing_but_weights_is_read_before_the_wait():
    found = audited(QUICK)
    assert not faults(found)
    assert [one.report.kernel for one in found[1:6]] == [
        "chained_qkv", "decode_parts", "chained_join_add", "chained_gate_up", "chained_add",
    ]  # fmt: skip


@pytest.mark.sim
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
def test_nothing_but_weights_is_read_before_the_wait_on_any_gpu(case):
    for capability in map(str, MULTIPROCESSORS):
        assert not faults(audited(case, "--capabilities", capability))


@pytest.mark.sim
@pytest.mark.timeout(1800)
@pytest.mark.skipif("OLDEST_TRITON" not in os.environ, reason="make kernel-sim says where the oldest Triton lies")
@pytest.mark.parametrize("case", CASES)
def test_nothing_but_weights_is_read_before_the_wait_with_the_oldest_triton(case):
    assert not faults(audited(case, triton=(os.environ["OLDEST_TRITON"],)))


@pytest.mark.sim
@pytest.mark.parametrize(
    ("fault", "case", "said"),
    [
        ("a read before the wait", "q06 1 x 256", "chained_gate_up: reads ('squares', 'weight')"),
        ("a return before the wait", "q06 1 x 16384", "decode_join: "),
        ("a store before the wait", "q06 1 x 256", "chained_add: stores before the wait"),
    ],
)
def test_planted_faults_of_order_are_seen_in_the_code(fault, case, said):
    assert fault in FAULTS
    found = faults(audited(case, "--fault", fault))
    assert any(one.startswith(said) for one in found), found
