"""Terminals of a grammar of JSON: scalars and names as one lexeme each, with the white space that stands beside marks.

Few and large lexemes make cheap masks: all scalars of a value are one, and white space belongs to brackets, commas and
colons.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from quire_server.answering.constraining.json_schema.characters import ALL, one, spelled, spelled_constant
from quire_server.answering.constraining.json_schema.formats import FORMATS
from quire_server.answering.constraining.json_schema.numbers import (
    DOUBLE_DIGITS,
    MOST_DIGITS,
    PLAIN_INTEGER,
    any_number,
    at_least,
    at_most,
    constant,
    multiple_of_power,
)
from quire_server.answering.constraining.json_schema.patterns import as_expression
from quire_server.answering.constraining.json_schema.reading import Schemata
from quire_server.answering.constraining.json_schema.shapes import (
    Boolean,
    Bound,
    Null,
    Number,
    SchemaRefused,
    Shape,
    Text,
)

# A space, or a line's end and an indentation: bounded, since models may write blanks without end.
WHITE_SPACE = "(?:[\\x20\\x09]|\\x0d?\\x0a[\\x20\\x09]{0,32})?"
_CHARACTER = spelled(ALL)
_LONGEST_MULTIPLE = 15  # digits up to which the library calculates exactly


class Terminals:
    """The terminals of one grammar, each once, by what they match."""

    def __init__(self, *, compact: bool) -> None:
        """`compact`: without white space."""
        self._names: dict[str, str] = {}
        self._space = "" if compact else WHITE_SPACE

    def lines(self) -> list[str]:
        """The definitions."""
        return [f"{name}: {body}" for body, name in self._names.items()]

    def named(self, body: str, kind: str = "T") -> str:
        """The name of the terminal with this body."""
        return self._names.setdefault(body, f"{kind}{len(self._names)}")

    def mark(self, character: str) -> str:
        """A bracket or a comma with the white space inside of what it stands for."""
        before = self._space if character in ",]}" else ""
        after = self._space if character in ",[{" else ""
        return self.named(f"/{before}\\x{ord(character):02x}{after}/", "P")

    def name(self, text: str) -> str:
        """A member's name, with its colon."""
        return self.named(f"/\\x22{''.join(map(spelled_constant, text))}\\x22{self._colon}/", "K")

    def other_name(self, wanted: Iterable[str], unwanted: Iterable[str], names: Sequence[str], *, begins: bool) -> str:
        """A name of a text that is none of `names` in any spelling, with its colon.

        `wanted`, `unwanted`: expressions of what is between its quotes. `begins`: nor one that begins as they do.
        """
        rest = f"{_CHARACTER}*" if begins else ""
        without = [
            *(f"/\\x22{each}\\x22/" for each in unwanted),
            *(f"/\\x22{_any_spelling(name)}{rest}\\x22/" for name in names),
        ]
        body = " & ".join([f"/\\x22{_CHARACTER}*\\x22/", *(f"/\\x22{each}\\x22/" for each in wanted)])
        for each in without:
            body += f" & ~{self.named(each, 'N')}"
        return self.named(f"{self.named(body, 'X')} /{self._colon}/", "K") if self._colon else self.named(body, "K")

    @property
    def _colon(self) -> str:
        return f"{self._space}\\x3a{self._space}"


def scalar(shape: Shape, schemata: Schemata) -> str | None:
    """The body of a terminal for a scalar; None for other values, and for steps that only the library calculates."""
    if isinstance(shape, Null):
        return "/null/"
    if isinstance(shape, Boolean):
        return f"/{'|'.join('true' if value else 'false' for value in shape.values)}/"
    if isinstance(shape, Text):
        return _text(shape, schemata)
    if not isinstance(shape, Number):
        return None
    found = _number(shape)
    if found is not None and shape.is_integer and schemata.has_plain_integers:
        return f"{found} & /{PLAIN_INTEGER}/"
    return found


def _text(shape: Text, schemata: Schemata) -> str:
    if shape.values is not None:
        values = "|".join("".join(map(spelled_constant, value)) for value in shape.values)
        return f"/\\x22(?:{values})\\x22/"
    named = [FORMATS[name] for name in shape.formats]
    most = min((most for most in (shape.most, *(most for _, most in named)) if most is not None), default=None)
    patterns = [
        schemata.tried(
            lambda pattern=pattern: as_expression(schemata.tree(pattern, shape.place)),  # type: ignore[misc]
            f"'pattern' {pattern[:64]!r} at {shape.place}",
        )
        for pattern in (*shape.patterns, *(pattern for pattern, _ in named))
    ]
    if shape.least or most is not None or not patterns:
        patterns.append(f"{_CHARACTER}{_counts(shape.least, most)}")
    return " & ".join(f"/\\x22{each}\\x22/" for each in patterns)


def _counts(least: int, most: int | None) -> str:
    if most is None:
        return "*" if not least else f"{{{least},}}"
    return f"{{{least},{most}}}"


def _number(shape: Number) -> str | None:
    if shape.values is not None:
        return f"/{'|'.join(constant(each.value, text=each.text) for each in shape.values)}/"
    parts = []
    for step in shape.steps:
        digits = step.normalize().as_tuple()
        if digits.digits != (1,):
            return None
        parts.append(multiple_of_power(int(digits.exponent), is_integer=shape.is_integer))
    for bound, expression in ((shape.low, at_least), (shape.high, at_most)):
        if bound is not None:
            _check_bound(bound, shape.place)
            if shape.is_integer and len(str(abs(int(bound.value)))) > DOUBLE_DIGITS:
                parts.append(PLAIN_INTEGER)
            parts.append(expression(bound.value, excluded=bound.excluded, is_integer=shape.is_integer))
    return " & ".join(f"/{each}/" for each in parts or [any_number(is_integer=shape.is_integer)])


def _check_bound(bound: Bound, place: str) -> None:
    if len(format(bound.value, "f")) > MOST_DIGITS:
        raise SchemaRefused(f"a bound at {place} has more than {MOST_DIGITS} digits")


def multiples(shape: Number) -> str:
    """A rule's body for numbers of steps that are no power of ten, by the library. Raises SchemaRefused."""
    bounds = {
        name: bound.value
        for bound, names in (
            (shape.low, ("minimum", "exclusiveMinimum")),
            (shape.high, ("maximum", "exclusiveMaximum")),
        )
        if bound is not None
        for name in [names[bound.excluded]]
    }
    for name, value in [*bounds.items(), *(("multipleOf", step) for step in shape.steps)]:
        digits = value.normalize().as_tuple()
        if len(digits.digits) + max(0, int(digits.exponent)) > _LONGEST_MULTIPLE or int(digits.exponent) < -9:
            raise SchemaRefused(
                f"'{name}' beside 'multipleOf' at {shape.place} has more than {_LONGEST_MULTIPLE} digits"
            )
    schema: dict[str, object] = {
        "x-guidance": {"whitespace_flexible": False},
        "type": "integer" if shape.is_integer else "number",
        **{name: _plain(value) for name, value in bounds.items()},
        "allOf": [{"multipleOf": _plain(step)} for step in shape.steps],
    }  # fmt: skip
    return f"%json {json.dumps(schema)}"


def _plain(value: object) -> int | float:
    number = float(str(value))
    return int(number) if number.is_integer() else number


def _any_spelling(text: str) -> str:
    return "".join(spelled(one(each)) for each in text)
