"""The head's argmax without logits: the same token as with them."""

import math
import time
from dataclasses import replace

import pytest
import torch

from quire_engine.build import build
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_kernels.cpu.ops import cpu_kernel_set
from quire_kernels.kernel_set import Norm
from support.checkpoints import shared_checkpoint
from support.offline import generate

BF16 = torch.bfloat16


def head(rows: int, width: int, columns: int, *, quantization: str | None = None, threads: int = 2, bias: bool = False):
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    kernels = cpu_kernel_set(threads, quantization)  # type: ignore[arg-type]
    weight = torch.randn(columns, width, generator=generator).to(BF16)
    offsets = torch.randn(columns, generator=generator).to(BF16) - 3 if bias else None
    x = torch.randn(rows, width, generator=generator).to(BF16)
    norm = torch.ones(width, dtype=BF16)
    return kernels, x, norm, weight, offsets


@pytest.mark.parametrize("rows", [1, 2, 5, 17, 64])
@pytest.mark.parametrize("columns", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_argmax_equals_that_of_the_logits(rows, columns, quantization):
    kernels, x, norm, weight, _ = head(rows, 96, columns, quantization=quantization)
    packed = kernels.pack_linear(weight, None)
    ids, finite = kernels.greedy(x, Norm(norm, 1e-6), packed)
    assert ids == kernels.logits(x, Norm(norm, 1e-6), packed).argmax(dim=1).tolist()
    assert all(finite)


def test_padding_never_wins_against_negative_logits():
    kernels, x, norm, weight, offsets = head(9, 32, 70, bias=True)
    packed = kernels.pack_linear(weight * 0.01, offsets - 100)
    ids, finite = kernels.greedy(x, Norm(norm, 1e-6), packed)
    assert ids == kernels.logits(x, Norm(norm, 1e-6), packed).argmax(dim=1).tolist()
    assert all(finite)


@pytest.mark.parametrize("threads", [1, 2])
def test_of_equal_maxima_the_first_column_wins(threads):
    kernels, x, norm, weight, _ = head(7, 64, 500, threads=threads)
    weight = weight[:100].repeat(5, 1)
    ids, _ = kernels.greedy(x, Norm(norm, 1e-6), kernels.pack_linear(weight, None))
    assert max(ids) < 100


def test_of_equal_maxima_the_first_wins_whoever_computes_them_in_whatever_order():
    # The caller comes to the second worker's half from its end, as long as that worker is not awake.
    kernels, x, norm, weight, _ = head(7, 64, 100)
    weight = weight.repeat(60, 1)
    offsets = torch.zeros(6000, dtype=BF16)
    offsets[:3000] = -100
    packed = kernels.pack_linear(weight, offsets)
    for _ in range(20):
        time.sleep(0.002)
        ids, _ = kernels.greedy(x, Norm(norm, 1e-6), packed)
        assert all(3000 <= i < 3100 for i in ids)


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("columns", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_of_the_columns_that_have_a_bit_the_first_greatest_wins(rows, columns, quantization):
    kernels, x, norm, weight, _ = head(rows, 96, columns, quantization=quantization)
    weight[columns // 2 :] = weight[: columns - columns // 2].clone()  # every value twice
    packed = kernels.pack_linear(weight, None)
    logits = kernels.logits(x, Norm(norm, 1e-6), packed)
    dice = torch.Generator().manual_seed(rows + columns)
    for share in (0.0, 0.01, 0.5, 0.99, 1.0):
        may = torch.rand(rows, columns, generator=dice) < share
        ids, finite = kernels.greedy(x, Norm(norm, 1e-6), packed, words_of(may))
        masked = logits.masked_fill(~may, -math.inf)
        assert ids == torch.where(may.any(dim=1), masked.argmax(dim=1), -1).tolist()
        assert all(finite)


def words_of(may):
    words = torch.nn.functional.pad(may, (0, -may.shape[1] % 64)).view(len(may), -1, 64).long()
    return (words << torch.arange(64)).sum(dim=2)


def test_bits_beyond_the_last_column_mean_nothing_and_words_of_another_shape_are_refused():
    kernels, x, norm, weight, offsets = head(3, 32, 70, bias=True)
    packed = kernels.pack_linear(weight * 0.01, offsets - 100)
    every = torch.full((3, 2), -1)
    assert kernels.greedy(x, Norm(norm, 1e-6), packed, every) == kernels.greedy(x, Norm(norm, 1e-6), packed)
    for wrong in (every[:, :1], every.int(), every[:2], torch.full((3, 4), -1)[:, ::2]):
        with pytest.raises(ValueError, match="allowed"):
            kernels.greedy(x, Norm(norm, 1e-6), packed, wrong)


def test_what_is_not_finite_is_told_where_it_has_no_bit():
    kernels, x, norm, weight, _ = head(3, 64, 300)
    weight[131] = math.inf
    allowed = torch.zeros(3, 5, dtype=torch.int64)
    allowed[0, 0] = 1
    ids, finite = kernels.greedy(x, Norm(norm, 1e-6), kernels.pack_linear(weight, None), allowed)
    assert finite == [False] * 3
    assert ids[1:] == [-1, -1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_says_so_alone(value):
    kernels, x, norm, weight, _ = head(6, 64, 300)
    packed = kernels.pack_linear(weight, None)
    expected, _ = kernels.greedy(x, Norm(norm, 1e-6), packed)
    x[2, 5] = value
    ids, finite = kernels.greedy(x, Norm(norm, 1e-6), packed)
    assert finite == [row != 2 for row in range(6)]
    assert [i for row, i in enumerate(ids) if row != 2] == [i for row, i in enumerate(expected) if row != 2]


def test_greedy_requests_get_the_tokens_that_come_with_logprobs():
    built = build(EngineConfig(model=str(shared_checkpoint("qwen3", dtype="bfloat16")), kernels="cpu", num_threads=2))
    plain = [
        GenerationRequest(
            request_id=f"r{i}",
            prompt_token_ids=tuple(range(3 + i, 20 + 3 * i)),
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_new_tokens=20),
            n=1 + i % 2,
        )
        for i in range(8)
    ]
    scored = [replace(r, sampling=replace(r.sampling, num_logprobs=0)) for r in plain]
    fast, slow = generate(built, plain), generate(built, scored)
    assert {key: result.token_ids for key, result in fast.items()} == {key: r.token_ids for key, r in slow.items()}
