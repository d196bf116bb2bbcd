"""Whatever is sent to /v1/responses makes a neutral request or is refused; what is stored reads the same."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from quire_server.dialects.responses.items import ContentItem, ItemReference, stored_items
from quire_server.dialects.responses.request import ResponseRequest, messages
from quire_server.errors import BadRequest
from quire_server.http.body import validate

_WORDS = (
    *("message", "function_call", "function_call_output", "reasoning", "item_reference", "web_search_call"),
    *("input_text", "output_text", "refusal", "input_image", "summary_text", "reasoning_text"),
    *("user", "assistant", "system", "developer", "tool", "function", "allowed_tools", "auto", "required", "none"),
    *("json_schema", "json_object", "text", "a", "", "low", "completed"),
)
_KEYS = (
    *("type", "role", "content", "text", "id", "call_id", "name", "arguments", "output", "summary", "status"),
    *("refusal", "tools", "mode", "function", "parameters", "strict", "format", "schema", "effort", "verbosity"),
)
_ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.floats(-1, 3) | st.sampled_from(_WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=6),
    max_leaves=12,
)

_PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "output_text", "text"]), "text": st.text(max_size=3)}
)
_CONTENT = st.text(max_size=4) | st.lists(_PART, max_size=3)
_ITEM = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "developer"]), "content": _CONTENT},
        optional={"type": st.just("message"), "id": st.just("msg_1"), "status": st.just("completed")},
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("function_call"),
            "call_id": st.sampled_from(["c1", "c2"]),
            "name": st.just("f"),
            "arguments": st.just("{}"),
        }
    ),
    st.fixed_dictionaries(
        {"type": st.just("function_call_output"), "call_id": st.sampled_from(["c1", "c2"]), "output": _CONTENT}
    ),
    st.fixed_dictionaries(
        {"type": st.just("reasoning"), "summary": st.just([])},
        optional={"content": st.lists(_PART, max_size=2), "id": st.just("rs_1")},
    ),
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from([*ResponseRequest.model_fields, "frob", "messages"]), _ANY, max_size=8), _ANY)
def test_anything_is_a_request_or_refused(body: dict[str, Any], given_input: object) -> None:
    try:
        request = validate(ResponseRequest, {"input": given_input, **body})
        items = [item for item in request.input if not isinstance(item, ItemReference)]
        options = request.options(items)
    except BadRequest:
        return
    json.dumps(request.shown({}))
    assert options.prompt.param == "input"


def _texts(conversation: list[dict[str, object]]) -> list[dict[str, object]]:
    """The messages with their parts joined, as templates that know no parts get them."""
    return [
        {**message, "content": "\n".join(part["text"] for part in content)}
        if isinstance(content := message.get("content"), list)
        else message
        for message in conversation
    ]


def _told(instructions: str | None, items: list[ContentItem]) -> list[dict[str, object]] | str:
    """The messages, or why there are none: an output without its call."""
    try:
        return _texts(messages(instructions, items))
    except BadRequest as error:
        return error.message


@settings(max_examples=50, deadline=None)  # `make property-test` draws many times as many
@given(st.lists(_ITEM, min_size=1, max_size=8), st.none() | st.just("be kind"))
def test_a_stored_conversation_is_the_one_that_was_sent(sent: list[dict[str, Any]], instructions: str | None) -> None:
    items = [item for item in validate(ResponseRequest, {"input": sent}).input if not isinstance(item, ItemReference)]
    raw = json.dumps([item.stored(f"{item.prefix}_{number}") for number, item in enumerate(items)]).encode()
    again = stored_items(raw)
    assert [item.stored(item.id or "") for item in again] == json.loads(raw)
    assert _told(instructions, again) == _told(instructions, items)
