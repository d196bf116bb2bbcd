"""JSON in pieces: the values and refusals of the parser that takes a text whole, at any size of the pieces."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire_server.errors import BadRequest, ClientGone
from quire_server.http.json_text import JsonLimits, parse_pieces, parse_text

ANY = JsonLimits(max_values=1 << 24)

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(["", '"', "\\", "[,", "},{", ":", "é😀"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | TEXTS
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXTS, inner, max_size=6),
    max_leaves=40,
)  # fmt: skip
# Whole documents, with what makes them invalid put in anywhere.
FAULTS = [
    "",
    ",",
    ",,",
    "[",
    "]",
    "{",
    "}",
    '"',
    "\\",
    ":",
    "NaN",
    "1" * 41,
    "\\ud800",
    '"\\ud800"',
    " ",
    "\n",
    '"a":1,',
]


def refusal(parse: Callable[[], object]) -> str | None:
    try:
        parse()
    except BadRequest as error:
        return error.code
    return None


def check(raw: bytes, piece_bytes: int, *, same_code: bool = True) -> None:
    """In pieces as in one: the same value, or a refusal."""
    found: list[object] = []
    code = refusal(lambda: found.append(parse_pieces(raw, ANY, piece_bytes=piece_bytes)))
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        assert code == "invalid_json"
        return
    wanted: list[object] = []
    wanted_code = refusal(lambda: wanted.append(parse_text(text)))
    assert (code == wanted_code) if same_code else ((code is None) == (wanted_code is None))
    assert found == wanted
    assert json.dumps(found) == json.dumps(wanted)  # 1, 1.0 and True are equal to Python


@given(VALUES, st.integers(2, 40), st.booleans(), st.sampled_from([None, 2]))
def test_every_value_survives(value: object, piece_bytes: int, is_ascii: bool, indent: int | None) -> None:
    check(json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode(), piece_bytes)


@given(VALUES, st.integers(2, 40), st.sampled_from(FAULTS), st.floats(0, 1), st.integers(0, 3))
@example([[1], [2]], 2, ",", 0.3, 0)
@example([[1.0]], 2, "1" * 41, 0.5, 0)
@example([[1.0]], 2, "1" * 41, 1.0, 0)
@example([[-1]], 2, "1" * 39, 0.75, 0)
@example([[-1]], 2, "1" * 38, 0.75, 0)
def test_every_fault_is_found(value: object, piece_bytes: int, fault: str, place: float, dropped: int) -> None:
    text = json.dumps(value)
    at = int(place * len(text))
    # Of two faults either may be found first.
    check((text[:at] + fault + text[at + dropped :]).encode(), piece_bytes, same_code=False)


@pytest.mark.parametrize(
    "text",
    [
        *("[1,2,]", "[1,,2]", "[,1]", "[[,1]]", "[1, ,2]", "[1,2, ]", '{"a":1,}', '{"a":1,,"b":2}', '{"a":,"b":1}'),
        *("[[ ,1],2]", '{"a":1},{"b":2}', "1,2", ",", "[1,2", "[1,2}", '{"a":[1,2},"b":1]', '["a', '["a\\', '["a\\"]'),
        *('[1,2],"b":3', '{"a":[1,2],"b":3,"b":4}', '{"a":1,"b":2,"a":3}', '{"a":{"b":1,"c":2,"b":3}}', "", " ", "[]"),
        *(
            '{"":1,"a":[1,{"":2,"b":[3,4]}]}',
            '[{},{"a":{}}]',
            "[1e999,1]",
            "[1,Infinity]",
            "[1,01]",
            "[1,-]",
            "[1,tru]",
        ),
        *("[1,1" + "0" * 39 + "]", "[1,1" + "0" * 40 + "]", '["' + "1" * 50 + '",2]'),
        *(
            '["\\ud83d\\ude00","\\ud83d"]',
            '["a\nb",1]',
            '["\\x",1]',
            "[1] [2],[3]",
            "[true,false,null,-0,1.0,1E2,-1.5e-3]",
        ),
        *("[" * 64 + "1,2" + "]" * 64, "[" * 65 + "1,2" + "]" * 65, '{"a":' * 64 + "[1,2]" + "}" * 64),
    ],
)
def test_documents_at_every_size_of_pieces(text: str) -> None:
    for piece_bytes in (*range(2, 24), 1000):
        check(text.encode(), piece_bytes)


def test_a_float_may_have_many_digits() -> None:
    check(b"[1,0." + b"1" * 50 + b"]", 1000)


@pytest.mark.parametrize("raw", [b'["\xff",1,2]', b'["a","\xc3"]', '["aé",1]'.encode("utf-16"), b"\xef\xbb\xbf[1,2]"])
def test_what_is_not_utf_8(raw: bytes) -> None:
    for piece_bytes in (2, 4, 1000):
        check(raw, piece_bytes)


def test_a_long_string_among_keys() -> None:
    text = '{"a":1,"b":{"c":"' + "x\\n" * 300 + '","d":[1,2]},"e":2%s}'
    for piece_bytes in (8, 64, 200):
        check((text % "").encode(), piece_bytes)
        check((text % ',"b":3').encode(), piece_bytes)
        check((text % ',"f":{"g":1,"g":2}').encode(), piece_bytes)
    twice = '{"a":"' + "x" * 300 + '","a":2}'
    check(twice.encode(), 8)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b'{"a":[' + b"1," * 200_000 + b"1]}", "too_many_values"),
        (b'{"a":[' + b"[]," * 40_000 + b"1]}", "too_many_values"),
        (b'{"a":[' + b"{}," * 40_000 + b"1]}", "too_many_values"),
        (b"{" + b",".join(b'"%d":1' % i for i in range(70_000)) + b"}", "too_many_values"),
        (b"[" * 8_000_000, "invalid_json"),
        (b"[" + (b"[" * 60 + b"]" * 60 + b",") * 60_000, "too_many_values"),
        (b'{"a":"' + b'\\"' * 4_000_000, "invalid_json"),
        (b'{"a":"' + b"\\" * 8_000_001, "invalid_json"),
        (b'{"a":' + b"1" * 8_000_000 + b"}", "invalid_json"),
        (b'{"a":' + b" " * 8_000_000 + b"}", "invalid_json"),
    ],
)
def test_what_is_too_much_is_refused_early(raw: bytes, code: str) -> None:
    limits = JsonLimits(max_values=150_000)
    started = time.process_time()
    with pytest.raises(BadRequest) as caught:
        parse_pieces(raw, limits)
    assert caught.value.code == code
    assert time.process_time() - started < 5


def test_the_limits_are_exact() -> None:
    limits = JsonLimits(max_values=9, max_keys=3, max_brackets=4)
    assert parse_pieces(b"[" + b"1," * 9 + b"1]", limits) == [1] * 10
    assert parse_pieces(b'[{"a":1,"b":2},{"c":3},[]]', limits) == [{"a": 1, "b": 2}, {"c": 3}, []]
    for raw in (b"[" + b"1," * 10 + b"1]", b'{"a":1,"b":2,"c":3,"d":4}', b"[[],[],[],[]]"):
        with pytest.raises(BadRequest):
            parse_pieces(raw, limits)


def test_no_piece_takes_long() -> None:
    """Between two pieces another thread may run: the longest that one could wait for this one."""
    raw = b'{"prompt":[' + b"12345," * 400_000 + b'1],"text":"' + b"a\\n" * 300_000 + b'"}'
    calls = []

    def stopped() -> bool:
        calls.append(time.thread_time())
        return False

    parse_pieces(raw, ANY, stopped=stopped)
    gaps = sorted(after - before for before, after in itertools.pairwise(calls))
    assert len(gaps) > 60
    assert gaps[-1] < 0.5


def test_who_has_left_is_not_read_to_the_end() -> None:
    answers = iter([False, False, True])
    with pytest.raises(ClientGone):
        parse_pieces(b"[" + b"1," * 1000 + b"1]", ANY, stopped=lambda: next(answers), piece_bytes=16)
