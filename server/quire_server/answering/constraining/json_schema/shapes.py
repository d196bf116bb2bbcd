"""Shapes of values: the alternatives that a schema allows, kind by kind, and how two of them are joined.

Values inside of arrays and objects are named by the conjunction of the schemas that hold for them (`Schemas`), which
are not looked into before they are needed: schemas may refer to themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import TypeAlias

Schemas: TypeAlias = tuple[int, ...]  # numbers of schemas that all hold, in order; none: any value
ANYTHING: Schemas = ()
NOTHING: Schemas = (0,)  # the schema `false`


class SchemaRefused(Exception):
    """The reason why a schema is refused, with the place in it."""


@dataclass(frozen=True, slots=True)
class Null:
    """The value null."""


@dataclass(frozen=True, slots=True)
class Boolean:
    """Truth values."""

    values: tuple[bool, ...] = (True, False)


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound of numbers, which may itself be excluded."""

    value: Decimal
    excluded: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """A number of an enumeration, with its spelling in the schema."""

    value: Decimal
    text: str


@dataclass(frozen=True, slots=True)
class Number:
    """Numbers between bounds, of some steps, or of an enumeration."""

    is_integer: bool = False
    low: Bound | None = None
    high: Bound | None = None
    steps: tuple[Decimal, ...] = ()
    values: tuple[Constant, ...] | None = None
    place: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """Strings by length in characters, patterns and formats, or of an enumeration."""

    least: int = 0
    most: int | None = None
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    values: tuple[str, ...] | None = None
    place: str = ""


@dataclass(frozen=True, slots=True)
class Array:
    """Arrays: the first items each by schemas of their own, then all others by the same."""

    first: tuple[Schemas, ...] = ()
    others: Schemas = ANYTHING
    least: int = 0
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Members:
    """Rules of one schema for an object's members."""

    properties: tuple[tuple[str, Schemas], ...] = ()
    patterns: tuple[tuple[str, Schemas], ...] = ()
    others: Schemas = ANYTHING

    @property
    def names(self) -> dict[str, Schemas]:
        """The declared names."""
        return dict(self.properties)


@dataclass(frozen=True, slots=True)
class Object:
    """Objects, by what each of the joined schemas says of their members."""

    members: tuple[Members, ...] = ()
    required: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    place: str = ""


Shape: TypeAlias = Null | Boolean | Number | Text | Array | Object
Shapes: TypeAlias = tuple[Shape, ...]
ALL_SHAPES: Shapes = (Null(), Boolean(), Number(), Text(), Array(), Object())


def both(*schemas: Schemas) -> Schemas:
    """All of these schemas hold."""
    found = sorted({number for each in schemas for number in each})
    return NOTHING if 0 in found else tuple(found)


def joined(left: Shape, right: Shape, holds: Callable[[Text, str], bool]) -> Shape | None:
    """The values of both shapes; None where it is plain that there are none. `holds`: whether a text is of a shape."""
    found: Shape | None = left if left == right else None
    if isinstance(left, Boolean) and isinstance(right, Boolean):
        values = tuple(value for value in left.values if value in right.values)
        found = Boolean(values) if values else None
    elif isinstance(left, Number) and isinstance(right, Number):
        found = joined_numbers(left, right)
    elif isinstance(left, Text) and isinstance(right, Text):
        found = _joined_texts(left, right, holds)
    elif isinstance(left, Array) and isinstance(right, Array):
        found = _joined_arrays(left, right)
    elif isinstance(left, Object) and isinstance(right, Object):
        found = _joined_objects(left, right)
    return found


def _joined_objects(left: Object, right: Object) -> Object | None:
    return checked_object(
        Object(
            members=tuple(dict.fromkeys((*left.members, *right.members))),
            required=tuple(dict.fromkeys((*left.required, *right.required))),
            least=max(left.least, right.least),
            most=_smaller(left.most, right.most),
            place=left.place or right.place,
        )
    )


