"""How much memory the largest step takes on a GPU, estimated or found by running it.

Promises: leaves nothing allocated. Must not know: how the pool is sized from the answer.
"""

from __future__ import annotations

import torch

from quire_engine.batch import Batch, ScheduledSequence
from quire_engine.config import EngineConfig
from quire_engine.execution.kv_storage import KVStorage
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.decoder import Decoder
from quire_engine.execution.runner import LOGITS_BYTES, Runner
from quire_engine.types import SamplingParams, StopParams
from quire_kernels.kernel_set import KernelSet


def estimate_workspace(model: ModelConfig, kernels: KernelSet, config: EngineConfig) -> int:
    """Bytes: a step's widest activations in float32 a few times over, the logits with the sampler's copies, scratch."""
    scratch = 0
    if kernels.attention_scratch is not None:
        length = config.max_model_len or model.max_position_embeddings
        scratch = kernels.attention_scratch(config.limits.max_num_seqs, length, model.num_heads, model.head_dim)
    width = (
        model.hidden_size + 2 * model.intermediate_size + (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    )
    return 4 * config.limits.max_num_batched_tokens * width * 4 + 8 * LOGITS_BYTES + scratch


def measure_workspace(
    decoder: Decoder, kernels: KernelSet, config: EngineConfig, *, dtype: torch.dtype, device: torch.device
) -> int:
    """Bytes beside weights and pool, at the peak of steps of `config`'s limits. Its max_model_len must be set."""
    kv = KVStorage(kernels, decoder.config, 1, config.limits.block_size, dtype, device)
    runner = Runner(decoder, kv, config.limits.block_size, device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for batch in largest_batches(config):
        result = runner.execute(batch)
        if result.errors:
            failure = next(iter(result.errors.values()))
            raise RuntimeError(f"the model failed on a batch of the configured size: {failure}")
    peak = torch.cuda.max_memory_allocated(device) - before
    del kv, runner
    torch.cuda.empty_cache()
    return peak


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
