"""Replaces failed ops of a kernel set by the reference's, or drops optional ones.

Promises: an op that cannot be replaced raises an error and never stays in use. Must not know: the engine.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire_kernels.kernel_set import KernelSet
from quire_kernels.reference import REFERENCE

# Optional ops, which are faster forms of others: each is dropped if one of the ops that it must agree with has failed.
_FASTER = {
    "greedy": {"greedy", "logits"},
    "choose": {"choose"},
    "copy_blocks": {"copy_blocks"},
    "pack_stored": {"pack_stored"},
    "bind_decodes": {
        "bind_decodes",
        "norm_linear",
        "norm_gate_up",
        "linear_add",
        "rope_write",
        "attention",
    },
    "bind_layers": {
        "bind_layers",
        "norm_linear",
        "norm_gate_up",
        "linear_add",
        "norm_add",
        "mul_sigmoid",
        "rope_write",
        "attention",
        "mix_experts",
        "gate_rows",
    },
}
_ON_WEIGHTS = (
    "norm_linear",
    "norm_gate_up",
    "linear_add",
    "logits",
    "mix_experts",
    "given_experts",
    "gate_rows",
    "route",
)
_ON_POOLS = ("kv_part", "rope_write", "attention")
_ANYWHERE = ("embed", "norm_add", "mul_sigmoid")


class Irreplaceable(ValueError):
    """The reference has no replacement for a failed op; the text is a clause that follows "the OP op failed and"."""


def without(
    kernels: KernelSet, failed: Collection[str], *, reference_pool: bool, deterministic: bool = False
) -> KernelSet:
    """The set with the named ops replaced by the reference's. Raises Irreplaceable.

    `reference_pool`: the set's pool has the reference's layout. `deterministic`: a row's bits must not depend on its
    batch, on a device where the reference's bits do.
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
    if set(failed) & {*_ON_WEIGHTS, "pack_stored"}:  # the reference's products take matrices of numbers
        changes["stored_bits"] = None
    if "pack_stored" in failed:  # such matrices are decoded
        changes |= {"embed_stored": None, "stored_experts": False}
    for op, depends in _FASTER.items():
        if depends & set(failed):
            changes[op] = None
    return replace(kernels, **changes)  # type: ignore[arg-type]
