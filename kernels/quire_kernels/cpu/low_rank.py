"""The matrices that adapters add to products, in the form of the C++ kernels.

Promises: a packed matrix keeps its memory alive and never refers to the tensors that it came from; slots and shapes are
checked here. Must not know: layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire_kernels.cpu.context import map_huge
from quire_kernels.cpu.packing import PackedLinear
from quire_kernels.cpu.signatures import LowRankArgs, StepAdaptersArgs
from quire_kernels.cpu.stored import K_MULTIPLE
from quire_kernels.kernel_set import Addend, ExpertMatrices
from quire_kernels.low_rank import LowRankExperts, LowRankMatrix

_HALF = 32  # rows of half a panel
_ALIGNMENT = 64
_NOTHING = (0, 0, False, 0)  # for a product that an adapter leaves as it is
_MEMORY = ("shrink", "scales", "expand", "halves")  # of a packed matrix


class Product(NamedTuple):
    """The matrix that an adapter's matrix is added to."""

    num_rows: int  # of a gate-up pair both together; of experts one's
    num_inputs: int
    gate_up: bool
    experts: int = 0  # 0: it is one matrix


class PackedLowRank(NamedTuple):
    """B A of one matrix, or of one of every expert: `args` for C++, and the memory that it points to."""

    args: LowRankArgs
    product: Product
    memory: dict[str, Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.memory.values())


def pack_low_rank(matrix: LowRankMatrix) -> PackedLowRank:
    """Pack an adapter's matrix in bfloat16. Every half of a panel has the ranks of its own rows' parts alone."""
    parts = tuple([replace(part, shrink=part.shrink[None], expand=part.expand[None]) for part in matrix.parts])
    alone = LowRankExperts(
        count=1, num_rows=matrix.num_rows, num_inputs=matrix.num_inputs, gate_up=matrix.gate_up, parts=parts
    )
    return _packed(alone, Product(matrix.num_rows, matrix.num_inputs, matrix.gate_up))


def pack_low_rank_experts(experts: LowRankExperts) -> PackedLowRank:
    """Pack the matrices of every expert, one behind the other, like `pack_low_rank`."""
    return _packed(experts, Product(experts.num_rows, experts.num_inputs, experts.gate_up, experts.count))


