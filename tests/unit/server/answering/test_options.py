"""From a dialect's fields to the neutral request: no field is dropped, and null means "not given"."""

from __future__ import annotations

import pytest

from quire_server.answering.options import (
    Conversation,
    GenerationOptions,
    PromptOptions,
    SamplingOptions,
    StopOptions,
)
from quire_server.dialects.chat.wire import ChatCompletionRequest
from quire_server.dialects.common import WireModel
from quire_server.dialects.completions.wire import CompletionRequest
from quire_server.dialects.infill.wire import InfillRequest
from quire_server.dialects.messages.request import MessageRequest
from quire_server.dialects.responses.request import ResponseRequest

Dialect = type[CompletionRequest] | type[ChatCompletionRequest]

LEAST: dict[Dialect, dict[str, object]] = {
    CompletionRequest: {"prompt": "a"},
    ChatCompletionRequest: {"messages": [{"role": "user", "content": "a"}]},
}
# Of each field a value that asks for something else than leaving it out does.
OTHERS: dict[str, object] = {
    "model": "m", "n": 2, "stream": True, "stream_options": {"include_usage": True},
    "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.5, "seed": 0,
    "presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 2.0,
    "logit_bias": {"1": 2}, "allowed_token_ids": [1], "bad_words": ["a"], "logprob_token_ids": [1],
    "max_tokens": 5, "min_tokens": 1, "ignore_eos": True, "stop": "a", "stop_token_ids": [1],
    "include_stop_str_in_output": True,
    "truncate_prompt_tokens": 3, "truncation_side": "right",
    "skip_special_tokens": False, "spaces_between_special_tokens": False,
    "speculation": False,
    "prompt_logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True,
    "timings": True, "return_progress": True,
    "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}, "guided_json": {},
    "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "start: /a/", "guided_json_object": True,
    "json_schema": "{}", "regex": "a", "ebnf": 'root ::= "a"', "grammar": 'root ::= "a"',
    "priority": 1, "timeout": 2.5, "service_tier": "flex", "cache_salt": "s", "cache_ttl": 60, "request_id": "r",
    "use_beam_search": True, "beam_width": 2, "length_penalty": 0.5, "early_stopping": "never",
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "get_time"}}]
OWN: dict[Dialect, dict[str, object]] = {
    CompletionRequest: {
        "prompt": [1], "best_of": 2, "suffix": "s", "echo": True, "logprobs": 0, "add_special_tokens": False,
    },
    ChatCompletionRequest: {
        "messages": [{"role": "user", "content": "b"}], "max_completion_tokens": 5, "logprobs": True,
        "top_logprobs": 2, "add_generation_prompt": False, "continue_final_message": True,
        "chat_template": "a", "chat_template_kwargs": {"a": 1}, "reasoning_effort": "low", "add_special_tokens": True,
        "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False,
        "max_reasoning_tokens": 5, "thinking_token_budget": 5, "include_reasoning": False,
        "thinking": {"type": "enabled"},
        "enable_thinking": True, "thinking_budget": 5, "reasoning": {"effort": "low", "max_tokens": 5}, "echo": True,
        "documents": [{"title": "a", "text": "b"}], "prediction": {"type": "content", "content": "a"},
    },
}  # fmt: skip
NEEDS: dict[str, dict[str, object]] = {
    "stream_options": {"stream": True}, "top_logprobs": {"logprobs": True},
    **{name: {"use_beam_search": True} for name in ("beam_width", "length_penalty", "early_stopping")},
    "echo": {"messages": [{"role": "assistant", "content": "a"}]},
    "tool_choice": {"tools": TOOLS}, "parallel_tool_calls": {"tools": TOOLS},
}  # fmt: skip

dialects = pytest.mark.parametrize("dialect", LEAST, ids=lambda dialect: dialect.__name__)


def options(dialect: Dialect, **fields: object) -> GenerationOptions:
    return dialect.model_validate(LEAST[dialect] | fields, strict=True).options()


@dialects
def test_every_field_is_in_the_options(dialect: Dialect) -> None:
    others = OTHERS | OWN[dialect]
    assert set(others) == set(dialect.model_fields)
    for name, value in others.items():
        without = options(dialect, **NEEDS.get(name, {}))
        assert options(dialect, **NEEDS.get(name, {}), **{name: value}) != without, name


@dialects
def test_null_is_the_default(dialect: Dialect) -> None:
    nulls = dict.fromkeys(set(dialect.model_fields) - set(LEAST[dialect]))
    assert options(dialect, **nulls) == options(dialect)


@pytest.mark.parametrize(
    ("dialect", "least"),
    [
        *LEAST.items(),
        (MessageRequest, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
        (InfillRequest, {"input_prefix": "a", "input_suffix": "b"}),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_request_may_do_without_guesses(dialect: type[WireModel], least: dict[str, object]) -> None:
    for asked, expected in ((None, True), (True, True), (False, False)):
        wanted = dialect.model_validate(least | {"speculation": asked}, strict=True)
        assert wanted.options().speculates is expected  # type: ignore[attr-defined]
        of_response = ResponseRequest.model_validate(
            {"input": "a", "instructions": "a", "speculation": asked}, strict=True
        )
        assert of_response.options([]).speculates is expected


def test_a_dialects_defaults_are_in_its_options() -> None:
    assert options(CompletionRequest) == GenerationOptions(
        prompt=PromptOptions(source=["a"], param="prompt"), stop=StopOptions(default_max_tokens=16)
    )
    assert options(ChatCompletionRequest) == GenerationOptions(
        prompt=PromptOptions(
            source=Conversation(messages=[{"role": "user", "content": "a"}]), param="messages", add_special_tokens=False
        ),
        sampling=SamplingOptions(logprobs_param="top_logprobs"),
    )


def test_the_limit_keeps_the_name_it_was_given_by() -> None:
    assert options(ChatCompletionRequest, max_tokens=5).stop.max_tokens_param == "max_tokens"
    both = options(ChatCompletionRequest, max_tokens=5, max_completion_tokens=6).stop
    assert (both.max_tokens, both.max_tokens_param) == (6, "max_completion_tokens")


@dialects
def test_what_has_no_effect_is_named_once(dialect: Dialect) -> None:
    asked = options(dialect, foo=1, bar=None, store=True, stream=True, stream_options={"zoo": 1})
    assert asked.ignored == ("foo", "store", "stream_options.zoo")


@dialects
@pytest.mark.parametrize(("in_vain", "same"), [(True, False), (False, True)])
def test_what_is_asked_for_in_vain_is_named(dialect: Dialect, in_vain: bool, same: bool) -> None:
    asked = options(dialect, stream=True, stream_options={"include_obfuscation": in_vain})
    assert asked.ignored == (("stream_options.include_obfuscation",) if in_vain else ())
    asked = options(dialect, spaces_between_special_tokens=same)
    assert asked.ignored == (() if same else ("spaces_between_special_tokens",))


def test_what_messages_say_without_effect_is_named_once() -> None:
    message = {"role": "user", "content": "a", "weight": 1}
    assert options(ChatCompletionRequest, messages=[message, message]).ignored == ("messages.weight",)
