"""Tokens for a log that has none: contents that are equal just where the recorded block hashes are.

Owns what was made up for each hash. Promises: two blocks with one hash get the same tokens, two with different hashes
different ones, wherever in prompts or answers they stand; what prompts share inside of a block no log tells. Must not
know: the scheduler, steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire_engine.simulation.recorded import Entry

STOP = 1  # the token that ends an answer; it is never computed, so no block has it
_FIRST = 2


class Contents:
    """Made from the whole log at once: what an answer will say is known from its end, before its prompt is made."""

    def __init__(self, entries: Iterable[Entry], block_size: int) -> None:
        self._size = block_size
        self._next = _FIRST
        self._blocks: dict[str, tuple[int, ...]] = {}  # by hash
        self._prompts: dict[str, tuple[int, ...]] = {}  # by request, in full
        self._tails: dict[tuple[str, int], list[int]] = {}  # tokens from the prompt's last full block on, of a choice
        self._own: dict[tuple[str, int], int] = {}  # by choice: a token that nothing else has
        entries = list(entries)
        ends: dict[str, list[tuple[int, Sequence[str]]]] = {}
        for entry in entries:
            if entry.kind == "end":
                hashes = entry.plain.get("block_hashes", ())
                ends.setdefault(entry.request_id, []).append((int(entry.plain.get("choice", 0)), hashes))
        for entry in entries:
            if entry.kind == "submit":
                self._submitted(entry, ends.get(entry.request_id, []))

    def prompt(self, request_id: str) -> tuple[int, ...]:
        """All tokens of a request's prompt."""
        return self._prompts[request_id]

    def output(self, request_id: str, choice: int, position: int) -> int:
        """The token at a position behind the prompt."""
        first = len(self._prompts[request_id]) // self._size * self._size
        tail = self._tails.get((request_id, choice), [])
        if position - first < len(tail):
            return tail[position - first]
        if (request_id, choice) not in self._own:  # no block of it is known: taken for its own
            self._own[request_id, choice] = self._new()
        return self._own[request_id, choice]

    def _submitted(self, entry: Entry, ends: list[tuple[int, Sequence[str]]]) -> None:
        name, count = entry.request_id, int(entry.plain["request"]["num_prompt_tokens"])
        own = self._new()
        tokens: list[int] = []
        hashes = entry.plain.get("block_hashes", ())[: count // self._size]
        for content in hashes:
            tokens += self._block(content, ())
        tokens += [own] * (count // self._size * self._size - len(tokens))
        rest = count - len(tokens)
        beginning = self._beginning(own, rest, [hashes[0] for _, hashes in ends if hashes])
        self._prompts[name] = (*tokens, *beginning)
        for choice, answer in ends:
            tail: list[int] = []
            for index, content in enumerate(answer):
                tail += self._block(content, beginning if index == 0 else ())
            self._tails[name, choice] = tail

    def _beginning(self, own: int, count: int, next_hashes: Iterable[str]) -> tuple[int, ...]:
        """The prompt's tokens in its last, partial block, which its answers fill up: as known from elsewhere, if so."""
        known = next((self._blocks[content] for content in next_hashes if content in self._blocks), None)
        return (own,) * count if known is None else known[:count]

    def _block(self, content: str, beginning: tuple[int, ...]) -> tuple[int, ...]:
        if content not in self._blocks:
            self._blocks[content] = (*beginning, *[self._new()] * (self._size - len(beginning)))
        return self._blocks[content]

    def _new(self) -> int:
        self._next += 1
        return self._next
