"""A request's tokens and log-probabilities are the same to the last bit however it was scheduled.

Solo, batched, chunked, served from the prefix cache and preempted runs of the same requests are compared exactly on
a CPU. A GPU's products depend on the shape of the batch, so there the float32 runs must agree up to rounding.
"""

import random
from dataclasses import replace

import pytest
import torch

from quire_engine.build import build
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from support.checkpoints import VOCAB_SIZE, shared_checkpoint
from support.covering import few
from support.limits import engine_config
from support.offline import generate

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16 = {"family": "qwen3", "dtype": "bfloat16"}
MODELS = {  # a checkpoint, and how it is computed
    "qwen3": ({"family": "qwen3"}, {}),
    "llama": ({"family": "llama", "num_hidden_layers": 1}, {}),
    "mistral-windowed": ({"family": "mistral", "sliding_window": 24}, {}),
    "bf16": (BF16, {"kernels": "cpu"}),
    "bf16-reference": (BF16, {"kernels": "reference"}),
    "bf16-windowed": ({"family": "mistral", "sliding_window": 24, "dtype": "bfloat16"}, {"kernels": "cpu"}),
    "int8": (BF16, {"quantization": "int8"}),
    "int4": (BF16, {"quantization": "int4"}),
    "int8-kv": (BF16, {"kernels": "cpu", "kv_cache_dtype": "int8"}),
    "experts": ({"family": "mixtral"}, {}),
    "experts-bf16": ({"family": "qwen3_moe", "dtype": "bfloat16"}, {"kernels": "cpu"}),
    "experts-int4": ({"family": "olmoe", "dtype": "bfloat16"}, {"quantization": "int4"}),
}
USUAL = ("qwen3", "bf16-windowed", "int8-kv", "experts-int4")  # one of each kind; `make model-matrix` takes all
CPP = ("bf16", "bf16-windowed", "int8", "int4", "int8-kv", "experts-bf16", "experts-int4")  # by the C++ kernels


def engine(model="qwen3", device="cpu", **changes):
    settings = {
        "device": device,
        "num_threads": 1,
        "max_num_seqs": 48,
        "kv_memory": 16 << 20,
        "enable_prefix_caching": False,
    }
    checkpoint, computed = MODELS[model]
    return build(engine_config(model=str(shared_checkpoint(**checkpoint)), **{**settings, **computed, **changes}))


