"""Prefixes that outlive the process: which blocks are worth keeping, and which requests wait for kept ones.

Promises: a request waits only while that is sooner than computing; a block that comes from the store is one that the
request's own hashes name. Must not know: threads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Values
from dataclasses import dataclass, replace
from itertools import repeat

from quire_engine.block_hashes import block_hash, prompt_hashes, root_hash
from quire_engine.block_store import BlockStore, StoreCounts
from quire_engine.limits import SchedulerConfig
from quire_engine.scheduling.blocks import PrefixMatch
from quire_engine.scheduling.kv_allocator import KVAllocator, adopt, holds, tell
from quire_engine.scheduling.log.step_log import StepLog
from quire_engine.scheduling.sequence import Sequence
from quire_engine.scheduling.swapping import SwapCost
from quire_engine.types import EngineStats, GenerationRequest

LEAST_TOKENS = 512  # of a prompt that is kept though no other request has begun with its blocks
_PATIENCE = 5.0  # seconds without any block read, after which requests compute instead
_TRUST = 0.95  # of the time that reading took, whenever computing was preferred to it


def keeping_allocator(config: SchedulerConfig, store: BlockStore) -> tuple[KVAllocator, None]:
    """The allocator of a pool whose prefixes are kept; nothing is swapped there."""
    return KeepingAllocator(config, store), None


class KeepingAllocator(KVAllocator):
    """A `KVAllocator` that offers blocks to a store: full blocks of prompts with applied results.

    Kept are the blocks of a prompt of `LEAST_TOKENS` or more, as soon as they are computed, and blocks that a further
    request begins with, when it enters.
    """

    def __init__(self, config: SchedulerConfig, store: BlockStore) -> None:
        limits = config.limits
        super().__init__(
            num_blocks=config.num_blocks,
            block_size=limits.block_size,
            enable_prefix_caching=limits.enable_prefix_caching,
            groups=config.kv_groups,
        )
        tell(self, config)
        self._store = store

    def seat(self, sequence: Sequence, match: PrefixMatch) -> None:
        super().seat(sequence, match)
        group = sequence.group
        if group.first_scheduled is None and not group.is_resumed:  # else it finds its own blocks
            self._keep(sequence, 0, min(len(match.blocks), sequence.num_prompt_tokens // self.block_size))

    def invalidate(self, sequences: Iterable[Sequence]) -> None:
        sequences = list(sequences)
        super().invalidate(sequences)
        self._store.remove({key for sequence in sequences for key in sequence.kv.block_hashes})

    def forget_cached(self, kept: Collection[bytes] = ()) -> tuple[int, tuple[int, ...]]:
        self._store.clear()
        return super().forget_cached(kept)

    def _commit_blocks(self, sequence: Sequence, full: int) -> None:
        first = sequence.kv.num_committed
        super()._commit_blocks(sequence, full)
        if sequence.num_prompt_tokens >= LEAST_TOKENS:
            self._keep(sequence, first, min(full, sequence.num_prompt_tokens // self.block_size))

    def _keep(self, sequence: Sequence, first: int, end: int) -> None:
        """Keep the prompt's blocks from `first` up to `end`, and count all before them as used."""
        if first >= end:
            return
        keys = sequence.kv.block_hashes[:end]
        self._store.use(keys)
        for depth, key in enumerate(keys[first:], first):
            block = None if self._store.holds(key) else self._cache.block(key)
            if block is not None:
                self._store.offer(key, block, depth)

    def _forget(self, block: int) -> bytes | None:
        content = super()._forget(block)
        if content is not None:
            self._store.lose(content)
        return content


