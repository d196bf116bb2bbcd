"""A prompt's vector: what the model's reference says, and the same bits however it was scheduled and by whichever
runner."""

import random

import pytest
import torch

from quire_engine.build import build
from quire_engine.contract.types import NON_FINITE, GenerationRequest, SamplingParams, StopParams
from quire_engine.execution.finishing import MOST_POOLED, pooled_columns
from support.both_runners import NAN, Both
from support.checkpoints import VOCAB_SIZE, make_model, shared_checkpoint
from support.covering import few
from support.limits import engine_config
from support.model_steps import random_ids
from support.offline import generate

MODELS = {  # a checkpoint, and how it is computed
    "float32": ({"family": "qwen3"}, {}),
    "bf16-cpp": ({"family": "qwen3", "dtype": "bfloat16"}, {"kernels": "cpu"}),
    "bf16-windowed": ({"family": "mistral", "sliding_window": 24, "dtype": "bfloat16"}, {"kernels": "reference"}),
    "int8": ({"family": "qwen3", "dtype": "bfloat16"}, {"quantization": "int8"}),
}


def engine(model="float32", **changes):
    checkpoint, computed = MODELS[model]
    settings = {"device": "cpu", "num_threads": 1, "kv_memory": 16 << 20, "enable_prefix_caching": False}
    return build(engine_config(model=str(shared_checkpoint(**checkpoint)), **{**settings, **computed, **changes}))


def pooled(name, prompt, pooling):
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(),
        stop=StopParams(max_new_tokens=0),
        pooling=pooling,
    )


def prompts(count=12, longest=150, seed=0):
    source = random.Random(seed)
    shared = [source.randrange(3, VOCAB_SIZE) for _ in range(40)]
    each = ([source.randrange(3, VOCAB_SIZE) for _ in range(source.randint(1, longest))] for _ in range(count))
    return [(shared + ids if i % 3 == 0 else ids)[:longest] for i, ids in enumerate(each)]


def wanted(**options):
    return [pooled(f"{p}{i}", ids, p) for i, ids in enumerate(prompts(**options)) for p in ("last", "mean")]


def streams(count=4):
    """Who generates beside them."""
    return [
        GenerationRequest(
            request_id=f"g{i}",
            prompt_token_ids=tuple(random_ids(20 + i, seed=i)),
            sampling=SamplingParams(temperature=0.0, num_prompt_logprobs=1 if i == 1 else None),
            stop=StopParams(max_new_tokens=20),
        )
        for i in range(count)
    ]


def vectors(built, requests, **options):
    results = generate(built, requests, **options)
    assert all(result.error is None and result.finish in {"length", "stop"} for result in results.values())
    return {name: result.embedding for (name, _), result in results.items()}


@pytest.fixture(scope="module")
def solo():
    cache = {}

    def run(model):
        if model not in cache:
            built = engine(model)
            cache[model] = {}
            for request in wanted():
                cache[model] |= vectors(built, [request])
        return cache[model]

    return run


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_vectors_are_the_reference_s(family):
    built = build(engine_config(model=str(shared_checkpoint(family)), device="cpu", num_threads=1, kv_memory=16 << 20))
    reference = make_model(family)
    for ids in prompts(count=4):
        with torch.no_grad():
            rows = reference.model(torch.tensor([ids])).last_hidden_state[0].double()
        found = vectors(built, [pooled("last", ids, "last"), pooled("mean", ids, "mean")])
        for name, expected in (("last", rows[-1]), ("mean", rows.mean(dim=0))):
            actual = torch.tensor(found[name], dtype=torch.float64)
            assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-4), f"{name} of {len(ids)} tokens"


@pytest.mark.parametrize("model", few(MODELS, "bf16-windowed"))
def test_batched_and_cut_into_chunks_beside_streams_equals_solo(model, solo):
    built = engine(model, prefill_chunk=16, max_num_batched_tokens=64, max_num_seqs=16, min_chunk=7)
    found = vectors(built, [*wanted(), *streams()])
    assert {name: found[name] for name in solo(model)} == solo(model)
    assert all(found[request.request_id] is None for request in streams())


