"""Measures the peak rates of this machine: `python -m quire_kernels.cpu.probe` prints one JSON object.

Promises: all usable cores at once; a snapshot, since memory bandwidth depends on other users of the machine. Must not
know: tensors, models.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from ctypes import byref, c_double, c_int32
from dataclasses import asdict, dataclass
from pathlib import Path

from quire_kernels.cpu.choice import UnusableVariant, load_chosen
from quire_kernels.cpu.compiler import KernelBuildError
from quire_kernels.cpu.rates import KINDS, instruction, rate

_MOST_BYTES = 2 << 30  # most bytes of all workers together
_BYTES_PER_WORKER = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Operations count a multiply and an add as two. 0: the CPU has no instruction for it."""

    variant: str
    threads: int
    fp32_per_second: float
    bf16_per_second: float
    int8_per_second: float
    read_bytes_per_second: float
    cache_bytes: int  # sum of the last-level caches; 0: unknown
    fp32_instruction: str
    bf16_instruction: str  # empty: the CPU has none and multiplies bf16 as fp32
    int8_instruction: str


def measure(
    threads: int,
    library: ctypes.CDLL,
    *,
    seconds: float = 0.2,
    bytes_per_worker: int | None = None,
    passes: int = 3,
) -> Limits:
    """Takes about `seconds` per kind of arithmetic and a second for the memory. Raises MemoryError."""
    if bytes_per_worker is None:
        bytes_per_worker = min(_BYTES_PER_WORKER, _MOST_BYTES // threads)
    cpus = sorted(os.sched_getaffinity(0))
    pinned = (c_int32 * threads)(*cpus[:threads]) if threads <= len(cpus) else None
    context = library.quire_create(threads, pinned)
    if not context:
        raise MemoryError(f"starting {threads} worker threads")
    result = c_double()
    try:
        rates = {kind: rate(library, context, kind, seconds) for kind in KINDS}
        if library.quire_probe_read(context, bytes_per_worker, passes, byref(result)):
            raise MemoryError(f"{threads} x {bytes_per_worker} bytes for the read probe")
    finally:
        library.quire_destroy(context)
    return Limits(
        variant=library.quire_variant().decode(),
        threads=threads,
        fp32_per_second=rates["fp32"],
        bf16_per_second=rates["bf16"],
        int8_per_second=rates["int8"],
        read_bytes_per_second=result.value,
        cache_bytes=cache_bytes(),
        fp32_instruction=instruction(library, "fp32"),
        bf16_instruction=instruction(library, "bf16"),
        int8_instruction=instruction(library, "int8"),
    )


def cache_bytes(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """The sum of all last-level caches; 0 where the system does not tell."""
    sizes: dict[tuple[int, str], int] = {}
    for index in root.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, shared = int((index / "level").read_text()), (index / "shared_cpu_list").read_text().strip()
            size = (index / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        if size.endswith("K"):
            sizes[level, shared] = int(size[:-1]) << 10
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last)


def main() -> int:
    """Exit code 0 and the JSON, or 1 and a line on stderr."""
    parser = argparse.ArgumentParser(description="Peak arithmetic and read bandwidth of this machine, as JSON.")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help=f"worker threads [{cores}]")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each kind of arithmetic [0.2]")
    parser.add_argument("--cpu-variant", help="instruction set of the kernels; default: the fastest")
    asked = parser.parse_args()
    try:
        limits = measure(asked.threads, load_chosen(asked.cpu_variant).library, seconds=asked.seconds)
    except UnusableVariant as error:
        print(f"probe: the kernels {error}", file=sys.stderr)
        return 1
    except (KernelBuildError, MemoryError) as error:
        print(f"probe: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(limits)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
