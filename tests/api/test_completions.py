"""POST /v1/completions, not streamed: prompts, choices, stopping, echo and log-probabilities, usage."""

from __future__ import annotations

import pytest

from support.completing import FOX, complete, run, script
from support.fake_engine import FakeEngine
from support.fake_tokenizer import EOS, IM_END
from support.fakes import connect, make_app

pytestmark = pytest.mark.anyio


async def test_the_reply_has_openais_fields() -> None:
    reply = await run(max_tokens=3)
    assert list(reply) == ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"]
    assert reply["id"].startswith("cmpl-")
    assert reply["object"] == "text_completion"
    assert reply["model"] == "fake"
    assert reply["system_fingerprint"].startswith("fp_")
    assert reply["choices"] == [
        {
            "index": 0,
            "text": "The",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "token_ids": None,
        }
    ]
    assert reply["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_sixteen_tokens_by_default() -> None:
    assert (await run())["choices"][0]["text"] == FOX[:16]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "hello", "max_tokens": -1}),
        ("/v1/chat/completions", {"max_tokens": -1}),
        ("/v1/chat/completions", {"max_completion_tokens": -1, "max_tokens": 3}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": -1}),
        ("/api/generate", {"prompt": "hello", "options": {"num_predict": -1}, "stream": False}),
    ],
)
async def test_a_limit_of_minus_one_is_none(path: str, fields: dict[str, object]) -> None:
    engine = FakeEngine()
    async with connect(make_app(engine=engine)) as client:
        messages = {"messages": [{"role": "user", "content": "hello"}]} if "chat" in path else {}
        reply = await client.post(path, json={"model": "fake", **messages, **fields})
    assert reply.status_code == 200, reply.text
    (request,) = engine.submitted
    assert request.stop.max_new_tokens == 512 - len(request.prompt_token_ids)
    assert reply.json().get("max_output_tokens") is None


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("hi", [[104, 105]]),
        (["hi", "a"], [[104, 105], [97]]),
        ([104, 105], [[104, 105]]),
        ([[104, 105], [97]], [[104, 105], [97]]),
        ([[0, 259]], [[0, 259]]),
    ],
)
async def test_four_forms_of_prompt(prompt: object, ids: list[list[int]]) -> None:
    engine = FakeEngine()
    reply = await run(engine, prompt=prompt, max_tokens=1)
    assert [list(request.prompt_token_ids) for request in engine.submitted] == ids
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(ids)))
    assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))


async def test_choices_are_numbered_by_prompt_then_choice() -> None:
    reply = await run(
        FakeEngine(replies=lambda request, choice: (request.prompt_token_ids[0], 48 + choice)),
        prompt=["a", "b", "c"],
        n=2,
        max_tokens=2,
    )
    assert [(c["index"], c["text"]) for c in reply["choices"]] == [
        (0, "a0"),
        (1, "a1"),
        (2, "b0"),
        (3, "b1"),
        (4, "c0"),
        (5, "c1"),
    ]
    assert reply["usage"]["prompt_tokens"] == 3  # of each prompt once, whatever n is
    assert reply["usage"]["completion_tokens"] == 12


async def test_best_of_may_equal_n() -> None:
    assert len((await run(n=2, best_of=2, max_tokens=1))["choices"]) == 2


async def test_greedy_choices_are_equal() -> None:
    reply = await run(n=3, max_tokens=5)
    assert {choice["text"] for choice in reply["choices"]} == {FOX[:5]}


# -- stopping


@pytest.mark.parametrize(("include", "text"), [(False, "The quick "), (True, "The quick brown")])
async def test_a_stop_string_ends_the_text(include: bool, text: str) -> None:
    engine = FakeEngine()
    reply = await run(engine, stop="brown", include_stop_str_in_output=include, max_tokens=40)
    choice = reply["choices"][0]
    assert choice["text"] == text
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "brown")
    assert reply["usage"]["completion_tokens"] == len("The quick brown")
    assert len(engine.aborted) == 1


