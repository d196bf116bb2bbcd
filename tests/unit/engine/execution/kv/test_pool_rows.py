"""Blocks that ranks hold in parts, as one process would have them."""

from __future__ import annotations

import pytest
import torch

from quire_engine.contract.kv_groups import KVHeads, KVLayout, kv_layout, one_group
from quire_engine.execution.kv.kv_storage import HostKV, KVStorage, block_bytes, block_form
from quire_engine.execution.kv.pool_rows import BlockForm, HeadRows, PoolRows
from quire_engine.ranks import Rank, heads_of_rank
from quire_kernels.kernel_set import KernelSet, KVFormat
from quire_kernels.select import select

CPU, BF16, SIZE, BLOCKS = torch.device("cpu"), torch.bfloat16, 16, 5
ALIKE = [KVHeads(4, 32)] * 3
UNEQUAL = [
    KVHeads(4, 32),
    KVHeads(4, 32),
    KVHeads(4, 48),
]  # a block has room for four layers of 32, so that some is left


def kernels_of(kv_type: str) -> KernelSet:
    kv = KVFormat(head_dim=32, block_size=SIZE, kv_type=kv_type)  # type: ignore[arg-type]
    return select(CPU, BF16, "cpu", kv=kv, threads=1)


def form_of(kernels: KernelSet, whole: KVLayout, own: KVLayout) -> BlockForm:
    num_bytes = block_bytes(kernels, None, SIZE, BF16, whole)  # type: ignore[arg-type]
    return block_form(kernels, SIZE, BF16, num_bytes, own=own, whole=whole)


def pool(kernels: KernelSet, layout: KVLayout) -> torch.Tensor:
    return KVStorage(kernels, None, BLOCKS, SIZE, BF16, CPU, layout=layout).tensor  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_type", ["auto", "int8"])
@pytest.mark.parametrize(("heads", "size"), [(ALIKE, 1), (ALIKE, 2), (ALIKE, 8), (UNEQUAL, 2)])
def test_a_block_of_ranks_is_that_of_one(heads: list[KVHeads], size: int, kv_type: str) -> None:
    """By `place` and `content` from one process's pool to those of ranks and back, and by way of the host."""
    kernels, whole = kernels_of(kv_type), one_group(heads)
    own = one_group(heads_of_rank(heads, size))
    form = form_of(kernels, whole, own)
    pools = [pool(kernels, own) for _ in range(size)]
    ranks = PoolRows(*pools, form=form)
    used = sum(part.num_bytes for part in form.parts)
    assert ranks.num_bytes == block_bytes(kernels, None, SIZE, BF16, whole) >= used  # type: ignore[arg-type]
    payload = torch.randint(0, 256, (ranks.num_bytes,), dtype=torch.uint8)
    payload[used:] = 0
    data = payload.numpy().tobytes()
    ranks.place(data, 3)
    assert ranks.content(3) == data
    assert not any(ranks.content(2))
    at = own_at = 0
    for part in form.parts:  # whose heads lie where the kernels look for them
        rows = payload[at : at + part.num_bytes].view(*part)
        for number, each in enumerate(pools):
            share = rows[:, Rank(number, size).heads(part.num_heads)].flatten()
            assert torch.equal(each[3].flatten().view(torch.uint8)[own_at : own_at + len(share)], share)
        at, own_at = at + part.num_bytes, own_at + len(share)
    host = HostKV(ranks, 2)
    host.swap([(3, 1), (2, 0)], [(1, 4), (0, 3)])
    assert ranks.content(4) == data
    assert not any(ranks.content(3))


def test_what_ranks_have_is_named_by_the_layout() -> None:
    kernels = kernels_of("auto")
    whole = one_group(ALIKE)
    assert form_of(kernels, whole, whole).parts == (HeadRows(1, 1, block_bytes(kernels, None, SIZE, BF16, whole)),)  # type: ignore[arg-type]
    assert form_of(kernels, whole, one_group(heads_of_rank(ALIKE, 2))).parts == (HeadRows(3, 4, 2 * 2 * 16 * 32),)
    # Layers that differ for one process and are alike for a rank; groups of layers, each with its own kind of heads.
    few = [KVHeads(4, 32), KVHeads(2, 32)]
    assert form_of(kernels, one_group(few), one_group(heads_of_rank(few, 4))).parts == ()
    mixed = [KVHeads(4, 32), *[KVHeads(2, 64)] * 5] * 2
    windows = [None, *[128] * 5] * 2
    grouped, own = (kv_layout(heads_of_rank(mixed, size), windows, 4096) for size in (1, 2))
    assert len(grouped.windows) > 1
    assert form_of(kernels, grouped, own).parts == ()


def test_without_a_form_the_parts_lie_one_behind_the_other() -> None:
    kernels = kernels_of("auto")
    pools = [pool(kernels, one_group(ALIKE)) for _ in range(2)]
    rows = PoolRows(*pools)
    for number, each in enumerate(pools):
        each[1] = number + 1
    assert rows.content(1) == b"".join(each[1].flatten().view(torch.uint8).numpy().tobytes() for each in pools)
    rows.place(rows.content(1), 2)
    assert all(torch.equal(each[1], each[2]) for each in pools)