def _packed(matrix: LowRankExperts, product: Product) -> PackedLowRank:
    columns = -(-matrix.num_inputs // K_MULTIPLE) * K_MULTIPLE
    ranks = sum(part.shrink.shape[1] for part in matrix.parts)
    shrink = torch.zeros(matrix.count, ranks, columns, dtype=torch.bfloat16)
    scales = torch.zeros(matrix.count, ranks)
    expand = torch.zeros(matrix.num_rows, ranks, matrix.count, dtype=torch.bfloat16)
    first, last = torch.full((matrix.num_rows,), ranks), torch.zeros(matrix.num_rows, dtype=torch.int64)
    at = 0
    for part in matrix.parts:
        _, rows, rank = part.expand.shape
        own, end = slice(part.first_row, part.first_row + rows), at + rank
        shrink[:, at:end, : matrix.num_inputs] = part.shrink
        scales[:, at:end] = part.scale
        expand[own, at:end] = part.expand.permute(1, 2, 0)
        first[own], last[own] = at, end
        at = end
    halves = _in_halves(expand, 0, gate_up=matrix.gate_up)  # [halves, 32, R, E]
    firsts = _in_halves(first, ranks, gate_up=matrix.gate_up).amin(dim=1)
    counts = (_in_halves(last, 0, gate_up=matrix.gate_up).amax(dim=1) - firsts).clamp(min=0)
    firsts = torch.where(counts > 0, firsts, 0)
    starts = torch.cumsum(counts * _HALF, dim=0) - counts * _HALF
    packed = torch.empty(int(counts.sum()) * _HALF, matrix.count, dtype=torch.bfloat16)
    for low, count in {pair for pair in zip(firsts.tolist(), counts.tolist(), strict=True) if pair[1]}:
        chosen = ((firsts == low) & (counts == count)).nonzero().flatten()
        values = halves[chosen][:, :, low : low + count].transpose(1, 2).flatten(0, 2)
        packed[(starts[chosen, None] + torch.arange(count * _HALF)).flatten()] = values
    memory = {
        "shrink": shrink,
        "scales": scales,
        "expand": packed.T.contiguous(),
        # struct HalfRanks: eight bytes, then twice four.
        "halves": torch.stack([starts, firsts + (counts << 32)], dim=1),
    }
    return PackedLowRank(_arguments(ranks, product, memory), product, memory)


def _arguments(ranks: int, product: Product, memory: Mapping[str, Tensor]) -> LowRankArgs:
    per_expert = memory["expand"].numel() // product.experts if product.experts else 0
    places = {name: tensor.data_ptr() for name, tensor in memory.items()}
    return LowRankArgs(rank=ranks, per_expert=per_expert, **places)


def bind_adapter(sites: Sequence[PackedLowRank | None]) -> BoundAdapter:
    """The matrices of one adapter in one piece of memory on huge pages.

    A step reads a little of every adapter for each panel. In small pages it would look up an address for every 4 KiB,
    which takes as long as the reading itself.
    """
    sizes = [_aligned(tensor.nbytes) for site in sites if site is not None for tensor in site.memory.values()]
    free = map_huge(sum(sizes))
    moved: list[PackedLowRank | None] = []
    for site in sites:
        if site is None:
            moved.append(None)
            continue
        memory = {}
        for name, tensor in site.memory.items():
            place, free = free[: tensor.nbytes], free[_aligned(tensor.nbytes) :]
            memory[name] = place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        moved.append(site._replace(args=_arguments(site.args.rank, site.product, memory), memory=memory))
    return BoundAdapter(moved)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class BoundAdapter:
    """The matrices of one adapter, in one table for C++."""

    def __init__(self, sites: Sequence[PackedLowRank | None]) -> None:
        self._sites = tuple(sites)  # keeps their memory
        self.table = (LowRankArgs * len(self._sites))()
        for site, packed in enumerate(self._sites):
            if packed is not None:
                self.table[site] = packed.args

    def __getitem__(self, site: int) -> PackedLowRank | None:
        return self._sites[site]

    def told(self) -> tuple[Tensor, ...]:
        """All of it as tensors: the numbers of each site, zeros where it has no matrix, then the matrices' memory."""
        numbers = [(0, *_NOTHING) if each is None else (each.args.rank, *each.product) for each in self._sites]
        memory = [each.memory[name] for each in self._sites if each is not None for name in _MEMORY]
        return torch.tensor(numbers), *memory

    @staticmethod
    def restored(tensors: Sequence[Tensor]) -> BoundAdapter:
        """The adapter that `told` has told."""
        numbers, *memory = tensors
        sites: list[PackedLowRank | None] = []
        for rank, num_rows, num_inputs, gate_up, count in numbers.tolist():
            product = Product(num_rows, num_inputs, bool(gate_up), count)
            if product == _NOTHING:
                sites.append(None)
                continue
            own, memory = dict(zip(_MEMORY, memory, strict=False)), memory[len(_MEMORY) :]
            sites.append(PackedLowRank(_arguments(rank, product, own), product, own))
        return bind_adapter(sites)

    def check(self, products: Mapping[int, Product]) -> None:
        """Raises ValueError where it does not fit the products of a program, by site."""
        for site, product in products.items():
            packed = self._sites[site]
            if packed is not None and packed.product != product:
                raise ValueError(f"an adapter does not fit the product at site {site}")


def product_of(w: PackedLinear) -> Product:
    return Product(2 * w.num_outputs if w.gate_up else w.num_outputs, w.num_inputs, w.gate_up)


def products_of(experts: ExpertMatrices, width: int) -> tuple[Product, Product]:
    """The products of experts of rows of `width`: gate and up, and down."""
    above = Product(2 * experts.inner, width, True, experts.count)
    return above, Product(width, experts.inner, False, experts.count)


def addend_args(addend: Addend, w: PackedLinear, rows: int) -> StepAdaptersArgs:
    """Return the arguments of one product with an addend, which is site 0."""
    adapters = [BoundAdapter((matrix,)) for matrix in addend.matrices]
    for adapter in adapters:
        adapter.check({0: product_of(w)})
    return adapters_args(addend.slots, adapters, rows)


def expert_addend_args(
    above: Addend | None, below: Addend | None, experts: ExpertMatrices, rows: int, width: int
) -> StepAdaptersArgs:
    """Return arguments of both products of experts, sites 0 and 1, for rows of `width`. ValueError if both are None."""
    some = above or below
    if some is None:
        raise ValueError("no adapter adds anything")
    nothing = (None,) * len(some.matrices)
    pairs = zip(nothing if above is None else above.matrices, nothing if below is None else below.matrices, strict=True)
    adapters = [BoundAdapter(pair) for pair in pairs]
    for adapter in adapters:
        adapter.check(dict(enumerate(products_of(experts, width))))
    return adapters_args(some.slots, adapters, rows)


def adapters_args(slots: Tensor, adapters: Sequence[BoundAdapter], rows: int) -> StepAdaptersArgs:
    """Return the arguments of adapters that fit. Raises ValueError for slots that are not of the step."""
    count = len(adapters)
    if slots.dtype is not torch.int32 or slots.shape != (rows,) or not slots.is_contiguous():
        raise ValueError(f"slots must be contiguous int32 [{rows}]")
    if rows and (int(slots.min()) < -1 or int(slots.max()) >= count):
        raise ValueError(f"slots must be -1 or those of {count} adapters")
    tables = (ctypes.c_void_p * count)(*[ctypes.addressof(adapter.table) for adapter in adapters])
    args = StepAdaptersArgs(slots=slots.data_ptr(), adapters=ctypes.addressof(tables), count=count)
    args.kept = (slots, tables, adapters)
    return args


def _in_halves(rows: Tensor, filled: int, *, gate_up: bool) -> Tensor:
    """[N, ...] as [halves, 32, ...] in the order of panels: of a gate-up pair 32 rows of each in turns."""
    if not gate_up:
        return _split(rows, filled, 2 * _HALF)
    gate, up = (_split(part, filled, _HALF) for part in rows.chunk(2))
    return torch.stack([gate, up], dim=1).flatten(0, 1)


def _split(rows: Tensor, filled: int, multiple: int) -> Tensor:
    """Filled up to a multiple of rows, as [halves, 32, ...]."""
    missing = rows.new_full((-len(rows) % multiple, *rows.shape[1:]), filled)
    return torch.cat([rows, missing]).view(-1, _HALF, *rows.shape[1:])
