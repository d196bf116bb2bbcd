"""How many bytes the KV pool may take on a device, before the weights are loaded and after.

On a GPU the largest step's memory is estimated, then found by running such a step.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Protocol

import torch

from quire_engine.contract.batch import Batch, ScheduledSequence
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.drafts import most_drafted_rows
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.kv_groups import KVLayout
from quire_engine.contract.types import SamplingParams, StopParams
from quire_engine.execution.adapters import AdapterCache, adapter_scratch
from quire_engine.execution.executor import Executor, make_executor, runs_by_itself, spare_blocks
from quire_engine.execution.gpu.graphs import GRAPH_BYTES, MOST_GRAPHS, MOST_MIXED_ROWS
from quire_engine.execution.kv.kv_storage import KVStorage, block_bytes
from quire_engine.execution.models.served import ModelFacts, ServedModel
from quire_engine.execution.runner import LOGITS_BYTES
from quire_engine.machine import available_memory
from quire_engine.memory_plan import PoolSize, bytes_text, cpu_pool_bytes, gpu_pool_bytes
from quire_kernels.kernel_set import KernelSet

_log = logging.getLogger(__name__)


class PoolMemory(Protocol):
    """The memory of one kind of device, for one model and configuration."""

    max_useful_seqs: int | None  # more sequences of full length than these are not worth memory; None: any are

    def before_load(self, weights_bytes: int) -> int:
        """Bytes for the pool, as planned before the weights are loaded. Raises ConfigError."""
        ...

    def positions(self, planned: PoolSize) -> int:
        """The longest sequence that the model must be prepared for; `planned` is the pool that `before_load` gave."""
        ...

    def after_load(self, decoder: ServedModel, adapters: AdapterCache | None = None) -> int | None:
        """Bytes for the pool beside the loaded weights; None: those planned before. Raises ConfigError."""
        ...


def pool_memory(
    asked: EngineConfig,
    model: ModelFacts,
    kernels: KernelSet,
    *,
    dtype: torch.dtype,
    device: torch.device,
    layout: KVLayout | None = None,
    staging_bytes: int = 0,
) -> PoolMemory:
    """The memory of `device`; `staging_bytes` of a GPU's memory are for swaps. `layout`: of the pool of one rank."""
    if device.type == "cpu":
        return CpuMemory(asked)
    return GpuMemory(asked, model, kernels, dtype=dtype, device=device, layout=layout, staging_bytes=staging_bytes)


class CpuMemory:
    """See `PoolMemory`. The size is decided before the load, since the weights take what was counted.

    Other processes use the machine too: the default is a share of the free memory, and never more than the running
    sequences can fill.
    """

    def __init__(self, asked: EngineConfig) -> None:
        self._kv_memory = asked.kv_memory
        self._replicas = asked.replicas
        self.max_useful_seqs = asked.limits.max_num_seqs if asked.kv_memory is None else None

    def before_load(self, weights_bytes: int) -> int:
        available = available_memory()
        if weights_bytes >= available:
            raise ConfigError(
                f"the weights need {bytes_text(weights_bytes)} of memory and {bytes_text(available)} are available;"
                " set dtype to bfloat16 or use a smaller model"
            )
        return cpu_pool_bytes(available - weights_bytes, self._kv_memory, self._replicas)

    def positions(self, planned: PoolSize) -> int:
        return planned.max_model_len

    def after_load(self, decoder: ServedModel, adapters: AdapterCache | None = None) -> None:
        del decoder, adapters


class GpuMemory:
    """See `PoolMemory`. After the load the pool gets what is left beside the measured peak of the largest step.

    Of several ranks all have as much as this one, and measure at the same time, since they compute together.
    """

    max_useful_seqs: int | None = None  # the GPU serves nothing else, and cached prefixes fill what sequences leave

    def __init__(
        self,
        asked: EngineConfig,
        model: ModelFacts,
        kernels: KernelSet,
        *,
        dtype: torch.dtype,
        device: torch.device,
        layout: KVLayout | None = None,
        staging_bytes: int = 0,
    ) -> None:
        self._layout, self._staging_bytes = layout, staging_bytes
        # The pool's size, and with it the longest sequence, is known only when a step has been measured.
        self._asked = replace(asked, max_model_len=asked.max_model_len or model.max_position_embeddings)
        self._model = model
        self._kernels = kernels
        self._dtype = dtype
        self._device = device

    def before_load(self, weights_bytes: int) -> int:
        scratch = adapter_scratch(self._asked, self._model, self._kernels)
        return self._pool_bytes(weights_bytes, scratch + estimate_workspace(self._model, self._kernels, self._asked))

    def positions(self, planned: PoolSize) -> int:
        """The measured pool may hold a longer one than the planned."""
        del planned
        return self._asked.max_model_len or self._model.max_position_embeddings

    def after_load(self, decoder: ServedModel, adapters: AdapterCache | None = None) -> int:
        workspace = measure_workspace(
            decoder,
            self._kernels,
            self._asked,
            dtype=self._dtype,
            device=self._device,
            layout=self._layout,
            adapters=adapters,
        )
        workspace += adapter_scratch(self._asked, self._model, self._kernels)
        _log.info("a step takes up to %s of GPU memory beside the weights", bytes_text(workspace))
        return self._pool_bytes(0, workspace)

    def _pool_bytes(self, weights_to_come: int, workspace: int) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        ranks = self._asked.tensor_parallel_size
        return gpu_pool_bytes(
            total=ranks * total,
            free=ranks * (free - weights_to_come),
            utilization=self._asked.gpu_memory_utilization,
            workspace=ranks * workspace + self._staging_bytes,
            kv_memory=self._asked.kv_memory,
        )


