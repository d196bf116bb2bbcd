"""Measures the peak rates of this machine's first GPU: `python -m quire_engine.tools.gpu_limits` prints JSON.

Promises: the measurement uses only memory that is free at the moment; exit code 1 and one line if there is no GPU or
too little free memory. Must not know: models.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch

_MOST_COPIED = 1 << 30  # bytes of the copy's source; many times the size of any cache
_LEAST_COPIED = 128 << 20
_SIDE = {
    torch.bfloat16: 8192,
    torch.float16: 8192,
    torch.float32: 4096,
}  # size of square matrices that fill a large GPU
_REPEAT = 20


class NotMeasurable(RuntimeError):
    """Carries one line for the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Peak rates. A multiply-add counts as two operations. 0: not measured."""

    variant: str  # the GPU's name
    threads: int  # multiprocessors
    fp32_per_second: float  # without TF32, which models in float32 do not use
    bf16_per_second: float
    fp16_per_second: float
    int8_per_second: float
    read_bytes_per_second: float  # rate of a copy, reads and writes both counted
    cache_bytes: int  # size of the last level; 0: unknown


def seconds_of(work: Callable[[], object], device: torch.device, *, repeat: int = _REPEAT, warm_up: int = 3) -> float:
    """The shortest duration of `repeat` runs of `work`, by CUDA events on a GPU, otherwise by the host's clock."""
    for _ in range(warm_up):
        work()
    if device.type != "cuda":
        return min(_clocked(work) for _ in range(repeat))
    pairs = [(_timer(), _timer()) for _ in range(repeat)]
    for before, after in pairs:
        before.record()
        work()
        after.record()
    torch.cuda.synchronize(device)
    milliseconds: float = min(before.elapsed_time(after) for before, after in pairs)
    return milliseconds / 1e3


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _clocked(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(
    device: torch.device,
    *,
    copied: int = _MOST_COPIED,
    sides: Mapping[torch.dtype, int] = _SIDE,
    repeat: int = _REPEAT,
) -> Limits:
    """`copied`: bytes of the copy's source; `sides`: size of the square matrices by dtype. Raises OutOfMemoryError."""
    rates = {dtype: product_rate(device, dtype, side, repeat=repeat) for dtype, side in sides.items()}
    name, multiprocessors, cache = "cpu", 0, 0
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, multiprocessors = properties.name, properties.multi_processor_count
        cache = int(getattr(properties, "L2_cache_size", 0))
    return Limits(
        variant=name,
        threads=multiprocessors,
        fp32_per_second=rates.get(torch.float32, 0.0),
        bf16_per_second=rates.get(torch.bfloat16, 0.0),
        fp16_per_second=rates.get(torch.float16, 0.0),
        int8_per_second=0.0,
        read_bytes_per_second=copy_rate(device, copied, repeat=repeat),
        cache_bytes=cache,
    )


def copy_rate(device: torch.device, num_bytes: int, *, repeat: int = _REPEAT) -> float:
    """Bytes per second, reads and writes both counted."""
    source = torch.ones(num_bytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / seconds_of(lambda: target.copy_(source), device, repeat=repeat)


def product_rate(device: torch.device, dtype: torch.dtype, side: int, *, repeat: int = _REPEAT) -> float:
    """Operations per second of a product of square matrices. Random values: zeros would draw less power."""
    a = torch.randn(side, side, dtype=torch.float32, device=device).to(dtype)
    b = torch.randn(side, side, dtype=torch.float32, device=device).to(dtype)
    out = torch.empty_like(a)
    return 2 * side**3 / seconds_of(lambda: torch.mm(a, b, out=out), device, repeat=repeat)


def measure_gpu() -> Limits:
    """Measure in the GPU's free memory. Raises NotMeasurable."""
    if not torch.cuda.is_available():
        raise NotMeasurable("torch finds no usable GPU")
    free, _ = torch.cuda.mem_get_info()
    copied = min(_MOST_COPIED, free // 4)
    if copied < _LEAST_COPIED:
        raise NotMeasurable(f"only {free >> 20} MiB of the GPU's memory are free, too few to measure with")
    # Two random float32 matrices exist before they are converted to 16 bits.
    sides = {dtype: side if 20 * side**2 < free // 2 else 2048 for dtype, side in _SIDE.items()}
    try:
        return measure(torch.device("cuda"), copied=copied, sides=sides)
    except torch.OutOfMemoryError:
        raise NotMeasurable("too little of the GPU's memory is free to measure with") from None


def main() -> int:
    """Print the JSON and return 0, or print an error line to stderr and return 1."""
    try:
        print(json.dumps(asdict(measure_gpu())))
    except NotMeasurable as error:
        print(f"gpu limits: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
