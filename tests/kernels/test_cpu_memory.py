"""The KV pool's memory: committed in the background, unchanged by it, and free to go at any time."""

import ctypes
import mmap
import time

import pytest
import torch

from quire_kernels.cpu.ops import cpu_kernel_set
from quire_kernels.kernel_set import KernelSet

BLOCK = (4, 2, 16, 64)  # layers, kv heads, block size, head_dim
MADV_POPULATE_WRITE = 23


def commits_early() -> bool:
    memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(MADV_POPULATE_WRITE)
    except OSError:
        return False
    return True


def resident(pool: torch.Tensor) -> float:
    """The share of the pool's pages that are in memory."""
    start = -(-pool.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (pool.data_ptr() + pool.nbytes - start) // mmap.PAGESIZE
    present = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * mmap.PAGESIZE), present) != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(byte & 1 for byte in present) / pages


def new_pool(kernels: KernelSet, num_bytes: int) -> torch.Tensor:
    layers, heads, block_size, head_dim = BLOCK
    blocks = num_bytes // kernels.kv_block_bytes(layers, heads, block_size, head_dim, torch.bfloat16)
    return kernels.new_kv(blocks, layers, heads, block_size, head_dim, torch.bfloat16, torch.device("cpu"))


@pytest.fixture
def kernels() -> KernelSet:
    return cpu_kernel_set(1)


@pytest.mark.skipif(not commits_early(), reason="this Linux cannot commit pages without writing them (before 5.14)")
def test_pages_are_committed_before_they_are_used(kernels):
    pool = new_pool(kernels, 48 << 20)
    deadline = time.monotonic() + 300
    while resident(pool) < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert resident(pool) == 1
    assert not pool.any()


def test_what_is_written_meanwhile_stays(kernels):
    pool = new_pool(kernels, 48 << 20)
    flat = pool.view(-1)
    flat[::1000] = 1
    time.sleep(0.2)
    assert flat.sum(dtype=torch.float64) == len(flat[::1000])


def test_a_pool_may_go_while_it_is_committed(kernels):
    for _ in range(10):
        pool = new_pool(kernels, 256 << 20)
        del pool  # the thread goes on until it finds no memory
        time.sleep(0.01)
    assert not new_pool(kernels, 1 << 20).any()
