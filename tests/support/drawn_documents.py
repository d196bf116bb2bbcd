"""Draws JSON texts that a schema accepts, in every spelling that RFC 8259 has, and texts that it rejects.

Promises: what is drawn follows from the `Random` alone, and knows nothing of grammars; `accepts` asks a validator of
another make. A schema's `examples` stand for what cannot be drawn: patterns and formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from random import Random
from typing import Any, TypeAlias

from jsonschema import FormatChecker
from jsonschema.validators import Draft202012Validator

Json: TypeAlias = Any  # null, bool, int, Decimal, str, list, dict
_FORMATS = ["date", "email", "ipv4", "ipv6", "uuid"]  # that the validator knows without further packages
_WORDS = (
    "a",
    "offset",
    "path",
    "café",
    "日本語",
    "\U0001f600",
    "a/b",
    '"',
    "\\",
    "\n",
    "\t",
    "<b>",
    "&amp;",
    "\x01",
    "\x7f",
    "\u2028",
    "e\u0301",
    "{x}",
    "1e2",
    " ",
    "\x1b",
    "C:\\new",
    "\x00",
    "ß",
    "한국",
    "\U0001d11e",
    "</tag>",
    "\uffff",
)
_SHORT = {"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\", "/": "\\/"}
_NUMBERS = (
    0,
    1,
    -1,
    7,
    100,
    -20,
    1000,
    2**53 + 1,
    -(2**63),
    10**20,
    Decimal("0.5"),
    Decimal("-3.25"),
    Decimal("0.1"),
    Decimal("1e-7"),
    Decimal("123456.789"),
)
_HUGE = re.compile(r"[eE][+-]?[0-9]{4}")  # an exponent whose number the validator would write out
_OFTEN_ESCAPED = "\"\\/<>&'+=`\x7f"
_MOST_EXPONENT = 18
_LONG = 15  # digits beyond which constants, and numbers between such bounds, are written as digits alone
_MOST_TRIES = 60
_DEEPEST = 4


# -- the judge ---------------------------------------------------------------------------------------------------------


def accepts(schema: Mapping[str, Json], text: str) -> bool:
    """Whether the text is JSON of RFC 8259, with distinct names and paired surrogates, that the schema accepts."""
    try:
        value = read(text)
        text.encode()
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except ValueError:  # also of half a surrogate pair
        return False
    return bool(_validator(json.dumps(schema)).is_valid(value))


def read(text: str) -> Json:
    """The text's value, its numbers exact. Raises ValueError."""
    return json.loads(text, parse_float=_exact, parse_constant=_no_constant, object_pairs_hook=_distinct, strict=True)


def _exact(text: str) -> int | Decimal:
    value = Decimal(text)
    return int(value) if value == int(value) else value


def _no_constant(text: str) -> Json:
    raise ValueError(text)


