"""Both runners of one story: the one that is waited for on the reference's kernels, the GPU's on the simulated device.

Promises: models and pools of their own, of the same random weights. Must not know: what the stories are about.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from quire_engine.contract.batch import Batch
from quire_engine.execution.executor import Executor
from quire_engine.execution.gpu.runner import GpuRunner, RunnerLimits
from quire_engine.execution.runner import Runner
from support.checkpoints import shared_checkpoint
from support.columns import Columns, flat
from support.model_steps import Model
from support.simulated_device import SimulatedDevice
from support.simulated_kernels import SIMULATED
from support.step_stories import Story, Told, ahead

NUM_BLOCKS = 60
NAN = 13  # what follows this token is not finite
LIMITS = RunnerLimits(
    max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512, block_size=16, spare_block=NUM_BLOCKS
)


def models() -> tuple[Model, Model]:
    """The reference's model and the simulated device's, with pools of their own."""
    path = shared_checkpoint("qwen3", tie_word_embeddings=False)
    found = tuple(Model(path, num_blocks=NUM_BLOCKS + 1, kernels=kernels) for kernels in (None, SIMULATED))
    for model in found:
        model.decoder._weights.embedding[NAN] = torch.nan
    return found


class Both:
    """Both runners of one story."""

    def __init__(
        self, *, seed: int = 0, chunk: int = 11, mixed_rows: int = 0, graphs: bool = True, **options: Any
    ) -> None:
        """`options` of the GPU's runner; `wrap` puts something before its model; others: see `RunnerLimits`."""
        host, device = models()
        wrap = options.pop("wrap", lambda decoder: decoder)
        self.device = SimulatedDevice()
        limits = replace(LIMITS, mixed_rows=mixed_rows, graphs=graphs)
        self.runner = GpuRunner(wrap(device.decoder), device.kv.tensor, self.device, limits, **options)
        self.executor = Executor(self.runner, device.kv)
        self.story = Story(
            Executor(Runner(host.decoder, host.kv.tensor, 16, torch.device("cpu")), host.kv).execute,
            num_blocks=NUM_BLOCKS,
            chunk=chunk,
            seed=seed,
        )

    def check(self) -> list[int]:
        """Tell the GPU's runner, one step ahead, what was told the other one; the rows of padding in each step."""
        return check(self.executor, self.story.steps)


def check(executor: Executor, steps: list[Told], *, columns: Columns | None = None) -> list[int]:
    """`columns`: makes batches in columns of the story's."""
    padding: list[int] = []
    launched: list[tuple[int, set[int], Batch]] = []

    def collect() -> None:
        number, surplus, batch = launched.pop(0)
        result = flat(batch, executor.collect())
        for sequence_id in surplus:
            result.samples.pop(sequence_id, None)
            result.errors.pop(sequence_id, None)
            result.non_finite.discard(sequence_id)
        assert result == steps[number].result, f"step {number} differs"
        padding.append(result.num_padding_rows)

    for number, (whole, surplus) in enumerate(ahead(steps)):
        batch = columns.of(whole) if columns is not None else whole
        executor.launch(batch)
        launched.append((number, surplus, batch))
        if len(launched) == executor.max_in_flight:
            collect()
    while launched:
        collect()
    return padding
