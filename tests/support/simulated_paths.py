"""Optional paths of a GPU that is not there, with faults planted in them: `python -m support.simulated_paths WHAT`.

Every path computes what the reference does, so whoever takes one with a fault is found out; a fault is a wrong result,
an exception, a signal, a hang, or a lack of memory. Checks run where they always do: in forked workers of a process of
their own, which adds a line to the file `checked` in the home directory. Must not know: what a test expects.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import quire_engine.build
import quire_engine.process.__main__ as engine_process
import quire_engine.tools.prover.__main__ as prover
from quire_engine.build import build
from quire_engine.contract.config import EngineConfig
from quire_engine.execution import proven_paths
from quire_engine.execution.gpu.device import capture_on
from quire_engine.execution.verdict import Verdict
from quire_engine.tools.prover import ahead
from quire_engine.tools.prover.work import Proof
from quire_engine.tools.prover.workers import Patience, prove
from quire_kernels.kernel_set import KernelSet
from quire_kernels.layer_program import run_layers
from quire_kernels.optional_paths import (
    DECODE_CHAIN,
    DEPENDENT_LAUNCH,
    FLASH_ATTENTION,
    FP8_CACHE,
    FUSED_GATE_UP,
    GRAPHS,
    NAMES,
    PACKED_WEIGHTS,
    STORED_PRODUCTS,
    UNMASKED_PROMPTS,
)
from quire_kernels.verify.checks import ModelSizes
from quire_kernels.verify.findings import Subject
from quire_kernels.verify.heads import Heads
from quire_kernels.verify.paths import path_checks
from quire_kernels.verify.watch import run_check
from support.offline import generate
from support.simulated_device import SimulatedDevice
from support.simulated_gpus import Machine, OnTheCpu, asked, requests
from support.simulated_kernels import SIMULATED

CPU = torch.device("cpu")
_converse = prover.main
Faults = Mapping[str, str]  # the kind, by path
_OWN = (STORED_PRODUCTS, UNMASKED_PROMPTS, FUSED_GATE_UP, DECODE_CHAIN, DEPENDENT_LAUNCH, GRAPHS)
_OPS = {  # by path, the op that has its fault
    PACKED_WEIGHTS: "norm_linear",
    FP8_CACHE: "attention",
    FLASH_ATTENTION: "attention",
    STORED_PRODUCTS: "pack_stored",
    UNMASKED_PROMPTS: "attention",
    FUSED_GATE_UP: "norm_gate_up",
}
_SIZES = ModelSizes(
    hidden=64,
    inner=96,
    heads=Heads(num_heads=4, num_kv_heads=2, head_dim=32, block_size=16),
    vocabulary=300,
)
_HANGS = Path(tempfile.gettempdir()) / f"quire-planted-hang-{os.getpid()}"  # there while a worker hangs
_LONGEST = 300.0


def strike(kind: str, found: Any) -> Any:
    """What a fault makes of a result."""
    match kind:
        case "wrong":
            return found._replace(weight=found.weight * 1.5) if hasattr(found, "_replace") else found * 1.5
        case "exception":
            raise RuntimeError("planted")
        case "signal":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hang":
            _HANGS.touch()
        case "memory":
            raise torch.OutOfMemoryError("CUDA out of memory")
    time.sleep(_LONGEST)
    raise AssertionError("nobody has ended the process")


def simulated_set(left_out: Collection[str], faults: Faults) -> KernelSet:
    """A set that takes all optional paths but these."""
    taken = [name for name in NAMES if name not in left_out]
    kernels = replace(SIMULATED, optional=_OWN, graphs=GRAPHS in taken)
    if STORED_PRODUCTS not in taken:
        kernels = replace(kernels, pack_stored=None, stored_bits=None)
    for path, op in _OPS.items():
        if path in taken and path in faults:
            kernels = replace(kernels, **{op: _faulty(faults[path], getattr(kernels, op))})
    if DECODE_CHAIN in taken:
        kinds = [faults[path] for path in (DECODE_CHAIN, DEPENDENT_LAUNCH) if path in taken and path in faults]
        kernels = replace(kernels, bind_decodes=partial(_chain, kernels, kinds))
    return kernels


def _faulty(kind: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: strike(kind, compute(*given))


def _chain(kernels: KernelSet, kinds: list[str], program: Any) -> Callable[..., Any]:
    def compute(x: Any, kv: Any, step: Any) -> Any:
        found = run_layers(kernels, program, x, kv, step)
        for kind in kinds:
            found = strike(kind, found)
        return found

    return compute


class FaultyDevice(SimulatedDevice):
    """Captures with a fault."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._kind = faults.get(GRAPHS, "")

    def capture(self, body: Callable[[], None]) -> Any:
        if self._kind == "wrong":  # a graph of nothing
            return super().capture(lambda: None)
        if self._kind:
            strike(self._kind, None)
        return super().capture(body)


