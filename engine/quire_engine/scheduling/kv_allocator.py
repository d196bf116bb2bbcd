"""The blocks of sequences: which sequence holds which, and what it may write to.

A block that two tables hold, or that can be matched, is never handed out for writing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Set
from itertools import chain, repeat

from quire_engine.contract.block_hashes import block_hash, root_hash
from quire_engine.contract.invariants import require
from quire_engine.contract.kv_groups import WHOLE, KVGroup
from quire_engine.scheduling.blocks import NO_MATCH, NO_MOVES, Moves, PageTable, PrefixMatch
from quire_engine.scheduling.cached_blocks import CachedBlocks
from quire_engine.scheduling.prefix_cache import NOT_TOLD, PrefixCache, Tails, num_common
from quire_engine.scheduling.sequence import Content, Promise, Sequence

Copy = tuple[int, int]  # (source block, target block)
_WEIGHT = 1 / 64  # of the newest block in the average share of merged ones


class KVAllocator(CachedBlocks):
    """KV blocks for sequences: prefix matching, allocation, sharing, copy on write, release.

    The caller of a method that takes blocks must have found its cost in `num_available` first. Running out is a bug and
    raises InvariantViolation.

    Each group of layers has a page table of every sequence, and blocks that are matched by its own contents; all groups
    take their blocks from one pool. A window's blocks are given back when their sequence has results behind them.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool, groups: tuple[KVGroup, ...] = (WHOLE,)
    ) -> None:
        super().__init__(
            num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=enable_prefix_caching, groups=groups
        )
        self.merged_share = 0.0  # of the outputs' last full blocks, in a moving average: merged with equal ones
        self._promises = Promises(block_size)
        self._pinned: list[int] = []  # sources of this plan's copies, which must not be reused before they are read
        self._released: list[int] = []  # since the last batch

    def match(self, sequence: Sequence, max_tokens: int) -> PrefixMatch:
        """The longest cached prefix of at most `max_tokens` tokens. Changes no block."""
        if not self._caching:
            return NO_MATCH
        size, count = self.block_size, max_tokens // self.block_size
        self._extend_hashes(sequence, count)
        if self.by_window:
            found = self._caches.longest_match(sequence.kv.block_hashes[:count])
            return PrefixMatch(found[0], len(found[0]) * size, others=found[1:])
        blocks = tuple(self._cache.longest_match(sequence.kv.block_hashes[:count]))
        start = len(blocks) * size
        rest = sequence.token_ids[start : min(start + size, max_tokens)]
        is_enough = len(rest) >= self._tails.least
        tail = self._tails.longest(self._parent(sequence, len(blocks)), rest) if is_enough else None
        return PrefixMatch(blocks, start + (tail[1] if tail else 0), tail)

    def awaited(self, sequence: Sequence, match: PrefixMatch, max_tokens: int) -> Promise | None:
        """The last promise of the sequence's prefix beyond the match; None if waiting for it gains too little."""
        if not self._promises:
            return None
        first = len(match.blocks)
        parent = self._parent(sequence, first)
        num_tokens, promise = self._promises.awaited(sequence, first, max_tokens, parent, self._tails)
        gain = num_tokens - (match.num_tokens - first * self.block_size)
        return promise if gain >= max(self.block_size // 2, self._tails.least) else None

    def is_promised(self, promise: Promise) -> bool:
        """Whether the sequence that `awaited` named is still going to compute this content."""
        return self._promises.holds(promise)

    def seat_cost(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Available blocks that `seat` would use up; the source of a tail's copy counts until the step is planned."""
        pinned = int(match.tail is not None and self._pool.refs(match.tail[0]) == 0)
        if not self.by_window:
            revived = sum(1 for block in match.blocks if self._pool.refs(block) == 0)
            return sequence.blocks_for_known - len(match.blocks) + revived + pinned
        cost, known = pinned, len(sequence.token_ids)
        for table, entries in self._matched(sequence, match):
            passed = table.first_seen(match.num_tokens)
            cost += table.num_blocks_for(table.group.entry_end(match.num_tokens, known)) - len(entries)
            cost += sum(1 for block in entries[passed:] if self._pool.refs(block) == 0)
        return cost

    def seat(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Give an empty sequence its matched prefix, and new blocks for the rest of its known tokens.

        A window gets blocks for the next tokens alone. A matched tail is copied into the first new block, just before
        the sequence writes there (`reserve`).
        """
        self._own([sequence])
        known = len(sequence.token_ids)
        matched = self._matched(sequence, match)
        for table, entries in matched:  # all of them, before the first new block evicts one
            for block in table.fill(entries, table.first_seen(match.num_tokens)):
                self._hold(block)
        sequence.kv.num_committed = len(match.blocks)
        sequence.kv.num_computed = match.num_tokens
        sequence.kv.num_certain = len(match.blocks) * self.block_size
        if match.tail is not None:
            sequence.kv.copies_from = match.tail[0]
            self._hold(match.tail[0])
        for table, _ in matched:
            self._extend(sequence, table, table.group.entry_end(match.num_tokens, known))
        sequence.kv.num_reserved = self.groups[0].entry_end(match.num_tokens, known)
        if self._caching:
            self._extend_hashes(sequence, known // self.block_size)
            sequence.kv.num_promised = known
            self._promises.make(sequence, len(match.blocks), self._parent(sequence, len(match.blocks)), self._tails)

    def reserve_cost(self, sequence: Sequence, end: int) -> int:
        """Available blocks that `reserve` up to position `end` would use up."""
        growth = 0
        for table in sequence.kv.tables:
            if end > table.num_slots:
                growth += table.num_blocks_for(end) - len(table)
        return growth + len(self.groups) if sequence.kv.shares_tail and self._must_copy(sequence) else growth

    def reserve(self, sequence: Sequence, end: int) -> tuple[Copy, ...]:
        """Make positions num_computed .. end - 1 writable; returns the copies to make first, if some are needed.

        Copy on write: of n owners of a shared block the last one to write keeps it, so n owners cost n - 1 copies.
        """
        copies: tuple[Copy, ...] = ()
        if sequence.kv.copies_from is not None:
            target = sequence.kv.table.block_ids[sequence.kv.num_computed // self.block_size]
            copies = ((sequence.kv.copies_from, target),)
            self._pinned.append(sequence.kv.copies_from)
            sequence.kv.copies_from = None
        if sequence.kv.shares_tail:
            copies = tuple(self._copy_tails(sequence)) if self._must_copy(sequence) else ()
            sequence.kv.shares_tail = False
        self._grow(sequence, end)
        return copies

    def lend(self, sequence: Sequence, end: int) -> int:
        """Slots up to `end` until `take_back`, as far as tables and free blocks without content go; returns the end."""
        if self.reserve_cost(sequence, end) > self._pool.num_blank:
            end = min([table.num_slots for table in sequence.kv.tables])
        self._grow(sequence, end)
        sequence.kv.num_lent = max(0, end - len(sequence.token_ids))
        return end

    def take_back(self, sequence: Sequence, num_computed: int) -> None:
        """Set how many tokens are computed, lent slots included, and free the other lent blocks."""
        sequence.kv.num_reserved = sequence.kv.num_computed = num_computed
        sequence.kv.num_lent = 0
        for table in sequence.kv.tables:
            for block in table.cut(num_computed):
                self._drop(block)

    def cancel_copies(self, sequences: Iterable[Sequence], targets: Set[int]) -> None:
        """The copies into these blocks will not be made: their content must not be matched."""
        for sequence in sequences:
            full = sequence.kv.num_certain // self.block_size
            if any(not targets.isdisjoint(table.block_ids[full : full + 1]) for table in sequence.kv.tables):
                sequence.kv.num_certain = full * self.block_size

    def unpin(self) -> None:
        """The step is planned: later plans may reuse the sources of its copies, because steps run in order."""
        while self._pinned:
            self._drop(self._pinned.pop())

    def advance(self, sequence: Sequence, end: int) -> None:
        """The tokens up to position `end` are computed, or in flight before any step that is planned from now on."""
        sequence.kv.num_computed = end

    def commit(self, sequence: Sequence, num_computed: int) -> None:
        """The first `num_computed` tokens have applied results: make the blocks that they fill matchable.

        Blocks that a window has passed are given back. Steps in flight may still read such a block: any step that
        writes to it comes after them.
        """
        before, sequence.kv.num_certain = sequence.kv.num_certain, num_computed
        if self._caching:
            full = num_computed // self.block_size
            if full > sequence.kv.num_committed:
                self._commit_blocks(sequence, full)
            if before < sequence.kv.num_promised:
                self._promises.fulfil(sequence, num_computed)
                if num_computed >= sequence.kv.num_promised:
                    self._offer_tail(sequence)
        if self.by_window:
            self._give_back(sequence, num_computed)

    def reserve_block(self, sequence: Sequence) -> None:
        """Reserve one more block for a decode that has a row, whose last block is full and which shares none."""
        self._extend(sequence, sequence.kv.table, sequence.kv.table.num_slots + 1)

    def commit_block(self, sequence: Sequence, num_computed: int) -> None:
        """Commit the last block of a decode that has a row, full of applied results; the counts are in the row."""
        if self._caching:
            self._commit_blocks(sequence, num_computed // self.block_size)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let an empty child share the parent's blocks of the first `num_tokens` tokens, a partial one included."""
        full, partial = divmod(num_tokens, self.block_size)
        for table, source in zip(child.kv.tables, parent.kv.tables, strict=True):
            for block in table.fill(source.block_ids[: full + (1 if partial else 0)], source.num_passed):
                self._pool.share(block)
        child.kv.owner = parent.kv.owner
        child.kv.num_computed = child.kv.num_reserved = num_tokens
        child.kv.block_hashes = parent.kv.block_hashes[:full]
        child.kv.num_committed = min(parent.kv.num_committed, full)
        child.kv.num_certain = min(parent.kv.num_certain, num_tokens)
        if partial:
            parent.kv.shares_tail = child.kv.shares_tail = True

    def release(self, sequence: Sequence) -> None:
        """Take every block from the sequence; matchable blocks stay cached until reused, the deepest first."""
        if self._caching:
            self._pin_prompt(sequence)
            self._offer_tail(sequence)
            self._promises.withdraw(sequence)
        if sequence.kv.copies_from is not None:
            self._drop(sequence.kv.copies_from)
            sequence.kv.copies_from = None
        self._released.append(sequence.sequence_id)
        for table in sequence.kv.tables:
            for block in reversed(table.clear()):
                self._drop(block)
        sequence.kv.num_computed = sequence.kv.num_reserved = sequence.kv.num_certain = sequence.kv.num_lent = 0
        sequence.kv.num_committed = sequence.kv.num_promised = 0
        sequence.kv.shares_tail = False

    def invalidate(self, sequences: Iterable[Sequence]) -> None:
        """Stop matching the blocks of sequences, which hold wrong values, now and after their release."""
        for sequence in sequences:
            sequence.kv.num_certain = 0
            for block in _held(sequence):
                self._forget(block)

    def take_moves(self) -> Moves:
        """The copies to and from host memory for the next step; none without a host pool."""
        return NO_MOVES

    def take_released(self) -> tuple[int, ...]:
        """The ids of the sequences that were released since the last call."""
        released, self._released = tuple(self._released), []
        return released

    def parent_of(self, sequence: Sequence, index: int) -> bytes:
        """The hash of all blocks before the one at `index`, which are full."""
        self._extend_hashes(sequence, index)
        return self._parent(sequence, index)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise InvariantViolation unless reference counts equal the occurrences in the live tables.

        The blocks of a table also have its request's scope, and those that are cached are those that can be matched.
        """
        sequences = list(sequences)
        held = Counter(block for sequence in sequences for block in _held(sequence))
        held.update(sequence.kv.copies_from for sequence in sequences if sequence.kv.copies_from is not None)
        held.update(self._pinned)
        self._check_blocks(held)
        for sequence in sequences:
            scope = sequence.group.request.cache_scope
            for owner in map(self._pool.owner, _held(sequence)):
                require(owner is not None and owner.scope == scope, "a sequence holds a block of another scope")

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        for table in sequence.kv.tables:
            if num_tokens > table.num_slots:
                self._extend(sequence, table, num_tokens)
        sequence.kv.num_reserved = max(sequence.kv.num_reserved, num_tokens)

    def _extend(self, sequence: Sequence, table: PageTable, num_tokens: int) -> None:
        """Take blocks for one table, so that it has slots for `num_tokens` tokens."""
        count = table.num_blocks_for(num_tokens) - len(table)
        table.extend([self._take(sequence.kv.owner) for _ in range(count)])

    def _give_back(self, sequence: Sequence, num_computed: int) -> None:
        for table in sequence.kv.tables:
            first = table.first_seen(num_computed)
            if first > table.num_passed:
                for block in table.give_back(first):
                    self._drop(block)

    def _matched(self, sequence: Sequence, match: PrefixMatch) -> list[tuple[PageTable, tuple[int, ...]]]:
        """Each table of the sequence with the entries that the match has for it."""
        return list(zip(sequence.kv.tables, chain((match.blocks,), match.others, repeat(())), strict=False))

    def _own(self, sequences: Iterable[Sequence]) -> None:
        """See that the blocks that these sequences of one request take are of its scope and weight."""
        owner = None
        for sequence in sequences:
            if owner is None:
                request = sequence.group.request
                owner = self._pool.shares.owner(request.cache_scope, request.weight)
            sequence.kv.owner = owner

    def _commit_blocks(self, sequence: Sequence, full: int) -> None:
        self._extend_hashes(sequence, full)
        size, tokens = self.block_size, sequence.token_ids
        for index in range(sequence.kv.num_committed, full):
            content, is_new, is_merged = sequence.kv.block_hashes[index], False, False
            depth = index if index * size < sequence.num_prompt_tokens else NOT_TOLD
            for table, cache in zip(reversed(sequence.kv.tables), reversed(self._caches.each), strict=True):
                if index >= table.num_passed:  # the first group's answer counts, which has passed the fewest
                    block = table.block_ids[index]
                    is_new = cache.register(content, block, depth)
                    is_merged = not is_new and self._merge(table, cache, index, content)
                    if is_new and self.told_blocks.is_on:
                        self._tell_stored(sequence, index, cache.group)
            if depth == NOT_TOLD:
                self.merged_share += _WEIGHT * (is_merged - self.merged_share)
            # Requests diverge inside prompts and hardly ever inside outputs, whose blocks would be many.
            if is_new and depth != NOT_TOLD:
                self._offer(block, self._parent(sequence, index), tokens[index * size : (index + 1) * size])
        sequence.kv.num_committed = full

    def _merge(self, table: PageTable, cache: PrefixCache, index: int, content: bytes) -> bool:
        """Hold the block that has the same content already, and free the sequence's own; False if it is that block.

        Requests with equal tokens that run side by side so hold one block for all, wherever their beginnings were
        computed. Steps in flight may still read the freed block: any step that writes to it comes after them.
        """
        own, other = table.block_ids[index], cache.block(content)
        if other is None or other == own:
            return False
        if self._pool.refs(own) > 1:
            # Other choices hold its own block too, which would not be freed: once no other request held the equal one,
            # this request would hold a block more than its footprint.
            return False
        self._hold(other)
        table.replace(index, other)
        self._drop(own)
        return True

    def _tell_stored(self, sequence: Sequence, index: int, group: int = 0) -> None:
        """The sequence's full block at `index`, which is hashed, can be matched by that group of layers."""
        hashes, size = sequence.kv.block_hashes, self.block_size
        tokens = sequence.token_ids[index * size : (index + 1) * size]
        parent = hashes[index - 1] if index else b""
        self.told_blocks.stored(hashes[index], parent, tokens, request=sequence.group.request, group=group)

    def _pin_prompt(self, sequence: Sequence) -> None:
        """Pin the blocks of a prompt that its request asks to keep, of all groups of layers, the first ones first."""
        if not (seconds := sequence.group.request.cache_ttl):
            return
        self._pool.pin(
            [
                block
                for index in range(sequence.num_prompt_tokens // self.block_size)
                for table in sequence.kv.tables
                if table.num_passed <= index < len(table.block_ids)
                and self._caches.holds(block := table.block_ids[index])
            ],
            seconds,
        )

    def _offer_tail(self, sequence: Sequence) -> None:
        """Make the computed part of the sequence's partial block available for copies."""
        index, rest = divmod(sequence.kv.num_certain, self.block_size)
        if rest >= self._tails.least:
            tokens = sequence.token_ids[sequence.kv.num_certain - rest : sequence.kv.num_certain]
            self._offer(sequence.kv.table.block_ids[index], self._parent(sequence, index), tokens)

    def _parent(self, sequence: Sequence, index: int) -> bytes:
        """The hash of all blocks before the one at `index`."""
        return sequence.kv.block_hashes[index - 1] if index else root_hash(sequence.group.request.cache_salt)

    def _must_copy(self, sequence: Sequence) -> bool:
        """Whether another choice still holds the block that the sequence writes to next."""
        return self._pool.refs(sequence.kv.table.block_ids[sequence.kv.num_computed // self.block_size]) > 1

    def _copy_tails(self, sequence: Sequence) -> Iterator[Copy]:
        index = sequence.kv.num_computed // self.block_size
        for table in sequence.kv.tables:  # choices share the blocks of all groups or of none
            source = table.block_ids[index]
            target = self._take(sequence.kv.owner)
            self._pool.drop(source)  # never the last reference: another choice holds it
            table.replace(index, target)
            yield source, target

    def _extend_hashes(self, sequence: Sequence, count: int) -> None:
        hashes, size = sequence.kv.block_hashes, self.block_size
        for index in range(len(hashes), count):
            tokens = sequence.token_ids[index * size : (index + 1) * size]
            hashes.append(block_hash(self._parent(sequence, index), tokens))


def _held(sequence: Sequence) -> Iterator[int]:
    """The blocks in all tables of a sequence."""
    return (block for table in sequence.kv.tables for block in table.held)


class Promises:
    """Prefixes in flight: blocks that running sequences are computing and that waiting requests may wait for.

    A promise ends when its block has applied results, or when its sequence loses its blocks. So a request never waits
    for a block that no sequence computes.

    Why waiting is never slower than computing: the awaited tokens come out of the same steps' budget as the waiting
    request's own tokens would, and earlier, because running sequences are served before waiting ones. A request that
    entered instead would spend a part of that budget on the same tokens. Waiting can cost the one step between the last
    awaited token and the first own one, so at least half a block must be gained.

    Why the wait bound still holds: it rests on the elder alone (`policies.ElderRule`), and the elder is seated without
    waiting for a promise. Why no step is empty: the awaited sequence runs and has tokens left to compute, or results in
    flight. A waiting request computes nothing, so there are no cycles. If the awaited sequence is preempted, aborted or
    fails, its promises end with its blocks: the first waiting request enters in the next step and makes them anew.
    """

    __slots__ = ("_block_size", "_by_content", "_of")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._by_content: dict[Content, Sequence] = {}
        self._of: dict[Sequence, deque[tuple[int, Content]]] = {}  # in order: (ends at token, content)

    def __bool__(self) -> bool:
        return bool(self._of)

    def holds(self, promise: Promise) -> bool:
        """Whether this sequence is still going to compute it; another sequence may have promised the same since."""
        content, sequence = promise
        return self._by_content.get(content) is sequence

    def make(self, sequence: Sequence, first: int, root: bytes, tails: Tails) -> None:
        """A sequence enters and will compute its known tokens from block `first` on; its full blocks are hashed."""
        size, tokens, hashes = self._block_size, sequence.token_ids, sequence.kv.block_hashes
        own: deque[tuple[int, Content]] = deque()
        for index in range(first, -(-len(tokens) // size)):
            end = min((index + 1) * size, len(tokens))
            begins = tails.beginning(hashes[index - 1] if index else root, tokens[index * size : end])
            contents: list[Content] = [] if begins is None else [begins]
            if index < len(hashes):
                contents.append(hashes[index])
            for content in contents:
                if content not in self._by_content:  # otherwise another sequence computes it first
                    self._by_content[content] = sequence
                    own.append((end, content))
        if own:
            self._of[sequence] = own

    def fulfil(self, sequence: Sequence, num_tokens: int) -> None:
        """The sequence's first `num_tokens` tokens have applied results: other requests can match them."""
        own = self._of.get(sequence)
        if own is None:
            return
        while own and own[0][0] <= num_tokens:
            del self._by_content[own.popleft()[1]]
        if not own:
            del self._of[sequence]

    def withdraw(self, sequence: Sequence) -> None:
        """The sequence loses its blocks: end its promises."""
        for _, content in self._of.pop(sequence, ()):
            del self._by_content[content]

    def awaited(
        self, sequence: Sequence, first: int, max_tokens: int, root: bytes, tails: Tails
    ) -> tuple[int, Promise | None]:
        """The number of tokens after block `first` that other sequences will compute, and the last promise of them."""
        size, hashes = self._block_size, sequence.kv.block_hashes
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
