"""Whatever is logged is one line: JSON that can be read, or text that steers no terminal."""

from __future__ import annotations

import json
import logging
import sys
import unicodedata

from hypothesis import example, given
from hypothesis import strategies as st

from quire_server.logs import JsonFormatter, TextFormatter
from quire_server.logs.lines import MOST_CHARACTERS, encoded

ANY = st.text(st.characters(exclude_categories=()))  # halves of surrogate pairs too
STEERING = {"Cc", "Zl", "Zp"}
REVERSING = {"RLE", "LRE", "RLO", "LRO", "PDF", "RLI", "LRI", "FSI", "PDI"}
STEERS = "".join(
    char
    for char in map(chr, range(sys.maxunicode))
    if unicodedata.category(char) in STEERING or unicodedata.bidirectional(char) in REVERSING
)


def record(message: str, told: dict[str, object], trace: str | None) -> logging.LogRecord:
    made = logging.LogRecord("quire.test", logging.INFO, __file__, 1, "%s", (message,), None)
    made.__dict__.update(request_id="r", told=told)
    if trace is not None:
        try:
            raise ValueError(trace)
        except ValueError:
            made.exc_info = sys.exc_info()
    return made


@example(message="\ud800", value="\udfff", trace="\u2028")
@given(message=ANY, value=ANY, trace=st.none() | ANY)
def test_json(message: str, value: str, trace: str | None):
    line = encoded(JsonFormatter().format(record(message, {"path": value}, trace)))
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert len(line.splitlines()) == 1
    read = json.loads(line)
    assert (read["message"], read["path"]) == (message, value)


@example(message="\ud800", trace="\u2028")
@example(message=STEERS, trace=STEERS)
@given(message=ANY, trace=st.none() | ANY)
def test_text(message: str, trace: str | None):
    text = encoded(TextFormatter().format(record(message, {}, trace))).decode()
    assert text.endswith("\n")
    first, *more = text[:-1].split("\n")
    assert first.endswith("[r]")
    assert trace is not None or not more
    for line in (first, *more):
        assert not [char for char in line if unicodedata.category(char) in STEERING]
        assert not [char for char in line if unicodedata.bidirectional(char) in REVERSING]
    assert all(line.startswith("    ") for line in more)


def test_lines_have_a_bound():
    long = "m" * (MOST_CHARACTERS * 4)
    for formatter in (JsonFormatter(), TextFormatter()):
        assert len(formatter.format(record(long, {}, long))) < 5 * MOST_CHARACTERS
