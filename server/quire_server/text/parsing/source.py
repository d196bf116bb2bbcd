"""Text that arrives in pieces, for parsers that are written as if it were all there.

A parser is a generator: it is suspended where the text runs out and goes on when more has come. Promises: what a parser
reads does not depend on how the text was cut, as long as it asks only what is here; time is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]  # yields where it needs more text, returns its result
Show = Callable[[str], None]  # takes a piece of text that is settled

_SPACE = re.compile(r"[ \t\r\n]+")


class Markers:
    """Texts that are looked for. None may be the start of another one."""

    def __init__(self, *texts: str) -> None:
        self.pattern = re.compile("|".join(map(re.escape, texts)))
        self._texts = texts
        self._firsts = re.compile("|".join({re.escape(text[0]) for text in texts}))
        self._longest = max(map(len, texts))

    def settled(self, text: str, start: int) -> int:
        """The index up to which `text`, in which no marker is from `start` on, has none however it goes on."""
        for first in self._firsts.finditer(text, max(start, len(text) - self._longest + 1)):
            if any(marker.startswith(text[first.start() :]) for marker in self._texts):
                return first.start()
        return len(text)


class Source:
    """One text as its reader sees it. `push` and `end` are its driver's, the rest is the reader's."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._kept: list[str] | None = None

    def push(self, text: str) -> None:
        self._text = self._text[self._at :] + text  # what is left is shorter than a marker
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
        """The character that `peek` has shown."""
        return self._pass(self._at + 1)

    def match(self, pattern: re.Pattern[str]) -> str:
        """What is here already and matches, which may be only the start of what will."""
        found = pattern.match(self._text, self._at)
        return self._pass(found.end()) if found is not None else ""

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """All that matches a pattern for runs of a kind of character."""
        pieces = []
        while (yield from self.peek()):
            piece = self.match(pattern)
            if not piece:
                break
            pieces.append(piece)
        return "".join(pieces)

    def space(self) -> Steps[str]:
        """The whitespace that is next."""
        return (yield from self.run(_SPACE))

    def show_space(self, show: Show) -> Steps[None]:
        """Show the whitespace that is next, as it comes."""
        while (yield from self.peek()):
            text = self.match(_SPACE)
            if not text:
                break
            show(text)

    def literal(self, text: str) -> Steps[bool]:
        """Whether `text` is next; it is taken if so, and nothing is if not."""
        while True:
            here = self._text[self._at : self._at + len(text)]
            if here == text:
                self._pass(self._at + len(text))
                return True
            if self._ended or not text.startswith(here):
                return False
            yield

    def until(self, markers: Markers, show: Show) -> Steps[str]:
        """Show the text before the first of the markers; the marker, which is taken, or "" at the end of the text."""
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
        """Show all that is left."""
        while (yield from self.peek()):
            self._show_to(len(self._text), show)

    def keep(self) -> None:
        """From here on what is taken can be had again."""
        self._kept = []

    def kept(self) -> str:
        """What was taken since `keep`, or since the text that is sure to be used."""
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
