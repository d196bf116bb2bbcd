"""Faults planted in a real runner's steps: who ends, and that all others get the bits that they get without them."""

from __future__ import annotations

import random

import pytest

from quire_engine.build import BuiltEngine, build
from quire_engine.contract.config import Fault
from quire_engine.contract.types import MODEL_FAILED, NON_FINITE, GenerationRequest, SamplingParams, StopParams
from support.checkpoints import VOCAB_SIZE, shared_checkpoint
from support.limits import engine_config
from support.offline import Generated, generate

SEED, BAD = 666, ("r4", 0)
BF16 = {"family": "qwen3", "dtype": "bfloat16"}
MODELS = {  # a checkpoint, and how it is computed
    "reference": ({"family": "qwen3"}, {}),
    "bf16": (BF16, {"kernels": "cpu"}),
    "int8-kv": (BF16, {"kernels": "cpu", "kv_cache_dtype": "int8"}),
}


def built(model: str, *faults: Fault) -> BuiltEngine:
    checkpoint, computed = MODELS[model]
    settings = {"device": "cpu", "num_threads": 1, "max_num_seqs": 16, "kv_memory": 8 << 20, "faults": faults}
    return build(engine_config(model=str(shared_checkpoint(**checkpoint)), **{**settings, **computed}))


def requests(*, bad: int | None = None) -> list[GenerationRequest]:
    """Nine that run side by side, of which one may have the seed that brings faults; greedy ones and drawn ones."""
    rng = random.Random(5)
    return [
        GenerationRequest(
            request_id=f"r{i}",
            prompt_token_ids=tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(40)),
            sampling=SamplingParams(temperature=float(i % 2), seed=SEED if i == bad else i, num_logprobs=1),
            stop=StopParams(max_new_tokens=12),
        )
        for i in range(9)
    ]


def others(results: dict[tuple[str, int], Generated]) -> dict[tuple[str, int], Generated]:
    return {key: each for key, each in results.items() if key != BAD}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> tuple[str, dict[tuple[str, int], Generated]]:
    """Its name, and what all requests get without a fault."""
    return request.param, generate(built(request.param), requests())


def test_who_makes_steps_raise_ends_alone(model):
    name, golden = model
    results = generate(built(name, Fault(point="step.raise", seed=SEED)), requests(bad=4))
    assert (results[BAD].error or "").startswith(MODEL_FAILED)
    assert others(results) == others(golden)


def test_a_step_that_raises_once_costs_nobody_anything(model):
    name, golden = model
    faults = [Fault(point=point, nth=nth) for nth, point in enumerate(("step.raise", "oom", "alloc.fail"), start=1)]
    assert generate(built(name, *faults, Fault(point="oom", nth=9)), requests()) == golden


def test_who_never_has_memory_fails_alone(model):
    name, golden = model
    results = generate(built(name, Fault(point="alloc.fail", seed=SEED)), requests(bad=4))
    assert "no memory left" in (results[BAD].error or "")
    assert others(results) == others(golden)


def test_blocks_without_numbers_end_one_request_and_are_nobody_elses(model):
    name, golden = model
    spoiled = built(name, Fault(point="step.nan", seed=SEED))
    results = generate(spoiled, requests(bad=4))
    assert results[BAD].error == NON_FINITE
    assert others(results) == others(golden)
    assert generate(spoiled, requests()) == golden  # the same prompts, on the blocks of all of these


def test_blocks_that_lost_their_numbers_once_cost_nobody_anything(model):
    name, golden = model
    assert generate(built(name, Fault(point="step.nan", nth=4)), requests()) == golden
