"""A schema as rules of Lark in llguidance's dialect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

from quire_server.answering.constraining.json_schema.objects import Objects
from quire_server.answering.constraining.json_schema.reading import Schemata
from quire_server.answering.constraining.json_schema.shapes import Array, Number, Object, SchemaRefused, Schemas, Shape
from quire_server.answering.constraining.json_schema.terminals import Terminals, multiples, scalar


class JsonRules:
    """Rules and terminals of the JSON texts of several schemas, which share what they have in common."""

    def __init__(self, *, compact: bool = False) -> None:
        """`compact`: without white space between the parts of a value."""
        self._terminals = Terminals(compact=compact)
        self._rules: dict[str, str] = {}
        self._numbers = count()

    def value(self, schema: Mapping[str, object], *, lenient: bool = False) -> str:
        """The name of a rule of the values that the schema allows. Raises SchemaRefused.

        `lenient`: of `oneOf` any schema may hold.
        """
        schemata = Schemata(schema, lenient=lenient)
        return _Writer(schemata, self._terminals, self._rules, self._numbers).whole()

    def lines(self) -> list[str]:
        """The definitions of all rules and terminals."""
        return [*(f"{name}: {body}" for name, body in self._rules.items()), *self._terminals.lines()]


def grammar(schema: Mapping[str, object], *, compact: bool = False, lenient: bool = False) -> str:
    """A grammar, with a rule `start`, of the JSON texts of the values that the schema allows. Raises SchemaRefused."""
    rules = JsonRules(compact=compact)
    start = rules.value(schema, lenient=lenient)
    return "\n".join([f"start: {start}", *rules.lines()])


class _Writer:
    """Writes the rules of one schema."""

    def __init__(self, schemata: Schemata, terminals: Terminals, rules: dict[str, str], numbers: Iterator[int]) -> None:
        self._schemata, self._terminals, self._rules, self._numbers = schemata, terminals, rules, numbers
        self._values: dict[Schemas, str] = {}
        self._waiting: list[Schemas] = []
        self._objects = Objects(schemata, terminals, self._value, rules)

    def whole(self) -> str:
        """The name of the first rule."""
        start = self._value(self._schemata.root)
        while self._waiting:
            schemas = self._waiting.pop()
            self._rules[self._values[schemas]] = self._body(schemas)
        return start

    def _value(self, schemas: Schemas) -> str:
        """The name of the rule of the values for which these schemas hold."""
        if schemas not in self._values:
            self._values[schemas] = f"v{next(self._numbers)}"
            self._waiting.append(schemas)
        return self._values[schemas]

    def _body(self, schemas: Schemas) -> str:
        scalars: list[str] = []
        others: list[str] = []
        for shape in self._schemata.shapes(schemas):
            terminal = scalar(shape, self._schemata)
            if terminal is not None:
                scalars.append(terminal)
            elif (body := self._composed(shape)) is not None:
                others.append(body)
        if scalars:
            others.insert(0, self._terminals.named(" | ".join(dict.fromkeys(scalars))))
        if not others:
            raise SchemaRefused(f"no value fulfils the schema at {self._schemata.place(schemas)}")
        return " | ".join(dict.fromkeys(others))

    def _composed(self, shape: Shape) -> str | None:
        if isinstance(shape, Number):
            return multiples(shape)
        if isinstance(shape, Array):
            return self._array(shape)
        assert isinstance(shape, Object)
        return self._objects.body(shape)

    def _array(self, shape: Array) -> str | None:
        """The right side of a rule for arrays of this shape; None where there are none."""
        first = list(shape.first)
        most = shape.most
        for at, schemas in enumerate(first):
            if self._schemata.is_empty(schemas):
                most = at if most is None else min(most, at)
                break
        if self._schemata.is_empty(shape.others):
            most = len(first) if most is None else min(most, len(first))
        if most is not None:
            if shape.least > most:
                return None
            first = first[:most]
        inner = self._items([self._value(each) for each in first], shape, most)
        return f"{self._terminals.mark('[')} {inner} {self._terminals.mark(']')}".replace("  ", " ")

    def _items(self, first: list[str], shape: Array, most: int | None) -> str:
        """Items with commas, from the last one that has a place of its own to the first."""
        comma = self._terminals.mark(",")
        rest = ""
        if most is None or most > len(first):
            item = self._value(shape.others)
            least = max(0, shape.least - len(first))
            room = None if most is None else most - len(first)
            if first:
                rest = _repeated(f"{comma} {item}", least, room)
            else:
                more = _repeated(f"{comma} {item}", max(0, least - 1), None if room is None else room - 1)
                rest = f"{item} {more}".rstrip()
                rest = rest if least else f"({rest})?"
        for at in range(len(first) - 1, -1, -1):
            item = f"{comma} {first[at]}" if at else first[at]
            rest = f"{item} {rest}".rstrip()
            rest = rest if at < shape.least else f"({rest})?"
        return rest


def _repeated(part: str, least: int, most: int | None) -> str:
    """A part so many times; the library knows no repetition of at most none."""
    if most == 0:
        return ""
    if most is None:
        return f"({part})*" if not least else f"({part}){{{least},}}"
    return f"({part}){{{least},{most}}}"
