"""The kernel set in plain torch: the specification of every op, and the fallback without faster kernels.

Promises: runs on any torch device; on a CPU every row's result is bitwise independent of the rest of the call. Must not
know: the engine, the server, models.
"""

from __future__ import annotations

from quire_kernels.kernel_set import KernelSet
from quire_kernels.reference import attention, experts, linear, low_rank, paged_kv, rope

REFERENCE = KernelSet(
    name="reference",
    pack_linear=linear.pack_linear,
    pack_gate_up=linear.pack_gate_up,
    pack_stored=linear.pack_stored,
    embed=linear.embed,
    norm_linear=linear.norm_linear,
    norm_gate_up=linear.norm_gate_up,
    linear_add=linear.linear_add,
    norm_add=linear.norm_add,
    mul_sigmoid=linear.mul_sigmoid,
    linear=linear.linear,
    pack_router=linear.pack_linear,
    route=experts.route,
    mix_experts=experts.mix_experts,
    given_experts=experts.given_experts,
    gate_rows=experts.gate_rows,
    rope_write=rope.rope_write,
    attention=attention.attention,
    logits=linear.logits,
    new_kv=paged_kv.new_kv,
    kv_part=paged_kv.kv_part,
    kv_block_bytes=paged_kv.kv_block_bytes,
    adapted=low_rank.ADAPTED,
)
