"""Prefixes that are waited for, and blocks that are copied up to where prompts part: the same bits as alone.

The prompts are those of few families that part at any position, so that most of what they share ends inside of a block.
"""

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from quire_engine.build import build
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from support.checkpoints import VOCAB_SIZE, shared_checkpoint
from support.covering import few
from support.limits import engine_config
from support.offline import generate

BF16 = {"family": "qwen3", "dtype": "bfloat16"}
MODELS = {  # a checkpoint, and how it is computed
    "qwen3": ({"family": "qwen3"}, {}),
    "mistral-windowed": ({"family": "mistral", "sliding_window": 24}, {}),
    "bf16": (BF16, {"kernels": "cpu"}),
    "int8-kv": (BF16, {"kernels": "cpu", "kv_cache_dtype": "int8"}),
}
WAYS = {
    "whole": {},
    "chunked": {"prefill_chunk": 13, "min_chunk": 3},
    "tight": {"kv_memory": 40 * 4096, "max_model_len": 128, "max_num_seqs": 12},
}


def engine(model, **changes):
    checkpoint, computed = MODELS[model]
    settings = {"device": "cpu", "num_threads": 1, "max_num_seqs": 48, "kv_memory": 16 << 20}
    return build(engine_config(model=str(shared_checkpoint(**checkpoint)), **{**settings, **computed, **changes}))


def families(count, seed=0):
    """Two thirds begin as another prompt does, up to anywhere; some come twice, with choices, salts or scores."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(30, 90))] for _ in range(2)]
    requests = []
    for i in range(count):
        start = rng.choice(prompts)
        prompt = (start[: rng.randrange(len(start) + 1)] + [rng.randrange(3, VOCAB_SIZE) for _ in range(40)])[:90]
        prompts.append(prompt[: rng.randrange(1, 91)])
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(2**63),
            num_logprobs=2,
            num_prompt_logprobs=1 if i % 9 == 4 else None,
            repetition_penalty=1.1 if i % 5 == 3 else 1.0,
        )
        requests.append(
            GenerationRequest(
                request_id=f"r{i}",
                prompt_token_ids=tuple(prompts[-1]),
                sampling=sampling,
                stop=StopParams(max_new_tokens=rng.randrange(1, 9)),
                n=rng.choice([1, 1, 1, 2, 3]),
                cache_salt=rng.choice(["", "", "", "other"]),
            )
        )
    return requests


@pytest.fixture(scope="module")
def alone():
    cache = {}

    def run(model):
        if model not in cache:
            requests, results = families(30), {}
            built = engine(model, enable_prefix_caching=False)
            for request in requests:
                results |= generate(built, [request])
            cache[model] = requests, results
        return cache[model]

    return run


@pytest.mark.parametrize(
    ("model", "way"),
    [
        *few((("qwen3", way) for way in WAYS), ("qwen3", "whole")),
        *few(itertools.product(("bf16", "int8-kv", "mistral-windowed"), ("whole", "tight")), ("int8-kv", "tight")),
    ],
)
def test_shared_at_once_equals_solo(model, way, alone):
    requests, results = alone(model)
    built = engine(model, **WAYS[way])
    seen = Counter()

    def watch(batch):
        seen["copies"] += len(batch.copies)
        seen["waits"] += built.scheduler.stats().waiting["prefix"]

    assert generate(built, requests, on_batch=watch) == results
    again = [replace(request, request_id=f"again-{request.request_id}") for request in requests]
    second = generate(built, again, on_batch=watch)
    assert {(name.removeprefix("again-"), choice): result for (name, choice), result in second.items()} == results
    assert seen["copies"] > 10
    assert seen["waits"] > 5
