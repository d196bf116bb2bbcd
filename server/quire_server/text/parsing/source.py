"""Text that arrives in pieces, for parsers that are written as if it were complete.

A parser is a generator: it is suspended at the end of the text so far and resumed when more has come. Promises: the
result does not depend on how the text was cut, if a parser uses only the methods here; time is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]  # yields where it needs more text, returns its result
Show = Callable[[str], None]  # takes a piece of parsed text

_SPACE = re.compile(r"[ \t\r\n]+")


class Markers:
    """Texts to search for. No text may be a prefix of another one."""

    def __init__(self, *texts: str) -> None:
        self.pattern = re.compile("|".join(map(re.escape, texts)))
        self._texts = texts
        self._firsts = re.compile("|".join({re.escape(text[0]) for text in texts}))
        self._longest = max(map(len, texts))

    def may_begin(self, text: str, start: int) -> bool:
        """Whether `text` ends, from `start` on, within a marker."""
        rest = text[start : start + self._longest]
        return any(marker.startswith(rest) for marker in self._texts)

    def settled(self, text: str, start: int) -> int:
        """The index in `text` before which no marker can begin, whatever follows; none is complete from `start` on."""
        for first in self._firsts.finditer(text, max(start, len(text) - self._longest + 1)):
            if any(marker.startswith(text[first.start() :]) for marker in self._texts):
                return first.start()
        return len(text)


class Source:
    """The text of one parser. The driver calls `push` and `end`, the parser calls the other methods."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._kept: list[str] | None = None

    def push(self, text: str) -> None:
        self._text = self._text[self._at :] + text  # the rest is shorter than a marker
        self._at = 0

    def end(self) -> None:
        self._ended = True

    def peek(self) -> Steps[str]:
        """The next character; "" at the end of the text."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def take(self) -> str:
        """Consume the character that `peek` has returned."""
        return self._pass(self._at + 1)

    def match(self, pattern: re.Pattern[str]) -> str:
        """Consume the text that is here and matches; more of the match may come."""
        found = pattern.match(self._text, self._at)
        return self._pass(found.end()) if found is not None else ""

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Consume all that matches a pattern for a run of characters."""
        pieces = []
        while (yield from self.peek()):
            piece = self.match(pattern)
            if not piece:
                break
            pieces.append(piece)
        return "".join(pieces)

    def space(self) -> Steps[str]:
        """Consume the whitespace that comes next."""
        return (yield from self.run(_SPACE))

    def show_space(self, show: Show) -> Steps[None]:
        """Show the whitespace that comes next, as it arrives."""
        while (yield from self.peek()):
            text = self.match(_SPACE)
            if not text:
                break
            show(text)

    def literal(self, text: str) -> Steps[bool]:
        """Consume `text` if it comes next; False, with nothing consumed, if it does not."""
        while True:
            here = self._text[self._at : self._at + len(text)]
            if here == text:
                self._pass(self._at + len(text))
                return True
            if self._ended or not text.startswith(here):
                return False
            yield

    def precedes(self, markers: Markers) -> Steps[bool]:
        """Whether one of the markers, or the end of the text, comes next; consumes nothing."""
        while True:
            if markers.pattern.match(self._text, self._at) is not None:
                return True
            if not markers.may_begin(self._text, self._at):
                return False
            if self._ended:
                return True  # the text was cut off within a marker, or before it
            yield

    def closing(self, texts: Sequence[str], show: Show) -> Steps[None]:
        """Consume those of `texts` that come next, in this order; whitespace that none of them follows is shown."""
        for text in texts:
            space = yield from self.space()
            if not (yield from self.literal(text)) and space:
                show(space)

    def until(self, markers: Markers, show: Show) -> Steps[str]:
        """Show the text before the first marker; returns the marker, which is consumed, or "" at the text's end."""
        while True:
            found = markers.pattern.search(self._text, self._at)
            if found is not None:
                self._show_to(found.start(), show)
                return self._pass(found.end())
            if self._ended:
                self._show_to(len(self._text), show)
                return ""
            self._show_to(markers.settled(self._text, self._at), show)
            yield

    def rest(self, show: Show) -> Steps[None]:
        """Show the rest of the text."""
        while (yield from self.peek()):
            self._show_to(len(self._text), show)

    def keep(self) -> None:
        """Record the consumed text from here on, for `kept`."""
        self._kept = []

    def kept(self) -> str:
        """The text that was consumed since `keep`; ends the recording."""
        kept, self._kept = self._kept or [], None
        return "".join(kept)

    def _show_to(self, index: int, show: Show) -> None:
        text = self._pass(index)
        if text:
            show(text)

    def _pass(self, index: int) -> str:
        text = self._text[self._at : index]
        self._at = index
        if self._kept is not None:
            self._kept.append(text)
        return text
