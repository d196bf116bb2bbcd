"""Calls to compare with vLLM: what each is answered there, and why ours differs where it does.

vLLM's statuses are those of `vllm serve` 0.1x with --enable-auto-tool-choice, read from its documents and its request
models; it was not run here. Where its versions differ, the newer one counts. Must not know: the server.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Body = dict[str, Any]


class Call(NamedTuple):
    path: str
    fields: Body  # over the least valid body
    vllm: int
    ours: int
    why: str = ""


TEXT, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
LEAST: dict[str, Body] = {
    TEXT: {"prompt": "a", "max_tokens": 4},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
    TOKENIZE: {},
    DETOKENIZE: {},
}
BOTH = (TEXT, CHAT)


def say(role: str, **rest: Any) -> Body:
    return {"messages": [{"role": "user", "content": "a"}, {"role": role, **rest}]}


def user(**rest: Any) -> Body:
    return {"messages": [{"role": "user", **rest}]}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALLED = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

# Answered by both, and alike: the fields that clients send, at values that mean something.
GOOD_ANYWHERE: list[Body] = [
    {}, {"model": None}, {"model": ""}, {"n": 2, "temperature": 1}, {"n": None}, {"seed": -1}, {"seed": 0},
    {"temperature": 0}, {"temperature": 1}, {"temperature": 2}, {"temperature": 1e-9}, {"temperature": None},
    {"top_p": 1}, {"top_p": 0.1}, {"top_k": 0}, {"top_k": -1}, {"top_k": 40}, {"min_p": 0}, {"min_p": 1},
    {"presence_penalty": -2}, {"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 1.1},
    {"logit_bias": {"97": 5}}, {"logit_bias": {}}, {"logit_bias": None}, {"allowed_token_ids": [97]},
    {"bad_words": ["a"]}, {"bad_words": ["several tokens"]}, {"bad_words": []}, {"logprob_token_ids": [97]},
    {"stop": "x"}, {"stop": ["x", "y"]}, {"stop": []}, {"stop": None}, {"stop_token_ids": [97]},
    {"min_tokens": 2}, {"ignore_eos": True}, {"include_stop_str_in_output": True}, {"skip_special_tokens": False},
    {"spaces_between_special_tokens": False}, {"add_special_tokens": True}, {"truncate_prompt_tokens": 1},
    {"truncate_prompt_tokens": -1}, {"prompt_logprobs": 0}, {"prompt_logprobs": 3}, {"return_token_ids": True},
    {"return_tokens_as_token_ids": True}, {"cache_salt": "user:42@example"}, {"request_id": "abc"},
    {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}, {"stream_options": None},
    {"stream": True, "stream_options": {"continuous_usage_stats": True, "include_usage": True}},
    {"user": "me"}, {"vendor_field": {"a": [1]}}, {"stream_interval": 3}, {"priority": 0},
    {"use_beam_search": True}, {"use_beam_search": True, "n": 2, "length_penalty": 0.5},
]  # fmt: skip
GOOD: dict[str, list[Body]] = {
    TEXT: [
        {"prompt": ["a", "b"]}, {"prompt": [97, 98]}, {"prompt": [[97], [98, 99]]}, {"echo": True},
        {"echo": True, "max_tokens": 0, "logprobs": 1}, {"logprobs": 0}, {"logprobs": 20}, {"max_tokens": None},
        {"best_of": None}, {"best_of": 1}, {"suffix": None}, {"response_format": {"type": "text"}},
    ],
    CHAT: [
        {"echo": True}, {"documents": [{"text": "a"}]},
        {"max_tokens": None}, {"max_completion_tokens": 3}, {"max_completion_tokens": None}, {"logprobs": True},
        {"logprobs": True, "top_logprobs": 5}, {"top_logprobs": 0}, {"top_logprobs": None}, {"logprobs": False},
        user(content=[{"type": "text", "text": "a"}]), user(content=""), user(content="a", name="me"),
        say("system", content="b"), say("developer", content="b"), say("assistant", content="b"),
        say("critic", content="b"),
        say("assistant", content=None, tool_calls=[CALLED]), say("assistant", tool_calls=[CALLED]),
        say("assistant", content="b", reasoning="c"), say("tool", content="b", tool_call_id="call_1"),
        {"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs": {"nothing": 1}},
        {"add_generation_prompt": False}, {"reasoning_effort": "low"}, {"include_reasoning": False},
        {"tool_choice": "none"}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "auto"},
        {"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL], "parallel_tool_calls": False},
        {"parallel_tool_calls": True}, {"response_format": {"type": "text"}}, {"response_format": None},
        {"metadata": {"a": "b"}}, {"store": True}, {"service_tier": "auto"}, {"safety_identifier": "x"},
        {"prompt_cache_key": "x"}, {"verbosity": "low"}, {"prediction": None}, {"modalities": ["text"]},
    ],
    TOKENIZE: [
        {"prompt": "a"}, {"prompt": ""}, {"prompt": "a", "return_token_strs": True}, user(content="a"),
        {**user(content="a"), "add_generation_prompt": False},
    ],
    DETOKENIZE: [{"tokens": [97]}, {"tokens": []}],
}  # fmt: skip

# Refused by both with 400.
BAD_ANYWHERE: list[Body] = [
    {"n": 0}, {"n": -1}, {"n": 1.5}, {"n": 10**6}, {"seed": 2**63}, {"temperature": -0.1}, {"temperature": "hot"},
    {"top_p": 0}, {"top_p": 1.1}, {"top_k": -2}, {"top_k": 1.5}, {"min_p": -0.1}, {"min_p": 1.1},
    {"presence_penalty": 2.1}, {"frequency_penalty": -2.1}, {"repetition_penalty": 0}, {"repetition_penalty": -1},
    {"logit_bias": {"a": 1}}, {"logit_bias": {"260": 1}}, {"logit_bias": [1]}, {"allowed_token_ids": []},
    {"allowed_token_ids": [260]}, {"bad_words": [""]}, {"bad_words": "a"}, {"logprob_token_ids": [260]},
    {"logprob_token_ids": [1] * 129}, {"stop": ""}, {"stop": ["x", ""]}, {"stop": 5}, {"stop": ["x"] * 17},
    {"stop_token_ids": ["a"]}, {"max_tokens": -2}, {"min_tokens": -1}, {"min_tokens": 5}, {"prompt_logprobs": -2},
    {"prompt_logprobs": 21}, {"prompt_logprobs": 1, "stream": True}, {"truncate_prompt_tokens": -2},
    {"truncate_prompt_tokens": 0}, {"cache_salt": ""}, {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": []}, {"model": 5}, {"response_format": {"type": "nothing"}},
]  # fmt: skip
BAD: dict[str, list[Body]] = {
    TEXT: [
        {"prompt": None}, {"prompt": []}, {"prompt": [[]]}, {"prompt": ""}, {"prompt": [1.5]}, {"prompt": [-1]},
        {"prompt": [260]}, {"prompt": ["a", 1]}, {"prompt": {}}, {"prompt": "a" * 600}, {"max_tokens": 0},
        {"logprobs": -1}, {"logprobs": 21}, {"suffix": "b"}, {"prompt_embeds": "AAAA"},
    ],
    CHAT: [
        {"messages": []}, {"messages": "a"}, {"messages": [{}]}, {"messages": [{"content": "a"}]}, user(content=5),
        user(content=[{"type": "nothing"}]), user(content=[{"type": "text"}]), user(content=None),
        user(content="a" * 600), {"max_tokens": 0}, {"max_completion_tokens": -2}, {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -2}, {"logprobs": 5},
        {"continue_final_message": True, "add_generation_prompt": True}, {"reasoning_effort": "extreme"},
        {"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": 5}, {"tool_choice": "auto"},
        {"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        {"tools": [TOOL], "tool_choice": "sometimes"}, {"tools": [{"type": "function"}]}, {"tools": 5},
        {"response_format": {"type": "json_schema"}},
    ],
    TOKENIZE: [
        {}, {"prompt": 5}, {"messages": "a"},
        {**user(content="a"), "add_generation_prompt": True, "continue_final_message": True},
    ],
    DETOKENIZE: [{}, {"tokens": ["a"]}, {"tokens": [-1]}],
}  # fmt: skip

TYPES = "a string is no number and 1 is not true: a client with a bug is told"
BOUND = "what one request may cost is bounded"
NOT_HERE = "vLLM drops it or does it; we do not do it, and nothing that asks for another answer is dropped"
HARMLESS = "what is meant is clear, and clients send it"
DIFFERENT: list[Call] = [
    *(Call(path, fields, 200, 400, TYPES) for path in BOTH for fields in (
        {"temperature": "0.5"}, {"n": "1"}, {"n": True}, {"stream": "false"}, {"ignore_eos": 1}, {"seed": "7"},
        {"max_tokens": "4"}, {"top_k": 5.0})),
    *(Call(path, {"n": 17, "temperature": 1}, 200, 400, BOUND) for path in BOTH),
    Call(TEXT, {"prompt": ["a"] * 65}, 200, 400, BOUND),
    *(Call(path, {"temperature": 2.5}, 200, 400, "OpenAI's range; above 2 is noise") for path in BOTH),
    *(Call(path, {"repetition_penalty": 20}, 200, 400, "far beyond use, and it overflows logits") for path in BOTH),
    *(Call(path, {"logit_bias": {"97": 101}}, 200, 400, "vLLM lowers it to 100 in silence") for path in BOTH),
    *(Call(path, {"stop_token_ids": [10**6]}, 200, 400, "no such token: it would never stop") for path in BOTH),
    *(Call(path, {"request_id": "a b"}, 200, 400, "it is echoed in headers and logs") for path in BOTH),
    *(Call(path, {"cache_salt": "a\n"}, 200, 400, "control characters are a mistake") for path in BOTH),
    *(Call(path, {"n": 2, "temperature": 0}, 400, 200, "OpenAI answers: equal choices") for path in BOTH),
    *(Call(path, {"stop": [*"12345"]}, 400, 200, "lm-eval and agents send more than four") for path in BOTH),
    *(Call(path, {"priority": 3}, 400, 200, "without the policy it is named in x-quire-ignored") for path in BOTH),
    *(Call(path, {"max_tokens": 10**6}, 400, 200, "lowered to what fits; editors ask for more") for path in BOTH),
    *(Call(path, fields, 200, 400, NOT_HERE) for path in BOTH for fields in (
        {"length_penalty": 2.0}, {"vllm_xargs": {"a": 1}}, {"kv_transfer_params": {"a": 1}},
        {"repetition_detection": {"min_count": 2}}, {"logits_processors": ["x"]}, {"mirostat": 2}, {"beam_width": 4})),
    *(Call(CHAT, fields, 200, 400, NOT_HERE) for fields in (
        {"functions": [{"name": "f"}]}, {"function_call": "auto"}, {"modalities": ["text", "audio"]},
        {"audio": {"voice": "x"}}, {"mm_processor_kwargs": {"a": 1}},
        user(content=[{"type": "image_url", "image_url": {"url": "data:,"}}]))),
    Call(CHAT, {"messages": [{"role": "user"}]}, 200, 400, "OpenAI's rule: only an assistant may have no content"),
    Call(CHAT, {"tools": []}, 400, 200, HARMLESS),
    Call(CHAT, {"tools": [], "tool_choice": "none"}, 400, 200, HARMLESS),
    Call(TOKENIZE, {"prompt": "a", **user(content="a")}, 200, 400, "one of the two would be dropped"),
    Call(DETOKENIZE, {"tokens": [10**6]}, 200, 400, "no such token"),
]  # fmt: skip

# (method, path, vLLM, ours, why): with no body.
ROUTES: list[tuple[str, str, int, int, str]] = [
    ("GET", "/health", 200, 200, ""), ("GET", "/version", 200, 200, ""), ("GET", "/metrics", 200, 200, ""),
    ("GET", "/v1/models", 200, 200, ""), ("GET", "/docs", 200, 200, ""), ("GET", "/openapi.json", 200, 200, ""),
    ("GET", "/nothing", 404, 404, ""), ("GET", TEXT, 405, 405, ""), ("GET", CHAT, 405, 405, ""),
    ("POST", "/v1/models", 405, 405, ""), ("DELETE", TEXT, 405, 405, ""), ("POST", "/health", 405, 405, ""),
    ("GET", "/v1/models/fake", 404, 200, "client.models.retrieve of the SDKs"),
    ("GET", "/", 404, 200, "a page for people"),
    ("GET", "/tokenizer_info", 404, 200, "vLLM needs a flag; lm-eval asks for it"),
    ("GET", "/load", 200, 200, ""), ("GET", "/ping", 200, 200, ""), ("POST", "/ping", 200, 200, ""),
    ("POST", "/invocations", 400, 404, "the route of one cloud"),
]  # fmt: skip


def calls() -> list[Call]:
    """All with a body."""
    found = [Call(path, fields, 200, 200) for path in BOTH for fields in GOOD_ANYWHERE]
    found += [Call(path, fields, 200, 200) for path, several in GOOD.items() for fields in several]
    found += [Call(path, fields, 400, 400) for path in BOTH for fields in BAD_ANYWHERE]
    found += [Call(path, fields, 400, 400) for path, several in BAD.items() for fields in several]
    return found + DIFFERENT
