"""Swaps of a runner that is waited for: bytes as they were, whatever the pool holds."""

from __future__ import annotations

import pytest
import torch

from quire_engine.contract.batch import Batch
from quire_engine.execution.kv.kv_storage import HostKV
from quire_engine.execution.kv.pool_rows import PoolRows, block_rows
from quire_kernels.kernel_set import KVFormat
from quire_kernels.select import select

CPU = torch.device("cpu")


def pools() -> list[torch.Tensor]:
    """Of every kind of content that a CPU's kernels have, of three blocks' worth of random bytes and more."""
    found = [torch.zeros(9, 2, 2, 2, 16, 32, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    kernels = select(CPU, torch.bfloat16, "cpu", kv=KVFormat(head_dim=32, block_size=16, kv_type="int8"), threads=1)
    found.append(kernels.new_kv(9, 2, 2, 16, 32, torch.bfloat16, CPU))
    for pool in found:
        rows = block_rows(pool)
        rows.copy_(torch.randint(0, 256, rows.shape, dtype=torch.uint8))
    return found


@pytest.mark.parametrize("pool", pools(), ids=lambda pool: str(pool.dtype))
def test_what_went_out_comes_in_elsewhere(pool: torch.Tensor) -> None:
    before = block_rows(pool).clone()
    host = HostKV(PoolRows(pool), 4)
    host.swap([(1, 3), (7, 0)], [])
    block_rows(pool)[[1, 7]] = 0
    host.swap([], [(0, 2), (3, 5), (3, 7)])
    after = block_rows(pool)
    assert torch.equal(after[[2, 5, 7]], before[[7, 1, 1]])
    assert torch.equal(after[[0, 3, 4, 6, 8]], before[[0, 3, 4, 6, 8]])


def test_what_goes_out_in_a_step_is_read_before_what_comes_in_is_written() -> None:
    pool = pools()[0]
    before = block_rows(pool).clone()
    host = HostKV(PoolRows(pool), 2)
    host.swap([(0, 0)], [])
    host.swap([(1, 1)], [(0, 1), (1, 2)])  # block 1 leaves, the first comes in its place, and it comes back as 2
    assert torch.equal(block_rows(pool)[:3], before[[0, 0, 1]])


def test_the_cost_of_a_block_is_the_copies_alone() -> None:
    """Of 9 blocks 4 can be copied, out and in: eight copies in four seconds; what came before is not counted."""
    times = iter([100.0, 104.0])
    pool = torch.zeros(9, 1, 2, 1, 16, 16)
    assert HostKV(PoolRows(pool), 4, clock=lambda: next(times)).seconds_per_block() == 0.5
    assert not pool.any()


def test_a_batch_of_no_items_swaps_for_others() -> None:
    """So it is where all items of a step failed in the one before: the blocks that it moves are not theirs."""
    from quire_engine.execution.executor import Executor
    from quire_engine.execution.runner import Runner
    from support.checkpoints import shared_checkpoint
    from support.model_steps import Model

    model = Model(shared_checkpoint(), num_blocks=4)
    runner = Runner(model.decoder, model.kv.tensor, 16, CPU)
    executor = Executor(runner, model.kv, host=HostKV(PoolRows(model.kv.tensor), 1))
    model.kv.tensor[2].fill_(1.0)
    result = executor.execute(Batch(step_id=0, items=(), num_tokens=0, swap_out=((2, 0),), swap_in=((0, 3),)))
    assert not result.samples
    assert torch.equal(model.kv.tensor[3], torch.ones_like(model.kv.tensor[3]))
    with pytest.raises(RuntimeError, match="no host blocks"):
        Executor(runner, model.kv).execute(Batch(step_id=0, items=(), num_tokens=0, swap_out=((2, 0),)))
