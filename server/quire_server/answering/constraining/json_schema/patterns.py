"""Patterns of schemas: ECMA-262 as far as an automaton can follow it, read into a tree.

A tree becomes an expression for the JSON strings whose characters it accepts, each in any of its spellings. It is also
matched against names and constants here, in time that a budget bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from quire_server.answering.constraining.json_schema.characters import (
    ALL,
    CharacterSet,
    character_set,
    complement,
    contains,
    one,
    rust_class,
    spelled,
)

_MOST_STEPS = 200_000  # of one match
_MOST_DEPTH = 100  # of groups
_MOST_BRANCHES = 64  # of alternatives that differ in their anchors

_DIGIT = character_set([(0x30, 0x39)])
_WORD = character_set([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_BLANKS = "\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"
_SPACE = character_set([(0x2000, 0x200A), *((ord(each), ord(each)) for each in _BLANKS)])
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0", "a": "\a"}
_NOT_DOT = character_set([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)])
_SPECIAL = "^$\\.*+?()[]{}|"


class PatternRefused(Exception):
    """The reason why a pattern is refused."""


@dataclass(frozen=True, slots=True)
class One:
    """One character of a set; `named`: a property of Unicode in the library's words, whose members are not known."""

    members: CharacterSet
    named: str = ""


@dataclass(frozen=True, slots=True)
class Many:
    """A tree again and again, `least` to `most` times; None: without end."""

    body: Tree
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Row:
    """Trees one after the other."""

    parts: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several trees."""

    options: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """The beginning or the end of the text."""

    is_start: bool


Tree: TypeAlias = One | Many | Row | Choice | Edge
EMPTY = Row(())


@lru_cache(maxsize=512)
def read_pattern(pattern: str) -> Tree:
    """Read a pattern. Raises PatternRefused."""
    return _Reader(pattern).whole()


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0
        self._ignores_case = False
        self._dot_all = False

    def whole(self) -> Tree:
        found = self._choice()
        if self._at < len(self._text):
            raise PatternRefused(f"')' at character {self._at} closes nothing")
        return found

    def _peek(self, length: int = 1) -> str:
        return self._text[self._at : self._at + length]

    def _take(self, length: int = 1) -> str:
        found = self._peek(length)
        if len(found) < length:
            raise PatternRefused("it ends too early")
        self._at += length
        return found

    def _skip(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _choice(self) -> Tree:
        options = [self._row()]
        while self._skip("|"):
            options.append(self._row())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _row(self) -> Tree:
        parts: list[Tree] = []
        while self._at < len(self._text) and self._peek() not in ("|", ")"):
            part = self._atom()
            if part is not None:
                parts.append(self._repeated(part))
        return parts[0] if len(parts) == 1 else Row(tuple(parts))

    def _repeated(self, part: Tree) -> Tree:
        while (counts := self._counts()) is not None:
            if isinstance(part, Edge):
                raise PatternRefused("an anchor is repeated")
            self._skip("?")
            part = Many(part, *counts)
        return part

    def _counts(self) -> tuple[int, int | None] | None:
        for mark, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._skip(mark):
                return times
        end = self._text.find("}", self._at)
        if self._peek() != "{" or end < 0:
            return None
        least, comma, most = self._text[self._at + 1 : end].partition(",")
        if not least.isdecimal() or not least.isascii() or (most and not (most.isdecimal() and most.isascii())):
            return None
        self._at = end + 1
        counts: tuple[int, int | None] = (int(least), (int(most) if most else None) if comma else int(least))
        if counts[1] is not None and counts[0] > counts[1]:
            raise PatternRefused(f"the count {{{least},{most}}} is out of order")
        return counts

    def _atom(self) -> Tree | None:
        character = self._take()
        if character == "(":
            return self._group()
        if character == "[":
            return self._one(self._class())
        if character == ".":
            return One(ALL if self._dot_all else complement(_NOT_DOT))
        if character in "^$":
            return Edge(character == "^")
        if character == "\\":
            return self._escape()
        if character in "*+?":
            raise PatternRefused(f"'{character}' repeats nothing")
        return self._one(one_of(character))

    def _one(self, found: One) -> One:
        if not self._ignores_case or found.named:
            return found
        if sum(high - low for low, high in found.members) > 2048:  # nothing but the complement of a few
            return found
        both = [(low, high) for low, high in found.members]
        for low, high in found.members:
            for code in range(low, high + 1):
                both += [(ord(x), ord(x)) for x in (chr(code).lower(), chr(code).upper()) if len(x) == 1]
        return One(character_set(both))

    def _group(self) -> Tree | None:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise PatternRefused(f"its groups are nested deeper than {_MOST_DEPTH} levels")
        before = self._ignores_case, self._dot_all
        if self._skip("?"):
            if self._peek() in ("=", "!") or self._peek(2) in ("<=", "<!"):
                raise PatternRefused("look-around, including look-ahead and look-behind, is not supported")
            if self._skip("<") or self._skip("P<"):
                self._take(self._text.find(">", self._at) + 1 - self._at)
            elif not self._flags():
                self._depth -= 1
                return None
        found = self._choice()
        if not self._skip(")"):
            raise PatternRefused("a group has no end")
        self._ignores_case, self._dot_all = before
        self._depth -= 1
        return found

    def _flags(self) -> bool:
        """Whether a group follows; without one the flags hold up to the end of the group around them."""
        on = True
        while (flag := self._take()) not in ")":
            if flag == ":":
                return True
            if flag == "-" and on:
                on = False
            elif flag == "i":
                self._ignores_case = on
            elif flag == "s":
                self._dot_all = on
            elif flag != "u":
                raise PatternRefused(f"groups with '?{flag}' are not supported")
        return False

    def _escape(self) -> Tree:
        kind = self._take()
        if kind in "bB":
            raise PatternRefused("word boundaries are not supported")
        if kind in "AzZ":
            return Edge(kind == "A")
        if kind in "123456789" or kind == "k":
            raise PatternRefused("back-references are not supported")
        self._at -= 1
        return self._one(self._escaped_one())

    def _escaped_one(self) -> One:
        """Read the characters named by an escape, in a class or outside of one."""
        kind = self._take()
        if kind.lower() in _CLASSES:
            members = _CLASSES[kind.lower()]
            return One(members if kind.islower() else complement(members))
        if kind in "pP":
            return One((), f"\\{kind}{self._property()}")
        if kind in _CONTROLS:
            return one_of(_CONTROLS[kind])
        if kind == "c":
            return one_of(chr(ord(self._take()) % 32))
        if kind in "xu":
            return one_of(self._numbered(kind))
        if kind.isalnum():
            raise PatternRefused(f"'\\{kind}' is not known")
        return one_of(kind)

    def _property(self) -> str:
        if self._peek() != "{":
            name = self._take()
        else:
            end = self._text.find("}", self._at)
            name = self._take(end + 1 - self._at) if end > 0 else ""
        if not name or not name.strip("{}").replace("_", "").replace("=", "").isalnum() or not name.isascii():
            raise PatternRefused("a property of Unicode has no name")
        return name if name[0] == "{" else f"{{{name}}}"

    def _numbered(self, kind: str) -> str:
        if self._skip("{"):
            end = self._text.find("}", self._at)
            digits = self._take(max(0, end - self._at))
            self._skip("}")
        else:
            digits = self._take(2 if kind == "x" else 4)
        code = self._code(digits)
        if 0xD800 <= code < 0xDC00 and self._skip("\\u"):
            code = 0x10000 + ((code - 0xD800) << 10) + (self._code(self._take(4)) - 0xDC00)
        if not 0 <= code <= 0x10FFFF or 0xD800 <= code < 0xE000:
            raise PatternRefused(f"'\\{kind}{digits}' is no character")
        return chr(code)

    def _code(self, digits: str) -> int:
        try:
            return int(digits, 16)
        except ValueError:
            raise PatternRefused(f"{digits[:8]!r} is no number of a character") from None

    def _class(self) -> One:
        is_negated = self._skip("^")
        ranges: list[tuple[int, int]] = []
        named: list[str] = []
        while not self._skip("]"):
            low = self._member()
            if self._peek() == "-" and self._peek(2) not in ("-]", "-") and not low.named and _is_one(low):
                self._take()
                high = self._member()
                if high.named or not _is_one(high) or high.members[0][0] < low.members[0][0]:
                    raise PatternRefused("a range of characters is out of order")
                ranges.append((low.members[0][0], high.members[0][0]))
            else:
                ranges += low.members
                named += [low.named] if low.named else []
        members = character_set(ranges)
        if named:
            return One((), f"[{'^' if is_negated else ''}{rust_class(members) if members else ''}{''.join(named)}]")
        return One(complement(members) if is_negated else members)

    def _member(self) -> One:
        if self._peek(2) in ("[:", "&&", "--", "~~"):
            raise PatternRefused(f"'{self._peek(2)}' in a class of characters is not supported")
        character = self._take()
        if character != "\\":
            return one_of(character)
        if self._skip("b"):
            return one_of("\b")
        return self._escaped_one()


def one_of(character: str) -> One:
    """The tree of one character."""
    return One(one(character))


def _is_one(found: One) -> bool:
    return len(found.members) == 1 and found.members[0][0] == found.members[0][1]


# -- The tree as an expression


def as_expression(tree: Tree) -> str:
    """The expression of the strings, without quotes, in which the tree matches somewhere. Raises PatternRefused."""
    anything = f"{spelled(ALL)}*"
    branches = [
        f"{'' if starts else anything}{_written(body)}{'' if ends else anything}"
        for starts, body, ends in _branches(tree)
    ]
    if not branches:
        raise PatternRefused("no text matches it")
    return f"(?:{'|'.join(dict.fromkeys(branches))})"


_Branch: TypeAlias = tuple[bool, Tree, bool]  # whether it begins and ends the text, and what is between


def _branches(tree: Tree) -> list[_Branch]:
    """The alternatives of a tree by their anchors. Raises PatternRefused."""
    if not _has_edge(tree):
        return [(False, tree, False)]
    if isinstance(tree, Edge):
        return [(tree.is_start, EMPTY, not tree.is_start)]
    found: list[_Branch] = []
    if isinstance(tree, Choice):
        found = [branch for option in tree.options for branch in _branches(option)]
    elif isinstance(tree, Many):
        if tree.most != 1:
            raise PatternRefused("an anchor is repeated")
        found = _branches(tree.body) + ([(False, EMPTY, False)] if tree.least == 0 else [])
    elif isinstance(tree, Row):
        found = [(False, EMPTY, False)]
        for part in tree.parts:
            found = [both for left in found for right in _branches(part) if (both := _joined(left, right)) is not None]
            if len(found) > _MOST_BRANCHES:
                raise PatternRefused("too many of its alternatives differ in their anchors")
    return found


def _joined(left: _Branch, right: _Branch) -> _Branch | None:
    """The two one after the other; None where no text matches."""
    if right[0] and not _may_be_empty(left[1]):
        return None
    if left[2] and not _may_be_empty(right[1]):
        return None
    body = Row((*(() if right[0] else (left[1],)), *(() if left[2] else (right[1],))))
    return left[0] or right[0], body, left[2] or right[2]


def _has_edge(tree: Tree) -> bool:
    return isinstance(tree, Edge) or any(map(_has_edge, _below(tree)))


def _below(tree: Tree) -> tuple[Tree, ...]:
    if isinstance(tree, Many):
        return (tree.body,)
    return tree.parts if isinstance(tree, Row) else tree.options if isinstance(tree, Choice) else ()


def _may_be_empty(tree: Tree) -> bool:
    if isinstance(tree, Many):
        return tree.least == 0 or _may_be_empty(tree.body)
    if isinstance(tree, Row):
        return all(map(_may_be_empty, tree.parts))
    return isinstance(tree, Edge) or (isinstance(tree, Choice) and any(map(_may_be_empty, tree.options)))


def _written(tree: Tree) -> str:
    if isinstance(tree, One):
        if tree.named:  # the library knows the members, so that they are written as they are
            return f"[{tree.named}&&[^\\x22\\x5c\\x00-\\x1f]]"
        found = spelled(tree.members)
        if not found:
            raise PatternRefused("a class of characters is empty")
        return found
    if isinstance(tree, Many):
        if tree.most is None:
            counts = "*" if tree.least == 0 else "+" if tree.least == 1 else f"{{{tree.least},}}"
        else:
            counts = f"{{{tree.least},{tree.most}}}"
        return f"(?:{_written(tree.body)}){counts}"
    if isinstance(tree, Row):
        return "".join(map(_written, tree.parts))
    if isinstance(tree, Choice):
        return f"(?:{'|'.join(map(_written, tree.options))})"
    raise PatternRefused("an anchor stands within it")


# -- Matching


def matches(tree: Tree, text: str) -> bool:
    """Whether the tree matches somewhere in the text. Raises PatternRefused where that cannot be told in time."""
    return bool(_Match(text).ends(tree, set(range(len(text) + 1))))


class _Match:
    def __init__(self, text: str) -> None:
        self._text = text
        self._steps = 0

    def ends(self, tree: Tree, starts: set[int]) -> set[int]:
        """Return the places where matches of the tree end that begin at one of `starts`."""
        self._steps += len(starts) + 1
        if self._steps > _MOST_STEPS:
            raise PatternRefused("it takes too long to match")
        if isinstance(tree, One):
            if tree.named:
                raise PatternRefused("properties of Unicode cannot be held against names and constants")
            text = self._text
            return {at + 1 for at in starts if at < len(text) and contains(tree.members, text[at])}
        if isinstance(tree, Edge):
            return starts & {0 if tree.is_start else len(self._text)}
        if isinstance(tree, Row):
            for part in tree.parts:
                starts = self.ends(part, starts) if starts else starts
            return starts
        if isinstance(tree, Choice):
            return set().union(*(self.ends(option, starts) for option in tree.options))
        return set().union(*self._rounds(tree, starts))

    def _rounds(self, tree: Many, starts: set[int]) -> Iterator[set[int]]:
        seen: set[int] = set()
        number = 0
        while starts and (tree.most is None or number <= tree.most):
            if number >= tree.least:
                starts = starts - seen
                seen |= starts
                yield starts
            before = starts
            starts = self.ends(tree.body, starts)
            number += 1
            if number < tree.least and starts == before:  # it has matched nothing, and goes on to do so
                number = tree.least
