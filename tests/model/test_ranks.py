"""Models that several processes compute: the tokens and log-probabilities of one process, to the last bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from model.test_bitwise import CPP, MODELS, mixed_requests
from quire_engine.build import BuiltEngine, build, resolve_plan
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.types import Adapter
from quire_engine.execution.models.adapter import read_adapter
from quire_engine.execution.models.config import load_model_config
from quire_kernels.ranks import RankLost
from support.adapters import write_adapter
from support.checkpoints import shared_checkpoint
from support.limits import engine_config
from support.offline import generate

SETTINGS = {"device": "cpu", "kernels": "cpu", "max_num_seqs": 48, "kv_memory": 16 << 20, "packed_cache": False}
# The first ones differ in how they are divided; `make rank-test` takes all.
USUAL = [("experts-int4", 2)]
ONE_HEAD = ("experts-int4", 4)  # its rows are normed over all heads, and a rank would have one: it is refused
DIVIDED = [
    pytest.param(model, size, marks=[] if (model, size) in USUAL else pytest.mark.matrix)
    for model in CPP
    for size in (2, 4)
    if (model, size) != ONE_HEAD
]


def settings_of(model: str, **changes):  # type: ignore[no-untyped-def]
    checkpoint, computed = MODELS[model]
    path = str(shared_checkpoint(**{"dtype": "bfloat16", **checkpoint}))
    return engine_config(model=path, **{**SETTINGS, **computed, **changes})


@contextmanager
def ranks(model: str, size: int, **changes) -> Iterator[BuiltEngine]:  # type: ignore[no-untyped-def]
    """An engine of so many processes; the test's own runs on all its cores again afterwards."""
    before = os.sched_getaffinity(0)
    built = build(settings_of(model, tensor_parallel_size=size, num_threads=size, **changes))
    try:
        yield built
    finally:
        built.close()
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(("model", "size"), DIVIDED)
def test_ranks_give_the_tokens_of_one_and_a_killed_one_ends_the_step(model: str, size: int) -> None:
    """Mixed steps, then prefix hits, then too small a pool with guessed tokens; several choices copy blocks."""
    requests = mixed_requests(16 if (model, size) in USUAL else 24)
    one = build(settings_of(model, num_threads=2, enable_prefix_caching=False))
    expected = generate(one, requests)
    with ranks(model, size, enable_prefix_caching=True) as built:
        assert built.plan.machine.tensor_parallel_size == size
        assert built.plan.identity.numerics == one.plan.identity.numerics
        assert generate(built, requests) == expected
        again = generate(built, requests)
        assert again == expected
        assert sum(result.num_cached_tokens > 0 for result in again.values()) > len(requests) // 2
        plan = built.plan
        steps = built.scheduler.answer("steps", {"limit": 64})["steps"]  # type: ignore[index]
        assert all(len(step.rank_seconds) == size and min(step.rank_seconds) >= 0 for step in steps)
        assert sum(max(step.rank_seconds) for step in steps) > 0
    most = max(
        plan.scheduler.limits.footprint(num_prompt=len(r.prompt_token_ids), max_new_tokens=r.stop.max_new_tokens, n=r.n)
        for r in requests
    )
    length = max(len(r.prompt_token_ids) + r.stop.max_new_tokens for r in requests)
    tight = {"kv_memory": int(1.2 * most) * plan.pool.bytes_per_block, "max_model_len": length, "speculation": "suffix"}
    resumed = [
        replace(request, resumed_token_ids=(tuple(expected[request.request_id, 0].token_ids[:1]),))
        for request in requests
        if request.n == 1
        and request.sampling.num_prompt_logprobs is None
        and len(expected[request.request_id, 0].token_ids) > 1  # else there is nothing to go on with
    ]
    with ranks(model, size, prefill_chunk=7, min_chunk=3, **tight) as built:
        preempted = generate(built, requests)
        assert preempted == expected
        assert sum(result.num_preemptions for result in preempted.values()) > 3
        for key, after in generate(built, resumed).items():
            assert after.token_ids == expected[key].token_ids[1:]
        assert built.ranks is not None
        os.kill(built.ranks.pids[0], signal.SIGKILL)
        with pytest.raises(RankLost):
            generate(built, requests)


def test_a_model_whose_rows_are_normed_over_all_heads_needs_two_in_a_rank() -> None:
    model, size = ONE_HEAD
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={size}: 4 heads, .* set it to 1 or 2$"):
        resolve_plan(settings_of(model, tensor_parallel_size=size, num_threads=size))


@pytest.mark.matrix  # guessed tokens beside ranks: above; a draft model: test_speculation.py
def test_a_draft_model_beside_ranks_changes_no_token() -> None:
    requests = mixed_requests(8)
    expected = generate(build(settings_of("bf16", num_threads=2)), requests)
    draft = shared_checkpoint("qwen3", num_hidden_layers=1, dtype="bfloat16")
    with ranks("bf16", 2, speculation=f"model:{draft}") as built:
        assert generate(built, requests) == expected


@pytest.mark.matrix  # adapters in one process: test_adapters.py; ranks without: above
def test_adapters_beside_ranks(tmp_path: Path) -> None:
    """Four, of which two are kept: some come and go, and come again."""
    path = shared_checkpoint("qwen3", dtype="bfloat16")
    config = load_model_config(path)
    paths = [write_adapter(tmp_path / f"a{i}", path, seed=i, rank=4 + i) for i in range(4)]
    adapters = [
        Adapter(name=f"a{i}", path=str(each), digest=read_adapter(each, config, max_rank=16).digest)
        for i, each in enumerate(paths)
    ]
    requests = [
        request.bound_to(None if i % 5 == 4 else adapters[i % 5]) for i, request in enumerate(mixed_requests(15))
    ]
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
    expected = generate(build(settings_of("bf16", num_threads=2, **lora)), requests)
    assert len({tuple(result.token_ids) for result in expected.values()}) > 10
    with ranks("bf16", 2, **lora) as built:
        assert generate(built, requests) == expected
        assert generate(built, requests) == expected


def test_the_pool_s_memory_is_that_of_all_ranks() -> None:
    one, two = (resolve_plan(settings_of("bf16", tensor_parallel_size=size, num_threads=2)) for size in (1, 2))
    assert (two.pool.bytes_per_block, two.scheduler) == (one.pool.bytes_per_block, one.scheduler)
    assert (one.machine.num_threads, two.machine.num_threads) == (2, 1)
    four = resolve_plan(settings_of("bf16", tensor_parallel_size=4, num_threads=4))  # two heads of keys, each twice
    assert four.pool.bytes_per_block == 2 * one.pool.bytes_per_block


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tensor_parallel_size": 3},
            "4 heads, and 2 of keys, are not divided among so many ranks; set it to 1, 2 or 4",
        ),
        ({"kernels": "reference"}, "the reference kernels are not divided among ranks; set kernels to cpu"),
        ({"num_threads": 1}, "with num_threads=1 not every rank has one; set tensor_parallel_size to at most 1"),
    ],
)
def test_what_ranks_cannot_serve_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_plan(settings_of("bf16", **{"tensor_parallel_size": 2, "num_threads": 4, **changes}))
    assert message in str(refused.value)
    assert str(refused.value).startswith(f"tensor_parallel_size={changes.get('tensor_parallel_size', 2)}: ")
