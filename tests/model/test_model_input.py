"""A batch as tensors."""

from __future__ import annotations

import dataclasses

import torch

from support.model_steps import batch_of, input_of, scheduled


def test_a_mixed_batch_row_by_row():
    """A whole prompt, a slice across a block border, a decoding sequence and a slice that wants no logits."""
    ids = list(range(100, 130))
    silent = dataclasses.replace(scheduled(ids, [6], 0, 2), wants_sample=False, wants_prompt_logprobs=False)
    batch = batch_of(
        scheduled(ids, [7], 0, 3),
        scheduled(ids, [2, 5, 9, 3], 2, 5, all_logits=False),
        scheduled(ids, [8, 4, 1], 8, 1, all_logits=False),
        silent,
    )
    step = input_of(batch, 4)
    assert step.input_ids.tolist() == [100, 101, 102, 102, 103, 104, 105, 106, 108, 100, 101]
    assert step.positions.tolist() == [0, 1, 2, 2, 3, 4, 5, 6, 8, 0, 1]
    assert step.kv_slots.tolist() == [28, 29, 30, 10, 11, 20, 21, 22, 4, 24, 25]
    assert step.query_starts.tolist() == [0, 3, 8, 9, 11]
    assert step.context_lens.tolist() == [3, 7, 9, 2]
    assert step.block_tables.tolist() == [[7, 0, 0], [2, 5, 0], [8, 4, 1], [6, 0, 0]]
    assert step.sample_rows.tolist() == [0, 1, 2, 7, 8]
    assert step.sampled is not None
    assert step.sampled.positions.tolist() == [0, 1, 2, 6, 8]
    assert step.sampled.kv_slots.tolist() == [28, 29, 30, 22, 4]
    assert step.sampled.query_starts.tolist() == [0, 3, 4, 5, 5]
    assert (step.sampled.query_lens, step.sampled.max_query_len) == ((3, 1, 1, 0), 3)
    assert (step.sampled.kv_lens, step.sampled.max_context_len) == ((3, 7, 9, 2), 9)
    assert step.query_lens == (3, 5, 1, 2)
    assert step.kv_lens == (3, 7, 9, 2)
    assert (step.max_query_len, step.max_context_len) == (5, 9)


def test_types_are_what_the_ops_take():
    step = input_of(batch_of(scheduled([1, 2], [0], 0, 2)), 16)
    assert step.sampled is None  # all rows are asked for
    wide = (step.input_ids, step.positions, step.kv_slots, step.sample_rows)
    narrow = (step.query_starts, step.context_lens, step.block_tables)
    assert {tensor.dtype for tensor in wide} == {torch.int64}
    assert {tensor.dtype for tensor in narrow} == {torch.int32}


def test_a_batch_that_wants_no_logits_has_no_sample_rows():
    item = dataclasses.replace(scheduled([1, 2], [0], 0, 2), wants_sample=False, wants_prompt_logprobs=False)
    step = input_of(batch_of(item), 16)
    assert step.sample_rows.shape == (0,)
    assert step.sampled is not None
    assert step.sampled.query_lens == (0,)
