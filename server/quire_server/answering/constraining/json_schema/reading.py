"""Schemas as shapes: keywords are joined, references followed, and alternatives multiplied out where they stand.

A schema is looked into once. What it says of the values inside of its own are numbers of other schemas, so that
schemas that refer to themselves end. Bounds hold work that alternatives of alternatives would multiply.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import TypeVar, cast
from urllib.parse import unquote

from quire_server.answering.constraining.json_schema.formats import FORMATS
from quire_server.answering.constraining.json_schema.patterns import PatternRefused, Tree, matches, read_pattern
from quire_server.answering.constraining.json_schema.shapes import (
    ALL_SHAPES,
    ANYTHING,
    NOTHING,
    Array,
    Boolean,
    Bound,
    Constant,
    Members,
    Null,
    Number,
    Object,
    SchemaRefused,
    Schemas,
    Shape,
    Shapes,
    Text,
    both,
    checked_array,
    checked_number,
    checked_object,
    checked_text,
    joined,
    joined_numbers,
)

MOST_JOINS = 100_000  # of shapes, in one schema
MOST_ALTERNATIVES = 1_000  # of one value
MOST_SIGNIFICANT = 15  # digits of a number with a fraction or an exponent, which readers of JSON keep
_KINDS: dict[str, Shapes] = {
    "null": (Null(),), "boolean": (Boolean(),), "number": (Number(),), "integer": (Number(is_integer=True),),
    "string": (Text(),), "array": (Array(),), "object": (Object(),),
}  # fmt: skip
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_TEXTS = ("minLength", "maxLength", "pattern", "format")
_OF_ARRAYS = ("items", "prefixItems", "minItems", "maxItems")
_OF_OBJECTS = (
    "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
)  # fmt: skip
_JOINING = ("type", "const", "enum", "anyOf", "oneOf", "allOf", "$ref")
KEYWORDS = frozenset((*_OF_NUMBERS, *_OF_TEXTS, *_OF_ARRAYS, *_OF_OBJECTS, *_JOINING))
_MOST_SHOWN = 128  # characters of a reference in a message
PLAIN_INTEGERS = ("draft-03", "draft-04")  # in their terms 1.0 and 1e2 are no integers
_T = TypeVar("_T")


class Schemata:
    """The schemas of one document by number, and what each conjunction of them allows."""

    def __init__(self, root: Mapping[str, object], *, lenient: bool = False) -> None:
        """`lenient`: `oneOf` need not tell its schemas apart."""
        self._root = root
        self._lenient = lenient
        self.has_plain_integers = any(name in str(root.get("$schema")) for name in PLAIN_INTEGERS)
        self._found: list[tuple[object, str]] = [(False, "#")]
        self._numbers: dict[int, int] = {}
        self._shapes: dict[Schemas, Shapes] = {}
        self._own: dict[int, Shapes] = {}
        self._open: list[int] = []  # schemas that are being looked into
        self._made: dict[int, tuple[object, object]] = {}  # the schemas of constants, beside what keeps their ids
        self._joins = 0
        self._empty: dict[Schemas, bool] = {}
        self.root = self._number(root, "#")

    def place(self, schemas: Schemas) -> str:
        """Return the place of the first of the schemas in the document; "#" without schemas."""
        return self._found[schemas[0]][1] if schemas else "#"

    def shapes(self, schemas: Schemas) -> Shapes:
        """The shapes of the values for which all of these schemas hold. Raises SchemaRefused."""
        if schemas not in self._shapes:
            found: Shapes = ALL_SHAPES
            for number in schemas:
                found = self._product(found, self._of(number), self._found[number][1])
            self._shapes[schemas] = found
        return self._shapes[schemas]

    def is_empty(self, schemas: Schemas) -> bool:
        """Whether it is plain that no value fulfils them. A value that holds itself is taken to be possible."""
        if schemas not in self._empty:
            self._empty[schemas] = False
            self._empty[schemas] = all(self._is_impossible(shape) for shape in self.shapes(schemas))
        return self._empty[schemas]

    def member(self, shape: Object, name: str) -> Schemas:
        """The schemas of the member of this name. Raises SchemaRefused."""
        found = []
        for each in shape.members:
            mine = [schemas for pattern, schemas in each.patterns if self.matches(pattern, name, shape.place)]
            declared = each.names.get(name)
            if declared is not None:
                mine.append(declared)
            found += mine or [each.others]
        return both(*found)

    def matches(self, pattern: str, text: str, place: str) -> bool:
        """Whether the pattern matches in the text. Raises SchemaRefused."""
        return self.tried(lambda: matches(read_pattern(pattern), text), f"'pattern' {pattern[:64]!r} at {place}")

    def tree(self, pattern: str, place: str) -> Tree:
        """The pattern's tree. Raises SchemaRefused."""
        return self.tried(lambda: read_pattern(pattern), f"'pattern' {pattern[:64]!r} at {place}")

    def tried(self, make: Callable[[], _T], what: str) -> _T:
        """Make something of a pattern. Raises SchemaRefused, which names the pattern as `what`."""
        try:
            return make()
        except PatternRefused as refusal:
            raise SchemaRefused(f"{what}: {refusal}") from None
        except RecursionError:
            raise SchemaRefused(f"{what} is nested too deeply") from None

    # -- Schemas one by one

    def _number(self, schema: object, place: str) -> Schemas:
        """The schema's number."""
        if schema is True or (isinstance(schema, Mapping) and not KEYWORDS.intersection(schema)):
            return ANYTHING
        if schema is False:
            return NOTHING
        if not isinstance(schema, Mapping):
            raise SchemaRefused(f"{place} is no schema")
        if id(schema) not in self._numbers:
            self._numbers[id(schema)] = len(self._found)
            self._found.append((schema, place))
        return (self._numbers[id(schema)],)

    def _of(self, number: int) -> Shapes:
        """The shapes of one schema."""
        if number not in self._own:
            schema, place = self._found[number]
            if number in self._open:
                raise SchemaRefused(f"'$ref' at {self._found[self._open[-1]][1]} leads back to itself without a value")
            self._open.append(number)
            self._own[number] = () if schema is False else self._read(cast(Mapping[str, object], schema), place)
            self._open.pop()
        return self._own[number]

    def _read(self, schema: Mapping[str, object], place: str) -> Shapes:
        shapes = self._typed(schema, place)
        shapes = tuple(found for shape in shapes if (found := self._narrowed(shape, schema, place)) is not None)
        if "enum" in schema or "const" in schema:
            shapes = self._product(shapes, self._constants(schema, place), place)
        if "$ref" in schema:
            target = self._number(resolved(self._root, schema["$ref"], place), str(schema["$ref"]))
            shapes = self._product(shapes, self.shapes(target), place)
        for i, each in enumerate(_listed(schema, "allOf", place)):
            shapes = self._product(shapes, self.shapes(self._number(each, f"{place}/allOf/{i}")), place)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                options = [
                    self._product(shapes, self.shapes(self._number(each, f"{place}/{name}/{i}")), place)
                    for i, each in enumerate(_listed(schema, name, place))
                ]
                if name == "oneOf" and not self._lenient:
                    options = self._apart(options, place)
                shapes = _united(options)
        return shapes

    def _product(self, left: Shapes, right: Shapes, place: str) -> Shapes:
        if right in (left, ALL_SHAPES):
            return left
        if left == ALL_SHAPES:
            return right
        self._joins += len(left) * len(right)
        if self._joins > MOST_JOINS:
            raise SchemaRefused(f"the alternatives at {place} multiply to too many")
        found: dict[Shape, None] = {}
        for one in left:
            for other in right:
                if type(one) is type(other) and (shape := joined(one, other, self._holds)) is not None:
                    found[shape] = None
        if len(found) > MOST_ALTERNATIVES:
            raise SchemaRefused(f"the value at {place} has {len(found)} alternatives of at most {MOST_ALTERNATIVES}")
        return tuple(found)

    def _apart(self, options: list[Shapes], place: str) -> list[Shapes]:
        """The options without the shapes that several of them have. Raises SchemaRefused where others overlap."""
        counts = Counter(shape for option in options for shape in set(option))
        shared = tuple(shape for shape, count in counts.items() if count > 1)
        options = [tuple(shape for shape in option if counts[shape] == 1) for option in options]
        for i, one in enumerate(options):
            for other in (shared, *options[:i]):
                if len(one) == len(other) == 1 and _are_other_texts(one[0], other[0]):
                    continue
                if any(not self._is_impossible(shape) for shape in self._product(one, other, place)):
                    raise SchemaRefused(
                        f"'oneOf' at {place} is not supported where no type, constant or required property tells its"
                        " schemas apart"
                    )
        return options

    def _is_impossible(self, shape: Shape) -> bool:
        if isinstance(shape, Object):
            return any(self.is_empty(self.member(shape, name)) for name in shape.required)
        if isinstance(shape, Array):
            needed = [shape.first[i] if i < len(shape.first) else shape.others for i in range(min(shape.least, 64))]
            return any(map(self.is_empty, dict.fromkeys(needed)))
        return False

    def _holds(self, text: Text, value: str) -> bool:
        if len(value) < text.least or (text.most is not None and len(value) > text.most):
            return False
        patterns = [*text.patterns, *(FORMATS[name][0] for name in text.formats)]
        longest = [most for name in text.formats if (most := FORMATS[name][1]) is not None]
        return len(value) <= min(longest, default=len(value)) and all(
            self.matches(pattern, value, text.place) for pattern in patterns
        )

    # -- Keywords

    def _typed(self, schema: Mapping[str, object], place: str) -> Shapes:
        wanted = schema.get("type")
        if wanted is None:
            return ALL_SHAPES
        names = wanted if isinstance(wanted, list) else [wanted]
        shapes: list[Shape] = []
        for name in names:
            if not isinstance(name, str) or name not in _KINDS:
                raise SchemaRefused(f"'type' at {place}: Invalid type: {str(name)[:64]}")
            shapes += _KINDS[name]
        if Number() in shapes:
            shapes = [shape for shape in shapes if shape != Number(is_integer=True)]
        return tuple(dict.fromkeys(shapes))

    def _narrowed(self, shape: Shape, schema: Mapping[str, object], place: str) -> Shape | None:
        if isinstance(shape, Number) and any(name in schema for name in _OF_NUMBERS):
            return _number(shape, schema, place)
        if isinstance(shape, Text) and any(name in schema for name in _OF_TEXTS):
            return self._text(schema, place)
        if isinstance(shape, Array) and any(name in schema for name in _OF_ARRAYS):
            return self._array(schema, place)
        if isinstance(shape, Object) and any(name in schema for name in _OF_OBJECTS):
            return self._object(schema, place)
        return shape

    def _text(self, schema: Mapping[str, object], place: str) -> Text | None:
        pattern, named = schema.get("pattern"), schema.get("format")
        if pattern is not None and not isinstance(pattern, str):
            raise SchemaRefused(f"'pattern' at {place} must be a string")
        found = Text(
            least=_count(schema, "minLength", place) or 0,
            most=_count(schema, "maxLength", place),
            patterns=() if pattern is None else (pattern,),
            formats=(named,) if isinstance(named, str) and named in FORMATS else (),
            place=place,
        )
        if pattern is not None:
            self.tree(pattern, place)
        return checked_text(found, self._holds)

    def _array(self, schema: Mapping[str, object], place: str) -> Array | None:
        first = [
            self._number(each, f"{place}/prefixItems/{i}")
            for i, each in enumerate(_listed(schema, "prefixItems", place))
        ]
        return checked_array(
            Array(
                first=tuple(first),
                others=self._number(schema.get("items", True), f"{place}/items"),
                least=_count(schema, "minItems", place) or 0,
                most=_count(schema, "maxItems", place),
            )
        )

    def _object(self, schema: Mapping[str, object], place: str) -> Object | None:
        properties = _mapped(schema, "properties", place)
        patterns = _mapped(schema, "patternProperties", place)
        for pattern in patterns:
            self.tree(pattern, f"{place}/patternProperties")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaRefused(f"'required' at {place} must be a list of names")
        members = Members(
            properties=tuple(
                (name, self._number(each, f"{place}/properties/{name[:64]}")) for name, each in properties.items()
            ),
            patterns=tuple(
                (name, self._number(each, f"{place}/patternProperties/{name[:64]}")) for name, each in patterns.items()
            ),
            others=self._number(schema.get("additionalProperties", True), f"{place}/additionalProperties"),
        )
        return checked_object(
            Object(
                members=() if members == Members() else (members,),
                required=tuple(dict.fromkeys(required)),
                least=_count(schema, "minProperties", place) or 0,
                most=_count(schema, "maxProperties", place),
                place=place,
            )
        )

    def _constants(self, schema: Mapping[str, object], place: str) -> Shapes:
        """The shapes of the values of `const` and `enum`."""
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(values, list):
            raise SchemaRefused(f"'enum' at {place} must be a list")
        if "const" in schema and "enum" in schema:
            return self._product(
                self._constants({"const": schema["const"]}, place),
                self._constants({"enum": schema["enum"]}, place),
                place,
            )
        texts: dict[str, None] = {}
        numbers: dict[Decimal, Constant] = {}
        shapes: list[Shape] = []
        for value in values:
            if isinstance(value, str):
                texts[value] = None
            elif value is None or isinstance(value, bool):
                shapes.append(Null() if value is None else Boolean((value,)))
            elif isinstance(value, (int, float, Decimal)):
                number = decimal(value, "enum" if "const" not in schema else "const", place)
                numbers.setdefault(number, Constant(number, str(value)))
            else:
                shapes += self.shapes(self._number(self._schema_of(value), place))
        if texts:
            shapes.append(Text(values=tuple(texts), place=place))
        if numbers:
            shapes.append(Number(values=tuple(numbers.values()), place=place))
        return tuple(dict.fromkeys(shapes))

    def _schema_of(self, value: object) -> object:
        """A schema for exactly this array or object."""
        if id(value) not in self._made:
            schema: dict[str, object]
            if isinstance(value, list):
                schema = {
                    "type": "array", "prefixItems": [{"const": each} for each in value],
                    "items": False, "minItems": len(value),
                }  # fmt: skip
            else:
                known = cast(Mapping[str, object], value)
                schema = {
                    "type": "object", "properties": {name: {"const": each} for name, each in known.items()},
                    "required": list(known), "additionalProperties": False,
                }  # fmt: skip
            self._made[id(value)] = value, schema
        return self._made[id(value)][1]


