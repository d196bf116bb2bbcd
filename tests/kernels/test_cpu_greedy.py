"""The head's argmax without logits: the same token as with them."""

import math
import time
from dataclasses import replace

import pytest
import torch

from quire_engine.build import build
from quire_engine.config import EngineConfig
from quire_engine.types import GenerationRequest, SamplingParams, StopParams
from quire_kernels.cpu.ops import cpu_kernel_set
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
    ids, finite = kernels.greedy(x, norm, 1e-6, packed)
    assert ids == kernels.logits(x, norm, 1e-6, packed).argmax(dim=1).tolist()
    assert all(finite)


def test_padding_never_wins_against_negative_logits():
    kernels, x, norm, weight, offsets = head(9, 32, 70, bias=True)
    packed = kernels.pack_linear(weight * 0.01, offsets - 100)
    ids, finite = kernels.greedy(x, norm, 1e-6, packed)
    assert ids == kernels.logits(x, norm, 1e-6, packed).argmax(dim=1).tolist()
    assert all(finite)


@pytest.mark.parametrize("threads", [1, 2])
def test_of_equal_maxima_the_first_column_wins(threads):
    kernels, x, norm, weight, _ = head(7, 64, 500, threads=threads)
    weight = weight[:100].repeat(5, 1)
    ids, _ = kernels.greedy(x, norm, 1e-6, kernels.pack_linear(weight, None))
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
        ids, _ = kernels.greedy(x, norm, 1e-6, packed)
        assert all(3000 <= i < 3100 for i in ids)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_says_so_alone(value):
    kernels, x, norm, weight, _ = head(6, 64, 300)
    packed = kernels.pack_linear(weight, None)
    expected, _ = kernels.greedy(x, norm, 1e-6, packed)
    x[2, 5] = value
    ids, finite = kernels.greedy(x, norm, 1e-6, packed)
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
