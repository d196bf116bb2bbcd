"""Forced calls and answers of gpt-oss, Kimi, GLM and OLMo, with their special tokens, through a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from quire_server.text.parsing.formats import TOOL_FORMATS
from support.checkpoints import make_checkpoint
from support.covering import few
from support.served_answers import served_answers

SETTINGS: dict[str, Any] = {"kv_memory": 8 << 20, "num_threads": 1, "max_model_len": 512, "device": "cpu"}
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {**CITY, "additionalProperties": False}}}]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "temperature": 1.5, "n": 4}
TEMPLATES = {
    "openai": "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{# <|channel|>analysis<|message|> #}<|start|>assistant",
    "glm45": "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<tool_call><arg_key>{% endif %}",
    "olmo3": "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<function_calls>{% endif %}",
    "kimi_k2": "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if tools %}<|tool_calls_section_begin|>{% endif %}",
}


def checkpoint(path: Path, form: str) -> Path:
    make_checkpoint(path, vocab_size=560)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in TOOL_FORMATS[form].markers])
    tokenizer.save(str(path / "tokenizer.json"))
    ends = [tokenizer.token_to_id(mark) for mark in ("<|im_end|>", "<|return|>", "<|call|>")]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [i for i in ends if i is not None]}))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATES[form]}))
    return path


@pytest.mark.parametrize("form", few(sorted(TEMPLATES), "openai"))
def test_forced_calls_and_answers_are_what_was_asked_for(form: str, tmp_path: Path) -> None:
    structure = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY, "strict": True}}
    path = checkpoint(tmp_path, form)
    end = Tokenizer.from_file(str(path / "tokenizer.json")).token_to_id("<|end|>")
    bias = {} if end is None else {"logit_bias": {str(end): 12}}  # so that a random model ends its thoughts
    asked = [
        ("/v1/chat/completions", {**CHAT, **bias, "tools": TOOLS, "tool_choice": "required"}),
        ("/v1/chat/completions", {**CHAT, **bias, "response_format": structure}),
        ("/v1/chat/completions", {**CHAT, "tools": TOOLS, "max_tokens": 20}),
    ]
    calls, answers, free = served_answers(asked, model=str(path), seed=1, **SETTINGS)
    finished = [choice for choice in calls["choices"] if choice["finish_reason"] != "length"]
    assert finished
    for choice in finished:
        (call, *others) = choice["message"]["tool_calls"]
        assert form != "openai" or not others
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
        assert call["id"].startswith("functions.weather:" if form == "kimi_k2" else "call_")
        assert not choice["message"]["content"]
    for choice in answers["choices"]:
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"])["city"] in ("Paris", "Rome")
    assert any(choice["finish_reason"] == "stop" for choice in answers["choices"])
    assert all("<|channel|>" not in (choice["message"]["content"] or "") for choice in free["choices"])
