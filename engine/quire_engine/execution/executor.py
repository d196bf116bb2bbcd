"""Drives a model's runner, and chooses it: block copies, faults, recovery and the steps in flight, on every device.

Promises: blocks are copied before the step that needs them; a sequence whose data make the model or the sampler fail
fails alone. Build and the measurement of memory make the same executor.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from operator import sub
from pathlib import Path
from typing import Protocol

import torch

from quire_engine.contract.batch import Batch, StepResult
from quire_engine.contract.config import Fault
from quire_engine.contract.drafts import most_drafted_rows
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.execution.adapters import AdapterCache
from quire_engine.execution.constrained.grammars import Grammars
from quire_engine.execution.fault_points import FaultPoints
from quire_engine.execution.gpu.adapters import PlacedAdapters
from quire_engine.execution.gpu.device import CudaDevice
from quire_engine.execution.gpu.graphs import MOST_MIXED_ROWS
from quire_engine.execution.gpu.rank_commands import RankCommands
from quire_engine.execution.gpu.resident import RunnerLimits
from quire_engine.execution.gpu.runner import GpuRunner
from quire_engine.execution.gpu.swaps import StreamedKV, staging_blocks
from quire_engine.execution.kv.kv_storage import HostBlocks, HostKV, KVBlocks, KVStorage
from quire_engine.execution.kv.pool_rows import PoolRows
from quire_engine.execution.models.served import ServedModel
from quire_engine.execution.runner import Computed, Runner
from quire_engine.execution.step_recovery import recover
from quire_kernels.kernel_set import KernelSet
from quire_kernels.reference import REFERENCE

_log = logging.getLogger(__name__)
RankSeconds = Callable[[], tuple[float, ...]]
_CAPTURE_SECONDS = 2.0  # of a start in which graphs are captured ahead; an idle server goes on with them


class BegunStep(Protocol):
    """A step that is under way, or done."""

    def result(self) -> StepResult:
        """Waits for it."""
        ...


class StepRunner(Protocol):
    """Computes steps on one device: `runner.Runner` at once, `gpu.runner.GpuRunner` beside its caller."""

    max_in_flight: int  # steps that may be begun and not collected

    def work(self) -> AbstractContextManager[object]:
        """Return the context in which everything is issued to the device."""
        ...

    def begin(self, batch: Batch, *, graphs: bool = True) -> BegunStep:
        """Begin a step; without `graphs` it is issued launch by launch, like a step that no graph serves."""
        ...

    def in_parts(self, batch: Batch) -> Callable[[Batch, int], StepResult]:
        """How to compute parts of a batch that could not be begun whole: a part, and the index of its first item."""
        ...

    def release(self) -> None:
        """Give back what memory the device can spare."""
        ...

    def capture_largest(self) -> None:
        """Capture the graphs that take the most memory: in what they allocate all others find room."""
        ...

    def choose_launches(self) -> None:
        """Measure which launches are faster, where there are several ways, with no step in flight."""
        ...

    def capture_next(self) -> int:
        """Capture one more graph that steps will likely need, with no step in flight; how many are left."""
        ...


class Executor:
    """See `engine.StepExecutor`. Owns the steps in flight and the host's blocks."""

    def __init__(
        self,
        runner: StepRunner,
        kv: KVBlocks,
        *,
        host: HostBlocks | None = None,
        faults: FaultPoints | None = None,
        waited: RankSeconds | None = None,
        commit: Callable[[], int] = lambda: 0,
    ) -> None:
        """Make an executor; without `host`, batches that swap fail. `faults` happen before whatever is computed.

        `waited`: how long each rank has waited for the others by now, where there are several. `commit`: commits one
        more page of the pool's memory, and tells how many are left.
        """
        self.max_in_flight = runner.max_in_flight
        self._waited = waited
        self._waited_before = () if waited is None else waited()
        self._runner, self._kv, self._host, self._faults = runner, kv, host, faults
        self._commit = commit
        self._in_flight: deque[BegunStep] = deque()

    def execute(self, batch: Batch, *, graphs: bool = True) -> StepResult:
        """One step, waited for."""
        self.launch(batch, graphs=graphs)
        return self.collect()

    def launch(self, batch: Batch, *, graphs: bool = True) -> None:
        """Begin a step. An item that raises gets `errors[sequence_id]`.

        Raises only what no single item can be blamed for: a failing block copy, a lost device, exhausted host
        memory. The process is then in an unknown state and its owner should end it.
        """
        if len(self._in_flight) == self.max_in_flight:
            raise RuntimeError(f"steps in flight: {self.max_in_flight}, and no more may be; collect one first")
        with self._runner.work():
            if batch.swap_out or batch.swap_in:
                self._host_blocks().swap(batch.swap_out, batch.swap_in, batch.swap_keys)
            if batch.copies:
                self._kv.copy_blocks(batch.copies)
            self._in_flight.append(self._begin(batch, graphs=graphs))

    def collect(self) -> StepResult:
        """The result of the oldest launched step, when it is there."""
        if not self._in_flight:
            raise RuntimeError("no step is launched")
        result = self._in_flight.popleft().result()
        if self._waited is None:
            return result
        before, self._waited_before = self._waited_before, self._waited()
        return replace(result, rank_seconds=tuple(map(sub, self._waited_before, before)))

    def swap_seconds(self) -> float:
        """Measure the seconds that copying a block to the host or back takes; call it before the first step."""
        with self._runner.work():
            return self._host_blocks().seconds_per_block()

    def keep_host_blocks(self, directory: Path, layout: bytes) -> tuple[bytes, ...]:
        """Keep what is swapped out in files; the keys of what the first host blocks have from them."""
        return self._host_blocks().keep_in(directory, layout)

    def forget_host_blocks(self, blocks: Sequence[int]) -> None:
        """Drop the content of these host blocks, from files too."""
        self._host_blocks().forget(blocks)

    def capture_largest(self) -> None:
        self._runner.capture_largest()

    def choose_launches(self) -> None:
        self._runner.choose_launches()

    def capture_graphs(self) -> None:
        """Capture the largest graphs before the first step, and for a while those that steps will likely need."""
        self.capture_largest()
        self.choose_launches()
        left = self.capture_ahead(_CAPTURE_SECONDS)
        if left:
            _log.info("%d graphs of steps are left to be captured, when the server is idle or a step needs them", left)

    def prepare(self) -> int:
        """Capture one graph or commit one page before a step needs it; how many are left. 0 with a step in flight."""
        if self._in_flight:
            return 0
        return self._runner.capture_next() or self._commit()

    def capture_ahead(self, seconds: float) -> int:
        """Capture such graphs until none is left or the time is up; how many are left."""
        end = time.monotonic() + seconds
        while (left := self._runner.capture_next()) and time.monotonic() < end:
            pass
        return left

    def _begin(self, batch: Batch, *, graphs: bool) -> BegunStep:
        if not batch.num_tokens:  # none of them turned out to have a token to compute; others' blocks were swapped
            return Computed(StepResult())
        try:
            self._inject(batch)
            return self._runner.begin(batch, graphs=graphs)
        except Exception as error:
            failure = error
        # Outside of the handler, which would keep the failed step's tensors alive.
        compute = self._runner.in_parts(batch)

        def compute_part(part: Batch, first: int) -> StepResult:
            self._inject(part)
            return compute(part, first)

        return Computed(recover(batch, failure, compute_part, self._runner.release))

    def _inject(self, batch: Batch) -> None:
        if self._faults is not None:
            self._faults.before(batch)

    def _host_blocks(self) -> HostBlocks:
        if self._host is None:
            raise RuntimeError("a block is to be swapped where there are no host blocks")
        return self._host


