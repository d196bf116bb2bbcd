"""Whole steps, by the engine in this process: decode by batch size, prefill by length, many requests to their end.

Promises: times are what the engine's owner sees, planning included; nothing is cached between prompts.
Must not know: limits, how results are shown.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import cast

import torch

from quire_engine.contract.config import Device, EngineConfig, KernelChoice
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.plan import EnginePlan, TokenCost
from quire_engine.contract.types import GenerationRequest, SamplingParams, StepOutput, StopParams
from quire_engine.engine import Engine, StepExecutor
from quire_engine.execution.executor import Executor
from quire_engine.execution.kv.kv_storage import KVStorage
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.models.weights import load_decoder
from quire_engine.execution.runner import Runner
from quire_engine.scheduling.scheduler import Scheduler
from quire_kernels.kernel_set import KVFormat
from quire_kernels.select import select

_SETTLING = 8  # steps of a batch before its time counts: graphs are captured, the pipeline fills


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """What is measured."""

    batches: tuple[int, ...]
    context: int  # tokens of the prompts that decode
    steps: int
    prefills: tuple[int, ...]
    requests: int  # of the last part
    lengths: tuple[int, int]  # of their prompts and of their answers, drawn between
    repeat: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTime:
    """A step in which every sequence advances by a token; the median."""

    executor: str
    batch: int
    seconds: float
    num_bytes: int  # that it must read: weights once, keys and values of all contexts


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTime:
    """A prompt alone, from its submission to its first token; the best."""

    tokens: int
    seconds: float
    operations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """All requests at once, to their end."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float


def engine_config(path: Path, device: str, sizes: StepSizes, kernels: KernelChoice = "auto") -> EngineConfig:
    """For one model. Prompts are computed whole, as many together as the longest one has tokens."""
    most, budget = max(sizes.batches), _budget(sizes)
    answers = max(_answer(sizes, batch) for batch in sizes.batches)
    longest = max(max(sizes.prefills) + 1, sizes.context + answers, 2 * sizes.lengths[1])
    limits = SchedulerLimits(
        max_num_seqs=most,
        max_num_batched_tokens=budget,
        prefill_chunk=max(sizes.prefills),
        max_num_partial_prefills=most,
        enable_prefix_caching=False,
        itl_target=0.0,
    )
    return EngineConfig(
        model=str(path), device=cast(Device, device), kernels=kernels, max_model_len=longest, limits=limits
    )


def _budget(sizes: StepSizes) -> int:
    return max(*sizes.prefills, *sizes.batches) + 64


def _answer(sizes: StepSizes, batch: int) -> int:
    """Tokens of each answer, so that all sequences decode together for long enough once the last prompt is in."""
    return _SETTLING + sizes.steps + 2 * -(-batch * sizes.context // _budget(sizes)) + 4


def eager(config: EngineConfig, plan: EnginePlan) -> StepExecutor:
    """The executor that launches kernel by kernel and waits for every step, with weights and a pool of its own."""
    path, device = Path(config.model), torch.device(plan.machine.device)
    model, dtype, block_size = load_model_config(path), getattr(torch, plan.model.dtype), config.limits.block_size
    kernels = select(device, dtype, config.kernels, kv=KVFormat(head_dim=model.head_dim, block_size=block_size))
    decoder = load_decoder(
        path, model, kernels=kernels, dtype=dtype, device=device, max_model_len=plan.scheduler.max_model_len
    )
    kv = KVStorage(kernels, model, plan.scheduler.num_blocks, block_size, dtype, device)
    return Executor(Runner(decoder, kv.tensor, block_size, device), kv)


class StepBench:
    """One executor, measured in parts. It gets one scheduler: sequences' ids are never used again."""

    def __init__(self, plan: EnginePlan, executor: StepExecutor, sizes: StepSizes, tell: Callable[[str], None]) -> None:
        self._plan, self._executor, self._sizes, self._tell = plan, executor, sizes, tell
        self._scheduler = Scheduler(plan.scheduler)
        self._random = random.Random(0)

    def decodes(self, name: str) -> list[DecodeTime]:
        return [self._decode(name, batch) for batch in self._sizes.batches]

    def _decode(self, name: str, batch: int) -> DecodeTime:
        self._tell(f"decode, {name}, {batch} sequences")
        context, answer, ends = self._sizes.context, _answer(self._sizes, batch), list[float]()

        def note(step: StepOutput) -> None:
            if step.stats.decode_tokens == batch and step.stats.prefill_tokens == 0:
                ends.append(time.perf_counter())

        self._run([self._request(i, context, answer) for i in range(batch)], note)
        gaps = [after - before for before, after in pairwise(ends)][_SETTLING:]
        if not gaps:
            raise RuntimeError(f"{batch} sequences never decoded together: the pool holds fewer of them")
        block_size = self._plan.scheduler.limits.block_size
        held = batch * (context + answer // 2)
        return DecodeTime(
            executor=name,
            batch=batch,
            seconds=statistics.median(gaps),
            num_bytes=self._plan.cost.weights_read_bytes + held * self._plan.pool.bytes_per_block // block_size,
        )

    def prefills(self) -> list[PrefillTime]:
        found = []
        for length in self._sizes.prefills:
            self._tell(f"prefill, {length} tokens")
            runs = [self._run([self._request(i, length, 1)], _ignore) for i in range(self._sizes.repeat + 1)]
            operations = prompt_operations(self._plan.cost, length)
            found.append(PrefillTime(tokens=length, seconds=min(runs[1:]), operations=operations))
        return found

    def throughput(self) -> Throughput:
        """Lengths drawn evenly; the first run compiles and captures, the second counts."""
        low, high = self._sizes.lengths
        draw = self._random.randint
        lengths = [(draw(low, high), draw(low, high)) for _ in range(self._sizes.requests)]
        seconds = 0.0
        for what in ("warm-up", "measured"):
            self._tell(f"{len(lengths)} requests at once, {what}")
            seconds = self._run([self._request(i, *both) for i, both in enumerate(lengths)], _ignore)
        return Throughput(
            requests=len(lengths),
            prompt_tokens=sum(prompt for prompt, _ in lengths),
            output_tokens=sum(answer for _, answer in lengths),
            seconds=seconds,
        )

    def _request(self, number: int, prompt: int, answer: int) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"{number:032x}",
            prompt_token_ids=tuple(self._random.choices(range(self._plan.model.vocab_size), k=prompt)),
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_new_tokens=answer),
        )

    def _run(self, requests: Sequence[GenerationRequest], on_step: Callable[[StepOutput], None]) -> float:
        """Seconds from the first submission to the last token. RuntimeError where a request fails."""
        failed: list[str] = []

        def take(step: StepOutput) -> None:
            on_step(step)
            failed.extend(output.error for output in step.outputs if output.error is not None)

        engine = Engine(self._scheduler, self._executor)
        engine.on_step = take
        started = time.perf_counter()
        for request in requests:
            engine.submit(request)
        while engine.has_work:
            engine.step()
        seconds = time.perf_counter() - started
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed, the first with: {failed[0]}")
        return seconds


def prompt_operations(cost: TokenCost, tokens: int) -> int:
    """Of one prompt alone: every token through the layers, the last one through the head."""
    looked_at = tokens * (tokens + 1) // 2
    products = tokens * cost.layer_parameters + cost.sampled_parameters
    return 2 * products + 4 * (looked_at * cost.layer_attention + tokens * cost.sampled_attention)


def _ignore(_: StepOutput) -> None:
    pass
