"""What tests of kernels and models share: devices, steps over a paged pool, a tiny greedy loop.

Promises: block ids are shuffled, so that no test passes because a sequence happens to be contiguous.
Must not know: the scheduler, HTTP.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire_engine.contract.batch import Batch, ScheduledSequence
from quire_engine.contract.types import SamplingParams, StopParams
from quire_engine.execution.kv.kv_storage import KVStorage
from quire_engine.execution.model_input import ModelInput, lengths, model_input
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.models.decoder import Decoder
from quire_engine.execution.models.weights import load_decoder, with_own_head
from quire_engine.execution.step_tensors import step_tensors
from quire_kernels.kernel_set import KernelSet, KVFormat
from quire_kernels.select import select

CPU = torch.device("cpu")
CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)
DEVICES = ("cpu", CUDA)


class Blocks:
    """Hands out blocks of a pool in shuffled order. Block 0 is kept out, so padding points at nobody's block."""

    def __init__(self, num_blocks: int, block_size: int, seed: int = 0) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self._free)

    def take(self, num_tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-num_tokens // self.block_size))]


def scheduled(
    token_ids: Sequence[int], block_ids: Sequence[int], start: int, num_tokens: int, *, all_logits: bool = True
) -> ScheduledSequence:
    """A slice of a sequence that asks for logits of every row, or of its last."""
    return ScheduledSequence(
        sequence_id=0,
        choice=0,
        prompt_token_ids=tuple(token_ids),
        output_token_ids=(),
        token_ids=tuple(token_ids[start : start + num_tokens]),
        start=start,
        block_ids=tuple(block_ids),
        wants_sample=True,
        wants_prompt_logprobs=all_logits,
        forks=(),
        sampling=SamplingParams(),
        stop=StopParams(max_new_tokens=1),
    )


def batch_of(*items: ScheduledSequence) -> Batch:
    return Batch(step_id=0, items=items, num_tokens=sum(item.num_tokens for item in items))


def input_of(batch: Batch, block_size: int, device: torch.device = CPU) -> ModelInput:
    """A batch's rows as tensors, whatever ids they have."""
    return model_input(step_tensors(batch, block_size, sys.maxsize), block_size, device)


def step_at(slots: Sequence[int], positions: Sequence[int], device: torch.device = CPU) -> ModelInput:
    """What rope_write looks at: rows at these positions, whose keys and values go to these slots."""
    step = input_of(batch_of(scheduled([0], [0], 0, 1)), 16, device)
    return replace(step, kv_slots=torch.tensor(slots, device=device), positions=torch.tensor(positions, device=device))


class Model:
    """A loaded decoder with a pool of its own."""

    def __init__(
        self,
        path: Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        block_size: int = 16,
        num_blocks: int = 200,
        max_model_len: int = 512,
        kernels: KernelSet | None = None,
    ) -> None:
        """`kernels`: the reference's where none are given."""
        self.device, self.block_size = torch.device(device), block_size
        config = with_own_head(path, load_model_config(path))
        kernels = kernels or select(
            self.device, dtype, "reference", kv=KVFormat(head_dim=config.head_dim, block_size=block_size)
        )
        self.decoder: Decoder = load_decoder(
            path, config, kernels=kernels, dtype=dtype, device=self.device, max_model_len=max_model_len
        )
        self.kv = KVStorage(kernels, config, num_blocks, block_size, dtype, self.device)
        self.num_blocks = num_blocks

    def blocks(self, seed: int = 0) -> Blocks:
        return Blocks(self.num_blocks, self.block_size, seed)

    def step(self, *items: ScheduledSequence) -> list[torch.Tensor]:
        """Compute one batch; the logits each item asked for, on the CPU."""
        step = step_tensors(batch_of(*items), self.block_size, self.decoder.config.vocab_size)
        rows = model_input(step, self.block_size, self.device)
        logits = self.decoder.logits(self.decoder.forward(rows, self.kv.tensor)).cpu()
        return list(logits.split(lengths(step.sampled_starts)))

    def logits(self, token_ids: Sequence[int], chunk: int | None = None, *, seed: int = 0) -> torch.Tensor:
        """[len(token_ids), V]: a sequence alone, in slices of `chunk` tokens."""
        blocks = self.blocks(seed).take(len(token_ids))
        chunk = chunk or len(token_ids)
        slices = [
            self.step(scheduled(token_ids, blocks, start, min(chunk, len(token_ids) - start)))[0]
            for start in range(0, len(token_ids), chunk)
        ]
        return torch.cat(slices)

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Continue every prompt by `num_tokens`, all in one batch. The first step holds all prompts whole."""
        pool = self.blocks()
        sequences = [(list(prompt), pool.take(len(prompt) + num_tokens)) for prompt in prompts]
        starts = [0] * len(prompts)
        for _ in range(num_tokens):
            items = [
                scheduled(ids, blocks, start, len(ids) - start, all_logits=False)
                for (ids, blocks), start in zip(sequences, starts, strict=True)
            ]
            starts = [len(ids) for ids, _ in sequences]
            for (ids, _), logits in zip(sequences, self.step(*items), strict=True):
                ids.append(int(logits[-1].argmax()))
        return [ids[len(prompt) :] for (ids, _), prompt in zip(sequences, prompts, strict=True)]


def random_ids(num_tokens: int, seed: int = 0, vocab_size: int = 512) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(vocab_size) for _ in range(num_tokens)]
