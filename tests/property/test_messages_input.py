"""Whatever is sent to /v1/messages makes a neutral request or is refused; of a conversation nothing is lost."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from quire_server.answering.options import Conversation
from quire_server.dialects.messages.request import MessageRequest
from quire_server.errors import BadRequest
from quire_server.http.body import validate

_WORDS = (
    *("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image", "document", "server_tool_use"),
    *("user", "assistant", "system", "tool", "auto", "any", "none", "custom", "bash_20250124"),
    *("enabled", "disabled", "adaptive", "omitted", "json_schema", "low", "create", "a", ""),
)
_KEYS = (
    *("type", "role", "content", "text", "thinking", "signature", "data", "id", "name", "input", "tool_use_id"),
    *("is_error", "input_schema", "budget_tokens", "display", "effort", "format", "schema", "cache_control"),
)
_FIELDS = (
    *("messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format", "stop_sequences"),
    *("max_tokens", "temperature", "top_k", "stream", "container", "thread", "metadata", "chat_template_kwargs"),
)
_ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.floats(-1, 3) | st.sampled_from(_WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=6),
    max_leaves=12,
)
_ASK = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}

_TEXT = st.text("abc", min_size=1, max_size=3)
_SAID = st.fixed_dictionaries({"type": st.just("text"), "text": _TEXT})
_THOUGHT = st.fixed_dictionaries({"type": st.just("thinking"), "thinking": _TEXT})
_MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.just("user"), "content": _TEXT | st.lists(_SAID, max_size=3)}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": _TEXT | st.lists(_SAID | _THOUGHT, max_size=3)}),
    st.fixed_dictionaries({"role": st.just("system"), "content": _TEXT}),
    st.just({"role": "loop"}),  # a use of a tool, and its result
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(_FIELDS), _ANY, max_size=4), st.lists(_ANY, max_size=3))
def test_junk_is_refused_or_makes_a_request(fields: dict[str, Any], content: list[Any]) -> None:
    for body in (_ASK | fields, _ASK | {"messages": [{"role": "user", "content": content}]} | fields):
        with contextlib.suppress(BadRequest):
            validate(MessageRequest, body).options()


@settings(max_examples=50, deadline=None)  # `make property-test` draws many times as many
@given(st.lists(_MESSAGE, min_size=1, max_size=8))
def test_all_that_was_said_is_told_in_turns(drawn: list[dict[str, Any]]) -> None:
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(drawn):
        if message["role"] != "loop":
            messages.append(message)
            continue
        use = {"type": "tool_use", "id": f"u{number}", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": f"u{number}", "content": "r"}
        messages.append({"role": "assistant", "content": [use]})
        messages.append({"role": "user", "content": [{"type": "text", "text": "abc"}, result]})
    source = validate(MessageRequest, _ASK | {"messages": messages}).options().prompt.source
    assert isinstance(source, Conversation)
    roles = [message["role"] for message in source.messages]
    assert all(role == "tool" or role != before for before, role in itertools.pairwise(roles))
    assert source.continue_final_message == (bool(roles) and roles[-1] == "assistant")
    assert roles.count("tool") == [message["role"] for message in drawn].count("loop")
    for before, message in itertools.pairwise(source.messages):
        if message["role"] == "tool":
            calls = before.get("tool_calls")
            assert isinstance(calls, list)
            assert message["tool_call_id"] in [call["id"] for call in calls]
    told = sorted("".join(_texts(source.messages)).replace("\n", "").replace("r", ""))
    assert told == sorted("".join(_texts(messages)).replace("r", ""))


def _texts(messages: Any) -> list[str]:
    texts = []
    for message in messages:
        content = message.get("content")
        texts.append(message.get("reasoning", ""))
        if isinstance(content, str):
            texts.append(content)
        else:
            texts += [part.get("text") or part.get("thinking") or part.get("content") or "" for part in content or ()]
    return texts
