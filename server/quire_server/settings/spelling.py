"""The ways to write one flag, made one: underscores, dotted JSON, switches with a value.

Promises: what is returned means what was given, in the spelling that the parser knows; values are left as they are.
Must not know: what flags do.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire_server.settings.sources import SettingsError

_TRUTH = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """Names of flags, without their hyphens in front, by what may be written after them."""

    switches: Collection[str]  # `--x`, `--no-x`, and `--x=true` as some scripts write it
    optional: Mapping[str, Collection[str]]  # `--x VALUE`, and `--x` and `--no-x` for its values "on" and "off"
    json: Collection[str]  # `--x '{"a": 1}'`, or `--x.a 1`


@dataclass(slots=True)
class _Reader:
    """The words still to be read, and what was gathered of dotted flags."""

    words: list[str]
    kinds: Kinds
    plain: list[str] = field(default_factory=list)
    dotted: dict[str, dict[str, Any]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)

    def next_is(self, values: Collection[str]) -> bool:
        return bool(self.words) and self.words[0].lower() in values


def plain_words(argv: Sequence[str], kinds: Kinds) -> list[str]:
    """The same command line in the parser's spelling. Raises SettingsError for dotted flags that make no object."""
    reader = _Reader(words=list(argv), kinds=kinds)
    while reader.words:
        word = reader.words.pop(0)
        if word == "--":
            return [*_gathered(reader), word, *reader.words]
        if word.startswith("--"):
            _read(reader, word)
        else:
            reader.plain.append(word)
    return _gathered(reader)


def _read(reader: _Reader, word: str) -> None:
    given, equals, value = word.removeprefix("--").partition("=")
    head, dot, path = given.partition(".")
    name = head.replace("_", "-")
    positive = name.removeprefix("no-")
    if name in reader.kinds.json:
        if dot:
            _gather(reader, name, path, value if equals else _following(reader, word))
            return
        reader.whole.add(name)
    elif name in reader.kinds.switches and not dot:
        if equals and value.lower() in _TRUTH:
            reader.plain.append(f"--{name}" if _TRUTH[value.lower()] else f"--no-{name}")
            return
        if not equals and reader.next_is({"true", "false"}):
            reader.plain.append(f"--{name}" if _TRUTH[reader.words.pop(0).lower()] else f"--no-{name}")
            return
    elif positive in reader.kinds.optional and not equals and not dot:
        if name != positive:
            reader.plain.append(f"--{positive}=off")
            return
        if not reader.next_is(reader.kinds.optional[name]):
            reader.plain.append(f"--{name}=on")
            return
    reader.plain.append(f"--{name}{dot}{path}{equals}{value}")


def _following(reader: _Reader, word: str) -> str:
    if not reader.words or reader.words[0].startswith("--"):
        raise SettingsError(f"{word}: expected a value")
    return reader.words.pop(0)


def _gather(reader: _Reader, name: str, path: str, text: str) -> None:
    """`a.b 1` sets `{"a": {"b": 1}}`; `a+ x,y` appends to a list."""
    *parents, last = path.split(".")
    place = reader.dotted.setdefault(name, {})
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise SettingsError(f"--{name}.{path}: {parent} has been given a value that is no object")
    if last.endswith("+"):
        listed = place.setdefault(last.removesuffix("+"), [])
        if not isinstance(listed, list):
            raise SettingsError(f"--{name}.{path}: it has been given a value that is no list")
        listed.extend(_value(part) for part in text.split(","))
    else:
        place[last] = _value(text)


def _value(text: str) -> object:
    try:
        decoded: object = json.loads(text)
    except ValueError:
        return text
    return decoded


def _gathered(reader: _Reader) -> list[str]:
    both = sorted(reader.whole & set(reader.dotted))
    if both:
        raise SettingsError(*(f"--{name}: given whole and in its dotted form; keep one" for name in both))
    return [*reader.plain, *(f"--{name}={json.dumps(value)}" for name, value in reader.dotted.items())]
