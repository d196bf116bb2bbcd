"""JSON in pieces is the JSON of the whole."""

from __future__ import annotations

import json
from array import array

import msgspec
import pytest

from quire_engine.contract.types import TokenLogprobs
from quire_server.dialects.completions.rendering import TOKENS_AT_ONCE, chat_pieces, completion_pieces, prompt_pieces
from quire_server.http.json_text import (
    CHARS_AT_ONCE,
    IDS_AT_ONCE,
    Pieces,
    pieces_of_ids,
    pieces_of_object,
    pieces_of_parts,
    pieces_of_text,
)
from quire_server.text.logprobs import LogprobFormat
from support.fake_tokenizer import load_tokenizer


@pytest.mark.parametrize("size", [0, 1, IDS_AT_ONCE, IDS_AT_ONCE + 1, 2 * IDS_AT_ONCE])
def test_ids(size: int) -> None:
    assert b"".join(pieces_of_ids(range(size))) == msgspec.json.encode(list(range(size)))
    assert b"".join(pieces_of_ids(array("I", range(size)))) == msgspec.json.encode(list(range(size)))


@pytest.mark.parametrize("text", ["", 'a"\\\n\u2028', "é😀" * CHARS_AT_ONCE, "x" * (CHARS_AT_ONCE - 1) + "😀\x00"])
def test_texts(text: str) -> None:
    assert b"".join(pieces_of_text(text)) == msgspec.json.encode(text)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"a": 1},
        {"a": 1, "b": [2]},
        {"p": Pieces(iter([b"[", b"1]"]))},
        {"a": None, "p": Pieces(iter([b"{}"])), "q": Pieces(iter([b"7"])), "b": "x"},
        {"p": Pieces(iter([b"2"])), "b": "x"},
        {"b": "x", "p": Pieces(iter([b"2"]))},
    ],
)
def test_objects(fields: dict[str, object]) -> None:
    held = {name: list(value.parts) if isinstance(value, Pieces) else value for name, value in fields.items()}
    fields = {name: Pieces(iter(value)) if isinstance(fields[name], Pieces) else value for name, value in held.items()}
    whole = {
        name: json.loads(b"".join(value)) if isinstance(fields[name], Pieces) else value for name, value in held.items()
    }
    assert b"".join(pieces_of_object(fields)) == msgspec.json.encode(whole)


def test_a_part_of_an_object() -> None:
    made = b"".join(pieces_of_object({"p": Pieces(iter([b"1"])), "b": 2}, begin=b'{"a":0,', end=b""))
    assert made + b"}" == b'{"a":0,"p":1,"b":2}'


def test_lists_of_parts() -> None:
    assert b"".join(pieces_of_parts(iter([]))) == b"[]"
    assert b"".join(pieces_of_parts(iter([iter([b"1"]), iter([b"[", b"]"])]))) == b"[1,[]]"


def positions(count: int) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(
            token_id=number % 250, logprob=-number / 3, rank=1, top_ids=(97, 98, 99), top_logprobs=(-0.5, -1.0, -2.5)
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("names_are_ids", [False, True])
@pytest.mark.parametrize("count", [0, 1, TOKENS_AT_ONCE, 3 * TOKENS_AT_ONCE + 1])
def test_logprobs_are_those_of_the_format(count: int, names_are_ids: bool) -> None:
    names = LogprobFormat(load_tokenizer(), names_are_ids=names_are_ids)
    chosen = positions(count)
    echoed = [None, *chosen]
    encode = msgspec.json.encode
    assert b"".join(prompt_pieces(names, echoed, 2).parts) == encode(names.prompt(echoed, 2))
    assert b"".join(chat_pieces(names, chosen, 2).parts) == encode(names.chat(chosen, 2))
    offsets = range(len(echoed))
    in_pieces = b"".join(completion_pieces(names, echoed, [65], iter(offsets), 2).parts)
    assert in_pieces == encode(names.completion(echoed, [65], offsets, 2))
