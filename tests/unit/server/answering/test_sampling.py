"""Defaults, limits and seeds: from a request's options to what the engine is given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.contract.errors import InfeasibleRequest
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_engine.scheduling.gate import check_request
from quire_server.answering.options import GenerationOptions
from quire_server.answering.sampling import (
    MOST_SCORES,
    ModelLimits,
    banned_words,
    resolve_sampling,
    resolve_stop,
    with_seed,
)
from quire_server.dialects.completions.wire import CompletionRequest
from quire_server.errors import BadRequest, ContextLengthExceeded
from support.fake_tokenizer import load_tokenizer
from support.fakes import make_plan
from support.limits import scheduler_config


def limits(**changes: int) -> ModelLimits:
    values = {
        "num_token_ids": 260,
        "max_logprobs": 20,
    }
    scheduler = {"max_model_len": 512, "num_blocks": 100}
    for name, value in changes.items():
        (values if name in values else scheduler)[name] = value
    return ModelLimits(**values, scheduler=scheduler_config(**scheduler))


def asked(**values: object) -> GenerationOptions:
    return CompletionRequest.model_validate({"prompt": "a", **values}, strict=True).options()


def resolve(options: GenerationOptions, **changes: int) -> SamplingParams:
    return resolve_sampling(options, tokenizer=load_tokenizer(), limits=limits(**changes))


def stop_of(options: GenerationOptions, *, prompt_tokens: int = 1, **changes: int) -> StopParams:
    return resolve_stop(
        options,
        resolve(options, **changes),
        prompt_tokens=prompt_tokens,
        tokenizer=load_tokenizer(),
        limits=limits(**changes),
    )


def test_defaults_are_openais() -> None:
    assert resolve(asked()) == SamplingParams()


def test_ids_must_have_logits_and_text() -> None:
    plan = make_plan()
    assert ModelLimits.of(plan, load_tokenizer(), 20).num_token_ids == 260
    with pytest.raises(BadRequest, match="250") as error:
        resolve(asked(logit_bias={"250": 1}), num_token_ids=250)
    assert error.value.param == "logit_bias"
    assert resolve(asked(logit_bias={"249": 1}), num_token_ids=250).logit_bias == ((249, 1.0),)


@pytest.mark.parametrize(("max_tokens", "used"), [(None, 16), (5, 5), (999, 411)])
def test_max_tokens_is_lowered_to_the_context(max_tokens: int | None, used: int) -> None:
    assert stop_of(asked(max_tokens=max_tokens), prompt_tokens=101).max_new_tokens == used


def test_more_alternatives_are_for_as_many_tokens_as_a_reply_may_hold() -> None:
    wide = {"max_logprobs": 256, "max_model_len": 1 << 20, "num_blocks": 1 << 17}
    longest = MOST_SCORES // 256
    for fields, prompt_tokens in (
        ({"logprobs": 256, "max_tokens": longest}, 1),
        ({"logprobs": 20, "max_tokens": 20 * longest}, 1),
        ({"prompt_logprobs": 256, "max_tokens": 1}, longest),
        ({"prompt_logprobs": 20, "max_tokens": 1}, 20 * longest),
    ):
        stop_of(asked(**fields), prompt_tokens=prompt_tokens, **wide)
    for fields, prompt_tokens, param in (
        ({"logprobs": 256, "max_tokens": longest + 1}, 1, "logprobs"),
        ({"logprobs": 256, "max_tokens": longest // 2, "n": 3}, 1, "logprobs"),
        ({"prompt_logprobs": 256, "max_tokens": 1}, longest + 1, "prompt_logprobs"),
    ):
        with pytest.raises(BadRequest, match="more than a reply may hold") as caught:
            stop_of(asked(**fields), prompt_tokens=prompt_tokens, **wide)
        assert caught.value.param == param


@pytest.mark.parametrize("prompt_tokens", [512, 513, 10**6])
def test_a_prompt_needs_room_for_an_answer(prompt_tokens: int) -> None:
    with pytest.raises(ContextLengthExceeded, match=f"512 tokens, but the prompt has {prompt_tokens}"):
        stop_of(asked(max_tokens=1), prompt_tokens=prompt_tokens)


def test_end_of_text_stops_unless_ignored() -> None:
    assert stop_of(asked(stop_token_ids=[5, 5, 257])).stop_token_ids == (5, 257, 259)
    assert stop_of(asked(stop_token_ids=[5], ignore_eos=True)).stop_token_ids == (5,)


@given(
    prompt=st.integers(1, 200),
    n=st.integers(1, 16),
    max_tokens=st.integers(1, 300),
    num_blocks=st.integers(1, 40),
    block_size=st.sampled_from([8, 16]),
)
def test_what_the_server_accepts_the_scheduler_accepts_too(
    prompt: int, n: int, max_tokens: int, num_blocks: int, block_size: int
) -> None:
    pool = {"num_blocks": num_blocks, "block_size": block_size, "max_model_len": 10**6}
    request = GenerationRequest(
        request_id="a",
        prompt_token_ids=(1,) * prompt,
        sampling=SamplingParams(),
        stop=StopParams(max_new_tokens=max_tokens),
        n=n,
    )
    try:
        check_request(scheduler_config(**pool), request)
        feasible = True
    except InfeasibleRequest:
        feasible = False
    try:
        stop = stop_of(asked(max_tokens=max_tokens, n=n), prompt_tokens=prompt, **pool)
        accepted = stop.max_new_tokens == max_tokens
    except ContextLengthExceeded:
        accepted = False
    assert accepted == feasible


def test_seeds() -> None:
    random = SamplingParams(temperature=1.0)
    assert with_seed(random, requested=-5, server_seed=1, token_ids=[1]).seed == -5
    assert with_seed(random, requested=0, server_seed=1, token_ids=[1]).seed == 0
    drawn = {with_seed(random, requested=None, server_seed=None, token_ids=[1]).seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < 2**63 for seed in drawn)
    derived = [with_seed(random, requested=None, server_seed=s, token_ids=t).seed for s in (1, 2) for t in ([1], [2])]
    assert len(set(derived)) == 4
    assert all(0 <= seed < 2**63 for seed in derived)
    greedy = SamplingParams(temperature=0.0)
    assert with_seed(greedy, requested=None, server_seed=None, token_ids=[1]) is greedy


class Words:
    """A tokenizer of whole words."""

    spellings = {  # noqa: RUF012 - read only
        "yes": [1],
        " yes": [2],
        "no": [3],
        " no": [9, 3],
        "may be": [4, 5],
        " may be": [6, 5],
        "on": [7],
        " on": [8, 8],
    }

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return self.spellings[text]


def test_bad_words_in_all_their_spellings() -> None:
    found = banned_words(["yes", "no"], Words())
    assert (found.token_ids, found.sequences) == ((1, 2, 3), ())  # " no" is covered by its last token
    found = banned_words(["may be", "yes", "may be"], Words())
    assert (found.token_ids, found.sequences) == ((1, 2), ((4, 5), (6, 5)))
    found = banned_words(["on"], Words())
    assert (found.token_ids, found.sequences) == ((7,), ((8, 8),))
