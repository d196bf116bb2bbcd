"""What compilers make of the launches of a decode chain: what a program does before it waits, and who fits beside whom.

Promises: the launches are those of real calls at real models' sizes, in their order; what is before the wait is read
from PTX, where addresses can be followed to the kernel's arguments, and from machine code, where nothing may have moved
ahead of it. `python -m support.triton_chain CASES ... --capabilities 90` prints a line of JSON for each launch, in a
process of its own. Must not know: what a kernel computes.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from quire_kernels.kernel_set import (
    Attend,
    AttentionRows,
    AttentionShape,
    LayerOp,
    LinearAdd,
    Norm,
    NormGateUp,
    NormLinear,
    RopeWrite,
)
from quire_kernels.reference.linear import Linear
from quire_kernels.triton import chain_product, decode_attention, decode_chain
from quire_kernels.triton.attention import TritonAttention
from quire_kernels.triton.pool import KVType
from support.planted import planted
from support.triton_audit import _INSTRUCTION, Launch, Report, _disassembled, _launch, report

WEIGHTS = ("weight",)  # what a program may read before it waits


# Faults of order, each a place of a kernel's module and what is put there.
FAULTS: dict[str, tuple[ModuleType, str, str]] = {
    "a read before the wait": (
        chain_product,
        """        prefetch_rows(of_up, BLOCK_K, depth)
        gdc_wait()

    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inverse = inverse_roots(squares, rows, num_rows, num_squares, depth, eps, ROWS)
""",
        """        prefetch_rows(of_up, BLOCK_K, depth)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inverse = inverse_roots(squares, rows, num_rows, num_squares, depth, eps, ROWS)
    if AHEAD:
        gdc_wait()
""",
    ),
    "a return before the wait": (
        decode_attention,
        """. Programs: (sequences, HEADS).\"\"\"
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
""",
        """.\"\"\"
    if tl.load(context_lens + first_sequence + tl.program_id(0)) <= SPLIT:
        return
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
""",
    ),
    "a store before the wait": (
        chain_product,
        """        prefetch_rows(of_outputs, BLOCK_K, depth)
        gdc_wait()
""",
        """        prefetch_rows(of_outputs, BLOCK_K, depth)
        tl.store(squares + tile * num_rows + tl.arange(0, ROWS), 0.0, mask=tl.arange(0, ROWS) < num_rows)
        gdc_wait()
""",
    ),
}


def with_fault(name: str, folder: Path) -> ModuleType:
    """A copy of the chain's module whose launches have one of `FAULTS`."""
    kernels, old, new = FAULTS[name]
    return planted(kernels, old, new, folder, within=decode_chain)


