"""Pieces of Lark in llguidance's dialect: texts, marks that are tokens, regular expressions, schemas, free text.

Promises: what is written here reads back as meant, whatever characters are in it. Must not know: what the pieces are
put together for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from quire_server.text.parsing.reasoning import TokenId

# Between the parts of a JSON value: a space, or a line's end and what indents the next line. What is not bounded models
# fill with blanks for ever.
_WHITESPACE = r" |\r?\n[ \t]{0,16}"
_ANY_TEXT = "/(?s:.*)/"


def text(value: str) -> str:
    """Exactly this text."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def written(value: str, marks: Iterable[str], token_id: TokenId) -> str:
    """Exactly this text, the marks in it by their tokens where they are some: so a model was trained to write them."""
    ids = {mark: token_id(mark) for mark in marks if mark}
    known = {mark: found for mark, found in ids.items() if found is not None}
    pieces = re.split(f"({'|'.join(map(re.escape, known))})", value) if known else [value]
    return " ".join(f"<[{known[piece]}]>" if piece in known else text(piece) for piece in pieces if piece)


def expression(pattern: str) -> str:
    """A whole text that a regular expression describes."""
    escaped = re.sub(r"\\.|/|\n|\r", _escaped, pattern, flags=re.DOTALL)
    return f"/{escaped}/"


def ending_in(mark: str) -> str:
    """A text up to and with the first place of `mark`; for rules that are lazy."""
    return expression(f"(?s:.*){_plain(mark)}")


def without(mark: str) -> str:
    """A text in which `mark` does not occur; for terminals."""
    return f"{_ANY_TEXT} & ~{expression(f'(?s:.*){_plain(mark)}(?s:.*)')}"


def not_beginning_with(characters: str) -> str:
    """A text whose first character but for spaces is none of these."""
    return expression(rf"\s{{0,4}}[^\s{_plain(characters)}](?s:.*)")


def json_value(schema: Mapping[str, object], *, compact: bool = False, lenient: bool = False) -> str:
    """A JSON value that fulfils the schema; `compact` leaves no whitespace between its parts."""
    options: dict[str, object] = {"whitespace_flexible": False} if compact else {"whitespace_pattern": _WHITESPACE}
    if lenient:
        options["lenient"] = True
    return f"%json {json.dumps({'x-guidance': options, **schema}, separators=(',', ':'))}"


def _plain(value: str) -> str:
    """A text inside a regular expression. Rust knows fewer escapes than Python's `re.escape` makes."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~/]", lambda found: "\\" + found[0], value)


def _escaped(found: re.Match[str]) -> str:
    """What would end the expression or its line, as an escape; what is escaped stays as it is."""
    return {"/": "\\/", "\n": "\\n", "\r": "\\r", "\\\n": "\\n", "\\\r": "\\r"}.get(found[0], found[0])
