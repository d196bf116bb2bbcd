"""Thinking in the words of several APIs: what each of them says, alone and together."""

from __future__ import annotations

from typing import Any

import pytest

from quire_server.answering.options import ReasoningOptions
from quire_server.dialects.chat.wire import ChatCompletionRequest
from quire_server.dialects.messages.request import MessageRequest
from quire_server.dialects.responses.request import ResponseRequest
from quire_server.errors import BadRequest, Unsupported
from quire_server.http.body import validate

MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
EVERY = (
    (ChatCompletionRequest, MESSAGES),
    (MessageRequest, MESSAGES | {"max_tokens": 5}),
    (ResponseRequest, {"input": "hi"}),
)


def asked(api: tuple[Any, dict[str, Any]], fields: dict[str, Any]) -> ReasoningOptions:
    model, body = api
    request = validate(model, body | fields)
    options: ReasoningOptions = request.reasoning_options()
    return options


@pytest.mark.parametrize("api", EVERY)
@pytest.mark.parametrize(
    ("fields", "effort", "budget"),
    [
        ({}, None, None),
        ({"enable_thinking": True}, "medium", None),
        ({"enable_thinking": False}, "none", None),
        ({"enable_thinking": True, "thinking_budget": 9}, "medium", 9),
        ({"enable_thinking": False, "thinking_budget": 9}, "none", 9),
        ({"thinking_budget": 0}, None, 0),
        ({"thinking": {"type": "disabled"}}, "none", None),
        ({"thinking": {"type": "adaptive"}}, "medium", None),
        ({"thinking": {"type": "auto"}}, None, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "medium", 9),
        ({"reasoning": {"effort": "high"}}, "high", None),
        ({"reasoning": {"enabled": True}}, "medium", None),
        ({"reasoning": {"enabled": False}}, "none", None),
        ({"reasoning": {"enabled": True, "effort": "low", "max_tokens": 9}}, "low", 9),
        ({"reasoning_effort": "high", "enable_thinking": True, "max_reasoning_tokens": 9}, "high", 9),
        ({"reasoning_effort": "none", "thinking": {"type": "disabled"}, "thinking_token_budget": 0}, "none", 0),
    ],
)
def test_each_word_says_what_it_says(
    api: tuple[Any, dict[str, Any]], fields: dict[str, Any], effort: str | None, budget: int | None
) -> None:
    options = asked(api, fields)
    assert (options.effort, options.max_tokens) == (effort, budget)
    names = {options.effort_param.partition(".")[0], options.max_tokens_param.partition(".")[0]}
    assert names <= {*fields, "reasoning_effort", "max_reasoning_tokens"}


@pytest.mark.parametrize("api", EVERY)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"enable_thinking": False, "reasoning_effort": "high"}, "enable_thinking"),
        ({"enable_thinking": True, "reasoning": {"effort": "none"}}, "enable_thinking"),
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "enable_thinking"),
        ({"reasoning": {"enabled": True, "effort": "none"}}, "reasoning.enabled"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort"),
        ({"max_reasoning_tokens": 5, "thinking_budget": 6}, "thinking_budget"),
        ({"enable_thinking": True, "thinking_budget": 0}, "thinking_budget"),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking"),
        ({"reasoning": {"enabled": False, "max_tokens": 5}}, "reasoning"),
    ],
)
def test_contradictions_are_refused(api: tuple[Any, dict[str, Any]], fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as error:
        asked(api, fields)
    assert error.value.param == param


@pytest.mark.parametrize("api", EVERY)
def test_other_types_are_refused_and_other_parts_reported(api: tuple[Any, dict[str, Any]]) -> None:
    with pytest.raises(Unsupported, match="'adaptive' and 'auto' are"):
        asked(api, {"thinking": {"type": "deep"}})
    model, body = api
    request = validate(model, body | {"thinking": {"type": "auto", "clear_thinking": True}})
    assert request.ignored_thinking_fields() == ["thinking.clear_thinking"]
    assert not asked(api, {"reasoning": {"exclude": True}}).show
