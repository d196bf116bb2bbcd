"""Measures the quality loss by quantization of a checkpoint: `python -m quire_engine.tools.quality`, in JSON.

Promises: memory holds one model at a time and the reference logits of a bounded set of prompts. Must not know: text.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire_engine.build import Resolved, resolve
from quire_engine.contract.batch import Batch, ScheduledSequence
from quire_engine.contract.config import Device, EngineConfig, KVCacheDType, Quantization
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.kv_groups import one_group
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import SamplingParams, StopParams
from quire_engine.execution.device import resolve_device
from quire_engine.execution.kv.kv_storage import KVStorage
from quire_engine.execution.loading import Loading
from quire_engine.execution.model_input import model_input
from quire_engine.execution.models.checkpoint import fingerprint
from quire_engine.execution.models.served import ModelFacts
from quire_engine.execution.progress import tell_nobody
from quire_engine.execution.proven_paths import asked_paths
from quire_engine.execution.step_tensors import step_tensors
from quire_engine.machine import usable_cores
from quire_engine.quality_store import Quality, store_quality
from quire_engine.tools.json_child import converse
from quire_engine.tools.logit_comparison import Comparison, Prompts, equal_share

_log = logging.getLogger(__name__)
_BLOCK_SIZE = 16
MAX_PROMPT_TOKENS = 256
CONTINUATION_TOKENS = 32
_LOGITS_BYTES = 1 << 30  # memory for the bf16 model's logits
_RANDOM_PROMPTS, _RANDOM_PROMPT_TOKENS = 8, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Quantization of the weights and type of the KV cache."""

    quantization: Quantization | None = None
    kv_cache_dtype: KVCacheDType = "auto"


def measure(
    path: Path,
    variants: Sequence[Variant],
    prompts: Prompts | None,
    *,
    end_token_ids: Sequence[int] = (),
    num_threads: int | None = None,
    device: Device = "cpu",
) -> Iterator[Quality]:
    """The quality of each variant in turn. Without `prompts`, fixed pseudo-random ids are used.

    A continuation ends after one of `end_token_ids`. Raises ConfigError, ModelLoadError.
    """
    threads, ends = num_threads or usable_cores(), frozenset(end_token_ids)
    plain = _resolved(path, Variant(), threads, device)
    config = plain.model
    kind = "random ids" if prompts is None else "text"
    prompts = bounded(random_prompts(config.vocab_size) if prompts is None else prompts, config)
    checkpoint = fingerprint(path)
    reference: list[Tensor] = []
    continued = ask(plain, Variant(), prompts, ends, reference.append)
    for variant in variants:
        comparison = Comparison(prompts, reference)
        resolved = _resolved(path, variant, threads, device)
        found = ask(resolved, variant, prompts, ends, comparison.add)
        shares = [equal_share(ours, theirs) for ours, theirs in zip(continued, found, strict=True)]
        yield Quality(
            checkpoint=checkpoint,
            quantization=variant.quantization,
            kv_cache_dtype=variant.kv_cache_dtype,
            device=resolved.device.type,
            prompts=kind,
            num_positions=comparison.num_positions,
            mean_kl=comparison.mean_kl,
            max_kl=comparison.max_kl,
            greedy_agreement=comparison.greedy_agreement,
            continuation_agreement=sum(shares) / len(shares),
            bf16_perplexity=comparison.reference_perplexity,
            perplexity=comparison.perplexity,
            measured=datetime.now(UTC).date().isoformat(),
        )


def random_prompts(vocab_size: int) -> Prompts:
    """Fixed pseudo-random prompts for a vocabulary of this size."""
    source = random.Random(0)
    return [[source.randrange(vocab_size) for _ in range(_RANDOM_PROMPT_TOKENS)] for _ in range(_RANDOM_PROMPTS)]


def bounded(prompts: Prompts, config: ModelFacts) -> Prompts:
    """The prompts cut to the context length and the memory for logits. Raises ConfigError for unusable prompts."""
    affordable = _LOGITS_BYTES // (4 * config.vocab_size * max(1, len(prompts)))
    longest = max(0, min(MAX_PROMPT_TOKENS, config.max_position_embeddings - CONTINUATION_TOKENS, affordable))
    cut = [list(prompt[:longest]) for prompt in prompts]
    if not cut or any(len(prompt) < 2 for prompt in cut):
        raise ConfigError(f"quality needs prompts of two tokens or more, of at most {longest} for this model")
    beyond = [token for prompt in cut for token in prompt if not 0 <= token < config.vocab_size]
    if beyond:
        raise ConfigError(
            f"the tokenizer is not this model's: token {beyond[0]} is not among its {config.vocab_size} tokens"
        )
    return cut


