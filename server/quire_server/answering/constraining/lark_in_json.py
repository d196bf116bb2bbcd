"""A client's Lark grammar as it is written inside of a JSON string.

Models write calls as JSON, so a text of the grammar comes with its line ends, quotes and backslashes escaped. Every
terminal is rewritten for that: each character that JSON escapes becomes its escape, in one spelling. Rules stay as
they are.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter

from quire_server.answering.constraining.json_schema import SchemaRefused

# Of a grammar: a text, an expression, a comment, the head of a definition, a name or anything else.
_PIECE = re.compile(
    r"""
    (?P<text>"(?:[^"\\\n]|\\.)*"i?)
    | (?P<comment>(?://|\#)[^\n]*)
    | (?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/[imslux]*)
    | (?P<import>%import[ \t]+common\.(?P<name>[A-Z_]+)(?:[ \t]*->[ \t]*(?P<alias>[A-Z_]+))?)
    | (?P<foreign>%(?!ignore\b)\w+|<[^<>\s]+>|@\w+|\.\.|~|&)
    | (?P<alias_of_rule>->[ \t]*\w+)
    | (?P<head>^[ \t]*[?!]?(?P<rule>[A-Za-z_]\w*)(?:\.[+-]?\d+)?[ \t]*:)
    | (?P<word>[A-Za-z_]\w*)
    | .
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
# Of an expression: a character class, an escape or a character.
_ATOM = re.compile(
    r"\[\^?\]?(?:[^\]\\]|\\.)*\]|\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[xu]\{[0-9a-fA-F]+\}|[pP]\{\w+\}|.)|.", re.DOTALL
)
_SHORT = {"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\"}
_SPECIAL = [*(chr(code) for code in range(0x20)), '"', "\\"]
_LONG = "0[0-7be-f]|1[0-9a-f]"  # those that have no short escape
_NUM_LONG = len(_SPECIAL) - len(_SHORT)
_PLAIN = r'[^"\\\x00-\x1f]'  # what JSON has as it is
_CLASSES = "dDwWsSpP"
_CONTROLS = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
# What Lark's library has of texts that JSON escapes; the rest of it is letters and digits.
_COMMON = {
    "LF": r"/\n/",
    "CR": r"/\r/",
    "NEWLINE": r"/(\r?\n)+/",
    "WS": r"/[ \t\f\r\n]+/",
    "WS_INLINE": r"/[ \t]+/",
    "ESCAPED_STRING": r'/"([^"\\\n]|\\.)*"/',
    "C_COMMENT": None, "CPP_COMMENT": None, "SH_COMMENT": None, "SQL_COMMENT": None,
}  # fmt: skip


def in_json(grammar: str) -> str:
    """The grammar of the JSON strings, without their quotes, of the texts of `grammar`. Raises SchemaRefused.

    Where no rule refers to itself all rules become terminals, and so one expression: a lexer that looks one byte ahead
    could not tell an escape that goes on with a text from one that ends it.
    """
    pieces = list(_pieces(grammar.replace("\r\n", "\n")))
    written = [_rewritten(found) for found in pieces]
    references = _references(pieces)
    if "%ignore" not in grammar and not _has_circle(references):
        named = {name: f"R_{name.upper()}" for name in references if name.islower()}
        return "start: R_START\n" + "".join(
            _as_terminal(found, text, named) for found, text in zip(pieces, written, strict=True)
        )
    if any(
        found["regex"] is not None and "|" in text and "\\\\" in text
        for found, text in zip(pieces, written, strict=True)
    ):
        raise SchemaRefused(
            "a grammar whose rules refer to themselves, or that ignores texts, has an expression of texts with quotes,"
            " backslashes or line ends"
        )
    return "".join(written)


def _pieces(grammar: str) -> Iterator[re.Match[str]]:
    for found in _PIECE.finditer(grammar):
        if found[0] in ('"', "/"):  # at once: to look for more of them would take the square of the grammar's length
            raise SchemaRefused(f"the text or expression that begins with {grammar[found.start() :][:32]} has no end")
        yield found


def _references(pieces: list[re.Match[str]]) -> dict[str, set[str]]:
    """The names that each definition refers to."""
    found: dict[str, set[str]] = {}
    known: set[str] = set()
    for piece in pieces:
        if piece["rule"] is not None:
            known = found.setdefault(piece["rule"], set())
        elif piece["word"] is not None:
            known.add(piece["word"])
    return found


def _has_circle(references: dict[str, set[str]]) -> bool:
    try:
        TopologicalSorter(references).prepare()
    except CycleError:
        return True
    return False


def _as_terminal(found: re.Match[str], text: str, named: dict[str, str]) -> str:
    if found["rule"] is not None:
        return f"{named.get(found['rule'], found['rule'])}:"
    if found["alias_of_rule"] is not None:
        return ""
    return named.get(found["word"], text) if found["word"] is not None else text


def _rewritten(found: re.Match[str]) -> str:
    if found["comment"] is not None:
        return ""
    if found["foreign"] is not None:
        raise SchemaRefused(f"'{found[0]}' is not supported in the grammar of a tool")
    if found["import"] is not None:
        return _imported(found)
    if found["text"] is not None:
        body, _, flag = found[0].rpartition('"')
        return _text(f'{body}"') + flag
    if found["regex"] is not None:
        body, _, flags = found[0][1:].rpartition("/")
        return f"/{expression_in_json(body, flags)}/{flags}"
    return found[0]


def _text(written: str) -> str:
    try:
        value = json.loads(re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", written), strict=False)
    except ValueError:
        raise SchemaRefused(f"{written[:64]} is no text") from None
    return json.dumps("".join(map(_escaped, value)), ensure_ascii=False)


def _imported(found: re.Match[str]) -> str:
    name = found["name"]
    if name not in _COMMON:
        return found[0]
    meaning = _COMMON[name]
    if meaning is None:
        raise SchemaRefused(f"'common.{name}' is not supported in the grammar of a tool")
    return f"{found['alias'] or name}: /{expression_in_json(meaning[1:-1])}/"


def expression_in_json(pattern: str, flags: str = "") -> str:
    """The regular expression of the JSON strings, without quotes, of the texts that match `pattern`."""
    if re.search(r"\(\?(?!:)", pattern):
        raise SchemaRefused("groups of expressions with options are not supported in the grammar of a tool")
    return "".join(_atom(found[0], dot_all="s" in flags) for found in _ATOM.finditer(pattern))


def _atom(atom: str, *, dot_all: bool) -> str:
    if atom == ".":
        return _class(r"[\s\S]" if dot_all else r"[^\n]")
    if atom == "[":
        raise SchemaRefused("a class of characters has no end")
    if atom[0] == "[":
        return _class(atom)
    if atom[0] == "\\" and len(atom) > 1:
        kind = atom[1]
        if kind in _CLASSES:
            return _class(f"[{atom}]")
        if kind in "xu" and len(atom) > 2:
            return _one(chr(int(atom[2:].strip("{}"), 16)))
        if kind in "bBAzZG" or kind.isdigit():
            raise SchemaRefused(f"'{atom}' is not supported in the grammar of a tool")
        return _one(_CONTROLS.get(kind, kind), otherwise=atom)
    return _one(atom, otherwise=atom)


def _one(character: str, *, otherwise: str = "") -> str:
    """An expression for one character; `otherwise`: for one that JSON does not escape."""
    if character in _SPECIAL:
        return f"(?:{re.escape(_escaped(character))})"
    return otherwise or f"\\x{{{ord(character):x}}}"


@lru_cache(maxsize=64)
def _class(written: str) -> str:
    """A class of characters: those that JSON has as they are, and the escapes of its others."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # sets of sets, which Python reads as plain characters
            known = re.compile(re.sub(r"\\[pP]\{\w+\}", "", written) if "\\p" in written.lower() else written)
    except (re.error, FutureWarning):
        raise SchemaRefused(
            f"the class of characters {written[:64]} is not supported in the grammar of a tool"
        ) from None
    members = [each for each in _SPECIAL if known.fullmatch(each)]
    escapes = [re.escape(_escaped(each)) for each in members if each in _SHORT]
    others = [f"{ord(each):02x}" for each in members if each not in _SHORT]
    if others:
        escapes.append(rf"\\u00(?:{'|'.join(others) if len(others) < _NUM_LONG else _LONG})")
    return f"(?:{'|'.join([f'[{written}&&{_PLAIN}]', *escapes])})"


def _escaped(character: str) -> str:
    """The character in a JSON string, in its shortest spelling."""
    if character in _SHORT:
        return _SHORT[character]
    return f"\\u{ord(character):04x}" if character < " " else character