def runs_by_itself(kernels: KernelSet, device: torch.device) -> bool:
    """Whether the device computes a step beside the host, the choice of tokens included.

    The reference's attention follows the lengths that the host knows, which a graph cannot, and waits for its indices.
    """
    return device.type == "cuda" and kernels.choose is not None and kernels.attention is not REFERENCE.attention


def check_planning_ahead(asked: str, kernels: KernelSet, device: torch.device) -> None:
    """Raises ConfigError if it is asked for where the host is busy until a step's tokens are known."""
    if asked != "on" or runs_by_itself(kernels, device):
        return
    if device.type == "cpu":
        reason = "steps are planned ahead on a GPU only, on CPUs it was slower"
    else:
        reason = f"the {kernels.name} kernels compute no step beside the host"
    raise ConfigError(f"async_scheduling=on: {reason}; set async_scheduling to auto or off")


def spare_blocks(kernels: KernelSet, device: torch.device) -> int:
    """Blocks that the pool has beyond those that are scheduled."""
    return int(runs_by_itself(kernels, device))


def staging_blocks_for(kernels: KernelSet, device: torch.device, bytes_per_block: int, num_host_blocks: int) -> int:
    """Blocks that the pool has behind those for swaps to go through."""
    return staging_blocks(bytes_per_block, num_host_blocks) if runs_by_itself(kernels, device) else 0


