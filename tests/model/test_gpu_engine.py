"""The whole engine on a GPU with the embedded model: the CPU's tokens, each request's own bits whatever runs beside it.

The same tests run on the CPU with its own kernels: so they can pass, and serve where there is no GPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from quire_engine.build import BuiltEngine, build
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_engine.demo import demo_model_path
from quire_engine.execution.executor import Executor
from quire_engine.execution.kv.kv_storage import KVStorage
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.models.weights import load_decoder
from quire_engine.execution.runner import Runner
from quire_engine.scheduling.scheduler import Scheduler
from quire_kernels.kernel_set import KernelSet
from support.model_steps import DEVICES, Model
from support.offline import Generated, generate

TEXTS = (
    "Once upon a time there was a little",
    "The capital of France is",
    "A quire is",
    "She opened the door and saw that",
    "One, two, three,",
)
TOKENS = 24
# Of a logit: the GPU and the CPU round bf16 products in another order. A wrong kernel is off by whole units.
TOLERANCE = 0.5
AGREEMENT = 0.9  # of tokens that are the very argmax of the CPU in float32
# On a CPU test_bitwise.py and test_speculation.py hold the same, with more models.
LONG_ON_CPU = (pytest.param("cpu", marks=pytest.mark.matrix), *DEVICES[1:])
ON_GPU = {"kernels": "triton", "deterministic": True}


@cache
def _prompts() -> tuple[tuple[int, ...], ...]:
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    return tuple(tuple(tokenizer.encode(text).ids) for text in TEXTS)


def _config(device: str, **options: object) -> EngineConfig:
    limits = SchedulerLimits(max_num_seqs=32, max_num_batched_tokens=512, prefill_chunk=48)
    asked = {"dtype": "bfloat16", "kv_memory": 64 << 20, "max_model_len": 512, "limits": limits}
    return EngineConfig(
        model=str(demo_model_path()), device=device, **{**asked, **(ON_GPU if device == "cuda" else {}), **options}
    )


def _requests(count: int, *, tokens: int = TOKENS) -> list[GenerationRequest]:
    """By turns greedy, drawn, with limits, with penalties, in three choices; prompts of 1 to some 200 tokens."""
    kinds = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9, seed=5, num_logprobs=3),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, seed=6),
        SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.2, presence_penalty=0.3),
        SamplingParams(temperature=1.0, seed=8),
    )
    found = []
    for i in range(count):
        prompt = (_prompts()[i % 5] * 30)[: 1 + 37 * i % 211]
        sampling = replace(kinds[i % 5], seed=i)
        found.append(
            GenerationRequest(
                request_id=f"request {i}",
                prompt_token_ids=prompt,
                sampling=sampling,
                stop=StopParams(max_new_tokens=tokens - i % 7),
                n=3 if i % 5 == 4 else 1,
            )
        )
    return found


def _greedy(built: BuiltEngine) -> list[list[int]]:
    requests = [
        GenerationRequest(
            request_id=str(i),
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_new_tokens=TOKENS),
        )
        for i, prompt in enumerate(_prompts())
    ]
    found = generate(built, requests)
    return [found[str(i), 0].token_ids for i in range(len(requests))]


def _check_against_the_cpu(answers: list[list[int]]) -> None:
    """Each token is nearly the greatest logit of the float32 reference on what came before, and mostly the greatest."""
    reference = Model(demo_model_path(), num_blocks=64, max_model_len=256)
    same = total = 0
    for prompt, answer in zip(_prompts(), answers, strict=True):
        logits = reference.logits([*prompt, *answer])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        behind = logits.amax(dim=1) - chosen
        assert float(behind.max()) < TOLERANCE, f"after {prompt}: behind the best by {behind.tolist()}"
        same += int((behind == 0).sum())
        total += len(answer)
    assert same >= AGREEMENT * total, f"{same} of {total} tokens"


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_tokens_are_the_cpus(device):
    _check_against_the_cpu(_greedy(build(_config(device))))


def test_a_wrong_token_is_found():
    answers = _greedy(build(_config("cpu")))
    answers[3][11] = (answers[3][11] + 1) % 500
    with pytest.raises(AssertionError):
        _check_against_the_cpu(answers)


@pytest.mark.parametrize("device", LONG_ON_CPU)
def test_a_request_in_any_batch_has_its_own_bits(device):
    """Batches of all sizes up to two dozen choices, so that padded graphs serve some; tokens and log-probabilities."""
    requests = _requests(17)
    alone = _alone(device, requests)
    for count in (2, 3, 5, 9, 17):
        together = generate(build(_config(device)), requests[:count])
        _check_equal(together, alone)


def _alone(device: str, requests: list[GenerationRequest]) -> dict[tuple[str, int], Generated]:
    """One after the other, without what another left in the cache."""
    limits = replace(_config(device).limits, enable_prefix_caching=False)
    built, found = build(_config(device, limits=limits)), {}
    for request in requests:
        found |= generate(built, [request])
    return found


def _check_equal(found: dict[tuple[str, int], Generated], expected: dict[tuple[str, int], Generated]) -> None:
    for key, result in found.items():
        assert result == expected[key], f"{key[0]}, choice {key[1]}"


@pytest.mark.parametrize("device", LONG_ON_CPU)
def test_preempted_and_cached_requests_have_their_own_bits(device):
    """In a pool that is too small for all, twice, so that the second time much comes from the prefix cache."""
    requests = _requests(17, tokens=60)
    built = build(_config(device))
    blocks = 48
    small = replace(built.plan.scheduler, num_blocks=blocks, max_model_len=16 * (blocks - 1))
    built = replace(built, scheduler=Scheduler(small))
    alone = _alone(device, requests)
    first = generate(built, requests)
    second = generate(built, requests)
    _check_equal(first, alone)
    _check_equal(second, alone)
    assert sum(result.num_preemptions for result in first.values()) > 0
    assert sum(result.num_cached_tokens for result in second.values()) > 0


@pytest.mark.parametrize("device", LONG_ON_CPU)
def test_guessed_tokens_change_no_bit(device):
    """Prompts that repeat themselves, so that guesses are found, some right and some wrong."""
    requests = _requests(9, tokens=40)
    alone = _alone(device, requests)
    built = build(_config(device, speculation="suffix"))
    _check_equal(generate(built, requests), alone)
    assert built.scheduler.stats().total_draft_tokens > 0


@pytest.mark.parametrize("device", LONG_ON_CPU)
def test_the_executor_that_serves_is_the_one_that_waits_for_every_step(device):
    """Graphs, steps ahead and input that is packed change nothing that a client sees."""
    requests = _requests(12)
    config = _config(device)
    served = generate(build(config), requests)
    _check_equal(served, generate(_waiting(config), requests))


def _waiting(config: EngineConfig) -> BuiltEngine:
    """The same engine around `Runner`, which computes a step when it is launched and reads its results at once."""
    built = build(config)
    path, device = Path(config.model), torch.device(config.device)
    model = load_model_config(path)
    kernels = _kernels(device)
    decoder = load_decoder(
        path,
        model,
        kernels=kernels,
        dtype=torch.bfloat16,
        device=device,
        max_model_len=built.plan.scheduler.max_model_len,
    )
    block_size = config.limits.block_size
    kv = KVStorage(kernels, model, built.plan.scheduler.num_blocks, block_size, torch.bfloat16, device)
    return replace(
        built,
        executor=Executor(Runner(decoder, kv.tensor, block_size, device), kv),
        scheduler=Scheduler(built.plan.scheduler),
    )


def _kernels(device: torch.device) -> KernelSet:
    if device.type == "cuda":
        from quire_kernels.triton.set import make_triton_set

        return make_triton_set(deterministic=True, warp_groups=torch.cuda.get_device_capability()[0] in (9, 10))
    from quire_kernels.kernel_set import KVFormat
    from quire_kernels.select import select

    model = load_model_config(demo_model_path())
    return select(device, torch.bfloat16, "auto", kv=KVFormat(head_dim=model.head_dim, block_size=16))
