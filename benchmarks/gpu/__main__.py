"""`make gpu-bench`, or `python -m gpu` with the project's folders in PYTHONPATH: under nine minutes on one GPU.

Promises: needs torch, triton, numpy and safetensors, and no network; a machine without a GPU is told in one line; each
part can run alone, and the most wanted come first; a part that fails, that this machine cannot run or for which the
time is up is named as not measured, and the others are measured. Must not know: how anything is measured or shown.
"""

from __future__ import annotations

import argparse
import gc
import platform
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from gpu.chips import doubts
from gpu.kernels import KernelBench, KernelSizes, KernelTime
from gpu.parts import ON_CPU as PARTS_ON_CPU
from gpu.parts import ON_GPU as PARTS_ON_GPU
from gpu.parts import PARTS, Bench, NotHere, PartSizes
from gpu.report import GpuResults, ModelResults, lines
from gpu.shapes import QWEN3_06B, TINY, ModelShape
from gpu.steps import StepBench, StepSizes, eager, engine_config
from quire_engine.build import build
from quire_engine.contract.config import KernelChoice
from quire_engine.demo import demo_model_path
from quire_engine.tools.gpu_limits import Limits, NotMeasurable, measure, measure_gpu
from quire_kernels.kernel_set import KVFormat
from quire_kernels.select import select

RESULTS = Path(__file__).parent / "results"
_SECONDS = 360.0  # after which no part is begun: each takes a minute or two
_WHOLE = ("kernels", "model", "demo")  # the parts that have tables of their own, after the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """All that is measured, for one kind of machine."""

    shape: ModelShape
    kernels: KernelSizes
    demo: StepSizes
    model: StepSizes
    parts: PartSizes


ON_GPU = Sizes(
    shape=QWEN3_06B,
    parts=PARTS_ON_GPU,
    kernels=KernelSizes(
        rows=(1, 8, 64, 256, 2048),
        decodes=((1, 1024), (1, 16384), (8, 4096), (64, 1024), (256, 1024)),
        prefills=(1024, 4096, 16384),
        operand_bytes=512 << 20,
        repeat=10,
    ),
    demo=StepSizes(
        batches=(1, 8, 64, 256),
        context=128,
        steps=64,
        prefills=(128, 1024),
        requests=512,
        lengths=(32, 256),
        repeat=5,
    ),
    model=StepSizes(
        batches=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        context=512,
        steps=48,
        prefills=(128, 512, 1024, 2048, 8192),
        requests=256,
        lengths=(100, 1024),
        repeat=5,
    ),
)
_FEW = StepSizes(batches=(1, 3), context=20, steps=12, prefills=(16, 40), requests=4, lengths=(4, 12), repeat=1)
ON_CPU = Sizes(
    shape=TINY,
    parts=PARTS_ON_CPU,
    kernels=KernelSizes(rows=(1, 3), decodes=((1, 40), (2, 20)), prefills=(24,), operand_bytes=1 << 16, repeat=2),
    demo=_FEW,
    model=_FEW,
)


NAMES = (*PARTS, *_WHOLE)