def mixed_requests(count, seed=0, *, longest=90, max_new=12):
    """Greedy and sampled, with and without log-probabilities, penalties and several choices; some share a prefix."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    requests = []
    for i in range(count):
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, longest))]
        if i % 4 == 0:
            prompt = (shared + prompt)[:longest]
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.6, 1.0, 1.5]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 0, 20]),
            min_p=rng.choice([0.0, 0.02]),
            seed=rng.randrange(-(2**63), 2**63),
            repetition_penalty=rng.choice([1.0, 1.1]),
            presence_penalty=rng.choice([0.0, 0.3]),
            num_logprobs=rng.choice([2, 5, 20]),
            num_prompt_logprobs=3 if i % 7 == 3 else None,
        )
        requests.append(
            GenerationRequest(
                request_id=f"r{i}",
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                stop=StopParams(
                    max_new_tokens=rng.randrange(1, max_new + 1), stop_token_ids=tuple(range(2, VOCAB_SIZE, 40))
                ),
                n=rng.choice([1, 1, 1, 2, 3]),
            )
        )
    return requests


def solo(requests, **settings):
    built = engine(**settings)
    results = {}
    for request in requests:
        results |= generate(built, [request])
    return results


@pytest.fixture(scope="module")
def expected():
    """The requests run alone, each in one piece, by model and device."""
    cache = {}

    def run(model, device):
        if (model, device) not in cache:
            requests = mixed_requests(32 if model in ("qwen3", *CPP) else 12)
            cache[model, device] = requests, solo(requests, model=model, device=device)
        return cache[model, device]

    return run


def agree(actual, expected, device):
    """Equality on a CPU. On a GPU the same up to rounding, until a greedy choice between near equals goes the other
    way: from there on the texts are different ones."""
    if device == "cpu":
        return actual == expected
    return actual.keys() == expected.keys() and all(_agree_roughly(actual[key], expected[key]) for key in actual)


def _agree_roughly(actual, expected):
    if actual.error != expected.error:
        return False
    for ours, theirs in zip(actual.logprobs, expected.logprobs, strict=False):
        if ours.token_id != theirs.token_id:
            return theirs.rank == 1 and theirs.top_logprobs[0] - theirs.top_logprobs[1] < 1e-3
        if abs(ours.logprob - theirs.logprob) > 1e-3:
            return False
    return (actual.token_ids, actual.finish) == (expected.token_ids, expected.finish)


def test_the_requests_are_worth_comparing(expected):
    """Distinct outputs of several lengths, none failed, seeds and choices that matter."""
    requests, results = expected("qwen3", "cpu")
    assert {result.finish for result in results.values()} == {"stop", "length"}
    assert sum(result.prompt_logprobs is not None for result in results.values()) >= 4
    several = [request for request in requests if request.n > 1 and request.sampling.temperature > 0.5]
    assert any(results[r.request_id, 0].token_ids != results[r.request_id, 1].token_ids for r in several)
    for request in requests:
        sent = results[request.request_id, 0]
        assert len(sent.logprobs) == len(sent.token_ids) > 0
        reseeded = replace(request, sampling=replace(request.sampling, seed=request.sampling.seed ^ 1))
        if request.sampling.temperature == 1.5 and len(sent.token_ids) > 4:
            assert generate(engine(), [reseeded])[request.request_id, 0].token_ids != sent.token_ids


@pytest.mark.parametrize(
    ("model", "device"),
    [
        *few(((model, "cpu") for model in MODELS), *((model, "cpu") for model in (*USUAL, "int8"))),
        *(pytest.param(m, "cuda", marks=pytest.mark.gpu) for m in ("qwen3", "llama")),
    ],
)
def test_batched_equals_solo(model, device, expected):
    requests, results = expected(model, device)
    widest = 0

    def watch(batch):
        nonlocal widest
        widest = max(widest, len(batch.items))

    # With a target for gaps the width of a batch would follow from how long steps take.
    together = generate(engine(model, device, itl_target=0.0), requests, on_batch=watch)
    assert agree(together, results, device)
    assert widest > len(requests) / 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", few([1, 2, 5, 13, 16, 33, 64], 5, 16, 33))
def test_chunked_equals_solo(chunk, device, expected):
    requests, results = expected("qwen3", device)
    budget = {"prefill_chunk": chunk, "min_chunk": min(chunk, 3), "max_num_seqs": 20, "max_num_batched_tokens": 80}
    requests = [request for request in requests if request.n <= budget["min_chunk"]]
    chunked = generate(engine(device=device, **budget), requests)
    assert agree(chunked, {key: results[key] for key in chunked}, device)


def chunks_of_models():
    """Every usual model with one size of chunk, each size with one of them; `make model-matrix` takes all."""
    for number, model in enumerate(("bf16-reference", "mistral-windowed", *CPP)):
        for place, chunk in enumerate((7, 3, 40)):
            yield pytest.param(model, chunk, marks=[] if model in USUAL and number % 3 == place else pytest.mark.matrix)


@pytest.mark.parametrize(("model", "chunk"), list(chunks_of_models()))
def test_chunked_equals_solo_for_other_models(model, chunk, expected):
    requests, results = expected(model, "cpu")
    assert generate(engine(model, prefill_chunk=chunk, min_chunk=3), requests) == results


@pytest.mark.parametrize(
    ("model", "device"),
    [
        *few(((model, "cpu") for model in ("qwen3", "mistral-windowed", *CPP)), *((model, "cpu") for model in USUAL)),
        pytest.param("qwen3", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_prefix_hit_equals_solo(model, device, expected):
    requests, results = expected(model, device)
    built = engine(model, device, enable_prefix_caching=True)
    first = generate(built, requests)
    second = generate(built, requests)
    assert agree(first, results, device)
    assert agree(second, results, device)
    hits = [second[request.request_id, 0].num_cached_tokens for request in requests]
    assert sum(hit > 0 for hit in hits) > len(requests) // 2
    assert max(hits) >= 64


@pytest.mark.parametrize(
    ("model", "device"),
    [
        *few(((model, "cpu") for model in ("qwen3", *CPP)), ("qwen3", "cpu"), ("int8-kv", "cpu")),
        pytest.param("qwen3", "cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("caching", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_preempted_equals_solo(caching, model, device, expected):
    """A pool for 1.2 of the largest requests."""
    requests, results = expected(model, device)
    plan = engine(model, device).plan
    largest = max(
        plan.scheduler.limits.footprint(num_prompt=len(r.prompt_token_ids), max_new_tokens=r.stop.max_new_tokens, n=r.n)
        for r in requests
    )
    blocks = int(1.2 * largest)
    length = max(len(r.prompt_token_ids) + r.stop.max_new_tokens for r in requests)
    tight = engine(
        model,
        device,
        kv_memory=blocks * plan.pool.bytes_per_block,
        max_model_len=length,
        enable_prefix_caching=caching,
    )
    preempted = generate(tight, requests)
    assert agree(preempted, results, device)
    assert sum(result.num_preemptions for result in preempted.values()) > 3


@pytest.mark.parametrize("model", few(["qwen3", *CPP], "qwen3", "bf16-windowed", "int8-kv"))
def test_other_block_sizes_and_thread_counts_equal_solo(model, expected):
    requests, results = expected(model, "cpu")
    results = {
        (request.request_id, choice): results[request.request_id, choice]
        for request in requests[:8]
        for choice in range(request.n)
    }
    assert generate(engine(model, block_size=32, num_threads=2), requests[:8]) == results
    torch.set_num_threads(1)


def pairs_and_triples(ids):
    return {tuple(ids[i : i + size]) for size in (2, 3) for i in range(len(ids) - size + 1)}


def test_banned_sequences():
    """Of what was said freely half is banned: what is said then has none of it, in every way of scheduling."""
    requests = [r for r in mixed_requests(20, seed=9) if r.n == 1 and r.sampling.num_prompt_logprobs is None]
    free = generate(engine(), requests)
    banned = []
    for request in requests:
        said = sorted(pairs_and_triples(free[request.request_id, 0].token_ids))
        rules = {"banned_sequences": tuple(said[::2]), "logprob_token_ids": tuple(range(0, VOCAB_SIZE, 31))}
        banned.append(replace(request, sampling=replace(request.sampling, **rules)))
    expected = solo(banned)
    for request in banned:
        result = expected[request.request_id, 0]
        assert not pairs_and_triples(result.token_ids) & set(request.sampling.banned_sequences)
        assert all(each.asked_ids == request.sampling.logprob_token_ids for each in result.logprobs)
    assert sum(expected[key].token_ids != free[key].token_ids for key in expected) > 3
    tight = {"kv_memory": 40 * 4096, "max_model_len": 128, "max_num_seqs": 12}
    for changes in ({"prefill_chunk": 7, "min_chunk": 3}, tight):
        assert generate(engine(**changes), banned) == expected
    resumed = [replace(r, resumed_token_ids=(tuple(expected[r.request_id, 0].token_ids[:-1]),)) for r in banned]
    for key, after in generate(engine(), resumed).items():
        assert after.token_ids == expected[key].token_ids[-1:]


@pytest.mark.parametrize("model", few(["qwen3", *CPP], "qwen3", "experts-int4"))
def test_resumed_equals_solo(model, expected):
    """After a crash the tokens already sent come back as a part of the request; the rest follow as before."""
    requests, results = expected(model, "cpu")
    resumed, kept = [], {}
    for request in requests:
        if request.sampling.num_prompt_logprobs is not None or request.n > 1:
            continue
        sent = results[request.request_id, 0]
        count = len(sent.token_ids) // 2
        resumed.append(replace(request, resumed_token_ids=(tuple(sent.token_ids[:count]),)))
        kept[request.request_id] = (sent.token_ids[count:], sent.logprobs[count:], sent.finish)
    assert len(resumed) > len(requests) // 3
    after = generate(engine(model), resumed)
    assert {i: (r.token_ids, r.logprobs, r.finish) for (i, _), r in after.items()} == kept


@pytest.mark.parametrize("device", DEVICES)
def test_mates_of_a_failing_request_equal_solo(device, expected):
    """Its steps are computed again, one sequence at a time, over keys and values already written."""
    requests, results = expected("qwen3", device)
    poison = replace(requests[0], request_id="poison", n=1, prompt_token_ids=(5, VOCAB_SIZE, 6))
    outcome = generate(engine(device=device), [*requests[:10], poison, *requests[10:]])
    failed = outcome.pop(("poison", 0))
    assert (failed.finish, failed.token_ids) == ("error", [])
    assert failed.error == "the model failed on this request (ValueError)"
    assert agree(outcome, results, device)
