"""The kernel set for a GPU: its ops as combinations of Triton kernels and torch's.

Promises: no op waits for the device except `greedy`, which returns its result on the host. With `deterministic` a row's
results are bitwise the same alone, in any batch and in any chunks. Must not know: the engine, the server.

Launches of a layer: the norm, the QKV product, rope_write, attention, the O product with the residual, the norm, the
gate-up product, the gate, the down product with the residual. These are nine, or eight with `deterministic`, where the
product computes the gate, if attention is one launch: in steps of contexts of up to 256 tokens and in steps of prefill
rows only. Longer decode rows take one more launch to join their
parts, and a step with both kinds of rows launches both: ten or eleven. An O or down product with a bias takes one more,
unless `deterministic`. Steps of decodes alone take fewer on newer GPUs: see `decode_chain`.

The join is a launch of its own instead of the work of the last program of a row. With the latter, programs would pass
their parts through an atomic counter. That a program's stores are visible after its atomic relies on an order of
stores, barrier and atomic that Triton does not document, and on each GPU's memory model. The simulators run programs
one after another and cannot test this; the sanitizer reports every such exchange as a race, so it would have to ignore
this memory. A launch boundary guarantees the order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quire_kernels.activations import Activation
from quire_kernels.adapter_places import AdapterPlaces, place_bytes
from quire_kernels.kernel_set import (
    AdaptedOps,
    Addend,
    BoundDecodes,
    ChoiceRows,
    ExpertHalves,
    KernelSet,
    LayerOp,
    Norm,
    Quantization,
)
from quire_kernels.low_rank import PlacedOps
from quire_kernels.optional_paths import (
    DECODE_CHAIN,
    DEPENDENT_LAUNCH,
    FUSED_GATE_UP,
    GRAPHS,
    STORED_PRODUCTS,
    UNMASKED_PROMPTS,
)
from quire_kernels.reference import REFERENCE
from quire_kernels.reference.linear import Linear
from quire_kernels.triton import low_rank, quantise
from quire_kernels.triton.activation import gate_mul, mul_sigmoid
from quire_kernels.triton.attention import TritonAttention
from quire_kernels.triton.choose import choose
from quire_kernels.triton.copy_blocks import copy_blocks
from quire_kernels.triton.decode_attention import decode_scratch
from quire_kernels.triton.decode_chain import bind_decodes
from quire_kernels.triton.experts import ExpertOps
from quire_kernels.triton.low_rank import add_adapted
from quire_kernels.triton.norm import norm_add, rms_norm
from quire_kernels.triton.pool import KVType
from quire_kernels.triton.product import TiledProduct, TorchProduct
from quire_kernels.triton.stored_product import StoredLinear, StoredProduct, pack_stored, stored_bits


def make_triton_set(
    *,
    kv_type: KVType = "auto",
    quantization: Quantization | None = None,
    deterministic: bool = False,
    warp_groups: bool = True,
    chained: bool = False,
    ahead: bool = False,
    left_out: Collection[str] = (),
) -> KernelSet:
    """The set for bfloat16 and float16 models.

    `kv_type`: type of the stored keys and values. `quantization`: of weights, at load; such a set has no experts.
    `deterministic`: see the module. `warp_groups`: whether the GPU has
    compute capability 9.x or 10.x, whose matrix instructions use groups of four warps. `chained`: steps of decodes take
    the launches of `decode_chain`; with `ahead` each begins before the one before it has ended, which takes 9.0.
    `left_out`: optional paths that must not be taken.
    """
    if chained and deterministic:
        raise ValueError("a decode's row would have other bits than the same row in a prompt")
    clears = UNMASKED_PROMPTS not in left_out
    attention = TritonAttention(kv_type, warp_groups=warp_groups, deterministic=deterministic, clears=clears)
    product = TiledProduct() if deterministic else TorchProduct()
    fused = deterministic and FUSED_GATE_UP not in left_out
    linear = LinearOps(product, StoredProduct(same_tiles=deterministic), fused=fused)
    experts = ExpertOps(same_tiles=deterministic)
    found = KernelSet(
        name="triton",
        pack_linear=REFERENCE.pack_linear,
        pack_gate_up=REFERENCE.pack_gate_up,
        pack_stored=None if STORED_PRODUCTS in left_out else pack_stored,
        stored_bits=None if STORED_PRODUCTS in left_out else stored_bits,
        pack_router=REFERENCE.pack_linear,
        route=experts.route,
        mix_experts=experts.mix_experts,
        given_experts=experts.given_experts,
        expert_halves=ExpertHalves(first=experts.first, second=experts.second),
        gate_rows=experts.gate_rows,
        embed=embed,
        adapted=linear.adapted,
        norm_linear=linear.norm_linear,
        norm_gate_up=linear.norm_gate_up,
        linear_add=linear.linear_add,
        norm_add=norm_add,
        mul_sigmoid=mul_sigmoid,
        rope_write=attention.rope_write,
        attention=attention.attention,
        attention_scratch=decode_scratch,
        bounded_attention=True,
        logits=linear.logits,
        greedy=linear.greedy,
        choose=choose,
        copy_blocks=copy_blocks,
        bind_decodes=_decodes(attention, left_out, ahead=ahead) if chained else None,
        new_kv=attention.new_kv,
        kv_part=attention.kv_part,
        kv_block_bytes=attention.kv_block_bytes,
        part_of=part_of,
        graphs=GRAPHS not in left_out,
        optional=_optional(deterministic=deterministic, chained=chained, ahead=ahead, packed=quantization is not None),
    )
    return found if quantization is None else _quantised(found, quantization)


def _optional(*, deterministic: bool, chained: bool, ahead: bool, packed: bool) -> tuple[str, ...]:
    """The optional paths of such a set, in use or left out. Quantised weights take no chain, and nothing as stored."""
    possible = {
        STORED_PRODUCTS: not packed,
        UNMASKED_PROMPTS: not deterministic,  # which joins parts of the keys, masked all of them
        FUSED_GATE_UP: deterministic and not packed,
        DECODE_CHAIN: chained and not packed,
        DEPENDENT_LAUNCH: chained and ahead and not packed,
        GRAPHS: True,
    }
    return tuple(name for name, is_possible in possible.items() if is_possible)


def _decodes(
    attention: TritonAttention, left_out: Collection[str], *, ahead: bool
) -> Callable[[Sequence[LayerOp]], BoundDecodes | None] | None:
    if DECODE_CHAIN in left_out:
        return None
    return partial(bind_decodes, attention, ahead=ahead and DEPENDENT_LAUNCH not in left_out)


def _quantised(kernels: KernelSet, quantization: Quantization) -> KernelSet:
    return replace(
        kernels,
        pack_linear=partial(quantise.pack_linear, quantization=quantization),
        pack_gate_up=partial(quantise.pack_gate_up, quantization=quantization),
        packed_bits=quantise.BITS[quantization],
        packed_bytes=quantise.packed_bytes,
        # Matrices that are stored in another form are decoded and quantised anew, and experts are not computed.
        pack_stored=None,
        stored_bits=None,
        pack_router=None,
        route=None,
        mix_experts=None,
        given_experts=None,
        expert_halves=None,
        gate_rows=None,
        bind_decodes=None,
    )


def _unpacked(matrix: object) -> int:
    raise TypeError(f"{type(matrix).__name__}: adapters of a GPU are copied to their places")


def embed(table: Tensor, ids: Tensor) -> Tensor:
    return table.index_select(0, ids)


def part_of(w: Linear | StoredLinear, rows: int) -> Linear | StoredLinear:
    """The tiles of plain matrices are those of the whole one; those of others are the same for all."""
    return w._replace(of=rows) if isinstance(w, Linear) else w


class LinearOps:
    """Projections fused with the norm before them and the activation or addition after them."""

    def __init__(self, product: TorchProduct | TiledProduct, stored: StoredProduct, *, fused: bool) -> None:
        """`fused`: the tiled product computes the activation too."""
        self._plain, self._stored = product, stored
        self._fused = product if fused and isinstance(product, TiledProduct) else None

    def norm_linear(self, x: Tensor, norm: Norm | None, w: Linear | StoredLinear) -> Tensor:
        return self._linear(x if norm is None else rms_norm(x, norm), w)

    def norm_gate_up(self, x: Tensor, norm: Norm | None, w: Linear | StoredLinear, activation: Activation) -> Tensor:
        if self._fused is not None and isinstance(w, Linear):
            return self._fused.gate_up(x if norm is None else rms_norm(x, norm), w, activation)
        return gate_mul(self.norm_linear(x, norm, w), activation)

    def linear_add(self, x: Tensor, w: Linear | StoredLinear, residual: Tensor, scale: float = 1.0) -> Tensor:
        if isinstance(w, StoredLinear):
            return self._stored.linear_add(x, w, residual, scale)
        return self._plain.linear_add(x, w, residual, scale)

    @property
    def adapted(self) -> AdaptedOps:
        """The projections with what adapters add."""
        placed = PlacedOps(make=AdapterPlaces, num_bytes=place_bytes, scratch=low_rank.scratch)
        return AdaptedOps(
            pack=_unpacked,
            bind=tuple,
            num_bytes=_unpacked,
            itemsize=2,
            norm_linear=self._adapted_linear,
            norm_gate_up=self._adapted_gate_up,
            linear_add=self._adapted_add,
            placed=placed,
        )

    def _adapted_linear(self, x: Tensor, norm: Norm | None, w: Linear | StoredLinear, addend: Addend) -> Tensor:
        rows = x if norm is None else rms_norm(x, norm)
        return add_adapted(self._linear(rows, w), rows, addend)

    def _adapted_gate_up(
        self, x: Tensor, norm: Norm | None, w: Linear | StoredLinear, activation: Activation, addend: Addend
    ) -> Tensor:
        rows = x if norm is None else rms_norm(x, norm)
        found = gate_mul(add_adapted(self._linear(rows, w), rows, addend), activation)
        if self._fused is not None and isinstance(w, Linear):
            # Rows without an adapter have the bits of the one launch that computes both, which need not be these.
            plain = self._fused.gate_up(rows, w, activation)
            return torch.where((addend.slots >= 0)[:, None], found, plain)
        return found

    def _adapted_add(
        self, x: Tensor, w: Linear | StoredLinear, residual: Tensor, scale: float, addend: Addend
    ) -> Tensor:
        return add_adapted(self.linear_add(x, w, residual, scale), x, addend, scale)

    def logits(self, x: Tensor, norm: Norm, w: Linear | StoredLinear) -> Tensor:
        return self._logits(rms_norm(x, norm), w)

    def greedy(
        self, x: Tensor, norm: Norm | None, w: Linear | StoredLinear, allowed: Tensor | None = None
    ) -> tuple[list[int], list[bool]]:
        """The argmax of each row; one copy to the host."""
        rows = _greatest(len(x), x.device)
        logits = self._logits(x if norm is None else rms_norm(x, norm), w)
        ids, finite, _ = choose(logits, rows)
        if allowed is not None:
            octets = allowed.to(x.device).view(torch.uint8).unsqueeze(2)
            bits = octets >> torch.arange(8, dtype=torch.uint8, device=x.device) & 1
            forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
            ids, _, possible = choose(logits.masked_fill(forbidden, -torch.inf), rows)
            ids = torch.where(possible, ids, -1)
        found: list[list[int]] = torch.stack([ids, finite.to(torch.int64)]).tolist()
        return found[0], [bool(flag) for flag in found[1]]

    def _linear(self, x: Tensor, w: Linear | StoredLinear) -> Tensor:
        return self._stored.linear(x, w) if isinstance(w, StoredLinear) else self._plain.linear(x, w)

    def _logits(self, x: Tensor, w: Linear | StoredLinear) -> Tensor:
        return self._stored.logits(x, w) if isinstance(w, StoredLinear) else self._plain.logits(x, w)


def _greatest(num_rows: int, device: torch.device) -> ChoiceRows:
    """Rows for greedy choice; of the sampling parameters only the dtypes matter."""
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
