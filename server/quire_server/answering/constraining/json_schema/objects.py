"""Rules for objects: declared members in any order, each at most once, and the required ones before undeclared ones.

A rule's parameter has a bit for each declared name that is written, which the library follows only as far as a text
goes. Beyond `MOST_UNORDERED` names come in groups of so many, one group after the other, in the order of the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from quire_server.answering.constraining.json_schema.patterns import as_expression
from quire_server.answering.constraining.json_schema.reading import Schemata
from quire_server.answering.constraining.json_schema.shapes import Object, SchemaRefused, Schemas, both
from quire_server.answering.constraining.json_schema.terminals import Terminals

MOST_UNORDERED = 64  # declared names whose order is free: the bits of a parameter
MOST_PATTERNS = 4  # of the names of one object: each doubles the kinds of names
MOST_COUNTED = 16  # members of an object that may have other names beside optional ones, where their number is bound
_COUNTER_BITS = 5


@dataclass(frozen=True, slots=True)
class Member:
    """A member: its name as a terminal, its value as a rule."""

    name: str
    value: str
    is_required: bool = False


class Objects:
    """Writes the rules of objects into `rules`."""

    def __init__(
        self, schemata: Schemata, terminals: Terminals, rule: Callable[[Schemas], str], rules: dict[str, str]
    ) -> None:
        """`rule`: the name of the rule of a value."""
        self._schemata, self._terminals, self._rule, self._rules = schemata, terminals, rule, rules

    def body(self, shape: Object) -> str | None:
        """The right side of a rule for objects of this shape; None where there are none. Raises SchemaRefused."""
        names = dict.fromkeys((*(name for each in shape.members for name in each.names), *shape.required))
        required = set(shape.required)
        declared: list[Member] = []
        for name in names:
            schemas = self._schemata.member(shape, name)
            if not self._schemata.is_empty(schemas):
                declared.append(Member(self._terminals.name(name), self._rule(schemas), name in required))
            elif name in required:
                return None
        others = list(self._others(shape, list(names), begins=len(declared) > MOST_UNORDERED))
        _check_counts(shape, declared, others)
        opening, closing = self._terminals.mark("{"), self._terminals.mark("}")
        if declared and shape.most != 0:
            return f"{opening} {self._groups(shape, declared, others, closing)}"
        inner = self._map(shape, others)
        return None if inner is None else f"{opening} {inner} {closing}".replace("  ", " ")

    def _others(self, shape: Object, names: Sequence[str], *, begins: bool) -> Iterator[Member]:
        """Members of names that are not declared: a kind for each combination of the patterns that a name may match."""
        patterns = list(dict.fromkeys(pattern for each in shape.members for pattern, _ in each.patterns))
        if len(patterns) > MOST_PATTERNS:
            raise SchemaRefused(
                f"'patternProperties' at {shape.place} has {len(patterns)} patterns of at most {MOST_PATTERNS}"
            )
        expressions = {
            pattern: self._schemata.tried(
                lambda pattern=pattern: as_expression(self._schemata.tree(pattern, shape.place)),  # type: ignore[misc]
                f"'patternProperties' {pattern[:64]!r} at {shape.place}",
            )
            for pattern in patterns
        }
        for chosen in product((True, False), repeat=len(patterns)):
            matched = {pattern for pattern, is_in in zip(patterns, chosen, strict=True) if is_in}
            schemas = both(*_of_names(shape, matched))
            if self._schemata.is_empty(schemas):
                continue
            name = self._terminals.other_name(
                [expressions[pattern] for pattern in patterns if pattern in matched],
                [expressions[pattern] for pattern in patterns if pattern not in matched],
                names,
                begins=begins,
            )
            yield Member(name, self._rule(schemas))

    def _map(self, shape: Object, others: Sequence[Member]) -> str | None:
        """Members without declared names."""
        if not others or shape.most == 0:
            return None if shape.least else ""
        pair = " | ".join(f"{each.name} {each.value}" for each in others)
        pair = self._add("pair", pair)
        most = "" if shape.most is None else shape.most - 1
        more = f"({self._terminals.mark(',')} {pair}){{{max(0, shape.least - 1)},{most}}}"
        if shape.most is None and shape.least <= 1:
            more = f"({self._terminals.mark(',')} {pair})*"
        elif shape.most == 1:
            more = ""
        return f"{pair} {more}".rstrip() if shape.least else f"({pair} {more})?".replace(" )", ")")

    def _groups(self, shape: Object, declared: Sequence[Member], others: Sequence[Member], closing: str) -> str:
        """The rule of all members and the closing bracket, made from the last group to the first.

        The bracket is theirs, since the library does not ask for the conditions of rules that may be empty.
        """
        groups = [declared[at : at + MOST_UNORDERED] for at in range(0, len(declared), MOST_UNORDERED)]
        following = {"first": closing, "more": closing}
        for number, group in reversed(list(enumerate(groups))):
            # Bits of required members come first, so that one condition asks for all of them.
            members = sorted(group, key=lambda member: not member.is_required)
            following = self._group(shape, members, others if number + 1 == len(groups) else (), following)
        return following["first"]

    def _group(
        self, shape: Object, members: Sequence[Member], others: Sequence[Member], following: dict[str, str]
    ) -> dict[str, str]:
        """The rules of one group at the object's beginning, and after another member."""
        item, more, first = (f"{kind}{len(self._rules)}" for kind in ("item", "more", "first"))
        limits = _Limits(shape, members, bool(others))
        alternatives = [
            f"{member.name} {member.value} {more}::set_bit({bit}){limits.may_add(bit)}"
            for bit, member in enumerate(members)
        ]
        alternatives += [
            f"{member.name} {member.value} {more}::{limits.counted}{limits.may_add_other}" for member in others
        ]
        self._rules[f"{item}::_"] = " | ".join(alternatives)
        comma = self._terminals.mark(",")
        self._rules[f"{more}::_"] = f"{following['more']}{limits.may_end} | {comma} {item}::_{limits.may_go_on}"
        empty = f"{following['first']}{limits.may_end} | " if limits.can_be_empty else ""
        self._rules[f"{first}::_"] = f"{empty}{item}::_"
        return {"first": f"{first}::0x0", "more": f"{more}::0x0"}

    def _add(self, kind: str, body: str) -> str:
        name = f"{kind}{len(self._rules)}"
        self._rules[name] = body
        return name


