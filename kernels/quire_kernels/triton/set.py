"""The kernel set for a GPU: which Triton kernels, and which of torch's, make up its ops.

Promises: nothing waits for the device but `greedy`, whose result is the host's. With `deterministic` a row's results
are bitwise the same alone, in any batch and in any chunks. Must not know: the engine, the server.

Launches of a layer: the norm, the QKV product, rope_write, attention, the O product with the residual, the norm, the
gate-up product, silu * up, the down product with the residual: nine, where attention is one launch, as it is for steps
of contexts of up to 256 tokens and for steps of prefill rows alone. Longer decode rows take one more, which joins their
parts, and a step that holds both kinds of rows launches for both: ten, and eleven. An O or down product with a bias
takes one more, unless `deterministic`.

Why the join is a launch of its own, and not the work of whichever program finishes a row last: programs would hand
their parts over by way of an atomic counter, and that all of a program's stores are seen behind its atomic rests on an
order of stores, barrier and atomic that Triton does not document, and on each GPU's memory model. The simulators run
programs one after another: they can show neither that it holds nor that it breaks, and the sanitizer takes every such
hand-over for a race, so it would have to be blind for this memory. A launch boundary is an order that all of them know.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_kernels.kernel_set import ChoiceRows, KernelSet
from quire_kernels.reference import REFERENCE
from quire_kernels.reference.linear import Linear
from quire_kernels.triton.activation import silu_mul
from quire_kernels.triton.attention import TritonAttention
from quire_kernels.triton.choose import choose
from quire_kernels.triton.copy_blocks import copy_blocks
from quire_kernels.triton.decode_attention import decode_scratch
from quire_kernels.triton.norm import rms_norm
from quire_kernels.triton.pool import KVType
from quire_kernels.triton.product import TiledProduct, TorchProduct


def make_triton_set(*, kv_type: KVType = "auto", deterministic: bool = False, warp_groups: bool = True) -> KernelSet:
    """The set for bfloat16 and float16 models.

    `kv_type`: what the pool holds. `deterministic`: see the module. `warp_groups`: whether the GPU is of compute
    capability 9.x or 10.x, whose matrix instructions are for groups of four warps.
    """
    attention = TritonAttention(kv_type, warp_groups=warp_groups, deterministic=deterministic)
    linear = LinearOps(TiledProduct() if deterministic else TorchProduct())
    return KernelSet(
        name="triton",
        pack_linear=REFERENCE.pack_linear,
        pack_gate_up=REFERENCE.pack_gate_up,
        embed=embed,
        norm_linear=linear.norm_linear,
        norm_gate_up=linear.norm_gate_up,
        linear_add=linear.linear_add,
        rope_write=attention.rope_write,
        attention=attention.attention,
        attention_scratch=decode_scratch,
        bounded_attention=True,
        logits=linear.logits,
        greedy=linear.greedy,
        choose=choose,
        copy_blocks=copy_blocks,
        new_kv=attention.new_kv,
        kv_block_bytes=attention.kv_block_bytes,
    )


def embed(table: Tensor, ids: Tensor) -> Tensor:
    return table.index_select(0, ids)


class LinearOps:
    """Projections with the norm before them and what follows them."""

    def __init__(self, product: TorchProduct | TiledProduct) -> None:
        self._product = product

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, w: Linear) -> Tensor:
        return self._product.linear(rms_norm(x, norm, eps), w)

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, w: Linear) -> Tensor:
        return silu_mul(self._product.linear(rms_norm(x, norm, eps), w))

    def linear_add(self, x: Tensor, w: Linear, residual: Tensor) -> Tensor:
        return self._product.linear_add(x, w, residual)

    def logits(self, x: Tensor, norm: Tensor, eps: float, w: Linear) -> Tensor:
        return self._product.logits(rms_norm(x, norm, eps), w)

    def greedy(
        self, x: Tensor, norm: Tensor, eps: float, w: Linear, allowed: Tensor | None = None
    ) -> tuple[list[int], list[bool]]:
        """One copy to the host."""
        logits, rows = self.logits(x, norm, eps, w), _greatest(len(x), x.device)
        ids, finite, _ = choose(logits, rows)
        if allowed is not None:
            octets = allowed.to(x.device).view(torch.uint8).unsqueeze(2)
            bits = octets >> torch.arange(8, dtype=torch.uint8, device=x.device) & 1
            forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
            ids, _, possible = choose(logits.masked_fill(forbidden, -torch.inf), rows)
            ids = torch.where(possible, ids, -1)
        found: list[list[int]] = torch.stack([ids, finite.to(torch.int64)]).tolist()
        return found[0], [bool(flag) for flag in found[1]]


def _greatest(num_rows: int, device: torch.device) -> ChoiceRows:
    """The greatest logit of every row; of the parameters of a draw only their types are looked at."""
    rows, numbers = torch.arange(num_rows, device=device), torch.empty(0, device=device)
    return ChoiceRows(
        logits_rows=rows,
        temperature=numbers,
        top_k=numbers,
        top_p=numbers,
        min_p=numbers,
        seed=rows,
        choice=rows,
        position=rows,
        draws=False,
        limits_k=False,
        limits_p=False,
    )
