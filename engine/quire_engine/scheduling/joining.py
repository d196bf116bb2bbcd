"""Prefixes in flight: blocks that a running sequence is about to fill, and who should wait for them.

Owns the promises of running sequences, by content. Promises: a promise ends when its block is computed for certain or
its sequence gives up its blocks, so nobody waits for what nobody computes. Must not know: queues, budgets, the pool.

Why waiting is never slower than computing: the awaited tokens come out of the same steps' budget as the waiter's own
would, and are served before them, because who runs is served before who enters; whoever entered instead would take a
part of that budget to compute the same tokens again. What waiting can cost is the one step between the last awaited
token and the first own one, so there must be half a block to gain.

Why it cannot break the wait bound: the bound rests on the elder alone (`policies.elder`), and the elder is seated
without being asked to wait. Why no step is empty: an awaited sequence runs and has tokens left to compute, or results
of its are in flight; a waiter runs nothing, so there are no circles. If the awaited sequence is preempted, aborted or
fails, its promises go with its blocks: the first of the waiters enters in the next step and promises them anew.
"""

from __future__ import annotations

from collections import deque

from quire_engine.scheduling.sequence import Content, Promise, Sequence
from quire_engine.scheduling.tails import Tails, num_common


class Promises:
    """What running sequences will have computed, until they have."""

    __slots__ = ("_block_size", "_by_content", "_of")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._by_content: dict[Content, Sequence] = {}
        self._of: dict[Sequence, deque[tuple[int, Content]]] = {}  # in order: (ends at token, content)

    def __bool__(self) -> bool:
        return bool(self._of)

    def holds(self, promise: Promise) -> bool:
        """Whether this sequence is still to compute it; whoever enters next may promise the same again."""
        content, sequence = promise
        return self._by_content.get(content) is sequence

    def make(self, sequence: Sequence, first: int, root: bytes, tails: Tails) -> None:
        """A sequence that enters will compute its known tokens from block `first` on; its hashes are known so far."""
        size, tokens, hashes = self._block_size, sequence.token_ids, sequence.block_hashes
        own: deque[tuple[int, Content]] = deque()
        for index in range(first, -(-len(tokens) // size)):
            end = min((index + 1) * size, len(tokens))
            begins = tails.beginning(hashes[index - 1] if index else root, tokens[index * size : end])
            contents: list[Content] = [] if begins is None else [begins]
            if index < len(hashes):
                contents.append(hashes[index])
            for content in contents:
                if content not in self._by_content:  # else whoever promised it first is ahead
                    self._by_content[content] = sequence
                    own.append((end, content))
        if own:
            self._of[sequence] = own

    def keep(self, sequence: Sequence, num_tokens: int) -> None:
        """So many of the sequence's tokens are computed for certain: others can match them."""
        own = self._of.get(sequence)
        if own is None:
            return
        while own and own[0][0] <= num_tokens:
            del self._by_content[own.popleft()[1]]
        if not own:
            del self._of[sequence]

    def withdraw(self, sequence: Sequence) -> None:
        """The sequence gives up its blocks: what it has not computed it never will."""
        for _, content in self._of.pop(sequence, ()):
            del self._by_content[content]

    def awaited(
        self, sequence: Sequence, first: int, max_tokens: int, root: bytes, tails: Tails
    ) -> tuple[int, Promise | None]:
        """Tokens behind block `first` that others will compute for a sequence, and the last promise of them."""
        size, hashes = self._block_size, sequence.block_hashes
        index, full = first, max_tokens // size
        while index < full and hashes[index] in self._by_content:
            index += 1
        last = (hashes[index - 1], self._by_content[hashes[index - 1]]) if index > first else None
        start = index * size
        tokens = sequence.token_ids[start : min(start + size, max_tokens)]
        begins = tails.beginning(hashes[index - 1] if index else root, tokens)
        provider = self._by_content.get(begins) if begins is not None else None
        if begins is None or provider is None:
            return start - first * size, last
        return start - first * size + num_common(provider.token_ids[start : start + size], tokens), (begins, provider)