class _Limits:
    """The conditions on a parameter: which members of a group are written, and how many."""

    def __init__(self, shape: Object, members: Sequence[Member], has_others: bool) -> None:
        self._all = f"[0:{len(members)}]"
        self._required = sum(member.is_required for member in members)
        self._optional = f"[{self._required}:{len(members)}]" if self._required < len(members) else ""
        self._has_others = has_others
        self._counter = f"[{len(members)}:{len(members) + _COUNTER_BITS}]" if has_others and shape.most else ""
        self._least = 0 if has_others else shape.least
        is_bound = shape.most is not None and (has_others or shape.most < len(members))
        self._room = (shape.most or 0) - self._required if is_bound else None
        self.can_be_empty = not self._required and not shape.least

    @property
    def counted(self) -> str:
        """The parameter after a member of another name."""
        return f"incr({self._counter})" if self._counter else "_"

    @property
    def may_end(self) -> str:
        """The condition under which no member of the group has to follow."""
        return _when(
            self._is_complete,
            f"bit_count_ge({self._all}, {self._least})" if self._least > max(self._required, 1) else "",
        )

    @property
    def may_go_on(self) -> str:
        """The condition under which a member can follow: none may be begun that cannot be written."""
        if self._has_others:
            if self._room is None:
                return ""
            return _when(_either(f"not({self._is_complete})" if self._required else "", self._has_room))
        more = _both(f"not(is_ones({self._all}))", self._has_room)
        if self._required and self._room is not None:
            more = _either(f"not({self._is_complete})", more)
        return _when(more)

    @property
    def may_add_other(self) -> str:
        """The condition under which a member of another name may follow: after the required ones."""
        return _when(self._is_complete, self._has_room)

    def may_add(self, bit: int) -> str:
        """The condition under which the member of this bit may follow."""
        return _when(f"bit_clear({bit})", "" if bit < self._required else self._has_room)

    @property
    def _is_complete(self) -> str:
        return f"is_ones([0:{self._required}])" if self._required else ""

    @property
    def _has_room(self) -> str:
        """Optional members that are written leave room for one more beside the required ones."""
        room = self._room
        if room is None:
            return ""
        if not self._counter:
            return f"bit_count_lt({self._optional}, {room})" if self._optional else ""
        if not self._optional:
            return f"lt({self._counter}, {room})"
        found = ""
        for count in range(room):
            here = f"and(eq({self._counter}, {count}), bit_count_lt({self._optional}, {room - count}))"
            found = _either(found, here)
        return found or "not(true)"


def _both(*conditions: str) -> str:
    found = ""
    for each in conditions:
        found = f"and({found}, {each})" if found and each else found or each
    return found


def _either(*conditions: str) -> str:
    found = ""
    for each in conditions:
        found = f"or({found}, {each})" if found and each else found or each
    return found


def _when(*conditions: str) -> str:
    found = _both(*conditions)
    return f" %if {found}" if found else ""


def _of_names(shape: Object, matched: set[str]) -> Iterable[Schemas]:
    """List the schemas of an undeclared name that matches these patterns alone."""
    for each in shape.members:
        mine = [schemas for pattern, schemas in each.patterns if pattern in matched]
        yield from mine or [each.others]


def _check_counts(shape: Object, declared: Sequence[Member], others: Sequence[Member]) -> None:
    """Refuse numbers of members that the rules cannot count. Raises SchemaRefused."""
    required = sum(member.is_required for member in declared)
    is_grouped = len(declared) > MOST_UNORDERED - (_COUNTER_BITS if others and shape.most is not None else 0)
    if shape.least > max(required, 1) and (others or is_grouped):
        raise SchemaRefused(
            f"'minProperties' at {shape.place} is not supported beyond 1 and the required properties"
            + (", where others are allowed" if others else "")
        )
    if shape.least and not required and is_grouped:
        raise SchemaRefused(f"'minProperties' at {shape.place} is not supported beside so many properties")
    if shape.most is None or not declared or (not others and shape.most >= len(declared)):
        return
    optional = len(declared) - required
    if is_grouped or (others and shape.most - required > (MOST_COUNTED if optional else 30)):
        raise SchemaRefused(
            f"'maxProperties' at {shape.place} is not supported beside optional properties, or beyond {MOST_COUNTED}"
        )