async def test_the_stop_string_completed_first_wins() -> None:
    choice = (await run(stop=["lazy", "jumps", "fox", "quick brown fo"], max_tokens=60))["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("The ", "quick brown fo")


async def test_a_stop_string_of_one_choice_leaves_the_others() -> None:
    engine = FakeEngine(replies=lambda request, choice: b"one END two" if choice == 1 else b"abcdefghijkl")
    reply = await run(engine, n=3, stop=["END"], max_tokens=11)
    assert [c["text"] for c in reply["choices"]] == ["abcdefghijk", "one ", "abcdefghijk"]
    assert [c["finish_reason"] for c in reply["choices"]] == ["length", "stop", "length"]
    assert reply["usage"]["completion_tokens"] == 11 + 7 + 11  # nothing after the match is counted
    assert engine.aborted == []


async def test_a_stop_string_of_one_prompt_aborts_that_prompt_only() -> None:
    engine = FakeEngine(replies=lambda request, choice: request.prompt_token_ids)
    reply = await run(engine, prompt=["abSTOP", "cdefgh"], stop=["STOP"], max_tokens=30)
    assert [c["text"] for c in reply["choices"]] == ["ab", "cdefgh" * 5]
    assert engine.aborted == [engine.submitted[0].request_id]


async def test_stop_strings_do_not_count_before_min_tokens() -> None:
    choice = (await run(script("ab.ab.ab."), stop=["."], min_tokens=4, max_tokens=9))["choices"][0]
    assert choice["text"] == "ab.ab"


async def test_a_stop_string_completed_by_the_last_token_wins_over_length() -> None:
    choice = (await run(stop=["quick"], max_tokens=9))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("The ", "stop", "quick")


async def test_a_beginning_of_a_stop_string_is_text_in_the_end() -> None:
    choice = (await run(stop=["quick brown cow"], max_tokens=12))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (FOX[:12], "length")


async def test_the_end_of_text_token_stops_without_a_reason() -> None:
    reply = await run(script("done", EOS), max_tokens=40)
    choice = reply["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("done", "stop", None)
    assert reply["usage"]["completion_tokens"] == 5


async def test_ignore_eos_goes_on() -> None:
    choice = (await run(script("ab", EOS), ignore_eos=True, max_tokens=7))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ababa", "length")
    shown = await run(script("ab", EOS), ignore_eos=True, max_tokens=4, skip_special_tokens=False)
    assert shown["choices"][0]["text"] == "ab<|end|>a"


@pytest.mark.parametrize(("stop_id", "reason"), [(EOS, None), (IM_END, IM_END)])
async def test_an_end_that_is_not_the_tokenizer_s_own_is_named(stop_id: int, reason: int | None) -> None:
    choice = (await run(script("ab", stop_id)))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", reason)


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab!")])
async def test_a_stop_token_ends_the_text(include: bool, text: str) -> None:
    reply = await run(
        script("ab!cd"), stop_token_ids=[33], include_stop_str_in_output=include, return_token_ids=True, max_tokens=9
    )
    choice = reply["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", 33)
    assert choice["token_ids"] == [97, 98, 33]
    assert reply["usage"]["completion_tokens"] == 3


async def test_an_unfinished_character_at_the_end_is_shown_as_such() -> None:
    assert (await run(script("aé"), max_tokens=2))["choices"][0]["text"] == "a�"


# -- echo and log-probabilities


async def test_echo_puts_the_prompt_first() -> None:
    reply = await run(echo=True, max_tokens=3, prompt=["hello", "you"])
    assert [c["text"] for c in reply["choices"]] == ["helloThe", "youThe"]
    assert reply["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("skip", [True, False])
async def test_echo_shows_every_token_of_a_prompt_of_ids(skip: bool) -> None:
    prompt = [256, 104, 257, 33]
    reply = await run(echo=True, max_tokens=3, prompt=prompt, logprobs=0, skip_special_tokens=skip)
    [choice] = reply["choices"]
    assert choice["text"] == "<|bos|>h<|end|>!The"
    assert choice["logprobs"]["text_offset"] == [0, 7, 8, 15, 16, 17, 18]
    cut = await run(echo=True, max_tokens=1, prompt=prompt, truncate_prompt_tokens=3, skip_special_tokens=skip)
    assert cut["choices"][0]["text"] == "h<|end|>!T"


async def test_offsets_count_special_tokens_that_the_echoed_text_shows() -> None:
    [choice] = (await run(echo=True, max_tokens=1, prompt="a<|end|>b", logprobs=0))["choices"]
    assert choice["text"] == "a<|end|>bT"
    assert choice["logprobs"]["text_offset"] == [0, 1, 8, 9]
    [choice] = (await run(echo=True, max_tokens=1, prompt="xa<|end|>b", logprobs=0, truncate_prompt_tokens=3))[
        "choices"
    ]
    assert choice["text"] == "abT"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2]


async def test_echo_without_new_tokens_scores_the_prompt() -> None:
    reply = await run(echo=True, max_tokens=0, logprobs=0, prompt="abc")
    choice = reply["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.7, -0.7]
    assert reply["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 0,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_what_evaluation_tools_ask_for() -> None:
    """Several prompts of ids, one new token, echo and log-probabilities: each scored token is in its own dict."""
    prompts = [[104, 101, 108], [97, 98, 99, 100]]
    reply = await run(prompt=prompts, max_tokens=1, logprobs=1, echo=True, seed=1234)
    for choice, prompt in zip(reply["choices"], prompts, strict=True):
        logprobs = choice["logprobs"]
        size = len(prompt) + 1
        assert {len(values) for values in logprobs.values()} == {size}
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["tokens"] == [*map(chr, prompt), "T"]
        assert all(
            token in top for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True)
        )


async def test_logprobs_are_parallel_lists() -> None:
    logprobs = (await run(max_tokens=3, logprobs=2))["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["T", "h", "e"],
        "token_logprobs": [-0.7, -0.7, -0.7],
        "top_logprobs": [{"T": -0.7, "U": -1.4}, {"h": -0.7, "i": -1.4}, {"e": -0.7, "f": -1.4}],
        "text_offset": [0, 1, 2],
    }


async def test_logprobs_zero_is_the_chosen_token_alone() -> None:
    logprobs = (await run(max_tokens=2, logprobs=0))["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"T": -0.7}, {"h": -0.7}]


async def test_text_offsets_count_characters() -> None:
    reply = await run(script("é€x"), max_tokens=6, logprobs=0, echo=True, prompt="aé")
    choice = reply["choices"][0]
    assert choice["text"] == "aéé€x"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 3, 3, 3, 4]


async def test_tokens_as_ids_are_never_alike() -> None:
    logprobs = (await run(script("é"), max_tokens=2, logprobs=1, return_tokens_as_token_ids=True))["choices"][0][
        "logprobs"
    ]
    assert logprobs["tokens"] == ["token_id:195", "token_id:169"]
    assert logprobs["top_logprobs"] == [{"token_id:195": -0.7}, {"token_id:169": -0.7}]


async def test_logprobs_end_with_the_stop_string() -> None:
    choice = (await run(stop="qu", logprobs=0, max_tokens=30, return_token_ids=True))["choices"][0]
    assert choice["text"] == "The "
    assert choice["logprobs"]["tokens"] == list("The qu")
    assert choice["token_ids"] == list(b"The qu")


async def test_prompt_logprobs() -> None:
    reply = await run(prompt_logprobs=1, max_tokens=1, prompt="ab", n=2)
    for choice in reply["choices"]:
        assert choice["logprobs"] is None
        assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -0.7, "rank": 1, "decoded_token": "b"}}]


