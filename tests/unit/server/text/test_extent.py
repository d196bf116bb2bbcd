"""How much there is of a value, and conversations that are refused for it before they are rendered."""

from __future__ import annotations

import pytest

from quire_server.errors import ContextLengthExceeded
from quire_server.text.prompt import ChatTemplate, exceeds
from support.fake_tokenizer import CHAT_TEMPLATE, load_tokenizer


@pytest.mark.parametrize(
    ("value", "most"),
    [
        ("x" * 101, 100),
        (["x" * 60, {"a": "x" * 60}], 100),
        ([1] * 50, 100),
        ({"x" * 101: 1}, 100),
        ({"a": [{"b": [{"c": "x" * 101}]}]}, 100),
        ([[[[]]]] * 20, 100),
    ],
)
def test_too_much(value: object, most: int) -> None:
    assert exceeds(value, most)
    assert not exceeds(value, 10 * most)


def test_no_more_is_looked_at_than_it_takes() -> None:
    class Text(str):
        __slots__ = ()

        def __len__(self) -> int:
            raise AssertionError("looked at")

    assert exceeds([Text("late"), *["x" * 60] * 3], 100)


def test_a_conversation_that_is_far_too_long_is_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(CHAT_TEMPLATE, load_tokenizer(), max_chars=1000)
    try:
        message = {"role": "user", "content": "x" * 900}
        assert len(template.render([message])) > 900

        def run(*_: object, **__: object) -> str:
            raise AssertionError("rendered")

        monkeypatch.setattr(template, "_run", run)
        calls = [{"function": {"name": "f", "arguments": "x" * 3000}}]
        for messages, tools in (
            ([message] * 3, ()),
            ([{"role": "assistant", "content": None, "tool_calls": calls}], ()),
            ([message], [{"type": "function", "function": {"description": "x" * 3000}}]),
        ):
            with pytest.raises(ContextLengthExceeded, match="1000 characters"):
                template.render(messages, tools=tools)
    finally:
        template.close()
