"""Tools told in words, for templates without a place for them."""

from __future__ import annotations

from quire_server.text.prompt import describe_tools

TOOLS = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "What time is it?"}


def test_the_tools_stand_before_the_conversation():
    system, user = describe_tools([USER], TOOLS)
    assert system["role"] == "system"
    assert str(system["content"]).endswith('{"name": "get_time", "parameters": {"type": "object"}}')
    assert user == USER


def test_a_system_message_keeps_its_text():
    told = describe_tools([{"role": "system", "content": "Be brief."}, USER], TOOLS)
    assert len(told) == 2
    assert str(told[0]["content"]).startswith("Be brief.\n\nYou can call functions.")


def test_calls_and_results_stay_as_text():
    call = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "é"}'}}
    history = [
        USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "10:15"}]},
    ]
    _, _, asked, result = describe_tools(history, TOOLS)
    one = '{"name": "get_time", "arguments": {"zone": "é"}}'
    assert asked == {"role": "assistant", "content": f"I look.\n[{one}, {one}]"}
    assert result == {"role": "user", "content": "The result of get_time: 10:15"}