def runner_limits(
    kernels: KernelSet, limits: SchedulerLimits, *, max_model_len: int, num_blocks: int, drafts: bool
) -> RunnerLimits:
    """The sizes of a GPU's runner and of every rank that follows it; the arguments are those of `make_executor`."""
    return RunnerLimits(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=limits.block_size,
        spare_block=num_blocks,
        drafted_rows=most_drafted_rows(limits.max_num_seqs) if drafts else 0,
        graphs=kernels.graphs,
        mixed_rows=MOST_MIXED_ROWS if kernels.bounded_attention and kernels.graphs else 0,
    )


def make_executor(
    decoder: ServedModel,
    kernels: KernelSet,
    kv: KVStorage,
    limits: SchedulerLimits,
    *,
    max_model_len: int,
    num_blocks: int,
    device: torch.device,
    ahead: bool = False,
    grammars: Grammars | None = None,
    adapters: AdapterCache | None = None,
    num_host_blocks: int = 0,
    drafts: bool = False,
    faults: Iterable[Fault] = (),
    rows: PoolRows | None = None,
    waited: RankSeconds | None = None,
    others: RankCommands | None = None,
    commit: Callable[[], int] = lambda: 0,
) -> Executor:
    """`num_blocks`: those that are scheduled; `kv` has `spare_blocks` more, and behind those `staging_blocks_for` so
    many host blocks. `ahead`: launch before the last is done. `drafts`: some steps have them.
    `rows`: of the blocks of all ranks, where the pool is that of one. `others`: ranks on devices of their own.
    `waited`, `commit`: as `Executor` has them."""
    placed = None if adapters is None else adapters.placed
    planted = FaultPoints(faults, kv.tensor, limits.block_size) if faults else None
    host: HostBlocks | None = None
    if not runs_by_itself(kernels, device):
        if placed is not None:
            raise ConfigError("enable_lora: adapters of a GPU take kernels that compute a step beside the host")
        host = HostKV(rows or PoolRows(kv.tensor), num_host_blocks) if num_host_blocks else None
        runner = Runner(decoder, kv.tensor, limits.block_size, device, grammars=grammars, adapters=adapters)
        return Executor(runner, kv, host=host, faults=planted, waited=waited, commit=commit)
    cuda = CudaDevice(device)
    gpu_runner = GpuRunner(
        decoder,
        kv.tensor,
        cuda,
        runner_limits(kernels, limits, max_model_len=max_model_len, num_blocks=num_blocks, drafts=drafts),
        max_in_flight=2 if ahead else 1,
        grammars=grammars,
        adapters=placed if isinstance(placed, PlacedAdapters) else None,
        others=others,
    )
    if num_host_blocks:
        with gpu_runner.work():
            host = StreamedKV(kv, cuda, first_staging=num_blocks + 1, num_blocks=num_host_blocks)
    return Executor(gpu_runner, kv, host=host, faults=planted)
