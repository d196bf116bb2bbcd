"""The kernel set of the simulated device: the reference's results from ops that are launched as a GPU's are.

Promises: attention and the choice of tokens are one operation each, which reads lengths and parameters from device
memory when it is done, and takes from the host only what a launch takes; a launch that was planned for less than the
device finds is an error. Must not know: the runner, graphs.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from quire_engine.contract.types import SamplingParams, StopParams
from quire_engine.execution import distribution, sampler
from quire_engine.execution.logit_rules import SampleRow
from quire_kernels.kernel_set import AttentionInput, AttentionRows, AttentionShape, ChoiceRows, KernelSet
from quire_kernels.reference import REFERENCE
from support.simulated_adapters import ADAPTED


@torch.library.custom_op("quire_tests::attention", mutates_args=())
def attention_op(  # noqa: PLR0917 - what a launch takes
    q: Tensor,
    kv: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    layer: int,
    num_kv_heads: int,
    scale: float,
    window: int,
    longest_query: int,
    longest: int,
) -> Tensor:
    starts, kv_lens = query_starts.tolist(), context_lens.tolist()
    query_lens = [end - start for start, end in pairwise(starts)]
    assert max(query_lens) <= longest_query, "a launch was planned for fewer rows"
    assert max(kv_lens) <= longest <= block_tables.shape[1] * kv.shape[4], "a launch was planned for shorter contexts"
    shape = AttentionShape(
        num_heads=q.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=q.shape[2],
        scale=scale,
        window=window or None,
    )
    step = AttentionRows(
        positions=positions,
        kv_slots=kv_slots,
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=block_tables,
        query_lens=tuple(query_lens),
        kv_lens=tuple(kv_lens),
        max_query_len=max(query_lens),
        max_context_len=max(kv_lens),
    )
    found = REFERENCE.attention(q, shape, kv, layer, step)
    found[starts[-1] :] = torch.nan  # rows of no sequence
    return found


@attention_op.register_fake
def _(q, *_):
    return torch.empty_like(q).flatten(1)


def attention(q: Tensor, shape: AttentionShape, kv: Tensor, layer: int, step: AttentionInput) -> Tensor:
    return attention_op(
        q,
        kv,
        step.positions,
        step.kv_slots,
        step.query_starts,
        step.context_lens,
        step.block_tables,
        layer,
        shape.num_kv_heads,
        shape.scale,
        shape.window or 0,
        step.max_query_len,
        step.max_context_len,
    )


@torch.library.custom_op("quire_tests::choose", mutates_args=())
def choose_op(  # noqa: PLR0917 - what a launch takes
    logits: Tensor,
    logits_rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    choice: Tensor,
    position: Tensor,
    draws: bool,
    limits_k: bool,
    limits_p: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    vocab_size, columns = logits.shape[1], (temperature, top_k, top_p, min_p, seed, choice, position)
    for tensor in (logits_rows, *columns):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0, "a kernel would be compiled once more for this address"
    rows = []
    for t, k, p, least, number, which, at in zip(*(column.tolist() for column in columns), strict=True):
        params = SamplingParams(
            temperature=t,
            top_k=k if draws and limits_k else 0,
            top_p=p if draws and limits_p else 1.0,
            min_p=least if draws else 0.0,
            seed=number,
        )
        assert draws or not t, "a launch was planned without draws"
        assert (params.top_k, params.top_p) == (k, p) or not t or k in {0, vocab_size}, "a launch leaves out a limit"
        rows.append(
            SampleRow(
                sampling=params,
                stop=StopParams(max_new_tokens=1),
                choice=which,
                prompt_token_ids=(),
                output_token_ids=(),
                position=at,
                logits_row=len(rows),
            )
        )
    values = logits.index_select(0, logits_rows)
    if not rows:
        return logits_rows.clone(), *(torch.empty(0, dtype=torch.bool) for _ in range(2))
    ids, possible = sampler._choose(distribution.padded(values), rows)
    return ids.clamp(0, vocab_size - 1), distribution.is_finite(values), possible


@choose_op.register_fake
def _(logits, logits_rows, *_):
    flags = [torch.empty_like(logits_rows, dtype=torch.bool) for _ in range(2)]
    return torch.empty_like(logits_rows), *flags


def choose(logits: Tensor, rows: ChoiceRows) -> tuple[Tensor, Tensor, Tensor]:
    return choose_op(
        logits,
        rows.logits_rows,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seed,
        rows.choice,
        rows.position,
        rows.draws,
        rows.limits_k,
        rows.limits_p,
    )


SIMULATED: KernelSet = replace(
    REFERENCE,
    name="simulated",
    attention=attention,
    choose=choose,
    greedy=None,
    bounded_attention=True,
    adapted=ADAPTED,
)