def _resolved(path: Path, variant: Variant, threads: int, device: Device) -> Resolved:
    """The model with its kernels, not loaded yet. Raises ConfigError, ModelLoadError."""
    config = EngineConfig(
        model=str(path),
        device=device,
        dtype="bfloat16",
        kernels="cpu" if resolve_device(device).type == "cpu" else "auto",
        quantization=variant.quantization,
        kv_cache_dtype=variant.kv_cache_dtype,
        num_threads=threads,
        packed_cache=False,
        limits=SchedulerLimits(block_size=_BLOCK_SIZE),
    )
    resolved = resolve(config, check_kernels=True)
    if left_out := set(asked_paths(config)) - set(asked_paths(resolved.asked)):
        raise ConfigError(f"{', '.join(sorted(left_out))}: left out on this GPU, where its checks failed")
    return resolved


@torch.inference_mode()
def ask(
    resolved: Resolved, variant: Variant, prompts: Prompts, ends: frozenset[int], on_logits: Callable[[Tensor], None]
) -> list[list[int]]:
    """Load the model, pass each prompt's logits to `on_logits`, return the greedy continuations, free the model.

    The logits are [T, V] float32 in host memory, with a row for every token of the prompt.
    """
    _log.info("computing with %s weights and a KV cache of %s", *_names(variant))
    blocks_each = [-(-(len(prompt) + CONTINUATION_TOKENS) // _BLOCK_SIZE) for prompt in prompts]
    config = resolved.model
    resolved = replace(resolved, layout=one_group(config.kv_heads))  # as the tables below
    kv = KVStorage(resolved.kernels, config, sum(blocks_each), _BLOCK_SIZE, torch.bfloat16, resolved.device)
    longest = max(len(prompt) for prompt in prompts) + CONTINUATION_TOKENS
    decoder = Loading(resolved.wanted(), None, tell_nobody).load(longest)

    def compute(*items: ScheduledSequence) -> Tensor:
        batch = Batch(step_id=0, items=items, num_tokens=sum(item.num_tokens for item in items))
        step = step_tensors(batch, _BLOCK_SIZE, config.vocab_size)
        rows = model_input(step, _BLOCK_SIZE, resolved.device)
        return decoder.logits(decoder.forward(rows, kv.tensor)).cpu()

    sequences, first_block = [], 0
    for prompt, num_blocks in zip(prompts, blocks_each, strict=True):
        blocks = range(first_block, first_block + num_blocks)
        first_block += num_blocks
        logits = compute(_slice(prompt, blocks, 0))
        on_logits(logits)
        sequences.append(([*prompt, int(logits[-1].argmax())], blocks))
    for _ in range(CONTINUATION_TOKENS - 1):
        going = [(ids, blocks) for ids, blocks in sequences if ids[-1] not in ends]
        if not going:
            break
        rows = compute(*(_slice(ids, blocks, len(ids) - 1) for ids, blocks in going))
        for (ids, _), token in zip(going, rows.argmax(dim=-1).tolist(), strict=True):
            ids.append(token)
    return [ids[len(prompt) :] for prompt, (ids, _) in zip(prompts, sequences, strict=True)]


def _names(variant: Variant) -> tuple[str, str]:
    kv = variant.kv_cache_dtype
    return variant.quantization or "bf16", "bf16" if kv == "auto" else kv


def _slice(token_ids: Sequence[int], blocks: Sequence[int], start: int) -> ScheduledSequence:
    """The tokens from `start` on, with logits for every row."""
    return ScheduledSequence(
        sequence_id=blocks[0],
        choice=0,
        prompt_token_ids=tuple(token_ids),
        output_token_ids=(),
        token_ids=tuple(token_ids[start:]),
        start=start,
        block_ids=tuple(blocks),
        wants_sample=True,
        wants_prompt_logprobs=True,
        forks=(),
        sampling=SamplingParams(),
        stop=StopParams(max_new_tokens=1),
    )


def answers(questions: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The quality of each variant of a question, stored for later starts. Raises ConfigError, ModelLoadError."""
    for asked in questions:
        found = measure(
            Path(asked["model"]),
            [Variant(**variant) for variant in asked["variants"]],
            asked["prompts"],
            end_token_ids=asked["end_token_ids"],
            num_threads=asked["num_threads"],
            device=asked["device"],
        )
        for quality in found:
            _keep(quality)
            yield asdict(quality)


def _keep(quality: Quality) -> None:
    try:
        store_quality(quality)
    except OSError as error:
        _log.warning("the quality is not kept for later starts: %s", error)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    torch.set_num_threads(1)  # the C++ kernels use their own threads
    sys.exit(converse(answers))
