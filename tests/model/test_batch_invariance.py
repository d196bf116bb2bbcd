"""On a CPU, bit for bit: however a sequence is cut, cached and batched, its logits are the same."""

from __future__ import annotations

import random

import pytest
import torch

from support.checkpoints import make_checkpoint, shared_checkpoint
from support.covering import few
from support.model_steps import Model, random_ids, scheduled

LENGTH = 150
VARIANTS = {
    "float32": ("qwen3", torch.float32, {}),
    "bfloat16": ("qwen2", torch.bfloat16, {}),
    "float16 window": ("mistral", torch.float16, {"sliding_window": 37}),
    "bfloat16 dynamic rope": (
        "llama",
        torch.bfloat16,
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            "max_position_embeddings": 64,
            "num_key_value_heads": 4,
        },
    ),
}


@pytest.fixture(scope="module", params=few(VARIANTS, "float16 window", "bfloat16 dynamic rope"))
def model(request, tmp_path_factory) -> Model:
    family, dtype, options = VARIANTS[request.param]
    path = make_checkpoint(tmp_path_factory.mktemp(family), family, dtype=str(dtype).removeprefix("torch."), **options)
    return Model(path, dtype=dtype, num_blocks=500)


@pytest.mark.parametrize(
    "chunks", [(1, 5, 16, 47), pytest.param((2, 3, 8, 15, 17, 31, 32, 63, 64), marks=pytest.mark.matrix)], ids=str
)
def test_every_chunking_gives_the_same_logits(model, chunks):
    token_ids = random_ids(LENGTH)
    whole = model.logits(token_ids)
    for chunk in chunks:
        assert torch.equal(model.logits(token_ids, chunk, seed=chunk), whole), f"chunks of {chunk}"


@pytest.mark.parametrize("count", [12, pytest.param(32, marks=pytest.mark.matrix)])
def test_sequences_together_are_sequences_alone(model, count):
    """Mixed steps: sequences join at different steps, take slices of random sizes, and decode along the way."""
    source = random.Random(0)
    sequences = [random_ids(source.randint(1, 120), seed=i) for i in range(count)]
    alone = [model.logits(ids, seed=i) for i, ids in enumerate(sequences)]
    model.kv.tensor.fill_(float("nan"))
    pool = model.blocks(seed=99)
    tables = [pool.take(len(ids)) for ids in sequences]
    done, results, step = [0] * count, [[] for _ in range(count)], 0
    while any(done[i] < len(ids) for i, ids in enumerate(sequences)):
        step += 1
        items, indices = [], []
        for i, ids in enumerate(sequences[: step * 4]):
            if left := len(ids) - done[i]:
                rows = min(left, source.choice((1, 1, 2, 7, 16, 33)))
                items.append(scheduled(ids, tables[i], done[i], rows))
                indices.append(i)
                done[i] += rows
        order = list(range(len(items)))
        source.shuffle(order)
        for at, logits in zip(order, model.step(*(items[at] for at in order)), strict=True):
            results[indices[at]].append(logits)
    for i, expected in enumerate(alone):
        assert torch.equal(torch.cat(results[i]), expected), f"sequence {i}"


def test_a_shared_prefix_gives_the_same_logits(model):
    """Two sequences whose first blocks are the same memory, one of them computed by the other."""
    prefix, tails = random_ids(64), (random_ids(50, seed=1), random_ids(37, seed=2))
    expected = [model.logits(prefix + tail)[64:] for tail in tails]
    model.kv.tensor.fill_(float("nan"))
    pool = model.blocks(seed=3)
    shared = pool.take(64)
    model.step(scheduled(prefix, shared, 0, 64))
    items = [scheduled(prefix + tail, shared + pool.take(len(tail)), 64, len(tail)) for tail in tails]
    for result, wanted in zip(model.step(*items), expected, strict=True):
        assert torch.equal(result, wanted)


def test_unused_slots_may_hold_anything(model):
    token_ids = random_ids(70)
    model.kv.tensor.zero_()
    clean = model.logits(token_ids, 20)
    for poison in (float("nan"), float("inf"), -6e4):
        model.kv.tensor.fill_(poison)
        assert torch.equal(model.logits(token_ids, 20), clean), poison


def test_a_copied_block_serves_as_the_original(model):
    token_ids = random_ids(40)
    expected = model.logits(token_ids)[32:]
    pool = model.blocks()
    blocks, copies = pool.take(40), pool.take(40)
    model.step(scheduled(token_ids, blocks, 0, 32))
    model.kv.copy_blocks(list(zip(blocks, copies, strict=True)))
    model.kv.tensor[blocks] = float("nan")
    assert torch.equal(model.step(scheduled(token_ids, copies, 32, 8))[0], expected)


def test_only_the_rows_asked_for_come_back_with_the_same_logits(model):
    token_ids = random_ids(40)
    blocks = model.blocks().take(40)
    every = model.step(scheduled(token_ids, blocks, 0, 40))[0]
    last = model.step(scheduled(token_ids, blocks, 0, 40, all_logits=False))[0]
    assert torch.equal(last, every[-1:])


def test_the_number_of_threads_does_not_matter():
    token_ids = random_ids(LENGTH)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(Model(shared_checkpoint(), dtype=torch.bfloat16).logits(token_ids, 50))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_copies_within_a_chain_read_before_they_write(model):
    kv = model.kv.tensor
    for block in (1, 2, 3):
        kv[block] = block
    model.kv.copy_blocks([(1, 2), (2, 3)])
    assert (kv[2] == 1).all()
    assert (kv[3] == 2).all()
    model.kv.copy_blocks([])
