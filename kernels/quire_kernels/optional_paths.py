"""The optional paths of steps on a GPU: faster ways, each with a plain one that serves where a device has not shown it.

Promises: in an order in which each is shown on top of those before it. Must not know: the engine, torch.
"""

from __future__ import annotations

from dataclasses import dataclass

# Settings ask for the first three.
PACKED_WEIGHTS, FP8_CACHE, FLASH_ATTENTION = "packed-weights", "fp8-cache", "flash-attention"
STORED_PRODUCTS, UNMASKED_PROMPTS, FUSED_GATE_UP = "stored-products", "unmasked-prompts", "fused-gate-up"
DECODE_CHAIN, DEPENDENT_LAUNCH, GRAPHS = "decode-chain", "dependent-launch", "graphs"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalPath:
    """A faster way, and what an operator is told that serves instead."""

    name: str
    plain: str
    needs: str = ""  # the path without which this one is not taken


PATHS = (
    OptionalPath(name=PACKED_WEIGHTS, plain="weights in the model's dtype"),
    OptionalPath(name=FP8_CACHE, plain="a KV cache in the model's dtype"),
    OptionalPath(name=FLASH_ATTENTION, plain="attention by Quire's kernels"),
    OptionalPath(name=STORED_PRODUCTS, plain="matrices decoded at load"),
    OptionalPath(name=UNMASKED_PROMPTS, plain="attention of prompts with masks everywhere"),
    OptionalPath(name=FUSED_GATE_UP, plain="gate and up in one launch, the activation in another"),
    OptionalPath(name=DECODE_CHAIN, plain="decodes op by op"),
    OptionalPath(name=DEPENDENT_LAUNCH, plain="launches that begin when the one before has ended", needs=DECODE_CHAIN),
    OptionalPath(name=GRAPHS, plain="steps launched op by op"),
)
NAMES = tuple(path.name for path in PATHS)
