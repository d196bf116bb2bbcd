"""Allocators that find less of a prefix than ours does: so a simulation says what each way of matching is worth.

`radix` is ours: whole blocks, and inside of the next one a copy of its first tokens, as a tree over tokens finds them.
`blocks` finds whole blocks alone; `whole` finds a prompt or a conversation only if all of it is the beginning.
Promises: nothing but the match differs.
"""

from __future__ import annotations

from quire_engine.contract.block_hashes import root_hash
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.scheduling.blocks import NO_MATCH, PrefixMatch
from quire_engine.scheduling.kept_prefixes import Allocate
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.sequence import Promise, Sequence
from quire_lab.simulation.setup import MatchName

_Content = tuple[bytes, tuple[int, ...]]  # the hash of the full blocks, the tokens behind them


def matching(name: MatchName, config: SchedulerConfig) -> Allocate | None:
    """The maker of the allocator for a way of matching; None: the scheduler's own. Raises ConfigError."""
    if name == "radix":
        return None
    if config.num_host_blocks or config.windows != (None,) or not config.limits.enable_prefix_caching:
        raise ConfigError(f"prefixes match by {name} in one pool with a prefix cache, no windows and no swap space")
    return BlockMatching if name == "blocks" else WholeMatching


class BlockMatching(KVAllocator):
    """Finds whole blocks alone, as most servers do; partial ones are not kept."""

    def __init__(self, config: SchedulerConfig) -> None:
        size = config.limits.block_size
        super().__init__(num_blocks=config.num_blocks, block_size=size, enable_prefix_caching=True)
        self.leave_out_tails()


class WholeMatching(KVAllocator):
    """Finds a cached content only as a whole: a request's prompt, or its prompt and output, computed to the end."""

    def __init__(self, config: SchedulerConfig) -> None:
        size = config.limits.block_size
        super().__init__(num_blocks=config.num_blocks, block_size=size, enable_prefix_caching=True)
        self._contents: dict[int, set[_Content]] = {}  # by their number of tokens

    def match(self, sequence: Sequence, max_tokens: int) -> PrefixMatch:
        """The longest whole content that is the sequence's beginning; of its own prompt all but the last token."""
        found = super().match(sequence, max_tokens)
        for length in sorted(self._contents, reverse=True):
            usable = min(length, max_tokens)
            if usable <= found.num_tokens and length <= len(sequence.token_ids) and usable > 0:
                self._extend_hashes(sequence, length // self.block_size)
                if self._content(sequence, length) in self._contents[length]:
                    return self._cut(found, usable)
        return NO_MATCH

    def awaited(self, sequence: Sequence, match: PrefixMatch, max_tokens: int) -> Promise | None:
        """Nothing: what another is computing is hardly ever all of a content."""
        del sequence, match, max_tokens
        return None

    def commit(self, sequence: Sequence, num_computed: int) -> None:
        before = sequence.kv.num_certain
        super().commit(sequence, num_computed)
        if before < sequence.num_prompt_tokens <= num_computed:
            self._learn(sequence, sequence.num_prompt_tokens)

    def release(self, sequence: Sequence) -> None:
        if sequence.kv.num_certain > sequence.num_prompt_tokens:
            self._learn(sequence, sequence.kv.num_certain)
        super().release(sequence)

    def _learn(self, sequence: Sequence, num_tokens: int) -> None:
        self._extend_hashes(sequence, num_tokens // self.block_size)
        self._contents.setdefault(num_tokens, set()).add(self._content(sequence, num_tokens))

    def _content(self, sequence: Sequence, num_tokens: int) -> _Content:
        full = num_tokens // self.block_size
        parent = sequence.kv.block_hashes[full - 1] if full else root_hash(sequence.group.request.cache_salt)
        return parent, tuple(sequence.token_ids[full * self.block_size : num_tokens])

    def _cut(self, found: PrefixMatch, num_tokens: int) -> PrefixMatch:
        """The first tokens of a match; what it has of the last block is copied, where that is worth a copy."""
        full, rest = divmod(num_tokens, self.block_size)
        if num_tokens == found.num_tokens:
            return found
        tail = (found.blocks[full], rest) if rest >= self._tails.least else None
        return PrefixMatch(found.blocks[:full], num_tokens if tail else full * self.block_size, tail)