def _distinct(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice")
    return found


class _Repeated(Exception):
    """A name that comes twice."""


def _repeats(text: str) -> bool:
    """Whether a text that is JSON has a name twice in one object."""

    def once(pairs: list[tuple[str, Json]]) -> None:
        if len(dict(pairs)) < len(pairs):
            raise _Repeated

    try:
        json.loads(text, object_pairs_hook=once)
    except _Repeated:
        return True
    except ValueError:
        return False
    return False


_validators: dict[str, Draft202012Validator] = {}


def _validator(schema: str) -> Draft202012Validator:
    found = _validators.get(schema)
    if found is None:
        parsed = json.loads(schema, parse_float=Decimal)
        found = _validators[schema] = Draft202012Validator(parsed, format_checker=FormatChecker(_FORMATS))
    return found


# -- values ------------------------------------------------------------------------------------------------------------


def drawn_value(schema: Mapping[str, Json], draw: Random) -> Json:
    """A value that the schema accepts. Raises LookupError where none was drawn."""
    for _ in range(_MOST_TRIES):
        try:
            value = _Values(schema, draw).of(schema, 0)
        except LookupError:
            continue
        if _validator(json.dumps(schema)).is_valid(value):
            return value
    raise LookupError("no value was drawn")


class _Values:
    """Draws values by a schema's keywords, mostly those that it accepts."""

    def __init__(self, root: Mapping[str, Json], draw: Random) -> None:
        self._root, self._draw = root, draw

    def of(self, schema: Json, depth: int) -> Json:
        if schema is False or depth > 12:
            raise LookupError("nothing")
        if schema is True:
            schema = {}
        known = schema.get("examples") or schema.get("enum") or ([schema["const"]] if "const" in schema else [])
        if known:
            return self._draw.choice(known)
        if "$ref" in schema:
            return self.of(self._target(schema["$ref"]), depth + 1)
        for several in ("anyOf", "oneOf"):
            if several in schema:
                rest = {name: value for name, value in schema.items() if name != several}
                return self.of(_merged(rest, self._draw.choice(schema[several])), depth + 1)
        if "allOf" in schema:
            merged = {name: value for name, value in schema.items() if name != "allOf"}
            for each in schema["allOf"]:
                merged = _merged(merged, self._target(each["$ref"]) if "$ref" in each else each)
            return self.of(merged, depth)
        return self._of_kind(schema, self._kind(schema), depth)

    def _kind(self, schema: Mapping[str, Json]) -> str:
        kind = schema.get("type")
        if isinstance(kind, list):
            return str(self._draw.choice(kind))
        if kind is not None:
            return str(kind)
        if "properties" in schema or "required" in schema or "additionalProperties" in schema:
            return "object"
        return "any"

    def _of_kind(self, schema: Mapping[str, Json], kind: str, depth: int) -> Json:
        ways: dict[str, Callable[[], Json]] = {
            "object": lambda: self._object(schema, depth),
            "array": lambda: self._array(schema, depth),
            "string": lambda: self._text(schema.get("minLength", 0), schema.get("maxLength")),
            "integer": lambda: self._number(schema, kind),
            "number": lambda: self._number(schema, kind),
            "boolean": lambda: self._draw.random() < 0.5,
            "null": lambda: None,
        }
        return ways[kind]() if kind in ways else self._any(depth)

    def _any(self, depth: int) -> Json:
        kinds = ["string", "integer", "number", "boolean", "null"]
        return self._of_kind({}, self._draw.choice(kinds + ["object", "array"] * (depth < _DEEPEST)), depth)

    def _object(self, schema: Mapping[str, Json], depth: int) -> dict[str, Json]:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        share = self._draw.choice((0.0, 0.3, 0.7, 1.0)) if depth < _DEEPEST else 0.0
        names = list(dict.fromkeys([*required, *(name for name in properties if self._draw.random() < share)]))
        found = {
            name: self.of(properties.get(name, schema.get("additionalProperties", True)), depth + 1) for name in names
        }
        more: list[tuple[str, Json]] = []
        extra = schema.get("additionalProperties", True)
        if extra is not False:
            more += [(self._name(properties), extra) for _ in range(self._draw.choice((0, 0, 1, 2)) * (depth < 3))]
        for each in schema.get("patternProperties", {}).values():
            more += [(name, each) for name in each.get("$names", ()) if self._draw.random() < 0.5]
        for name, value in more:
            if name not in properties and len(found) < schema.get("maxProperties", 99):
                found[name] = self.of(value, depth + 1)
        while extra is not False and len(found) < schema.get("minProperties", 0):
            found[self._text(1, 9)] = self.of(extra, depth + 1)
        shuffled = list(found.items())
        if self._draw.random() < 0.8:
            self._draw.shuffle(shuffled)
        # What is required comes before names that are not declared.
        others = [pair for pair in shuffled if pair[0] not in properties and pair[0] not in required]
        declared = [pair for pair in shuffled if pair not in others]
        last = max((i for i, (name, _) in enumerate(declared) if name in required), default=-1) + 1
        rest = [*declared[last:], *others]
        self._draw.shuffle(rest)
        return dict([*declared[:last], *rest])

    def _name(self, properties: Mapping[str, Json]) -> str:
        """A name that is not declared: any text, or one that begins as a declared one does or goes on from it."""
        known = self._draw.choice([*properties, "x"])
        return self._draw.choice((self._text(0, 8), f"{known}_1", known[:-1], known.upper(), f"{known} ", f"x{known}"))

    def _array(self, schema: Mapping[str, Json], depth: int) -> list[Json]:
        firsts, items = schema.get("prefixItems", []), schema.get("items", True)
        least = schema.get("minItems", 0)
        most = schema.get("maxItems", max(least, len(firsts)) + 3)
        if items is False:
            most = min(most, len(firsts))
        size = self._draw.choice((least, most, self._draw.randint(least, max(least, most))))
        if depth >= _DEEPEST:
            size = least
        return [self.of(firsts[i] if i < len(firsts) else items, depth + 1) for i in range(size)]

    def _text(self, least: int, most: int | None) -> str:
        """A text, of the least or the most length as often as not: in characters, not in bytes."""
        size = self._draw.choice((least, most if most is not None else least + 5, self._draw.randint(least, least + 9)))
        if most is not None:
            size = min(size, most)
        text = ""
        while len(text) < size:
            text += self._draw.choice(_WORDS) if self._draw.random() < 0.6 else self._draw.choice("abcxyz 019_-.")
        return text[:size]

    def _number(self, schema: Mapping[str, Json], kind: str) -> int | Decimal:
        low, high = schema.get("minimum"), schema.get("maximum")
        low = schema["exclusiveMinimum"] + 1 if "exclusiveMinimum" in schema else low
        high = schema["exclusiveMaximum"] - 1 if "exclusiveMaximum" in schema else high
        step = schema.get("multipleOf")
        near = [value for value in (low, high) if value is not None]
        if low is not None and high is not None:
            near += [self._draw.randint(-(-int(low) // 1), int(high))] * 3 if int(low) <= int(high) else []
        value = self._draw.choice(near or _NUMBERS)
        if not near and self._draw.random() < 0.4:
            value = self._draw.randint(-(10 ** self._draw.randint(1, 24)), 10 ** self._draw.randint(1, 24))
        exact = Decimal(str(value))
        if step is not None:
            exact -= exact % Decimal(str(step))
        if kind == "integer" or exact == exact.to_integral_value():
            return int(exact)
        return exact

    def _target(self, reference: str) -> Json:
        here: Json = self._root
        for step in reference.split("/")[1:]:
            here = here[step]
        return here


def _merged(one: Mapping[str, Json], other: Mapping[str, Json]) -> dict[str, Json]:
    """Both schemas' keywords in one; names and requirements of both."""
    found = {**one, **other}
    if "properties" in one and "properties" in other:
        found["properties"] = {**one["properties"], **other["properties"]}
    if "required" in one and "required" in other:
        found["required"] = list(dict.fromkeys([*one["required"], *other["required"]]))
    return found


# -- spellings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spelling:
    """How a value is written: its texts, its numbers and what stands between its parts.

    It keeps within what docs/api.md says of spellings: a text that the schema itself has, such as a declared name, has
    no escapes of ASCII but those that writers of JSON make; an integer has no fraction but zeros, nor a negative
    exponent, and a long constant or a number between long bounds is digits alone.
    """

    draw: Random
    own: frozenset[str]  # the texts of the schema itself
    escapes: str  # plain, ascii, upper, html, slash, any
    numbers: str  # plain, any
    spaces: str  # none, usual, indented, crlf, tabs, any

    @staticmethod
    def drawn(schema: Mapping[str, Json], draw: Random) -> Spelling:
        return Spelling(
            draw,
            own=frozenset(_texts(schema)),
            escapes=draw.choice(("plain", "plain", "ascii", "upper", "html", "slash", "any")),
            numbers="plain" if "multipleOf" in schema else draw.choice(("plain", "plain", "any")),
            spaces=draw.choice(("none", "usual", "usual", "indented", "crlf", "tabs", "any")),
        )

    def of(self, value: Json, depth: int = 0) -> str:
        if isinstance(value, str):
            return self.text(value)
        if value is None or isinstance(value, bool):
            return json.dumps(value)
        if isinstance(value, int | float | Decimal):
            return self.number(Decimal(str(value)))
        opening, closing = "[]" if isinstance(value, list) else "{}"
        if isinstance(value, list):
            parts = [self.of(each, depth + 1) for each in value]
        else:
            parts = [
                f"{self.text(name)}{self._before_colon()}:{self._after_colon()}{self.of(each, depth + 1)}"
                for name, each in value.items()
            ]
        if not parts:
            return opening + closing
        first, between, last = self._around(depth)
        return f"{opening}{first}{between.join(parts)}{last}{closing}"

    def text(self, value: str) -> str:
        return f'"{"".join(self._character(each, is_own=value in self.own) for each in value)}"'

    def number(self, value: Decimal) -> str:
        plain = f"{value:f}"
        if self.numbers == "plain" or (
            len(plain) > _LONG and any(len(each) > _LONG and each.isdigit() for each in self.own)
        ):
            return plain
        upper, plus = self.draw.choice("eE"), self.draw.choice(("", "+"))
        if "." in plain:
            sign, digits, exponent = value.as_tuple()
            assert isinstance(exponent, int)
            body, after = "".join(map(str, digits)), exponent + len(digits) - 1
            exponent_of_one = f"{upper}{plus if after >= 0 else ''}{after}"
            return self.draw.choice(
                (plain, f"{plain}0", f"{'-' * sign}{body[0]}.{body[1:] or '0'}{exponent_of_one}", f"{plain}{upper}0")
            )
        zeros = min(len(plain) - len(plain.rstrip("0")), _MOST_EXPONENT) if value else 0
        ways = [plain, f"{plain}.0", f"{plain}.00", f"{plain}{upper}{plus}0"]
        ways.append(f"{plain[: len(plain) - zeros]}{upper}{plus}{zeros}")
        return self.draw.choice([*ways, "-0", "-0.0", "0e5"] if value == 0 else ways)

    def _character(self, value: str, *, is_own: bool) -> str:
        must = value < " " or value in '"\\'
        escapes = self.escapes
        if escapes == "any":
            escapes = self.draw.choice(("plain", "ascii", "upper", "html", "slash", "every", "EVERY"))
        if must and escapes in ("plain", "ascii", "html", "slash") and value in _SHORT:
            return _SHORT[value]
        escaped = must or {
            "ascii": value > "~",
            "upper": value > "~",
            "html": value in "<>&'\u2028",
            "every": not is_own or not value.isascii() or value in _OFTEN_ESCAPED,
            "EVERY": not is_own or not value.isascii() or value in _OFTEN_ESCAPED,
        }.get(escapes, False)
        if escapes == "slash" and value == "/":
            return "\\/"
        if not escaped:
            return value
        units = value.encode("utf-16-be", "surrogatepass").hex()
        written = "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
        return written.upper().replace("\\U", "\\u") if escapes in ("upper", "EVERY") else written

    def _before_colon(self) -> str:
        return " " if self.spaces == "any" and self.draw.random() < 0.3 else ""

    def _after_colon(self) -> str:
        if self.spaces == "any":
            return self.draw.choice(("", " ", "\n", "\n    ", "\r\n\t"))
        return "" if self.spaces == "none" else " "

    def _around(self, depth: int) -> tuple[str, str, str]:
        """What comes before the first part, between two and behind the last."""
        match self.spaces:
            case "none":
                return "", ",", ""
            case "usual":
                return "", ", ", ""
            case "any":
                gaps = ("", " ", "\n", "\n  ", "\r\n" + "\t" * 16, "\n" + " " * 16)
                return (
                    self.draw.choice(gaps),
                    self.draw.choice(("", " ")) + "," + self.draw.choice(gaps),
                    self.draw.choice(gaps),
                )
        end = "\r\n" if self.spaces == "crlf" else "\n"
        unit = "\t" if self.spaces == "tabs" else "  "
        return end + unit * (depth + 1), f",{end}{unit * (depth + 1)}", end + unit * depth


def _texts(schema: Json) -> Iterator[str]:
    """All texts of a schema, its names and the digits of its numbers among them."""
    if isinstance(schema, str | int):
        yield str(schema)
    elif isinstance(schema, dict | list):
        yield from (name for name in schema if isinstance(name, str))
        for each in schema.values() if isinstance(schema, dict) else schema:
            yield from _texts(each)


def drawn_text(schema: Mapping[str, Json], draw: Random) -> str:
    """A text that the schema accepts. Raises LookupError where none was drawn."""
    text = Spelling.drawn(schema, draw).of(drawn_value(schema, draw))
    assert accepts(schema, text), text
    return text


# -- what a schema rejects ---------------------------------------------------------------------------------------------


def broken_texts(schema: Mapping[str, Json], draw: Random) -> Iterator[tuple[str, str]]:
    """Texts that the schema rejects, each with the kind of its fault, made from one that it accepts."""
    value = drawn_value(schema, draw)
    spelling = Spelling.drawn(schema, draw)
    whole = spelling.of(value)
    faults: dict[str, Callable[[], str | None]] = {
        "value": lambda: spelling.of(_changed(value, draw)),
        "twice": lambda: _with_escaped_twin(value, schema.get("properties", {}), draw),
        "surrogate": lambda: _with_half_a_pair(whole, draw),
        "character": lambda: _with_another_character(whole, draw),
        "cut": lambda: whole[: draw.randrange(len(whole))],
    }
    for kind, fault in faults.items():
        text = fault()
        # Names that are not declared may come twice: no grammar knows all that were written.
        is_known = text is not None and not _HUGE.search(text) and (kind == "twice" or not _repeats(text))
        if text is not None and is_known and not accepts(schema, text):
            yield kind, text


def _changed(value: Json, draw: Random) -> Json:
    """Another value: at one place, a name or a part is added, removed or exchanged."""
    if isinstance(value, dict) and draw.random() < 0.85:
        found = dict(value)
        way = draw.randrange(3)
        name = draw.choice([*found, ""])
        if way == 0:
            found.pop(name, None)
        elif way == 1:
            found[f"{name}_1"] = 1
        elif name in found:
            found[name] = _changed(found[name], draw)
        return found
    if isinstance(value, list) and value and draw.random() < 0.85:
        at = draw.randrange(len(value))
        return draw.choice(
            ([*value[:at], *value[at + 1 :]], [*value, value[at]], [*value[:at], _changed(value[at], draw)])
        )
    if isinstance(value, str):
        return draw.choice(
            (value + "x", value[:-1], value * 2, value.swapcase(), 1, None, value.replace("-02-", "-13-"))
        )
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        return draw.choice((value + 1, value - 1, Decimal(value) + Decimal("0.5"), value * 10, -value, str(value)))
    return draw.choice((None, True, "x", 1, [], {}))


def _with_escaped_twin(value: Json, declared: Mapping[str, Json], draw: Random) -> str | None:
    """The object with a declared name again, spelled with an escape, and another value."""
    names = [name for name in value if name and name in declared] if isinstance(value, dict) else []
    if not names:
        return None
    name = draw.choice(names)
    twin = "".join(f"\\u{unit:04x}" for unit in memoryview(name.encode("utf-16-le")).cast("H"))
    if draw.random() < 0.5:
        twin = json.dumps(name[:-1], ensure_ascii=False)[1:-1] + twin[-6:] if ord(name[-1]) < 0x10000 else twin
    plain = json.dumps(value, ensure_ascii=False, default=_as_number)
    added = f'"{twin}": {json.dumps(_changed(value[name], draw), default=_as_number)}'
    return f"{plain[:-1]}, {added}}}" if draw.random() < 0.5 else f"{{{added}, {plain[1:]}"


def _as_number(value: Decimal) -> float:
    return float(value)


def _with_half_a_pair(whole: str, draw: Random) -> str | None:
    ends = [i for i in range(1, len(whole)) if whole[i] == '"' and whole[i - 1] != "\\"]
    if not ends:
        return None
    at = draw.choice(ends)
    return whole[:at] + draw.choice(("\\ud83d", "\\uDE00", "\\ud83dx", "\\ud83d\\u0041", "\\ude00\\ud83d")) + whole[at:]


def _with_another_character(whole: str, draw: Random) -> str:
    at = draw.randrange(len(whole))
    added = draw.choice(
        ('"', "\\", ",", "0", "-", ".", "e", "}", "]", "\\x41", "\\u12", "\x02", "+", "'", "x", " ", "\n")
    )
    return whole[:at] + draw.choice((added, "")) + whole[at + draw.randrange(2) :]
