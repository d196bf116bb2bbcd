"""JSON that is read and written again has the numbers as they were spelled."""

from __future__ import annotations

import json
import math

import pytest

from quire_server.text import spelled_json

NUMBERS = ("1.10", "1e400", "-1E+05", "-0", "-0.0", "12345678901234567890", "0.1000000000000000055511151231257827", "7")


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_keep_their_spelling_at_every_depth(text: str) -> None:
    for whole in (text, f'{{"a": [{text}, {{"b": {text}}}], "{text}": "{text}"}}'):
        assert spelled_json.write(spelled_json.read(whole)) == whole
    value = spelled_json.read(text)
    assert isinstance(value, int | float)
    assert not isinstance(value, bool)
    assert value == json.loads(text) or math.isinf(value)
    assert str(value) == f"{value}" == repr(value) == text


def test_other_values_are_written_as_by_json() -> None:
    value = {"b": ["é<'&\n", None, True, 1, 2.5, {}, []], "a": {"c": "Xq7"}, "n": float("nan")}
    styles = [{}, {"ensure_ascii": True}, {"indent": 2}, {"separators": (",", ":")}, {"sort_keys": True}]
    for style in styles:
        assert spelled_json.write(value, **style) == json.dumps(value, **{"ensure_ascii": False, **style})  # type: ignore[arg-type]


def test_a_text_of_the_form_of_a_mark_stays_a_text() -> None:
    for text in ("Xq70123456789abcdef:0", ":0", '"Xq7":1'):
        assert json.loads(spelled_json.write({"a": text, "b": spelled_json.read("1.0e1")})) == {"a": text, "b": 10.0}
