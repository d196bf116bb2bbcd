"""A model computed by transformers' code over the paged pool, step by step, as `model_steps.Model` does for ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from quire_engine.build import resolve
from quire_engine.contract.batch import ScheduledSequence
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.kv_groups import one_group
from quire_engine.execution.kv.kv_storage import KVStorage
from quire_engine.execution.loading import Loading
from quire_engine.execution.model_input import lengths, model_input
from quire_engine.execution.progress import tell_nobody
from quire_engine.execution.step_tensors import step_tensors
from support.model_steps import CPU, Blocks, batch_of, scheduled


class FallbackSteps:
    """A loaded model with a pool of its own; `asked` are fields of `EngineConfig`."""

    def __init__(self, path: Path, *, num_blocks: int = 200, max_model_len: int = 256, **asked: object) -> None:
        config = EngineConfig(
            model=str(path), device="cpu", model_impl="transformers", num_threads=2, packed_cache=False
        )
        resolved = resolve(replace(config, **asked))  # type: ignore[arg-type]
        resolved = replace(resolved, layout=one_group(resolved.model.kv_heads))  # as the tables below
        torch.set_num_threads(1)
        self.resolved, self.num_blocks = resolved, num_blocks
        self.block_size = resolved.asked.limits.block_size
        self.model = Loading(resolved.wanted(), None, tell_nobody).load(max_model_len)
        self.kv = KVStorage(resolved.kernels, resolved.model, num_blocks, self.block_size, resolved.dtype, CPU)

    def blocks(self) -> Blocks:
        return Blocks(self.num_blocks, self.block_size)

    def step(self, *items: ScheduledSequence, released: tuple[int, ...] = ()) -> list[torch.Tensor]:
        """The logits that each item asked for."""
        step = step_tensors(
            replace(batch_of(*items), released=released), self.block_size, self.resolved.model.vocab_size
        )
        hidden = self.model.forward(model_input(step, self.block_size, CPU), self.kv.tensor)
        return list(self.model.logits(hidden).split(lengths(step.sampled_starts)))

    def run(self, ids: dict[int, list[int]], schedule: Sequence[Sequence[tuple[int, int]]]) -> dict[int, torch.Tensor]:
        """All logits of every sequence; each step of the schedule has (sequence, tokens)."""
        blocks = self.blocks()
        tables = {sequence: blocks.take(len(tokens)) for sequence, tokens in ids.items()}
        starts = dict.fromkeys(ids, 0)
        found: dict[int, list[torch.Tensor]] = {sequence: [] for sequence in ids}
        for rows in schedule:
            items = [
                replace(scheduled(ids[sequence], tables[sequence], starts[sequence], count), sequence_id=sequence)
                for sequence, count in rows
            ]
            for (sequence, count), logits in zip(rows, self.step(*items), strict=True):
                found[sequence].append(logits)
                starts[sequence] += count
        return {sequence: torch.cat(parts) for sequence, parts in found.items() if parts}
