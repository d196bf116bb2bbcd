"""Stop strings: finds them in a growing text, and holds back text that may become one.

Promises: the result does not depend on how the text was cut into pushes; time is linear in the text. Must not know:
tokenizers, HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Searches one choice's text for the first of several stop strings.

    The match that is complete first wins; of several complete at the same character, the first in the list. Text from
    the start of the match (with `include` from its end) is dropped. Without `include`, the longest end of the text that
    may still become a stop string is held back: at most the longest stop string's length less one.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """Raises ValueError for an empty stop string."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._include = include
        self._fallbacks = tuple(_fallbacks(stop) for stop in self._stops)
        self._matched_lengths = [0] * len(
            self._stops
        )  # per stop string: the length of its prefix that the text ends with
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, examine: bool = True) -> tuple[str, str | None]:
        """Returns the text that is safe to show and the stop string, if `text` completed one.

        With `examine=False` (before a minimum number of tokens) stop strings that `text` completes do not count; one
        that starts in it and is completed later does. After a match every push returns nothing.
        """
        if self.matched is not None:
            return "", None
        if not self._stops:
            return text, None
        for end, char in enumerate(text, start=1):
            stop = self._advance(char)
            if stop is not None and examine:
                self.matched = stop
                shown = self._held + text[:end]
                self._held = ""
                return (shown if self._include else shown[: len(shown) - len(stop)]), stop
        if self._include:
            return text, None
        shown = self._held + text
        kept = len(shown) - max(self._matched_lengths)
        self._held = shown[kept:]
        return shown[:kept], None

    def finish(self) -> str:
        """The held-back text, when the generation ends for another reason."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """One step of a Knuth-Morris-Pratt automaton per stop; the first stop of the list that ends at `char`."""
        completed: str | None = None
        for i, (stop, fallback) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            length = self._matched_lengths[i]
            while length and stop[length] != char:
                length = fallback[length]
            if stop[length] == char:
                length += 1
            if length == len(stop):
                completed = completed if completed is not None else stop
                length = fallback[length]
            self._matched_lengths[i] = length
        return completed


def _fallbacks(stop: str) -> tuple[int, ...]:
    """Return, for each length of a prefix of `stop`, the longest shorter prefix that is also its suffix."""
    fallback = [0, 0]
    for char in stop[1:]:
        length = fallback[-1]
        while length and stop[length] != char:
            length = fallback[length]
        fallback.append(length + 1 if stop[length] == char else 0)
    return tuple(fallback)
