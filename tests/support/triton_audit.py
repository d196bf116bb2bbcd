"""What ptxas makes of the Triton kernels, for GPUs that are not here.

Promises: kernels are compiled for the types, constants, alignments and warps of real calls: the calls are made, on
memory nobody touches, and every launch is noted down in place of being run; hence nothing has to be kept in step with
the ops by hand. Needs Triton without its interpreter: `python -m support.triton_audit CASES ... --capabilities 80 90`
prints a line of JSON for each kernel, in a process of its own. Must not know: what a kernel computes.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")
_INSTRUCTION = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)"
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """What one multiprocessor has, by the CUDA programming guide's table of compute capabilities."""

    registers: int
    warps: int
    blocks: int
    shared: int  # bytes of all blocks together
    shared_of_block: int


GPUS = {
    80: Gpu(65536, 64, 32, 164 << 10, 163 << 10),
    89: Gpu(65536, 48, 24, 100 << 10, 99 << 10),
    90: Gpu(65536, 64, 32, 228 << 10, 227 << 10),
    100: Gpu(65536, 64, 32, 228 << 10, 227 << 10),
    120: Gpu(65536, 48, 24, 100 << 10, 99 << 10),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel as it would be compiled for one call."""

    kernel: Any  # triton.JITFunction
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]  # arguments that are multiples of 16
    options: tuple[tuple[str, int], ...]

    def compile(self, capability: int) -> Any:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = [name for name, _ in self.signature]
        source = ASTSource(
            fn=self.kernel,
            signature=dict(self.signature),
            constexprs={(names.index(name),): value for name, value in self.constants},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in self.aligned},
        )
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(self.options))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One kernel's machine code on one GPU."""

    case: str
    kernel: str
    constants: str
    capability: int
    warps: int
    registers: int
    stack: int  # bytes
    spills: int  # loads and stores of local memory
    looped_spills: int  # those of them between a branch and a place before it that it jumps to
    shared: int  # bytes
    blocks: int  # on a multiprocessor at once
    matrix: tuple[str, ...]  # with shape and types: HMMA (mma.sync), HGMMA (wgmma), UTCHMMA (tcgen05)
    load_bytes: dict[str, int]  # bytes a thread loads from global memory, by width, each instruction counted once
    instructions: int

    @property
    def wide_share(self) -> float:
        """The share of loaded bytes that come 16 at a time, or by a bulk copy."""
        return self.load_bytes.get("16", 0) / max(1, sum(self.load_bytes.values()))


@contextmanager
def noted_launches() -> Iterator[list[Launch]]:
    """The launches of whatever is called meanwhile, each kind once and in order. Nothing runs on any device."""
    from triton.runtime.jit import JITFunction

    found: dict[Launch, None] = {}

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.setdefault(_launch(kernel, args, kwargs))

    run, launches = JITFunction.run, []
    JITFunction.run = note
    try:
        yield launches
    finally:
        JITFunction.run = run
        launches += found


def _launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """What Triton's own binder finds out about a call: which integers are 1, what is a multiple of 16."""
    options = tuple((name, kwargs.pop(name)) for name in _OPTIONS if name in kwargs)
    bound = inspect.signature(kernel.fn).bind(*args, **kwargs)
    bound.apply_defaults()
    signature, constants, aligned = [], [], []
    for param in kernel.params:
        value = bound.arguments[param.name]
        if param.is_constexpr or value is None or (type(value) is int and value == 1 and not param.do_not_specialize):
            signature.append((param.name, "constexpr"))
            constants.append((param.name, value))
            continue
        signature.append((param.name, _type_of(value)))
        if isinstance(value, torch.Tensor):
            multiple = value.data_ptr() % 16 == 0
        else:
            multiple = type(value) is int and value % 16 == 0
        if multiple and not (param.do_not_specialize or param.do_not_specialize_on_alignment):
            aligned.append(param.name)
    return Launch(kernel, tuple(signature), tuple(constants), tuple(aligned), options)


def _type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"a kernel was given {value!r}")


def report(case: str, launch: Launch, capability: int) -> Report:
    """Compile and read. Raises whatever Triton raises where a kernel cannot be compiled."""
    compiled = launch.compile(capability)
    resources, code = _disassembled(compiled.asm["cubin"])
    registers, stack = (int(n) for n in re.search(r"REG:(\d+) STACK:(\d+)", resources).groups())  # type: ignore[union-attr]
    ops: list[str] = re.findall(_INSTRUCTION, code, re.M)
    families = Counter(op.split(".")[0] for op in ops)
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    gpu = GPUS[capability]
    per_warp = -(-registers * 32 // 256) * 256  # registers are handed out 256 at a time
    return Report(
        case=case,
        kernel=launch.kernel.fn.__name__,
        constants=" ".join(f"{name}={value}" for name, value in launch.constants),
        capability=capability,
        warps=warps,
        registers=registers,
        stack=stack,
        spills=families["LDL"] + families["STL"],
        looped_spills=_looped(code, ("LDL", "STL")),
        shared=shared,
        blocks=min(gpu.registers // per_warp // warps, gpu.shared // (shared + 1024), gpu.warps // warps, gpu.blocks),
        matrix=tuple(sorted({op for op in ops if re.match(r"[A-Z]*MMA\b", op)})),
        load_bytes=_load_bytes(ops),
        instructions=len(ops),
    )


def _load_bytes(ops: list[str]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for op in ops:
        parts = op.split(".")
        if parts[0] in ("LDG", "LDGSTS"):
            width = 16 if "128" in parts else 8 if "64" in parts else 2 if {"U16", "S16"} & set(parts) else 4
            width = 1 if {"U8", "S8"} & set(parts) else 32 if "256" in parts else width
            found["16" if width >= 16 else str(width)] += width
        elif parts[0].startswith("UTMALDG"):
            found["16"] += 128
    return dict(found)


def _looped(code: str, families: tuple[str, ...]) -> int:
    """How many instructions of such families are part of a loop."""
    labels: dict[str, int] = {}
    found: list[int] = []
    loops: list[tuple[int, int]] = []
    for at, line in enumerate(code.splitlines()):
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = at
        elif op := re.match(_INSTRUCTION, line):
            if op[1].split(".")[0] in families:
                found.append(at)
            target = re.search(r"`\((\.L_x_\d+)\)", line)
            if op[1].startswith("BRA") and target and target[1] in labels:
                loops.append((labels[target[1]], at))
    return sum(any(first < at < last for first, last in loops) for at in found)


def _disassembled(cubin: bytes) -> tuple[str, str]:
    """cuobjdump's table of resources, nvdisasm's listing. Both come with Triton."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        resources = subprocess.run(
            [tools / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True
        )
        code = subprocess.run([tools / "nvdisasm", "-c", path], capture_output=True, text=True, check=True)
    return resources.stdout + resources.stderr, code.stdout


def reports(case: str, call: Callable[[int], object], capability: int) -> Iterator[Report]:
    """Every kernel that `call` launches on a GPU of that capability."""
    with noted_launches() as launches:
        call(capability)
    if not launches:
        raise ValueError(f"{case} launches nothing")
    for launch in launches:
        yield report(case, launch, capability)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("module", help="has CASES: names, and calls given a GPU's capability")
    parser.add_argument("cases", nargs="*", help="all of them where none is named")
    parser.add_argument("--capabilities", nargs="+", type=int, default=[80, 90, 100])
    arguments = parser.parse_args()
    calls: dict[str, Callable[[int], object]] = importlib.import_module(arguments.module).CASES
    for case in arguments.cases or calls:
        for capability in arguments.capabilities:
            for found in reports(case, calls[case], capability):
                print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main()
