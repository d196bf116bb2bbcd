"""Values that are of the right type and still harm: how many, how large, which tokens, which features together.

Promises: ids are held against the vocabulary on every route that takes them. Must not know: how sampling is done.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hostile.case import OK_OR_REFUSED, REFUSED, Answer, Case
from hostile.corpus.facts import MARK, Facts, Raw, shown

OK = frozenset({200})
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}
# One sensible use of each optional feature; all pairs of them must be served or refused, never fail.
FEATURES: dict[str, dict[str, object]] = {
    "logprobs": {"logprobs": 3},
    "stream": {"stream": True},
    "n": {"n": 3, "temperature": 1.0},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.2},
    "seed": {"seed": 1, "temperature": 1.0},
    "schema": {"response_format": _FORMAT},
    "stop": {"stop": ["a", "the"]},
    "echo": {"echo": True},
    "logit_bias": {"logit_bias": {"7": 100}},
    "allowed": {"allowed_token_ids": [5, 6, 7]},
    "bad words": {"bad_words": ["a", "the"]},
    "best_of": {"best_of": 3, "temperature": 1.0},
    "beams": {"use_beam_search": True, "n": 2, "temperature": 0.0},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": [7]},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "truncation": {"truncate_prompt_tokens": 1},
    "salt": {"cache_salt": "a"},
    "kept": {"cache_ttl": 60},
    "ids": {"return_token_ids": True, "return_tokens_as_token_ids": True},
    "deadline": {"timeout": 10.0},
}


def cases(facts: Facts) -> Iterator[Case]:
    yield from _counts(facts)
    yield from _greedy(facts)
    yield from _tokens(facts)
    yield from _pairs(facts)


def _counts(facts: Facts) -> Iterator[Case]:
    """Fan-out and limits: refused before anything is queued."""
    longer = facts.max_model_len
    wrong: list[dict[str, object]] = [
        *({"n": n} for n in (0, -1, 17, 10**9)),
        *({"best_of": n} for n in (0, 17, 10**9)),
        {"n": 4, "best_of": 2},
        {"prompt": ["a"] * 5000},
        {"prompt": ["a"] * 64, "n": 16},
        {"prompt": ["a"] * 65},
        *({"stop": stop} for stop in (["a"] * 17, [""], "", ["x" * 10_240], [1], [None])),
        *({"logprobs": n} for n in (21, 10**9, -1)),
        *({"prompt_logprobs": n} for n in (21, -1)),
        *({"max_tokens": n} for n in (-2, 0, 2**31, 2**63)),
        {"min_tokens": 1_000_000_000},
        {"min_tokens": 5, "max_tokens": 4},
        {"bad_words": ["a"] * 100_000},
        {"bad_words": [""]},
        {"stop_token_ids": list(range(1025))},
        {"allowed_token_ids": []},
        *({"seed": seed} for seed in (2**64, -(2**63) - 1, 1.5, "a", True)),
        *({"priority": value} for value in (2**63, 0.5)),
        *({"timeout": value} for value in (0, -1, 10**9)),
        *({"top_p": value} for value in (0, -0.1, 1.0001)),
        *({"top_k": value} for value in (-2, 2**31)),
        *({"temperature": value} for value in (-1e-9, 2.0001, 1e308)),
        *({name: Raw("NaN")} for name in ("temperature", "top_p", "min_p", "presence_penalty", "timeout")),
        *({name: "0.5"} for name in ("temperature", "top_p", "min_p", "presence_penalty", "timeout")),
        {"prompt": [1] * (longer + 1)},
        {"cache_salt": ""},
        {"cache_salt": "a" * 20_000},
        {"cache_salt": "a\u0000b"},
        {"cache_salt": 1},
        *({"cache_ttl": value} for value in (0, -1, 86_401, "5m", Raw("NaN"))),
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"logit_bias": {"7": 101}},
        {"logit_bias": {"7": -101}},
        {"logit_bias": {"7": Raw("NaN")}},
        {"logit_bias": {str(i): 1 for i in range(2000)}},
        *({"logit_bias": {key: 1}} for key in ("-1", "9" * 20, "1.0", " 1", "1 ", "a", "", "+1", "0x1", "\u0661")),
        {"beam_width": 10**9, "use_beam_search": True},
        {"stream_options": {"include_usage": True}},
    ]
    for changes in wrong:
        name = ", ".join(f"{key} = {shown(value)}" for key, value in changes.items())
        yield facts.completion("values", name, changes, REFUSED | ({413} if "100" in name or "5000" in name else set()))
    fine: list[dict[str, object]] = [
        *({"seed": seed} for seed in (-1, 0, 2**63 - 1, -(2**63))),
        {"priority": -(2**63)},
        {"stop": ["\U0001f600", "\u202e", "\x00"]},
        {"echo": True, "logprobs": 5, "prompt": [1] * (longer - 2), "max_tokens": 1},
        {"prompt": [1] * (longer - 1), "max_tokens": 1},
        {"cache_salt": "a/b@c"},
        {"cache_salt": "\u00e4"},
        {"user": "\u202e" * 1000},
        {"max_tokens": 2**31 - 1, "ignore_eos": True, "prompt": [1] * (longer - 1)},
        {"prompt": ["a"] * 64, "max_tokens": 1},
    ]
    for changes in fine:
        name = ", ".join(f"{key} = {shown(value)}" for key, value in changes.items())
        yield facts.completion("values", name, changes, OK_OR_REFUSED | {429})
    yield facts.completion("values", "timeout = 1e-9", {"timeout": 1e-9}, {504, 400})


def _greedy(facts: Facts) -> Iterator[Case]:
    """A temperature that is almost zero is greedy, and no division."""
    said: list[bytes] = []

    def same(answer: Answer) -> str | None:
        value = answer.json()
        text = value["choices"][0]["text"].encode() if isinstance(value, dict) and answer.status == 200 else b""
        said.append(text)
        return None if text == said[0] else f"{text!r} and not {said[0]!r}"

    for temperature in (0, Raw("1e-45"), 1e-12, Raw("-0.0"), Raw("5e-324")):
        changes: dict[str, object] = {"temperature": temperature, "max_tokens": 8, "prompt": "1, 2, 3,"}
        yield facts.completion("values", f"temperature = {shown(temperature)}", changes, OK, check=same)


def _tokens(facts: Facts) -> Iterator[Case]:
    size = facts.vocab_size
    for token in (-1, size - 1, size, size + 1, 2**31 - 1, 2**31, 2**63, 2**64, True, 1.5, "7", None, [7]):
        is_known = token == size - 1
        expected = OK_OR_REFUSED if is_known else REFUSED
        for path, name, body in (
            ("/v1/completions", "prompt", {"prompt": [token]}),
            ("/v1/completions", "prompt, the second of two", {"prompt": [[1], [1, token]]}),
            ("/v1/completions", "allowed_token_ids", {"prompt": MARK, "allowed_token_ids": [token]}),
            ("/v1/completions", "stop_token_ids", {"prompt": MARK, "stop_token_ids": [token]}),
            ("/v1/completions", "logprob_token_ids", {"prompt": MARK, "logprob_token_ids": [token]}),
            ("/v1/completions", "logit_bias", {"prompt": MARK, "logit_bias": {str(token): 1}}),
            ("/v1/chat/completions", "allowed_token_ids", _chat({"allowed_token_ids": [token]})),
            ("/v1/chat/completions", "stop_token_ids", _chat({"stop_token_ids": [token]})),
            ("/v1/chat/completions", "logprob_token_ids", _chat({"logprob_token_ids": [token]})),
            ("/v1/chat/completions", "logit_bias", _chat({"logit_bias": {str(token): 1}})),
            ("/v1/responses", "stop_token_ids", {"input": MARK, "store": False, "stop_token_ids": [token]}),
            ("/v1/responses", "logit_bias", {"input": MARK, "store": False, "logit_bias": {str(token): 1}}),
            ("/v1/embeddings", "input", {"input": [token]}),
            ("/v1/embeddings", "input, the second of two", {"input": [[1], [token]]}),
            ("/detokenize", "tokens", {"tokens": [token]}),
        ):
            if name in {"logit_bias"} and token == "7":
                continue  # which is how a bias is written
            limited = body | ({"max_tokens": 2} if "completions" in path else {})
            if path == "/v1/responses":
                limited["max_output_tokens"] = 2
            if name in {"prompt", "input"} and token == "7":
                expected_here = OK_OR_REFUSED  # a list of texts
            elif name in {"prompt", "input"} and token == [7]:
                expected_here = OK_OR_REFUSED  # a list of lists
            else:
                expected_here = expected
            yield facts.case("token ids", f"{name} = {shown(token)}", path, limited, expected_here)


def _chat(changes: dict[str, object]) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": MARK}], **changes}


def _pairs(facts: Facts) -> Iterator[Case]:
    for (one, first), (other, second) in itertools.combinations(FEATURES.items(), 2):
        changes = {"max_tokens": 6, **first, **second}
        yield facts.completion("pairs of features", f"{one} and {other}", changes, OK_OR_REFUSED)
