"""Strict JSON bodies: what is refused, what is named, how long it may take."""

from __future__ import annotations

import json
import time
from codecs import BOM_UTF8
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, model_validator

from quire_server.errors import BadRequest, UnsupportedMediaType, error_body
from quire_server.http.body import INLINE_BYTES, LongList, check_content_type, parse_json, validate
from quire_server.http.body_limits import OWN_BYTES, BodyBuffer
from quire_server.http.json_text import MAX_DEPTH


class Part(BaseModel):
    text: str


class Message(BaseModel):
    role: Literal["user", "system"]
    content: str | list[Part]


class Sample(BaseModel):
    prompt: str | LongList[str] | LongList[int] | LongList[LongList[int]] = ""
    temperature: float = Field(1.0, ge=0, le=2)
    n: int = Field(1, ge=1, le=16)
    messages: list[Message] = []

    @model_validator(mode="after")
    def _combination(self) -> Sample:
        if self.n == 2 and self.temperature == 0:
            raise ValueError("n must be 1 when temperature is 0")
        if self.n == 3:
            raise BadRequest("three is refused", param="n", code="three")
        return self


def refusal(raw: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        validate(Sample, parse_json(raw))
    assert len(error_body(caught.value)["error"]["message"].encode()) <= 1024
    return caught.value


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"n": NaN}',
        b'{"n": Infinity}',
        b'{"n": -Infinity}',
        b'{"temperature": 1e999}',
        b'{"n": ' + b"1" * 5000 + b"}",
        b"\xff{}",
        '{"n": 1}'.encode("utf-16"),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"prompt": "' + b'\\"' * 500_000,
        b'{"prompt": "a\nb"}',
        b'{"n": 1} {}',
        b"{'n': 1}",
    ],
)
def test_what_is_not_json_is_refused_quickly(raw: bytes) -> None:
    started = time.thread_time()
    assert refusal(raw).code == "invalid_json"
    assert time.thread_time() - started < 5


def test_duplicate_keys_are_refused_at_any_depth() -> None:
    assert refusal(b'{"n": 1, "n": 2}').code == "duplicate_key"
    assert refusal(b'{"messages": [{"role": "user", "role": "system"}]}').param == "role"


def test_depth_is_bounded_exactly() -> None:
    at_limit = b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    assert parse_json(at_limit)
    assert refusal(b'{"a":[' + at_limit + b"]}").code == "invalid_json"


def test_brackets_inside_strings_do_not_count() -> None:
    text = '["\\"' * 1000
    assert parse_json(
        f'{{"prompt": "{text.replace(chr(92), chr(92) * 2).replace(chr(34), chr(92) + chr(34))}"}}'.encode()
    )


def test_nul_and_surrogate_pairs_are_text() -> None:
    assert parse_json(b'{"prompt": "\\u0000\\ud83d\\ude00"}') == {"prompt": "\x00😀"}


@settings(max_examples=40)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(codec="utf-8")),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    )
)  # fmt: skip
def test_every_json_value_survives(value: object) -> None:
    import json

    assert parse_json(json.dumps({"value": value}).encode()) == {"value": value}
    assert parse_json(json.dumps({"value": value}, ensure_ascii=False).encode()) == {"value": value}


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"n": true}', "n"),
        (b'{"n": "3"}', "n"),
        (b'{"n": 1.0}', "n"),
        (b'{"n": 0}', "n"),
        (b'{"n": 100000000000000000000}', "n"),
        (b'{"temperature": "NaN"}', "temperature"),
        (b'{"temperature": 2.5}', "temperature"),
        (b'{"temperature": true}', "temperature"),
        (b'{"prompt": [1.5]}', "prompt"),
        (b'{"prompt": null}', "prompt"),
        (b'{"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}', "messages[1].content"),
        (b'{"messages": [{"role": "x", "content": "a"}]}', "messages[0].role"),
        (b'{"messages": {"role": "user"}}', "messages"),
    ],
)
def test_the_field_is_named_and_the_value_is_not_echoed(raw: bytes, param: str) -> None:
    error = refusal(raw)
    assert error.param == param
    assert "input_value" not in error.message


def test_errors_inside_a_union_name_the_place_and_not_the_branch() -> None:
    error = refusal(b'{"messages": [{"role": "user", "content": [{"text": 1}]}]}')
    assert "messages[0].content[0].text: Input should be a valid string" in error.message
    assert "list" not in (error.param or "")


def test_long_values_are_not_echoed() -> None:
    error = refusal(b'{"n": "' + b"x" * 300_000 + b'"}')
    assert len(error.message) < 200


def test_validators_may_raise_either_kind() -> None:
    assert refusal(b'{"n": 2, "temperature": 0}').message == "n must be 1 when temperature is 0"
    assert refusal(b'{"n": 3}').code == "three"


def test_at_most_ten_errors_are_told() -> None:
    class Wide(BaseModel):
        model_config = ConfigDict(extra="forbid")

    unknown = ",".join(f'"k{i}": 1' for i in range(500))
    with pytest.raises(BadRequest) as caught:
        validate(Wide, parse_json(f"{{{unknown}}}".encode()))
    assert caught.value.message.count("Extra inputs") == 10
    assert caught.value.code == "unknown_parameter"


def test_long_lists_of_wrong_items_are_refused_quickly() -> None:
    raw = b'{"prompt": [' + b"1.5," * 500_000 + b"1]}"
    value = parse_json(raw)
    started = time.thread_time()
    with pytest.raises(BadRequest):
        validate(Sample, value)
    assert time.thread_time() - started < 5


@pytest.mark.parametrize(
    "value",
    ["application/json", "application/json; charset=utf-8", "Application/JSON;charset=UTF-8", "application/ld+json"],
)
def test_json_content_types_pass(value: str) -> None:
    check_content_type(value)


@pytest.mark.parametrize(
    "value",
    [None, "", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16", "text/json"],
)
def test_other_content_types_are_refused(value: str | None) -> None:
    with pytest.raises(UnsupportedMediaType):
        check_content_type(value)


@pytest.mark.parametrize("size", [0, INLINE_BYTES, OWN_BYTES])  # parsed at once, in pieces, in a mapping of its own
def test_a_byte_order_mark_counts_as_white_space(size: int) -> None:
    text = json.dumps({"prompt": "é" + "x" * size}, ensure_ascii=False).encode()
    for raw in (BOM_UTF8 + text, BOM_UTF8 + b" \n" + text):
        buffer = BodyBuffer(len(raw))
        buffer.add(raw)
        assert parse_json(buffer.take()) == json.loads(text)
    for raw in (BOM_UTF8 * 2 + text, text + BOM_UTF8, BOM_UTF8[:2] + text, BOM_UTF8):
        with pytest.raises(BadRequest):
            parse_json(raw)