def decimal(value: object, name: str, place: str) -> Decimal:
    """A number of a schema as it is written. Raises SchemaRefused where its reader has not kept all of it."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        raise SchemaRefused(f"'{name}' at {place} must be a number")
    found = Decimal(str(value)) if isinstance(value, float) else Decimal(value)
    if not found.is_finite():
        raise SchemaRefused(f"'{name}' at {place} must be a number")
    if not isinstance(value, int):
        digits = "".join(map(str, found.as_tuple().digits)).strip("0")
        if len(digits) > MOST_SIGNIFICANT:
            raise SchemaRefused(
                f"'{name}' at {place} has a number with a fraction or an exponent of more than {MOST_SIGNIFICANT}"
                " digits"
            )
    return found


def _are_other_texts(one: Shape, other: Shape) -> bool:
    """Whether both are one constant text, and not the same: most alternatives of which there are many."""
    if not isinstance(one, Text) or not isinstance(other, Text) or one.values is None or other.values is None:
        return False
    return len(one.values) == len(other.values) == 1 and one.values != other.values


def _united(options: Iterable[Shapes]) -> Shapes:
    """The shapes of any of these; constants of one kind become one shape."""
    texts: dict[str, None] = {}
    numbers: dict[Decimal, Constant] = {}
    others: dict[Shape, None] = {}
    place = ""
    for shape in (shape for option in options for shape in option):
        if isinstance(shape, Text) and shape.values is not None:
            texts.update(dict.fromkeys(shape.values))
            place = place or shape.place
        elif isinstance(shape, Number) and shape.values is not None:
            numbers.update({each.value: each for each in shape.values})
            place = place or shape.place
        else:
            others[shape] = None
    constants: list[Shape] = [Text(values=tuple(texts), place=place)] if texts else []
    if numbers:
        constants.append(Number(values=tuple(numbers.values()), place=place))
    return (*constants, *others)


def _number(shape: Number, schema: Mapping[str, object], place: str) -> Number | None:
    def bound(name: str, *, excluded: bool) -> Bound | None:
        return Bound(decimal(schema[name], name, place), excluded) if name in schema else None

    step = decimal(schema["multipleOf"], "multipleOf", place) if "multipleOf" in schema else None
    if step is not None and step <= 0:
        raise SchemaRefused(f"'multipleOf' at {place} must be greater than 0")
    found: Number | None = shape
    for low, high in (
        (bound("minimum", excluded=False), bound("maximum", excluded=False)),
        (bound("exclusiveMinimum", excluded=True), bound("exclusiveMaximum", excluded=True)),
    ):
        other = Number(low=low, high=high, steps=() if step is None else (step,), place=place)
        found = None if found is None else joined_numbers(found, other)
    return found if found is None else checked_number(found)


def _count(schema: Mapping[str, object], name: str, place: str) -> int | None:
    value = schema.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)) or value < 0 or value != int(value):
        raise SchemaRefused(f"'{name}' at {place} must be a number of at least 0 without a fraction")
    return int(value)


def _listed(schema: Mapping[str, object], name: str, place: str) -> list[object]:
    value = schema.get(name, [])
    if not isinstance(value, list):
        raise SchemaRefused(f"'{name}' at {place} must be a list of schemas")
    return value


def _mapped(schema: Mapping[str, object], name: str, place: str) -> Mapping[str, object]:
    value = schema.get(name, {})
    if not isinstance(value, Mapping):
        raise SchemaRefused(f"'{name}' at {place} must be an object of schemas")
    return cast(Mapping[str, object], value)


def resolved(root: Mapping[str, object], reference: object, place: str) -> object:
    """The schema that a reference at this place leads to. Raises SchemaRefused."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise SchemaRefused(f"'$ref' at {place} leads out of the schema; only references within it are followed")
    if len(reference) > 1 and not reference.startswith("#/"):
        return _anchored(root, unquote(reference[1:]), place)
    here: object = root
    for step in reference.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(here, Mapping) and name in here:
            here = here[name]
        elif isinstance(here, list) and name.isdecimal() and int(name) < len(here):
            here = here[int(name)]
        else:
            raise SchemaRefused(f"'$ref' at {place} leads to {reference[:_MOST_SHOWN]}, which is not there")
    if not isinstance(here, (Mapping, bool)):
        raise SchemaRefused(f"'$ref' at {place} leads to something that is no schema")
    return here


def _anchored(root: Mapping[str, object], name: str, place: str) -> object:
    for schema in _mappings(root):
        if schema.get("$anchor") == name or f"#{name}" in (schema.get("$id"), schema.get("id")):
            return schema
    raise SchemaRefused(f"'$ref' at {place} leads to #{name[:_MOST_SHOWN]}, which is not there")


def _mappings(value: object) -> Iterator[Mapping[str, object]]:
    waiting = [value]
    while waiting:
        here = waiting.pop()
        if isinstance(here, Mapping):
            yield here
            waiting += here.values()
        elif isinstance(here, list):
            waiting += here