def main(argv: Sequence[str] | None = None) -> int:
    """0: measured, or this machine lacks what a part needs; 1: some part failed or had no time; 2: there is no GPU."""
    parser = argparse.ArgumentParser(prog="gpu-bench", description="What this GPU's kernels, steps and engine reach.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, to try the flow")
    parser.add_argument("--kernels", default="auto", help="the kernel set [auto]")
    parser.add_argument(
        "--parts", default=",".join(NAMES), help="names with commas between them, in this order [%(default)s]"
    )
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="no part begins later [%(default)g]")
    parser.add_argument("--out", type=Path, help=f"JSON file [{RESULTS.name}/DEVICE-TIME.json beside the code]")
    asked = parser.parse_args(argv)
    wanted = asked.parts.split(",")
    unknown = sorted(set(wanted) - set(NAMES))
    if unknown:
        parser.error(f"no part is called {unknown[0]}: they are {', '.join(NAMES)}")
    started, begun = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.monotonic()
    try:
        limits = measure_gpu() if asked.device == "cuda" else _tiny_limits()
    except NotMeasurable as error:
        print(f"gpu-bench: {error}", file=sys.stderr)
        return 2
    results = GpuResults(
        started=started,
        device=_device_name(asked.device),
        versions=_versions(),
        limits=limits,
        doubts=doubts(
            limits.variant, bytes_per_second=limits.read_bytes_per_second, bf16_per_second=limits.bf16_per_second
        ),
        kernel_set="",
        kernels=[],
    )
    sizes = ON_GPU if asked.device == "cuda" else ON_CPU
    results = _measure(results, sizes, asked.device, asked.kernels, wanted, asked.seconds)
    results = replace(results, seconds=time.monotonic() - begun)
    print("\n".join(lines(results)))
    path = (
        asked.out or RESULTS / f"{re.sub(r'[^a-z0-9]+', '-', limits.variant.lower())}-{started.replace(':', '')}.json"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(results.encode())
    print(f"written to {path}")
    return 1 if results.failures else 0


def _tell(what: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {what}", file=sys.stderr, flush=True)


def _measure(  # noqa: PLR0917 - what was asked for
    results: GpuResults, sizes: Sizes, device: str, kernels: KernelChoice, wanted: Sequence[str], seconds: float
) -> GpuResults:
    """Part after part; none is begun when time is up."""
    deadline = time.monotonic() + seconds
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="quire-gpu-bench-") as folder:
        bench = Bench(
            device=device,
            kernels=kernels,
            sizes=sizes.parts,
            limits=results.limits,
            folder=Path(folder),
            tell=_tell,
        )
        for name in wanted:
            if time.monotonic() > deadline:
                failures.append(f"{name}: the time was up")
                continue
            _tell(name)
            try:
                if name == "kernels":
                    kernel_set, times = _kernels(sizes, device, kernels)
                    results = replace(results, kernel_set=kernel_set, kernels=times)
                elif name == "demo":
                    results.models.append(_model("quire-demo", demo_model_path(), device, kernels, sizes.demo))
                elif name == "model":
                    path = bench.checkpoint(sizes.shape)
                    results.models.append(_model(sizes.shape.name, path, device, kernels, sizes.model))
                else:
                    results.parts[name] = PARTS[name](bench)
            except NotHere as lacking:
                results.not_measured[name] = str(lacking)
            except Exception as error:
                failures.append(_failure(name, error))
            _release(device)
    return replace(results, failures=failures)


def _kernels(sizes: Sizes, device: str, kernels: KernelChoice) -> tuple[str, list[KernelTime]]:
    where = torch.device(device)
    kv = KVFormat(head_dim=sizes.shape.head_dim, block_size=16)
    kernel_set = select(where, torch.bfloat16, kernels, kv=kv)
    return kernel_set.name, KernelBench(kernel_set, sizes.shape, sizes.kernels, where).run(_tell)


def _model(name: str, path: Path, device: str, kernels: KernelChoice, sizes: StepSizes) -> ModelResults:
    config = engine_config(path, device, sizes, kernels)
    built = build(config)
    plan = built.plan
    bench = StepBench(plan, built.executor, sizes, _tell)
    decodes, prefills, throughput = bench.decodes("serving"), bench.prefills(), bench.throughput()
    del bench, built
    _release(device)  # both pools at once would not fit
    decodes += StepBench(plan, eager(config, plan), sizes, _tell).decodes("eager")
    return ModelResults(
        model=name,
        kernels=plan.machine.kernels,
        parameters=plan.model.num_parameters,
        load_seconds=plan.load_seconds,
        decodes=decodes,
        prefills=prefills,
        throughput=throughput,
    )


def _failure(what: str, error: Exception) -> str:
    traceback.print_exception(error)
    return f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _tiny_limits() -> Limits:
    sides = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 128}
    return measure(torch.device("cpu"), copied=1 << 22, sides=sides, repeat=3)


def _device_name(device: str) -> str:
    if device == "cpu":
        return f"{platform.machine()} processor, tiny sizes: these numbers mean nothing"
    properties = torch.cuda.get_device_properties(0)
    memory = properties.total_memory / 2**30
    return f"{properties.name}, compute capability {properties.major}.{properties.minor}, {memory:.0f} GiB"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "CUDA": str(torch.version.cuda)}
    try:
        found["triton"] = version("triton")
    except PackageNotFoundError:
        found["triton"] = "none"
    return found


if __name__ == "__main__":
    sys.exit(main())