def patient(descriptor: int, seconds: float) -> bool:
    """Whether there is something to read: nothing is late but a hang that was planted."""
    del seconds
    end = time.monotonic() + _LONGEST
    while time.monotonic() < end:
        if select.select([descriptor], [], [], 0.02)[0]:
            return True
        if _HANGS.exists():
            _HANGS.unlink()
            return False
    raise AssertionError("a worker says nothing")


def _each(planted: Faults) -> None:
    """The problem of each path with its fault alone, where the other paths are shown."""
    found = {}
    torch.set_num_threads(1)  # so that workers are forked from a process of one thread
    warm = FaultyDevice({})
    for path in (UNMASKED_PROMPTS, GRAPHS):  # what torch imports at a first call is imported once
        for check in path_checks(path, _subject({}, ()), _SIZES, capture_on(lambda: warm)):
            assert run_check(check, CPU).ok, check
    for path, kind in planted.items():
        faults = {path: kind}
        others = {name: "" for name in NAMES if name != path}
        verdict = Verdict(ops_checked=True, possible=NAMES, paths=others)
        proof = Proof(
            make=partial(_subject, faults),
            capture=capture_on(partial(FaultyDevice, faults)),
            sizes=_SIZES,
            asked=(PACKED_WEIGHTS, FP8_CACHE, FLASH_ATTENTION),
        )
        prove(proof.work, verdict, Patience(budget=_LONGEST), wait=patient)
        found[path] = [verdict.paths.pop(path), verdict.ops, sorted(verdict.paths.items())]
    print(json.dumps(found))


def _subject(faults: Faults, left_out: Collection[str]) -> Subject:
    quantized = PACKED_WEIGHTS not in left_out
    return Subject(
        kernels=simulated_set(left_out, faults),
        device=CPU,
        dtype=torch.bfloat16,
        quantization="int8" if quantized else None,
        alone=False,
    )


def _child(faults: Faults) -> int:
    """The process of a start's checks, on such a GPU."""
    with open(_checked(), "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")
    prover.DEVICE = CPU
    prover.select_kernels = lambda config, *_: simulated_set(config.left_out_paths or (), faults)
    prover.CudaDevice = lambda _: FaultyDevice(faults)  # type: ignore[assignment, misc]
    prover.prove = partial(prove, wait=patient)
    with torch._C.DisableTorchFunction():  # that of the process it was forked from
        return _converse()


def _checked() -> Path:
    return Path.home() / "checked"


def _find_gpu(faults: Faults) -> None:
    """Let this process find such a GPU, which it checks at a start as it would another one."""
    Machine()
    torch.cuda.get_device_capability = lambda _=None: (9, 0)  # type: ignore[assignment]
    quire_engine.build.shown_here = proven_paths.shown_here
    quire_engine.build.select_kernels = lambda config, *_: simulated_set(config.left_out_paths or (), faults)
    proven_paths._command = lambda: [sys.executable, "-m", __spec__.name, "child", json.dumps(faults)]
    proven_paths._is_checked = lambda *_: True
    proven_paths.PATIENCE = {"budget": _LONGEST}


def _engine(faults: Faults, fd: str, parent: str) -> int:
    """The engine process of a server, on such a GPU."""
    _find_gpu(faults)
    ahead.may_be_asked = lambda config: config.left_out_paths is None
    prover.main = partial(_child, faults)  # of the process that is forked
    with OnTheCpu():
        engine_process.main(int(fd), int(parent))
    return 0


def _serve(faults: Faults) -> None:
    """Two starts of one engine: their tokens, whether they are the plain ones', what is left out, what was logged."""
    said = _Lines()
    logging.getLogger("quire_engine.execution.proven_paths").addHandler(said)
    plain = build(asked(device="cpu", kernels="reference", async_scheduling="off"))
    expected, found = generate(plain, requests()[:3]), []
    _find_gpu(faults)
    with OnTheCpu():
        for _ in range(2):
            built = build(_config(faults))
            same = None if found else generate(built, requests()[:3]) == expected
            machine = built.plan.machine
            found.append({"same": same, "left_out": machine.left_out_paths, "replaced": machine.replaced_ops})
            children = len(_checked().read_text(encoding="utf-8").splitlines())
            found[-1] |= {"children": children, "said": said.take(), "kv": built.plan.pool.dtype}
            built.close()
    print(json.dumps(found))


def _config(faults: Faults) -> EngineConfig:
    return asked(kv_cache_dtype="fp8" if FP8_CACHE in faults else "auto")


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def take(self) -> list[str]:
        taken, self._lines = self._lines, []
        return taken


def main(what: str, faults: str = "{}", *given: str) -> int:
    planted: Faults = json.loads(faults)
    match what:
        case "each":
            _each(planted)
        case "serve":
            _serve(planted)
        case "child":
            return _child(planted)
        case "engine":
            return _engine(planted, *given)
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
