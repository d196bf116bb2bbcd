"""Models of transformers' code that several processes compute: the tokens and log-probabilities of one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from model.test_bitwise import mixed_requests
from quire_engine.build import BuiltEngine, build
from quire_engine.contract.types import GenerationRequest
from quire_engine.memory_plan import plan_text
from support.limits import engine_config
from support.offline import generate
from sweep.__main__ import save_random, tiny

# By kind: options of the checkpoint, the heads that one rank holds of it, and what is unusual about it.
ODD = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16, "hidden_size": 48}
KINDS: dict[str, tuple[str, dict[str, int], float]] = {
    "dense": ("gemma2", {}, 1),
    "experts": ("qwen3_moe", {}, 1),
    "odd heads": ("llama", ODD, 2),
    "recurrent": ("qwen3_5_text", {}, 1),
    "experts one by one": ("gpt_oss", {}, 1),
    "latent": ("deepseek_v3", {}, 2),  # of a plain pool
}
VOCABULARY = 120
USUAL = ("odd heads",)  # `make rank-test` takes all
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "bfloat16",
    "model_impl": "transformers",
    "packed_cache": False,
    "kv_memory": 16 << 20,
    "max_model_len": 128,
    "max_num_seqs": 16,
    "num_threads": 2,
}


@cache
def checkpoint(kind: str) -> str:
    model_type, options, _ = KINDS[kind]
    folder = Path(mkdtemp(prefix="quire-fallback-ranks-"))
    save_random(tiny(model_type, **options), folder, torch.bfloat16)
    return str(folder)


def asked(count: int) -> list[GenerationRequest]:
    """Mixed requests, of the tokens that tiny models have, with short answers."""
    return [
        replace(
            each,
            prompt_token_ids=tuple([3 + token % VOCABULARY for token in each.prompt_token_ids]),
            stop=replace(each.stop, max_new_tokens=min(6, each.stop.max_new_tokens)),
        )
        for each in mixed_requests(count, longest=60)
    ]


@contextmanager
def built(kind: str, size: int, **changes: Any) -> Iterator[BuiltEngine]:
    """An engine of so many processes; the test's own runs on all its cores again afterwards."""
    before = os.sched_getaffinity(0)
    settings = {**SETTINGS, "tensor_parallel_size": size, **changes}
    made = build(engine_config(model=checkpoint(kind), **settings))
    try:
        yield made
    finally:
        made.close()
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in USUAL else pytest.mark.matrix) for kind in KINDS]
)
def test_ranks_give_the_tokens_of_one(kind: str) -> None:
    """Mixed steps of prompts in slices, then prefix hits where there are some; choices copy blocks or states."""
    requests = asked(10)
    with built(kind, 1, enable_prefix_caching=False) as one:
        expected = generate(one, requests)
        assert not any(result.error for result in expected.values())
        numerics = one.plan.identity.numerics
    with built(kind, 2, prefill_chunk=16, min_chunk=8) as two:
        assert two.plan.machine.tensor_parallel_size == 2
        assert two.plan.identity.numerics == numerics
        assert two.plan.pool.copies == KINDS[kind][2]
        assert ("each 2 times, since several ranks have all heads" in plan_text(two.plan)) == (KINDS[kind][2] == 2)
        assert generate(two, requests) == expected
        again = generate(two, requests)
        assert again == expected
        hits = sum(result.num_cached_tokens > 0 for result in again.values())
        assert hits == 0 if kind == "recurrent" else hits > len(requests) // 2


@pytest.mark.matrix  # in `make rank-test`; four ranks of a family of ours: test_ranks.py
def test_four_ranks_of_which_two_have_the_same_head() -> None:
    requests = asked(4)
    with built("dense", 1) as one:
        expected = generate(one, requests)
    with built("dense", 4, num_threads=4) as four:
        assert four.plan.pool.copies == 2
        assert "each 2 times, since several ranks have some heads" in plan_text(four.plan)
        assert generate(four, requests) == expected
