"""The CPU kernel set: its ops over one pool of worker threads. Must not know: requests."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from functools import partial

from quire_kernels.cpu.attention import CpuAttention, KVType
from quire_kernels.cpu.choice import load_chosen
from quire_kernels.cpu.context import Arena, Context, fetch_for, fetch_text
from quire_kernels.cpu.experts import ExpertOps, router_packer
from quire_kernels.cpu.layers import CpuLayers
from quire_kernels.cpu.library import OnCompiled
from quire_kernels.cpu.linear import LinearOps
from quire_kernels.cpu.low_rank import pack_low_rank_experts
from quire_kernels.cpu.packing import KINDS, Packer, packed_form
from quire_kernels.cpu.ranks import join, join_columns
from quire_kernels.cpu.stored import stored_bits
from quire_kernels.cpu.topology import by_core
from quire_kernels.cpu.variants import cpu_vendor
from quire_kernels.kernel_set import KernelSet, Quantization
from quire_kernels.reference import REFERENCE


def cpu_kernel_set(
    threads: int | None = None,
    quantization: Quantization | None = None,
    *,
    kv_type: KVType = "bf16",
    cpu_variant: str | None = None,
    library: ctypes.CDLL | None = None,
    on_compiled: OnCompiled | None = None,
) -> KernelSet:
    """The kernel set for bfloat16 models, with `threads` workers of its own, including the calling thread.

    None: one per usable core. `kv_type`: the type of the pool. `cpu_variant`: the instruction set, None: the fastest.
    Raises KernelBuildError where the C++ cannot be compiled, UnusableVariant where it cannot run.
    """
    why = ""
    if library is None:
        chosen = load_chosen(cpu_variant, on_compiled=on_compiled)
        vendor = cpu_vendor()
        library, why = chosen.library, f"{chosen.why}; {fetch_text(fetch_for(vendor), vendor)}"
    context = Context(library, threads or len(by_core(os.sched_getaffinity(0))))
    arena = Arena()
    packer = Packer(context, quantization, arena.allocate)
    linear, attention = LinearOps(context), CpuAttention(context, kv_type)
    experts = ExpertOps(context)
    return KernelSet(
        name="cpu",
        pack_linear=packer.linear,
        pack_gate_up=packer.gate_up,
        # What is to be quantised here is decoded first.
        pack_stored=packer.stored if quantization is None else None,
        stored_bits=stored_bits if quantization is None else None,
        stored_experts=True,
        embed=REFERENCE.embed,
        embed_stored=linear.embed_stored if quantization is None else None,
        norm_linear=linear.norm_linear,
        norm_gate_up=linear.norm_gate_up,
        linear_add=linear.linear_add,
        norm_add=linear.norm_add,
        mul_sigmoid=linear.mul_sigmoid,
        linear=linear.linear,
        pack_router=router_packer(Packer(context, None, arena.allocate).linear),
        route=experts.route,
        mix_experts=experts.mix_experts,
        given_experts=experts.given_experts,
        gate_rows=experts.gate_rows,
        rope_write=attention.rope_write,
        attention=attention.attention,
        logits=linear.logits,
        greedy=linear.greedy,
        new_kv=attention.new_kv,
        kv_part=attention.kv_part,
        kv_block_bytes=attention.kv_block_bytes,
        packed_bits=KINDS[quantization].bits,
        packed_bytes=lambda weight: weight.num_bytes,
        bind_layers=partial(CpuLayers, context, attention),
        adapted=replace(linear.adapted, pack_experts=pack_low_rank_experts, mix_experts=experts.mix_experts),
        packed_form=packed_form(context, quantization),
        join=partial(join, context),
        join_columns=partial(join_columns, context),
        fetch=context.fetch,
        own_threads=True,
        variant=library.quire_variant().decode(),
        why_variant=why,
    )