def _smaller(left: int | None, right: int | None) -> int | None:
    return left if right is None else right if left is None else min(left, right)


def joined_numbers(left: Number, right: Number) -> Number | None:
    """The numbers of both; None where there are none."""
    both_of = Number(
        is_integer=left.is_integer or right.is_integer,
        low=_tighter(left.low, right.low, lambda one, other: one > other),
        high=_tighter(left.high, right.high, lambda one, other: one < other),
        steps=tuple(dict.fromkeys((*left.steps, *right.steps))),
        values=left.values if right.values is None else right.values,
        place=left.place or right.place,
    )
    if left.values is not None and right.values is not None:
        others = {constant.value for constant in right.values}
        both_of = replace(both_of, values=tuple(each for each in left.values if each.value in others))
    return checked_number(both_of)


def _tighter(left: Bound | None, right: Bound | None, is_tighter: Callable[[Decimal, Decimal], bool]) -> Bound | None:
    if left is None or right is None:
        return left or right
    if left.value == right.value:
        return left if left.excluded else right
    return left if is_tighter(left.value, right.value) else right


def checked_number(number: Number) -> Number | None:
    """The number without the constants that break its bounds; None where nothing is left."""
    low, high = number.low, number.high
    if low is not None and high is not None:
        if low.value > high.value or (low.value == high.value and (low.excluded or high.excluded)):
            return None
        if number.is_integer and number.values is None and not _has_integer(low, high):
            return None
    if number.values is None:
        return number
    values = tuple(each for each in number.values if _is_within(each.value, number))
    return replace(number, values=values) if values else None


def _has_integer(low: Bound, high: Bound) -> bool:
    first = int(low.value.to_integral_value(rounding="ROUND_CEILING"))
    first += 1 if low.excluded and first == low.value else 0
    return first < high.value or (first == high.value and not high.excluded)


def _is_within(value: Decimal, number: Number) -> bool:
    low, high = number.low, number.high
    if low is not None and (value < low.value or (value == low.value and low.excluded)):
        return False
    if high is not None and (value > high.value or (value == high.value and high.excluded)):
        return False
    if number.is_integer and value != value.to_integral_value():
        return False
    return all(Fraction(value) % Fraction(step) == 0 for step in number.steps)


def _joined_texts(left: Text, right: Text, holds: Callable[[Text, str], bool]) -> Text | None:
    both_of = Text(
        least=max(left.least, right.least),
        most=_smaller(left.most, right.most),
        patterns=tuple(dict.fromkeys((*left.patterns, *right.patterns))),
        formats=tuple(dict.fromkeys((*left.formats, *right.formats))),
        values=left.values if right.values is None else right.values,
        place=left.place or right.place,
    )
    if left.values is not None and right.values is not None:
        others = set(right.values)
        both_of = replace(both_of, values=tuple(each for each in left.values if each in others))
    return checked_text(both_of, holds)


def checked_text(text: Text, holds: Callable[[Text, str], bool]) -> Text | None:
    """The text without the constants that break its rules; None where nothing is left."""
    if text.most is not None and text.least > text.most:
        return None
    if text.values is None:
        return text
    values = tuple(each for each in text.values if holds(text, each))
    return Text(values=values, place=text.place) if values else None


def _joined_arrays(left: Array, right: Array) -> Array | None:
    def at(array: Array, number: int) -> Schemas:
        return array.first[number] if number < len(array.first) else array.others

    length = max(len(left.first), len(right.first))
    return checked_array(
        Array(
            first=tuple(both(at(left, number), at(right, number)) for number in range(length)),
            others=both(left.others, right.others),
            least=max(left.least, right.least),
            most=_smaller(left.most, right.most),
        )
    )


def checked_array(array: Array) -> Array | None:
    """The array; None where it can have no length."""
    return None if array.most is not None and array.least > array.most else array


def checked_object(found: Object) -> Object | None:
    """The object; None where it can have no number of members."""
    if found.most is not None and max(found.least, len(found.required)) > found.most:
        return None
    return found
