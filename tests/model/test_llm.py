"""The offline API gives what the server gives, bit for bit: the same requests to both, over one engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams
from support.checkpoints import shared_checkpoint
from support.covering import few
from support.served_answers import answers_of

MODELS = {"demo": lambda: "quire-demo", "llama": lambda: str(shared_checkpoint("llama"))}
SETTINGS: dict[str, Any] = {"kv_memory": 8 << 20, "num_threads": 1, "max_model_len": 256, "seed": 11}
PROMPTS: list[str | list[int]] = ["Once upon a time", [60, 61, 62, 63, 64]]
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 40},
    "all that fits": {"temperature": 0, "max_tokens": None, "ignore_eos": True},
    "sampled": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 7, "max_tokens": 30},
    "the seed of the model": {"temperature": 1.2},
    "choices": {"n": 3, "temperature": 0.9, "seed": 5, "max_tokens": 24},
    "stop strings": {"temperature": 0.8, "seed": 1, "stop": ["a", "xy", "."], "min_tokens": 4, "max_tokens": 50},
    "stop strings shown": {"temperature": 0, "stop": "e", "include_stop_str_in_output": True},
    "stop ids": {"temperature": 0.9, "seed": 3, "stop_token_ids": [25, 79, 80, 81, 299], "max_tokens": 100},
    "logprobs": {"temperature": 0.5, "seed": 2, "logprobs": 3, "n": 2},
    "logprobs of the chosen": {"temperature": 0, "logprobs": 0},
    "prompt logprobs": {"temperature": 0, "prompt_logprobs": 2, "max_tokens": 3},
    "penalties": {"seed": 9, "presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "biased": {"seed": 4, "logit_bias": {65: 3.5, 66: -100.0}, "allowed_token_ids": [64, 65, 66, 67], "min_tokens": 2},
    "special tokens": {"temperature": 1.9, "seed": 8, "skip_special_tokens": False, "logit_bias": {1: 9.0}},
    "cut": {"temperature": 0, "truncate_prompt_tokens": 3, "max_tokens": 8},
}
CHATS = [
    [{"role": "user", "content": "What is the capital of Japan?"}],
    [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Tell me a short story."},
    ],
]
CHAT_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0, "max_tokens": 30}, {}),
    "sampled": ({"temperature": 0.8, "seed": 6, "n": 2, "max_tokens": None, "logprobs": 2}, {}),
    "no turn opened": ({"temperature": 0}, {"add_generation_prompt": False}),
    "continued": ({"temperature": 0, "stop": [" "]}, {"continue_final_message": True}),
}


def body(params: dict[str, Any]) -> dict[str, Any]:
    """The request of the same parameters; where vLLM's default is not OpenAI's, the server must be told."""
    wire = {"return_token_ids": True, **params}
    if "logprobs" in wire:
        wire["return_tokens_as_token_ids"] = True  # two tokens may read alike
    if "logit_bias" in wire:
        wire["logit_bias"] = {str(key): value for key, value in wire["logit_bias"].items()}
    return wire


def completion_body(prompt: object, params: dict[str, Any]) -> dict[str, Any]:
    wire = {"prompt": prompt, **body(params)}
    # Completions generate 16 tokens when not told; more than there is room for is lowered to the room.
    return wire | {"max_tokens": 1000} if wire.get("max_tokens", 16) is None else wire


def chat_body(messages: object, params: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    wire = {"messages": messages, "max_tokens": 16, **body(params), **options}
    if "logprobs" in wire:
        wire |= {"logprobs": True, "top_logprobs": params["logprobs"]}
    return wire


SEARCH = BeamSearchParams(beam_width=3, max_tokens=20, length_penalty=0.7)
BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 20, "length_penalty": 0.7, "logprobs": 0}


class Both:
    """One model, offline and served: the LLM, and all answers of the server by case."""

    def __init__(self, model: str) -> None:
        asked = {(name, i): ("/v1/completions", completion_body(PROMPTS[i], CASES[name])) for name, i in GENERATED}
        asked |= {
            (name, i, "chat"): ("/v1/chat/completions", chat_body(CHATS[i], *CHAT_CASES[name])) for name, i in CHATTED
        }
        asked |= {("beams", i): ("/v1/completions", completion_body(PROMPTS[i], BEAMS)) for i in range(len(PROMPTS))}
        self.llm = LLM(model, **SETTINGS)
        thread = self.llm._thread
        assert thread._state is not None
        replies = thread.call(answers_of(thread._state, list(asked.values())))
        self.served = dict(zip(asked, replies, strict=True))
        params = [SamplingParams(**CASES[name]) for name, _ in GENERATED]
        outputs = self.llm.generate([PROMPTS[i] for _, i in GENERATED], params, use_tqdm=False)
        self.generated = dict(zip(GENERATED, outputs, strict=True))
        self.searched = self.llm.beam_search(PROMPTS, SEARCH)


GENERATED = [(name, i) for name in CASES for i in range(len(PROMPTS))]
CHATTED = [(name, i) for name in CHAT_CASES for i in range(len(CHATS))]


@pytest.fixture(scope="module", params=few(MODELS, "demo"))
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    made = Both(MODELS[request.param]())
    with made.llm:
        yield made


def assert_same_end(choice: CompletionOutput, served: dict[str, Any]) -> None:
    assert choice.index == served["index"]
    assert choice.token_ids == served["token_ids"]
    assert (choice.finish_reason, choice.stop_reason) == (served["finish_reason"], served["stop_reason"])


@pytest.mark.parametrize("number", range(len(PROMPTS)))
@pytest.mark.parametrize("case", CASES)
def test_generate_gives_what_completions_give(both: Both, case: str, number: int) -> None:
    output, served = both.generated[case, number], both.served[case, number]
    prompt, params = PROMPTS[number], CASES[case]
    choices = served["choices"]
    assert output.finished
    assert output.prompt_token_ids == choices[0]["prompt_token_ids"]
    if isinstance(prompt, str) and case != "cut":
        assert output.prompt == prompt
    elif not isinstance(prompt, str):
        assert output.prompt is None
    assert len(output.outputs) == len(choices) == params.get("n", 1)
    for choice, its in zip(output.outputs, choices, strict=True):
        assert_same_end(choice, its)
        assert choice.text == its["text"]
        if params.get("logprobs") is None:
            assert choice.logprobs is choice.cumulative_logprob is None
            continue
        assert choice.logprobs is not None
        chosen = [position[token].logprob for position, token in zip(choice.logprobs, choice.token_ids, strict=True)]
        assert chosen == its["logprobs"]["token_logprobs"]
        assert choice.cumulative_logprob == sum(chosen)
        tops = [
            {f"token_id:{token}": entry.logprob for token, entry in position.items()} for position in choice.logprobs
        ]
        assert tops == its["logprobs"]["top_logprobs"]
        assert all(params["logprobs"] <= len(position) <= params["logprobs"] + 1 for position in choice.logprobs)
    wanted = choices[0].get("prompt_logprobs")
    if params.get("prompt_logprobs") is None:
        assert output.prompt_logprobs is None
    else:
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is wanted[0] is None
        shown = [
            {str(token): (entry.logprob, entry.rank, entry.decoded_token) for token, entry in position.items()}
            for position in output.prompt_logprobs[1:]
            if position is not None
        ]
        assert shown == [{token: tuple(entry.values()) for token, entry in position.items()} for position in wanted[1:]]


@pytest.mark.parametrize("case", CHAT_CASES)
def test_chat_gives_what_chat_completions_give(both: Both, case: str) -> None:
    params, options = CHAT_CASES[case]
    outputs = both.llm.chat(CHATS, SamplingParams(**params), use_tqdm=False, **options)
    for number, output in enumerate(outputs):
        served = both.served[case, number, "chat"]
        assert output.prompt_token_ids == served["prompt_token_ids"]
        for choice, its in zip(output.outputs, served["choices"], strict=True):
            assert_same_end(choice, its)
            assert choice.text == its["message"]["content"]
            if choice.logprobs is not None:
                content = its["logprobs"]["content"]
                assert [p[t].logprob for p, t in zip(choice.logprobs, choice.token_ids, strict=True)] == [
                    position["logprob"] for position in content
                ]
    (alone,) = both.llm.chat(CHATS[0], SamplingParams(**params), use_tqdm=False, **options)
    assert content_of(alone) == content_of(outputs[0])


def content_of(output: RequestOutput) -> list[tuple[str, list[int]]]:
    return [(choice.text, choice.token_ids) for choice in output.outputs]


def test_the_prompt_of_a_chat_is_what_the_template_made(both: Both) -> None:
    (output,) = both.llm.chat(CHATS[0], SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt is not None
    assert output.prompt.endswith("<|im_start|>assistant\n")
    (again,) = both.llm.generate(output.prompt, SamplingParams(temperature=0), use_tqdm=False)
    assert again.prompt_token_ids == output.prompt_token_ids
    assert both.llm.chat([], use_tqdm=False) == []


def test_the_cases_end_in_every_way(both: Both) -> None:
    """Else the comparisons would say less than they seem to."""
    ends = {
        (choice.finish_reason, type(choice.stop_reason))
        for output in both.generated.values()
        for choice in output.outputs
    }
    assert ends >= {("length", type(None)), ("stop", str), ("stop", int)}


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_beam_search_finds_what_completions_find(both: Both, number: int) -> None:
    choices = both.served["beams", number]["choices"]
    sequences = both.searched[number].sequences
    prompt_ids = choices[0]["prompt_token_ids"]
    assert len(sequences) == len(choices) == 3
    assert [each.score for each in sequences] == sorted([each.score for each in sequences], reverse=True)
    for found, its in zip(sequences, choices, strict=True):
        ended = its["finish_reason"] == "stop"
        output = its["token_ids"][:-1] if ended else its["token_ids"]
        assert found.tokens == prompt_ids + output
        assert found.text == both.llm.get_tokenizer().decode(found.tokens)
        assert (found.score, found.finish_reason) == (its["beam_score"], its["finish_reason"])
        assert found.cum_logprob == sum(its["logprobs"]["token_logprobs"])
        assert found.score == pytest.approx(found.cum_logprob / len(its["token_ids"]) ** 0.7)
        assert len(found.logprobs) == len(its["token_ids"])