class KeptPrefixes:
    """Brings kept blocks into the pool for requests whose prompts begin with them, before they enter the queue.

    There they are cached prefixes like any other. Without a store no request waits.
    """

    def __init__(self, kv: KVAllocator, log: StepLog | None, store: BlockStore | None) -> None:
        self._kv, self._log, self._store = kv, log, store
        self._cost = SwapCost(0.0)
        self._waits: dict[str, Wait] = {}  # by request
        # By key what is under way: the first request for it, and the depth in its prompt.
        self._reading: dict[bytes, tuple[GenerationRequest, int]] = {}
        self._trust = 1.0  # share of the measured time of reading
        self._reported = StoreCounts()

    @property
    def is_reading(self) -> bool:
        return bool(self._waits)

    def is_ready(self, request: GenerationRequest, clock: Callable[[], float]) -> bool:
        """Whether the request has nothing to wait for; what is kept of its prompt begins to be read."""
        if self._store is None:
            return True
        wait, now = self._waits.get(request.request_id), clock()
        if wait is None:
            wait = self._begin(request, self._store, now)
            if wait is None:
                return True
        wait.keys &= self._reading.keys()
        if wait.keys and now - wait.moved_at < _PATIENCE:
            return False
        self.withdraw(request.request_id)
        return True

    def withdraw(self, request_id: str) -> None:
        """The request does not wait any more."""
        if self._waits.pop(request_id, None) is not None and not self._waits and self._store is not None:
            self._reading.clear()
            self._store.cancel()

    def take_in(self, now: float) -> None:
        """Bring into the pool what has been read. Call it between steps, with none in flight."""
        if self._store is None or not self._waits:
            return
        run: list[tuple[bytes, bytes]] = []  # blocks that follow each other in one prompt
        owner, first = None, 0
        for key, payload in self._store.take():
            found = self._reading.pop(key, None)
            if found is None:
                continue
            for wait in self._waits.values():
                wait.moved_at = now
            if payload is None:
                continue
            request, depth = found
            if owner is not None and (request is not owner or depth != first + len(run)):
                self._place(owner, first, run, self._store)
                owner, run = None, []
            if owner is None:
                owner, first = request, depth
            run.append((key, payload))
        if owner is not None:
            self._place(owner, first, run, self._store)

    def adopt(self, request: GenerationRequest, first: int, keys: Values[bytes]) -> list[int | None]:
        """Give blocks of the pool to these contents, which begin at block `first` of the request's prompt.

        None for one that is there already or has no room. A replay makes the call too, with the keys of its own tokens.
        """
        if self._log is not None:
            self._log.adopted(request, first, len(keys), self._kv.block_size)
        parents: Iterable[bytes | None] = repeat(None)
        if self._kv.told_blocks.is_on:
            before = prompt_hashes(request.prompt_token_ids, request.cache_salt, self._kv.block_size, most=first)
            parents = [before[-1] if before else b"", *keys]
        return [
            adopt(self._kv, key, depth, request, parent)
            for depth, (key, parent) in enumerate(zip(keys, parents, strict=False), first)
        ]

    def wait(self, seconds: float) -> None:
        """Until a block has been read, at most so long."""
        if self._store is not None:
            self._store.wait(seconds)

    def learn(self, *, prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """Learn from a step's size and its seconds what computing takes."""
        self._cost.learn(prompt_tokens=prompt_tokens, num_decodes=num_decodes, seconds=seconds)

    def has_news(self) -> bool:
        """Whether the store's counts are others than the last statistics had."""
        return self._store is not None and self._store.counts != self._reported

    def add_to(self, stats: EngineStats) -> EngineStats:
        """The statistics, completed by those of the store."""
        if self._store is None:
            return stats
        counts = self._reported = self._store.counts
        return replace(
            stats,
            kept_blocks=counts.blocks,
            total_kept_written=counts.written,
            total_kept_read=counts.read,
            total_kept_dropped=counts.dropped,
            total_kept_refused=counts.refused,
        )

    def _place(self, request: GenerationRequest, first: int, run: list[tuple[bytes, bytes]], store: BlockStore) -> None:
        blocks = self.adopt(request, first, [key for key, _ in run])
        for (_, payload), block in zip(run, blocks, strict=True):
            if block is not None:
                store.place(payload, block)

    def _begin(self, request: GenerationRequest, store: BlockStore, now: float) -> Wait | None:
        """Begin to read the kept part of a prompt; None where there is none, or computing is sooner."""
        if request.sampling.num_prompt_logprobs is not None or request.pooling == "mean":
            return None  # every row is computed
        wanted, pending = self._kept(request, store)
        if not wanted and not pending:
            return None
        if wanted:
            self._cost.measured(self._trust * store.seconds_per_block)
            is_sooner = self._cost.prefers_restoring(
                num_blocks=len(wanted), num_tokens=len(wanted) * self._kv.block_size
            )
            if not is_sooner:
                self._trust *= _TRUST  # or one slow read would be the last
                return None
            self._trust = 1.0
            self._reading |= {key: (request, depth) for key, depth in wanted.items()}
            store.read(wanted)
        wait = self._waits[request.request_id] = Wait({*wanted, *pending}, now)
        return wait

    def _kept(self, request: GenerationRequest, store: BlockStore) -> tuple[dict[bytes, int], list[bytes]]:
        """Of the prompt's first blocks, which are in the pool, kept or under way: those to read, and those under way.

        At least one token is left to compute, and no more are read than the pool has room for.
        """
        tokens, size, room = request.prompt_token_ids, self._kv.block_size, self._kv.num_available
        wanted: dict[bytes, int] = {}
        pending: list[bytes] = []
        key = root_hash(request.cache_salt)
        for depth in range((len(tokens) - 1) // size):
            key = block_hash(key, tokens[depth * size : (depth + 1) * size])
            if holds(self._kv, key):
                continue
            if key in self._reading:
                pending.append(key)
            elif store.holds(key) and len(wanted) < room:
                wanted[key] = depth
            else:
                break
        return wanted, pending


@dataclass(slots=True)
class Wait:
    """A request that waits for blocks to be read."""

    keys: set[bytes]  # that were under way when it came
    moved_at: float  # when the last block was read, or it came
