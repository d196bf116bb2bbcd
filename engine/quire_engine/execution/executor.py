"""Which runner serves a model: the one that is waited for, or on a GPU whose kernels choose tokens the one that is
not.

Promises: build and the measurement of memory make the same one.
"""

from __future__ import annotations

import torch

from quire_engine.execution.constrained.grammars import Grammars
from quire_engine.execution.gpu.device import CudaDevice
from quire_engine.execution.gpu.graphs import MOST_MIXED_ROWS
from quire_engine.execution.gpu.runner import GpuRunner, RunnerLimits
from quire_engine.execution.gpu.swaps import staging_blocks
from quire_engine.execution.kv_storage import HostKV, KVStorage
from quire_engine.execution.models.decoder import Decoder
from quire_engine.execution.runner import Runner
from quire_engine.limits import SchedulerLimits
from quire_kernels.kernel_set import KernelSet
from quire_kernels.reference import REFERENCE


def runs_by_itself(kernels: KernelSet, device: torch.device) -> bool:
    """Whether the device computes a step beside the host, the choice of tokens included.

    The reference's attention follows the lengths that the host knows, which a graph cannot, and waits for its indices.
    """
    return device.type == "cuda" and kernels.choose is not None and kernels.attention is not REFERENCE.attention


def spare_blocks(kernels: KernelSet, device: torch.device) -> int:
    """Blocks that the pool has beyond those that are scheduled."""
    return int(runs_by_itself(kernels, device))


def staging_blocks_for(kernels: KernelSet, device: torch.device, bytes_per_block: int, num_host_blocks: int) -> int:
    """Blocks that the pool has behind those for swaps to go through."""
    return staging_blocks(bytes_per_block, num_host_blocks) if runs_by_itself(kernels, device) else 0


def make_runner(
    decoder: Decoder,
    kernels: KernelSet,
    kv: KVStorage,
    limits: SchedulerLimits,
    *,
    max_model_len: int,
    num_blocks: int,
    device: torch.device,
    ahead: bool = False,
    grammars: Grammars | None = None,
    num_host_blocks: int = 0,
) -> Runner | GpuRunner:
    """`num_blocks`: those that are scheduled; `kv` has `spare_blocks` more, and behind those `staging_blocks_for` so
    many host blocks. `ahead`: launch before the last is done."""
    if not runs_by_itself(kernels, device):
        host = HostKV(kv.tensor, num_host_blocks) if num_host_blocks else None
        return Runner(decoder, kv, limits.block_size, device, grammars=grammars, host=host)
    return GpuRunner(
        decoder,
        kv,
        CudaDevice(device),
        RunnerLimits(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=limits.block_size,
            spare_block=num_blocks,
            mixed_rows=MOST_MIXED_ROWS if kernels.bounded_attention else 0,
            num_host_blocks=num_host_blocks,
        ),
        max_in_flight=2 if ahead else 1,
        grammars=grammars,
    )