class Sizes(NamedTuple):
    """Of a model's layers."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_type: KVType = "auto"
    bias: bool = False
    head_norms: bool = True


QWEN3_06B = Sizes(1024, 3072, 16, 8, 128)
QWEN3_8B = Sizes(4096, 12288, 32, 8, 128)
CASES: dict[str, tuple[Sizes, int, int]] = {  # sizes, rows, planned tokens of context
    "q06 1 x 256": (QWEN3_06B, 1, 256),
    "q06 1 x 1024": (QWEN3_06B, 1, 1024),
    "q06 1 x 16384": (QWEN3_06B, 1, 16384),
    "q06 64 x 1024": (QWEN3_06B, 64, 1024),
    "8B 1 x 1024": (QWEN3_8B, 1, 1024),
    "8B 64 x 4096": (QWEN3_8B, 64, 4096),
    "8B 16 x 1024 fp8": (QWEN3_8B._replace(kv_type="fp8"), 16, 1024),
    "Qwen2.5-0.5B 8 x 1024": (Sizes(896, 4864, 14, 2, 64, bias=True, head_norms=False), 8, 1024),
}


def layers(sizes: Sizes, count: int, make: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[LayerOp]:
    """A program of `count` layers; `make(*shape)` gives every tensor but RoPE's."""
    width, kv_width = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim

    def linear(outputs: int, inputs: int, bias: bool = False) -> Linear:
        return Linear(make(outputs, inputs).to(dtype), make(outputs).to(dtype) if bias else None)

    def norm() -> Norm:
        return Norm((1 + 0.1 * make(sizes.hidden)).to(dtype), 1e-6)

    angles = make(4096, sizes.head_dim // 2).float()
    rope = torch.cat([angles.cos(), angles.sin()], dim=1)
    program: list[LayerOp] = []
    for layer in range(count):
        norms = {}
        if sizes.head_norms:
            norms = {name: (1 + 0.1 * make(sizes.head_dim)).to(dtype) for name in ("q_norm", "k_norm")}
        shape = AttentionShape(
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            scale=sizes.head_dim**-0.5,
            **norms,
        )
        program += [
            NormLinear(norm=norm(), weight=linear(width + 2 * kv_width, sizes.hidden, sizes.bias)),
            RopeWrite(shape=shape, rope=rope, layer=layer),
            Attend(shape=shape, layer=layer),
            LinearAdd(source="mixed", weight=linear(sizes.hidden, width)),
            NormGateUp(norm=norm(), weight=linear(2 * sizes.inner, sizes.hidden), activation="silu"),
            LinearAdd(source="wide", weight=linear(sizes.hidden, sizes.inner)),
        ]
    return program


class Noted(NamedTuple):
    """A launch and its programs."""

    launch: Launch
    grid: tuple[int, ...]


@contextmanager
def noted_sequence() -> Iterator[list[Noted]]:
    """Every launch of whatever is called meanwhile, in order. Nothing runs on any device."""
    from triton.runtime.jit import JITFunction

    found: list[Noted] = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(Noted(_launch(kernel, args, kwargs), tuple(grid)))

    run = JITFunction.run
    JITFunction.run = note
    try:
        yield found
    finally:
        JITFunction.run = run


def sequence(
    sizes: Sizes, num_rows: int, context: int, capability: int, module: ModuleType = decode_chain
) -> list[Noted]:
    """The launches of two layers of a step of decodes."""
    dtype = torch.bfloat16
    attention = TritonAttention(sizes.kv_type, warp_groups=capability in (90, 100))
    program = layers(sizes, 2, lambda *shape: torch.empty(shape, dtype=dtype), dtype)
    chain = module.bind_decodes(attention, program, ahead=True)
    assert chain is not None
    kv = attention.new_kv(2, 2, sizes.kv_heads, 16, sizes.head_dim, dtype, torch.device("cpu"))
    with noted_sequence() as found:
        assert chain(torch.empty(num_rows, sizes.hidden, dtype=dtype), [kv], decodes([context] * num_rows)) is not None
    return found


def decodes(
    lengths: list[int], tables: torch.Tensor | None = None, slots: torch.Tensor | None = None, device: Any = "cpu"
) -> Any:
    """A step of one row a sequence, as far as layers look at it."""
    rows = len(lengths)
    if tables is None:
        tables = torch.zeros(rows, -(-max(lengths) // 16), dtype=torch.int32, device=device)
    step = AttentionRows(
        positions=torch.tensor(lengths, device=device) - 1,
        kv_slots=torch.zeros(rows, dtype=torch.int64, device=device) if slots is None else slots,
        query_starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=tables,
        query_lens=(1,) * rows,
        kv_lens=tuple(lengths),
        max_query_len=1,
        max_context_len=max(lengths),
    )
    return _Decodes(step)


class _Decodes:
    """`StepInput` of rows that are all sampled."""

    def __init__(self, rows: AttentionRows) -> None:
        self._rows, self.sampled, self.sample_rows = rows, None, torch.arange(len(rows.positions))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def in_group(self, group: int) -> Any:
        return self

    def over(self, **changes: Any) -> _Decodes:
        return _Decodes(replace(self._rows, **changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """A launch of a chain, and what its programs do before they wait."""

    report: Report
    grid: tuple[int, ...]
    waits: int  # instructions
    releases: int  # of the launch behind it
    loaded_before: tuple[str, ...]  # the arguments that loads and prefetches before the wait get their addresses from
    unknown_before: int  # loads before the wait whose addresses are no argument's
    stored_before: int
    left_before: int  # returns, and branches to places behind the wait
    machine_loads: tuple[int, int]  # loads before the wait in PTX and in machine code
    machine_stores: int
    machine_exits: int


def audited(case: str, capability: int, module: ModuleType = decode_chain) -> Iterator[Early]:
    """Each launch of two layers, in order; what was compiled once is not compiled again."""
    known: dict[Launch, Early] = {}
    for launch, grid in sequence(*CASES[case], capability, module):
        if launch not in known:
            known[launch] = _early(case, launch, grid, capability)
        yield replace(known[launch], grid=grid)


def _early(case: str, launch: Launch, grid: tuple[int, ...], capability: int) -> Early:
    compiled = launch.compile(capability)
    ptx, (_, code) = compiled.asm["ptx"], _disassembled(compiled.asm["cubin"])
    constants = {name for name, _ in launch.constants}
    arguments = [name for name, _ in launch.signature if name not in constants]
    before = ptx[: ptx.index("griddepcontrol.wait")] if "griddepcontrol.wait" in ptx else ptx
    addressed = _addressed(ptx, before, arguments)
    ops = re.findall(_INSTRUCTION, code, re.M)
    ahead = ops[: ops.index("ACQBULK")] if "ACQBULK" in ops else ops
    return Early(
        report=report(case, launch, capability),
        grid=grid,
        waits=ptx.count("griddepcontrol.wait"),
        releases=ptx.count("griddepcontrol.launch_dependents"),
        loaded_before=tuple(sorted({name for names in addressed for name in names})),
        unknown_before=sum(not names for names in addressed),
        stored_before=len(re.findall(r"\b(?:st\.global|red\.|atom\.)", before)),
        left_before=_left(ptx, before),
        machine_loads=(
            len(re.findall(r"\bld\.global", before)),
            sum(op.split(".")[0] in ("LDG", "LDGSTS", "LD") for op in ahead),
        ),
        machine_stores=sum(op.split(".")[0] in ("STG", "ST", "RED", "ATOMG", "ATOM") for op in ahead),
        machine_exits=sum(op.split(".")[0] in ("EXIT", "RET") for op in ahead),
    )


def _left(ptx: str, before: str) -> int:
    returns = re.findall(r"^\s*(?:@!?%p\d+\s+)?(?:ret|exit);", before, re.M)
    labels = re.findall(r"\bbra(?:\.uni)?\s+(\$?\w+);", before)
    return len(returns) + sum(ptx.index(f"{label}:") > len(before) for label in labels)


def _addressed(ptx: str, before: str, arguments: list[str]) -> list[set[str]]:
    """Of each load and prefetch before the wait the arguments that are part of its address."""
    parts: dict[str, set[str]] = {}
    lines = [line.split("//")[0].strip() for line in ptx.splitlines()]
    for _ in range(2):  # addresses that a loop moves on
        for line in lines:
            param = re.match(r"ld\.param\.\S+\s+(?:\{\s*)?(%\w+)(?:\s*\})?,\s*\[\w+_param_(\d+)\]", line)
            if param:
                index = int(param[2])
                parts[param[1]] = {arguments[index]} if index < len(arguments) else set()
                continue
            registers = re.findall(r"%\w+", re.sub(r"^@!?%p\d+\s+", "", line))
            if not registers or (line.startswith((".", "ld.global", "@%p", "@!%p")) and "ld.global" in line):
                continue
            found: set[str] = set()
            for name in registers[1:]:
                found |= parts.get(name, set())
            parts[registers[0]] = parts.get(registers[0], set()) | found
    pointers = {name for name in arguments if name not in ("depth", "width")}
    found_ones = []
    for line in before.splitlines():
        if "ld.global" in line or "prefetch.global" in line:
            place = re.search(r"\[\s*(%\w+)", line)
            found_ones.append(parts.get(place[1], set()) & pointers if place else set())
    return found_ones


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", help="all of them where none is named")
    parser.add_argument("--capabilities", nargs="+", type=int, default=[90])
    parser.add_argument("--fault", choices=FAULTS, help="planted before anything is compiled")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        module = decode_chain if arguments.fault is None else with_fault(arguments.fault, Path(folder))
        for case in arguments.cases or CASES:
            for capability in arguments.capabilities:
                for found in audited(case, capability, module):
                    print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main()
