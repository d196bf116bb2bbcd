"""Beam search by the whole engine: the tokens and scores of transformers' `generate`, whatever happens on the way.

Against transformers tokens are equal and scores close, its sums being of float32; against ourselves every bit is equal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import pytest
import torch

from quire_engine.build import BuiltEngine, build
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.types import BeamParams, GenerationRequest, SamplingParams, StopParams
from support.checkpoints import VOCAB_SIZE, shared_checkpoint
from support.limits import engine_config
from support.model_steps import random_ids
from support.offline import generate

SHAPES = {
    "qwen3": {},
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3},
    "qwen2": {"num_key_value_heads": 1},
    "mistral": {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96},
}


@dataclass(frozen=True)
class Case:
    """A search: its width, its rules, and how many of the first ids end a beam."""

    family: str = "qwen3"
    width: int = 4
    num_returned: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_stops: int = 24
    min_tokens: int = 0
    max_tokens: int = 12
    seed: int = 0

    @property
    def prompt(self) -> tuple[int, ...]:
        vocab_size = SHAPES[self.family].get("vocab_size", VOCAB_SIZE)
        return tuple(random_ids(5 + 7 * self.seed, self.seed, vocab_size))

    def request(self, name: str = "r", *, num_logprobs: int | None = 2) -> GenerationRequest:
        return GenerationRequest(
            request_id=name,
            prompt_token_ids=self.prompt,
            sampling=SamplingParams(temperature=0.0, min_tokens=self.min_tokens, num_logprobs=num_logprobs),
            stop=StopParams(max_new_tokens=self.max_tokens, stop_token_ids=tuple(range(self.num_stops))),
            n=self.num_returned,
            beam=BeamParams(width=self.width, length_penalty=self.length_penalty, early_stopping=self.early_stopping),
        )


RULES = [
    {},
    {"early_stopping": True},
    {"early_stopping": "never"},
    {"length_penalty": 0.0, "early_stopping": "never"},
    {"length_penalty": 2.0},
    {"length_penalty": 2.0, "early_stopping": "never"},
    {"length_penalty": -1.0, "early_stopping": True},
    {"width": 2, "num_returned": 1, "num_stops": 90},
    {"width": 8, "num_returned": 3, "min_tokens": 4, "num_stops": 60, "early_stopping": True},
    {"width": 5, "num_returned": 5, "max_tokens": 1},
    {"width": 16, "num_returned": 16, "num_stops": 1},
]
CASES = [Case(seed=seed % 5, **rule) for seed, rule in enumerate(RULES)] + [
    Case(family="llama", seed=1, num_stops=40),
    Case(family="llama", seed=2, early_stopping=True, num_stops=40, width=6, num_returned=6),
    Case(family="qwen2", seed=3, num_stops=40, length_penalty=0.5),
    Case(family="mistral", seed=4, num_stops=6, early_stopping="never"),
    Case(family="mistral", seed=2, num_stops=2, width=3, num_returned=2, max_tokens=20),
]


def config(family: str = "qwen3", **settings: Any) -> EngineConfig:
    path = shared_checkpoint(family, **SHAPES[family])
    return engine_config(
        **{"model": str(path), "device": "cpu", "num_threads": 1, "kv_memory": 8 << 20, "dtype": "float32", **settings}
    )


@cache
def built(family: str) -> BuiltEngine:
    return build(config(family))


@cache
def reference_model(family: str) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        shared_checkpoint(family, **SHAPES[family]), dtype=torch.float32
    ).eval()


def by_transformers(case: Case) -> list[tuple[tuple[int, ...], float]]:
    """Each returned beam's tokens and score."""
    stops = list(range(case.num_stops))
    with torch.inference_mode():
        result = reference_model(case.family).generate(
            torch.tensor([case.prompt]),
            attention_mask=torch.ones(1, len(case.prompt), dtype=torch.int64),
            num_beams=case.width,
            num_return_sequences=case.num_returned,
            do_sample=False,
            max_new_tokens=case.max_tokens,
            min_new_tokens=case.min_tokens or None,
            length_penalty=case.length_penalty,
            early_stopping=case.early_stopping,
            eos_token_id=stops,
            pad_token_id=10_000,
            return_dict_in_generate=True,
            output_scores=True,
        )
    rows = result.sequences[:, len(case.prompt) :].tolist()
    tokens = [tuple(token for token in row if token != 10_000) for row in rows]
    return list(zip(tokens, result.sequences_scores.tolist(), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_and_scores_of_transformers(case: Case) -> None:
    found = generate(built(case.family), [case.request()])
    expected = by_transformers(case)
    assert [tuple(found["r", choice].token_ids) for choice in range(case.num_returned)] == [
        each for each, _ in expected
    ]
    for choice, (tokens, score) in enumerate(expected):
        output = found["r", choice]
        assert output.beam_score == pytest.approx(score, rel=1e-4)
        assert output.finish == ("stop" if tokens[-1] < case.num_stops else "length")
        total = sum(entry.logprob for entry in output.logprobs)
        assert total / len(tokens) ** case.length_penalty == pytest.approx(output.beam_score, rel=1e-12)
        assert [entry.token_id for entry in output.logprobs] == list(tokens)
        assert all(len(entry.top_ids) == 2 for entry in output.logprobs)


def test_one_beam_is_a_greedy_search() -> None:
    searched = replace(Case(width=1, num_returned=1, num_stops=3, max_tokens=20).request(), prompt_token_ids=(5, 6, 7))
    plain = replace(searched, request_id="plain", beam=None)
    found = generate(built("qwen3"), [searched, plain])
    one, other = found["r", 0], found["plain", 0]
    assert (one.token_ids, one.logprobs, one.finish) == (other.token_ids, other.logprobs, other.finish)


def test_the_rules_are_tried() -> None:
    """Among the cases are searches that end early, by either reason, and ranks that the penalty of length changes."""
    found = {case: generate(built(case.family), [case.request()]) for case in CASES[:7]}
    finishes = {output.finish for outputs in found.values() for output in outputs.values()}
    assert finishes == {"stop", "length"}
    eager, patient = Case(early_stopping=True), Case(early_stopping="never", length_penalty=2.0)
    tokens = [
        [generate(built("qwen3"), [replace(case, seed=seed).request()])["r", 0].token_ids for seed in range(5)]
        for case in (eager, patient)
    ]
    assert sum(map(len, tokens[0])) < sum(map(len, tokens[1]))


@pytest.mark.parametrize(
    "computed",
    [pytest.param({}, marks=pytest.mark.matrix), {"dtype": "bfloat16", "kernels": "cpu"}],
    ids=["reference", "cpu"],
)
def test_every_bit_is_that_of_a_search_alone(computed: dict[str, Any]) -> None:
    """In a pool that holds a part of what runs at once: chunked, preempted, computed again, served from the cache."""
    requests = [replace(case, max_tokens=24).request(f"r{number}") for number, case in enumerate(CASES[:10])]
    requests += [replace(requests[1], request_id="again"), replace(requests[2], request_id="plain", n=1, beam=None)]
    roomy = build(config(**computed, enable_prefix_caching=False))
    alone: dict[tuple[str, int], Any] = {}
    for request in requests:
        alone |= generate(roomy, [request])
    block_bytes = roomy.plan.pool.bytes_per_block
    tight = build(
        config(
            **computed,
            kv_memory=26 * block_bytes,
            max_model_len=100,
            max_num_seqs=24,
            max_num_batched_tokens=40,
            prefill_chunk=16,
        )
    )
    together = generate(tight, requests)
    assert together == alone
    searched = [together[name, choice] for name, choice in together if name != "plain"]
    assert sum(output.num_preemptions for output in searched) > 0
    assert sum(output.num_cached_tokens for output in searched) > 0
    assert any(output.num_preemptions == 0 for output in searched)
