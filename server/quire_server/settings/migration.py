"""Command lines of other servers in our settings: llama-server's, SGLang's, TGI's, and Ollama's variables.

Promises: every word that is given has one fate: a setting, a note that nothing changes, a place in requests, or a
refusal with its reason. The same tables tell `quire config from` and `quire serve`, which takes words that are not its
own where they mean the same. vLLM's own flags need no translation: `vllm` has them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Literal

Fate = Literal["setting", "nothing", "request", "refused"]
Convert = Callable[[Sequence[str]], Sequence[str]]  # values as they are given -> our words; raises ValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Names of another server's flags, or patterns of such names, and their fate here."""

    names: tuple[str, ...]  # with their hyphens; a variable as it is written
    fate: Fate
    text: str  # the reason, or what to do instead; of a setting what is different, if anything
    setting: str = ""  # the name of our setting, where there is one
    convert: Convert | None = None

    @property
    def is_pattern(self) -> bool:
        """Whether its names stand for others."""
        return any("*" in name for name in self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Another server."""

    name: str  # as `quire config from` takes it
    title: str
    rows: tuple[Row, ...]
    defaults: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # ours, for what is not given
    has_variables: bool = False  # variables in place of flags
    switches: frozenset[str] = frozenset()  # names of flags that take no value
    optional: frozenset[str] = frozenset()  # names of flags that stand alone or take on, off or auto
    version: str = ""  # whose flags the table has

    def row(self, name: str) -> Row | None:
        """The row of a name; one that has the name itself comes before patterns."""
        for is_exact in (True, False):
            for row in self.rows:
                if any(name == each if is_exact else fnmatchcase(name, each) for each in row.names):
                    return row
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A command line of ours, and what is said about it."""

    words: tuple[str, ...]  # behind `quire serve`
    notes: tuple[str, ...]  # of what changes nothing, or belongs into requests
    problems: tuple[str, ...]  # of what is not there; without them the server does what the other one did

    @property
    def command(self) -> str:
        """The command line of `quire serve`, quoted for a shell."""
        return shlex.join(("quire", "serve", *self.words))


_NUMBER = re.compile(r"-?\.?\d")


def translate_words(server: Server, words: Sequence[str]) -> Translation:
    """The words of another server's command line, or its variables as NAME=value, in our settings."""
    ours: dict[str, list[str]] = {}
    notes: list[str] = []
    problems: list[str] = []
    for name, values in _given(server, words):
        row = server.row(name)
        if row is None:
            problems.append(_unknown(server, name))
            continue
        said = f"{name}: {row.text}"
        if row.fate == "refused":
            problems.append(said)
        elif row.fate != "setting":
            notes.append(said)
        else:
            try:
                found = list((row.convert or _plain(row.setting))(values))
            except ValueError as error:
                problems.append(f"{' '.join((name, *values))}: {error}")
                continue
            if found:
                ours[found[0]] = found
            if row.text:
                notes.append(said)
    said_already = {word for found in ours.values() for word in found}
    for setting, value in server.defaults.items():
        if flag(setting) not in said_already:
            ours[flag(setting)] = [flag(setting), value]
    return Translation(
        words=tuple(word for found in ours.values() for word in found), notes=tuple(notes), problems=tuple(problems)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """A command line of `quire serve` in which words of another server have become ours."""

    words: tuple[str, ...]
    notes: tuple[str, ...]  # of what means something else in a detail, or changes nothing
    problems: tuple[str, ...]


def adopt(server: Server, words: Sequence[str], is_ours: Callable[[str, str], bool]) -> Adopted:
    """Replace the flags of another server that mean the same here; what has no equal is a problem with its reason.

    `is_ours`: whether a flag, with what follows it or nothing, is one of our own.
    """
    taken: list[str] = []
    notes: list[str] = []
    problems: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            taken += [word, *left]
            break
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        following = value if equals else (left[0] if left else "")
        row = server.row(name) if word.startswith("-") and not _NUMBER.match(word) else None
        if row is None or is_ours(name, following):
            taken.append(word)
            continue
        values = [value] if equals else _values(server, name, left)
        if row.fate in {"refused", "request"}:
            problems.append(
                f"{name} ({server.title}'s) {row.text};"
                f" `quire config from {server.name} ...` translates its command lines"
            )
            continue
        try:
            taken += (row.convert or _plain(row.setting))(values) if row.fate == "setting" else ()
            notes += [f"{name}: {row.text}"] if row.text else []
        except ValueError as error:
            problems.append(f"{' '.join((name, *values))}: {error}")
    return Adopted(words=tuple(taken), notes=tuple(notes), problems=tuple(problems))


_TOGGLES = frozenset(("on", "off", "auto", "1", "0", "true", "false"))


def variables_line(server: Server, names: Collection[str]) -> str:
    """A warning about variables of another server, which set nothing here; empty where there are none."""
    prefix = f"{server.name.upper()}_"
    own = [name for name in sorted(names) if name.startswith(prefix)]
    found = [name for name in own if (row := server.row(name)) is not None and row.fate == "setting"]
    if not found:
        return ""
    given = " ".join(f'{name}="${name}"' for name in found)
    command = f"quire config from {server.name} {given}"
    return f"variables of {server.title} set nothing here; for flags that do the same: {command}"


def _values(server: Server, name: str, left: list[str]) -> list[str]:
    """Take the value of a flag, if it has one, from the words behind it."""
    is_value = bool(left) and (not left[0].startswith("-") or _NUMBER.match(left[0]) is not None)
    if not is_value or name in server.switches or (name in server.optional and left[0] not in _TOGGLES):
        return []
    return [left.pop(0)]


def _given(server: Server, words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each flag or variable with its values, in their order; values without a flag are under the empty name."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if server.has_variables and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", word, re.DOTALL):
            name, _, value = word.partition("=")
            found.append((name, [value]))
        elif word.startswith("-") and not _NUMBER.match(word):
            name, equals, value = word.partition("=")
            found.append((name.replace("_", "-"), [value] if equals else []))
        elif found:
            found[-1][1].append(word)
        else:
            found.append((word, []))
    return found


def _unknown(server: Server, name: str) -> str:
    known = [each for row in server.rows for each in row.names if "*" not in each]
    close = get_close_matches(name, known, n=1, cutoff=0.7)
    return f"{name} is not known of {server.title}" + (f"; did you mean {close[0]}?" if close else "")


def flag(setting: str) -> str:
    """`max_num_seqs` -> `--max-num-seqs`."""
    return "--" + setting.replace("_", "-")


def _plain(setting: str) -> Convert:
    """Convert a flag to ours with the same values; to a switch where there are none."""
    return lambda values: [flag(setting), *values]


def one_of(setting: str, values: Mapping[str, str | None], other: str) -> Convert:
    """Values by a table; None: our default does it. Raises ValueError with `other` for those that are not in it."""

    def convert(given: Sequence[str]) -> Sequence[str]:
        value = given[0] if given else "on"
        if value not in values:
            raise ValueError(other)
        ours = values[value]
        return () if ours is None else (flag(setting), *([ours] if ours else []))

    return convert


def switched(setting: str, *, on: bool = True) -> Convert:
    """A switch of theirs that is `--x` or `--no-x` of ours."""
    name = flag(setting) if on else f"--no-{setting.replace('_', '-')}"
    return lambda values: () if values[:1] in (["false"], ["0"], ["off"]) else (name,)


def unless(setting: str, absent: Sequence[str]) -> Convert:
    """The value under our name, unless it means that there is none."""
    return lambda values: () if values and values[0] in absent else (flag(setting), *values)


def of_requests(name: str, absent: Sequence[str] = ()) -> Convert:
    """A default of requests, unless the value means that there is none."""
    return lambda values: (
        () if values[:1] and values[0] in absent else (f"{flag('override_generation_config')}.{name}", *values)
    )


def setting_row(names: str, setting: str, text: str = "", convert: Convert | None = None) -> Row:
    """Names that become a setting of ours."""
    return Row(names=tuple(names.split()), fate="setting", text=text, setting=setting, convert=convert)


def nothing(names: str, text: str) -> Row:
    """Names that change nothing here."""
    return Row(names=tuple(names.split()), fate="nothing", text=f"changes nothing here, {text}")


def in_requests(names: str, text: str, setting: str = "") -> Row:
    """Names of what requests say here, or a setting for all of them."""
    return Row(names=tuple(names.split()), fate="request", text=text, setting=setting)


def refused(names: str, text: str) -> Row:
    """Names of what is not there."""
    return Row(names=tuple(names.split()), fate="refused", text=f"is not there: {text}")


def markdown(server: Server) -> list[str]:
    """The rows of the table that docs/migrating.md has of a server: what becomes a setting."""
    lines = []
    for row in server.rows:
        if row.fate == "setting" and not row.is_pattern:
            names = ", ".join(name.lstrip("-") if server.has_variables is False else name for name in row.names)
            lines.append(f"| {names} | `{flag(row.setting)}` | {row.text} |")
    return lines