def estimate_workspace(model: ModelFacts, kernels: KernelSet, config: EngineConfig) -> int:
    """Bytes: a step's widest activations in float32 a few times over, the logits with the sampler's copies, scratch,
    graphs.
    """
    scratch, rows = 0, config.limits.max_num_seqs
    if config.speculation != "off":
        rows = most_drafted_rows(rows)
    if kernels.attention_scratch is not None:
        length = config.max_model_len or model.max_position_embeddings
        scratch = kernels.attention_scratch(rows, length, model.num_heads, model.head_dim)
    width = (
        model.hidden_size + 2 * model.intermediate_size + (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    )
    graphs = 0
    if kernels.choose is not None:  # the largest graphs' own logits and activations, and what every graph takes
        graphs = 2 * 4 * rows * (model.vocab_size + width) + MOST_GRAPHS * GRAPH_BYTES
        graphs += 4 * MOST_MIXED_ROWS * width if kernels.bounded_attention else 0
    return 4 * config.limits.max_num_batched_tokens * width * 4 + 8 * LOGITS_BYTES + scratch + graphs


def measure_workspace(
    decoder: ServedModel,
    kernels: KernelSet,
    config: EngineConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    layout: KVLayout | None = None,
    adapters: AdapterCache | None = None,
) -> int:
    """Bytes beside weights, pool and adapters, at the peak of steps of the limits. max_model_len must be set.

    With what the executor that will serve keeps on the device, its graphs among it. Leaves nothing allocated.
    `layout`: of the pool; None: all of the model's layers and heads.
    """
    spare, block_size = spare_blocks(kernels, device), config.limits.block_size
    kv = KVStorage(kernels, decoder.config, 1 + spare, block_size, dtype, device, layout=layout)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    executor = make_executor(
        decoder,
        kernels,
        kv,
        config.limits,
        max_model_len=config.max_model_len or 1,
        num_blocks=1,
        device=device,
        drafts=config.speculation != "off",
        adapters=adapters,
    )
    for batch in largest_batches(config):
        result = executor.execute(batch, graphs=False)
        if result.errors or result.starved:
            failure = next(iter(result.errors.values()), "the device has no memory for one sequence alone")
            raise RuntimeError(f"the model failed on a batch of the configured size: {failure}")
    graphs = _measure_graphs(executor, device) if runs_by_itself(kernels, device) else 0
    peak = torch.cuda.max_memory_allocated(device) - before
    del kv, executor
    torch.cuda.empty_cache()
    return peak + graphs + spare * block_bytes(kernels, decoder.config, block_size, dtype, layout)


def _measure_graphs(executor: Executor, device: torch.device) -> int:
    """Bytes of the largest graphs, whose pool has room for all others, and a reserve for each graph's own memory.

    Asked of the driver: what it keeps of a graph is not in torch's books.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    executor.capture_largest()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # of the eager step before the capture: the graph's own memory stays
    left, _ = torch.cuda.mem_get_info(device)
    return max(0, free - left) + MOST_GRAPHS * GRAPH_BYTES


def largest_batches(config: EngineConfig) -> tuple[Batch, Batch]:
    """Prompt chunks and decodes at the end of full contexts, up to every limit, all sampled the costly way.

    The first has the largest chunks, which may leave no room for decodes; the second all the decodes that one step can
    hold, for what attention keeps of each, and chunks in what they leave. Every sequence lives in block 0 of a pool of
    one block: the values are meaningless, the shapes are real.
    """
    limits = config.limits
    chunks = _chunk_sizes(config, limits.max_num_batched_tokens, limits.max_num_seqs)
    left = limits.max_num_batched_tokens - sum(chunks)
    decodes = [1] * min(limits.max_num_batched_tokens, limits.max_num_seqs)
    if len(decodes) > 1:
        decodes.pop()  # the place of a prompt
    beside = _chunk_sizes(config, limits.max_num_batched_tokens - len(decodes), limits.max_num_seqs - len(decodes))
    return (
        _batch(config, [*chunks, *[1] * min(left, limits.max_num_seqs - len(chunks))]),
        _batch(config, [*beside, *decodes]),
    )


def _chunk_sizes(config: EngineConfig, num_tokens: int, num_sequences: int) -> list[int]:
    """The largest chunks of prompts that a step with room for so many tokens and sequences may compute."""
    limits = config.limits
    sizes: list[int] = []
    for _ in range(min(limits.max_num_partial_prefills, num_sequences)):
        sizes.append(min(limits.prefill_chunk, config.max_model_len or 1, num_tokens - sum(sizes)))
        if sum(sizes) >= num_tokens:
            break
    return [size for size in sizes if size]


def _batch(config: EngineConfig, sizes: list[int]) -> Batch:
    """The last tokens of full contexts, so many of each sequence."""
    limits, length = config.limits, config.max_model_len or 1
    prompt = (0,) * length
    blocks = (0,) * limits.num_blocks_for(length)
    sampling = SamplingParams(top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, num_logprobs=20)
    items = tuple(
        ScheduledSequence(
            sequence_id=i,
            choice=0,
            prompt_token_ids=prompt,
            output_token_ids=(),
            token_ids=prompt[:size],
            start=length - size,
            block_ids=blocks,
            wants_sample=True,
            wants_prompt_logprobs=False,
            forks=(),
            sampling=sampling,
            stop=StopParams(max_new_tokens=1),
        )
        for i, size in enumerate(sizes)
    )
    return Batch(step_id=0, items=items, num_tokens=sum(sizes))