def test_streams_are_the_same_beside_pooled_prompts():
    alone = generate(engine(), streams())
    beside = generate(engine(prefill_chunk=16), [*wanted(), *streams()])
    assert {key: beside[key] for key in alone} == alone


def test_preempted_equals_solo(solo):
    tight = engine(kv_memory=13 * 16 * 1024, max_num_seqs=8, prefill_chunk=16, max_model_len=160)
    assert tight.plan.scheduler.num_blocks < 30
    results = generate(tight, [*streams(), *wanted()])
    assert sum(result.num_preemptions for (name, _), result in results.items() if name in solo("float32")) > 0
    assert {name: results[name, 0].embedding for name in solo("float32")} == solo("float32")


def test_the_last_row_is_read_behind_a_cached_prefix_and_the_mean_is_not(solo):
    built = engine(enable_prefix_caching=True)
    generate(built, wanted())
    again = generate(built, wanted())
    cached = {name: again[name, 0].num_cached_tokens for name in solo("float32")}
    assert sum(count for name, count in cached.items() if name.startswith("last")) > 100
    assert not any(count for name, count in cached.items() if name.startswith("mean"))
    assert {name: again[name, 0].embedding for name in solo("float32")} == solo("float32")


def test_in_chunks_beside_streams_equals_solo(solo):
    built = engine(prefill_chunk=16)
    found = vectors(built, [*streams(), *wanted()])
    assert {name: found[name] for name in solo("float32")} == solo("float32")


def test_both_runners_pool_the_same_bits():
    both = Both(seed=5)
    both.story.pool(0, random_ids(30, 0), "mean")
    both.story.add(1, random_ids(9, 1), 9, temperature=0.8, seed=-5)
    both.story.pool(2, random_ids(23, 2), "last")
    both.story.add(3, random_ids(12, 2), 3, num_prompt_logprobs=2, num_logprobs=1)
    both.story.pool(4, random_ids(1, 4), "last")
    both.story.pool(5, [5, NAN, 6], "mean")
    both.story.add(6, random_ids(5, 6), 6, logit_bias=((7, 30.0),), num_logprobs=2)
    both.story.add(7, random_ids(3, 7), 4, forks=(8, 9))
    both.story.run()
    results = [told.result for told in both.story.steps]
    assert results[0].errors == {5: NON_FINITE}
    assert sum(len(result.pooled) for result in results) == 3 + 1 + 1
    both.check()


def test_a_step_of_forks_and_pooled_rows_is_no_step_of_decodes():
    """As many choices as rows, by chance: one row has two choices, another none."""
    both = Both(seed=6)
    both.story.add(0, random_ids(1, 0), 4, forks=(1,))
    both.story.pool(2, random_ids(1, 2), "last")
    both.story.run()
    both.check()


def test_sums_are_the_same_in_any_order():
    class Same:
        def normed(self, hidden):
            return hidden.double()

    rows = torch.randn(1000, 24, generator=torch.Generator().manual_seed(0)) * 50
    whole = pooled_columns(Same(), rows)
    for cut in (1, 7, 256, 999):
        parts = [pooled_columns(Same(), part) for part in rows[torch.randperm(1000)].split(cut)]
        assert torch.equal(torch.stack(parts).sum(dim=0), whole)
    assert whole[-1] == 0
    assert torch.allclose(whole[:-1].double() / 2**32, rows.double().sum(dim=0), atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), MOST_POOLED])
def test_values_that_cannot_be_summed_are_counted(value):
    class Same:
        def normed(self, hidden):
            return hidden.double()

    rows = torch.ones(300, 4)
    rows[299, 2] = value
    assert pooled_columns(Same(), rows).tolist()[-1] == 1


def test_a_request_for_a_vector_can_ask_for_nothing_else():
    request = pooled("r", [5, 6], "last")
    for wrong in (
        {"stop": StopParams(max_new_tokens=1)},
        {"n": 2},
        {"sampling": SamplingParams(num_prompt_logprobs=0)},
    ):
        fields = {name: getattr(request, name) for name in ("request_id", "prompt_token_ids", "sampling", "stop")}
        refused = generate(engine(), [GenerationRequest(**{**fields, "pooling": "last", **wrong})])
        assert all("nothing else" in str(result.error) for result in refused.values())
