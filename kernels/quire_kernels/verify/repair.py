"""A kernel set without the ops that failed: the reference's in their place, or none where the set need not have one.

Promises: what cannot be replaced is said, never left in place. Must not know: the engine.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire_kernels.kernel_set import KernelSet
from quire_kernels.reference import REFERENCE

# An op that may be missing does what others do, faster; it goes with those that it would not be true to.
_FASTER = {
    "greedy": {"greedy", "logits"},
    "choose": {"choose"},
    "copy_blocks": {"copy_blocks"},
    "bind_layers": {"bind_layers", "norm_linear", "norm_gate_up", "linear_add", "rope_write", "attention"},
}
_ON_WEIGHTS = ("norm_linear", "norm_gate_up", "linear_add", "logits")
_ON_POOLS = ("rope_write", "attention")
_ANYWHERE = ("embed",)


class Irreplaceable(ValueError):
    """An op failed that the reference has nothing for; the text is a clause that follows "the OP op failed and"."""


def without(
    kernels: KernelSet, failed: Collection[str], *, reference_pool: bool, deterministic: bool = False
) -> KernelSet:
    """The set with the reference's ops in place of those of these names. Raises Irreplaceable.

    `reference_pool`: its pool has the reference's layout. `deterministic`: a row's bits must not depend on its batch,
    on a device where the reference's do.
    """
    if deterministic and set(failed) - set(_FASTER):
        raise Irreplaceable("rows of the reference's would depend on their batch")
    possible = [*_ANYWHERE]
    if kernels.packed_bits is None:
        possible += _ON_WEIGHTS
    if reference_pool:
        possible += _ON_POOLS
    changes: dict[str, object] = {}
    for op in failed:
        if op in possible:
            changes[op] = getattr(REFERENCE, op)
        elif op not in _FASTER:
            raise Irreplaceable(
                "reference attention cannot read this KV pool"
                if op in _ON_POOLS
                else "reference products cannot read these weights"
                if op in _ON_WEIGHTS
                else "the reference's would not fit the others"
            )
    for op, depends in _FASTER.items():
        if depends & set(failed):
            changes[op] = None
    return replace(kernels, **changes)  # type: ignore[arg-type]
