"""Makes up tokens for a log without tokens, with the common prefixes that the log records.

Owns the tokens of each content. Promises: two contents have a common prefix of the same length as the recorded ones.
Must not know: the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

from quire_lab.simulation.recorded import Entry

STOP = 1  # the token that ends an answer; it is never computed, so no content has it
_FIRST = 2


class Contents:
    """Made from the whole log at once: an answer is known from its end, before its prompt is sent."""

    def __init__(self, entries: Iterable[Entry], block_size: int) -> None:
        self._size = block_size
        self._contents: dict[int, tuple[int, ...]] = {}  # by ordinal
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._outputs: dict[
            tuple[str, int], list[tuple[int, ...]]
        ] = {}  # with the prompt; a search has one for each beam
        entries = list(entries)
        # Tokens of outputs that had not ended when the log did; they equal no others.
        self._unknown = count(_FIRST + 1 + max((entry.ordinal for entry in entries), default=0))
        for entry in entries:
            if entry.kind in {"submit", "end", "adopt"}:
                self._add(entry)

    def prompt(self, request_id: str) -> tuple[int, ...]:
        """All tokens of a request's prompt."""
        return self._prompts[request_id]

    def content(self, ordinal: int) -> tuple[int, ...]:
        """All tokens of the content that the entry with this ordinal is."""
        return self._contents[ordinal]

    def output(self, request_id: str, choice: int, position: int, beam: int = 0) -> int:
        """The token at a position after the prompt; in a search, of the beam that was the sequence's `beam`-th."""
        outputs = self._outputs.get((request_id, choice), ())
        known = outputs[beam] if beam < len(outputs) else ()
        return known[position] if position < len(known) else next(self._unknown)

    def blocks(self, request_id: str) -> Iterator[tuple[int, ...]]:
        """The tokens of each full block of the prompt."""
        prompt, size = self._prompts[request_id], self._size
        return (prompt[end - size : end] for end in range(size, len(prompt) + 1, size))

    def _add(self, entry: Entry) -> None:
        name = entry.request_id
        if entry.kind == "submit":
            num_tokens = int(entry.plain["request"]["num_prompt_tokens"])
            self._prompts[name] = self._made(entry, num_tokens, ())
        elif entry.kind == "adopt":
            self._made(entry, int(entry.plain["num_tokens"]), ())
        elif name in self._prompts:
            made = self._made(entry, int(entry.plain["num_tokens"]), self._prompts[name])
            self._outputs.setdefault((name, int(entry.plain["choice"])), []).append(made)

    def _made(self, entry: Entry, num_tokens: int, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """The content: the common prefix that the log names, or at least its prompt, then unique tokens."""
        other, num_shared = entry.plain.get("shared", (0, 0))
        begins = self._contents.get(other, ())[:num_shared]
        if len(begins) < len(prompt):
            begins = prompt[:num_tokens]
        own = _FIRST + entry.ordinal
        made = self._contents[entry.ordinal] = (*begins, *[own] * (num_tokens - len(begins)))
        return made
