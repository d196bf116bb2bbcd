"""Published limits of GPUs, as a check of those that were measured.

Promises: dense bf16 products with float32 sums, and the bandwidth of the memory; from NVIDIA's data sheets.
Must not know: how limits are measured.
"""

from __future__ import annotations

from dataclasses import dataclass

# A copy and a large product reach these shares of what is published where nobody else uses the GPU and it is cool.
_LEAST, _MOST = 0.6, 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One kind of GPU."""

    name: str  # what torch's name of the device contains
    bytes_per_second: float
    bf16_per_second: float


# Of names that contain each other the longer one comes first.
CHIPS = (
    Chip(name="B200", bytes_per_second=8.0e12, bf16_per_second=2250e12),
    Chip(name="H200", bytes_per_second=4.8e12, bf16_per_second=989e12),
    Chip(name="H100 PCIe", bytes_per_second=2.0e12, bf16_per_second=756e12),
    Chip(name="H100 80GB HBM3", bytes_per_second=3.35e12, bf16_per_second=989e12),
    Chip(name="A100-SXM4-80GB", bytes_per_second=2.039e12, bf16_per_second=312e12),
    Chip(name="A100 80GB PCIe", bytes_per_second=1.935e12, bf16_per_second=312e12),
    Chip(name="A100-SXM4-40GB", bytes_per_second=1.555e12, bf16_per_second=312e12),
    Chip(name="A100-PCIE-40GB", bytes_per_second=1.555e12, bf16_per_second=312e12),
    Chip(name="L40S", bytes_per_second=0.864e12, bf16_per_second=362e12),
    Chip(name="L4", bytes_per_second=0.3e12, bf16_per_second=121e12),
    Chip(name="A10", bytes_per_second=0.6e12, bf16_per_second=125e12),
    Chip(name="RTX 4090", bytes_per_second=1.008e12, bf16_per_second=165e12),
    Chip(name="RTX 3090", bytes_per_second=0.936e12, bf16_per_second=71e12),
)


def chip_of(name: str) -> Chip | None:
    """By whole words, so that an A10 is not an A100, nor an L4 an L40."""
    words = f" {name} "
    return next((chip for chip in CHIPS if f" {chip.name} " in words), None)


def doubts(name: str, *, bytes_per_second: float, bf16_per_second: float) -> list[str]:
    """What speaks against the measured limits; a sentence each."""
    chip = chip_of(name)
    if chip is None:
        return [f"no published limits of {name} are known here: the measured ones are not checked"]
    found = []
    pairs = (
        ("the memory's bandwidth", bytes_per_second, chip.bytes_per_second),
        ("the bf16 peak", bf16_per_second, chip.bf16_per_second),
    )
    for what, measured, published in pairs:
        share = measured / published
        if share < _LEAST:
            found.append(
                f"{what} was measured at {share:.0%} of the published one: is the GPU shared, hot or throttled?"
            )
        elif share > _MOST:
            found.append(f"{what} was measured at {share:.0%} of the published one: the measurement is wrong")
    return found