async def test_token_ids_on_request() -> None:
    choice = (await run(return_token_ids=True, max_tokens=2))["choices"][0]
    assert choice["prompt_token_ids"] == list(b"hello")
    assert choice["token_ids"] == list(b"Th")


# -- prompts


async def test_a_long_prompt_can_be_cut() -> None:
    engine = FakeEngine()
    async with connect(make_app(engine=engine, max_model_len=32)) as client:
        reply = await complete(client, prompt="0123456789", truncate_prompt_tokens=4, max_tokens=1, echo=True)
        assert reply["choices"][0]["text"] == "6789T"
        await complete(client, prompt="0123456789", truncate_prompt_tokens=4, truncation_side="right", max_tokens=1)
        await complete(client, prompt="x" * 100, truncate_prompt_tokens=-1, max_tokens=10)
        await complete(client, prompt="ab", truncate_prompt_tokens=10, max_tokens=1)
    assert [len(request.prompt_token_ids) for request in engine.submitted] == [4, 4, 22, 2]
    assert bytes(engine.submitted[1].prompt_token_ids) == b"0123"


async def test_special_tokens_in_a_prompt_are_tokens() -> None:
    engine = FakeEngine()
    await run(engine, prompt="a<|end|>", max_tokens=1)
    assert engine.submitted[0].prompt_token_ids == (97, EOS)


async def test_a_prompt_may_fill_the_context_when_nothing_is_generated() -> None:
    reply = await run(settings={"max_model_len": 16}, prompt="x" * 16, echo=True, max_tokens=0)
    assert reply["usage"]["total_tokens"] == 16


async def test_cached_tokens_are_counted_once_per_prompt() -> None:
    reply = await run(FakeEngine(num_cached_tokens=4), prompt=["hello", "there"], n=2, max_tokens=3)
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}


# -- what the engine is asked for
