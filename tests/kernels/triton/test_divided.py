"""Products divided among ranks on devices: with `deterministic` every rank has the bits of one rank alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire_engine.contract.kv_groups import one_group
from quire_engine.execution.kv.kv_storage import KVStorage
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.models.weights import load_decoder
from quire_engine.ranks import ALONE, Rank, heads_of_rank
from quire_kernels.divided import divided
from quire_kernels.kernel_set import KernelSet
from quire_kernels.reference.linear import Linear
from quire_kernels.triton import product
from quire_kernels.triton.set import make_triton_set
from quire_kernels.triton.stored_product import StoredLinear
from support.checkpoints import shared_checkpoint
from support.device_ranks import OneOfThem, in_turns, same
from support.guarded import DEVICE
from support.model_steps import Blocks, batch_of, input_of, random_ids, scheduled
from support.quantised import FORMS, make_quantised

pytest.importorskip("transformers")

Make = Callable[[], KernelSet]
LAST = {"wants_prompt_logprobs": False}


def plain() -> KernelSet:
    return make_triton_set(deterministic=True)


def computed(path: Path, make: Make, collective: OneOfThem | None = None) -> list[Tensor]:
    """Hidden states and logits of mixed steps: whole prompts, parts of them, decodes."""
    config, kernels, rank = load_model_config(path), make(), ALONE
    if collective is not None:
        rank, kernels = Rank(collective.rank, collective.size), divided(kernels, collective)
    loaded = {"kernels": kernels, "dtype": torch.bfloat16, "device": DEVICE, "max_model_len": 128}
    decoder = load_decoder(path, config, **loaded, rank=rank)
    layout = one_group(heads_of_rank(config.kv_heads, rank.size))
    kv = KVStorage(kernels, config, 16, 16, torch.bfloat16, DEVICE, layout=layout)
    ids, blocks = random_ids(60, vocab_size=min(200, config.vocab_size)), Blocks(16, 16)
    tables = [blocks.take(45), blocks.take(20)]
    found = []
    for first, second, flags in [((0, 30), (0, 1), {}), ((30, 14), (1, 18), LAST), ((44, 1), (19, 1), LAST)]:
        items = (scheduled(ids[:45], tables[0], *first), scheduled(ids[40:60], tables[1], *second))
        batch = batch_of(*(replace(item, **flags) for item in items))
        hidden = decoder.forward(input_of(batch, 16, DEVICE), kv.tensor)
        found += [hidden.cpu().clone(), decoder.logits(hidden).cpu()]
    return found


def check(path: Path, sizes: tuple[int, ...], make: Make = plain) -> None:
    expected = computed(path, make)
    assert all(each.isfinite().all() for each in expected)
    for size in sizes:
        same(in_turns(size, lambda collective: computed(path, make, collective)), expected)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3", (4,)),  # norms of heads; two heads of keys, each twice where ranks are four
        pytest.param("qwen3", (2,), marks=pytest.mark.sim),  # as below with experts and in int8
        pytest.param("qwen2", (2,), marks=pytest.mark.sim),  # biases
        pytest.param("gemma2", (2,), marks=pytest.mark.sim),  # projections that are normed and then added
        pytest.param("granite", (2,), marks=pytest.mark.sim),  # a scale of what is added
        pytest.param("phi3", (2,), marks=pytest.mark.sim),  # stored in one
        pytest.param("cohere", (2,), marks=pytest.mark.sim),  # attention beside the MLP
        pytest.param("gemma4", (2,), marks=pytest.mark.sim),  # heads of two widths, of which one kind is one head
    ],
)
def test_ranks_have_the_bits_of_one(family, sizes):
    check(shared_checkpoint(family), sizes)


@pytest.mark.parametrize(
    "family",
    [
        "qwen2_moe",  # an expert of all rows, with a gate
        pytest.param("gpt_oss", marks=pytest.mark.sim),  # biases, another activation
        pytest.param("afmoe", marks=pytest.mark.sim),  # a gate of attention, layers without experts
        pytest.param("gemma4_moe", marks=pytest.mark.sim),  # beside an MLP
    ],
)
def test_experts_are_divided_by_columns(family):
    """Each of every rank's, whoever chooses it."""
    check(shared_checkpoint(family), (2,))


@pytest.mark.sim
def test_one_rank_that_gathers_from_itself():
    check(shared_checkpoint("qwen3"), (1,))


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_triton_set(deterministic=True, quantization="int8"),
        pytest.param(lambda: make_triton_set(deterministic=True, quantization="int4"), marks=pytest.mark.sim),
        pytest.param(lambda: make_triton_set(deterministic=True, kv_type="fp8"), marks=pytest.mark.sim),
    ],
    ids=["int8", "int4", "fp8 keys"],
)
def test_ranks_of_other_formats_have_the_bits_of_one(make):
    check(shared_checkpoint("qwen3"), (2,), make)


@pytest.mark.sim
@pytest.mark.parametrize("name", ["gptq", "fp8 by row"])
def test_matrices_are_divided_as_they_are_stored(name, tmp_path):
    check(make_quantised(tmp_path, FORMS[name])[0], (2,))


def test_a_rank_holds_its_own_rows_alone():
    path = shared_checkpoint("qwen3")
    config = load_model_config(path)

    def sizes(collective: OneOfThem) -> list[int]:
        kernels, rank = divided(plain(), collective), Rank(collective.rank, collective.size)
        loaded = {"kernels": kernels, "dtype": torch.bfloat16, "device": DEVICE, "max_model_len": 16}
        weights = load_decoder(path, config, **loaded, rank=rank)._weights
        matrices = [op.weight for op in weights.program if hasattr(op, "weight")] + [weights.head]
        assert all(isinstance(each.weight, Linear | StoredLinear) for each in matrices)
        return [len(each.weight.weight) for each in matrices]

    (alone,), (first, second) = in_turns(1, sizes), in_turns(2, sizes)
    assert [a + b for a, b in zip(first, second, strict=True)] == alone


def test_a_rank_s_tiles_are_those_of_the_whole_matrix(monkeypatch):
    """A matrix of 4,096 rows has tiles of 64 columns, one of 2,048 others: the rank's half has those of the whole."""
    widths = []

    class Kernel:
        def __getitem__(self, _):
            return lambda *_, **constants: widths.append(constants["BLOCK_N"])

    monkeypatch.setattr(product, "product_kernel", Kernel())
    monkeypatch.setattr(product, "gated_product_kernel", Kernel())
    part_of, tiled = plain().part_of, product.TiledProduct()
    half = Linear(torch.zeros(2048, 16, dtype=torch.bfloat16), None)
    for w in (half, part_of(half, 4096)):
        tiled.linear(torch.zeros(3, 16, dtype=torch.bfloat16), w)
    for w in (half, part_of(half, 8192)):
        tiled.gate_up(torch.zeros(3, 16, dtype=torch.bfloat16), w, "silu")
    assert widths == [32, 64, 32, 64]
