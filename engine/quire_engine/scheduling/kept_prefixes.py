"""Prefixes that this process has not computed: which blocks are kept and lent, and which requests wait for others'.

They are in a store that outlives the process, or come from other engines. Promises: a request waits only while that is
sooner than computing; a block that comes in is one that the request's own hashes name. Must not know: threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Values
from dataclasses import dataclass, replace
from itertools import repeat

from quire_engine.contract.block_hashes import block_hash, prompt_hashes, root_hash
from quire_engine.contract.block_store import MOST_FETCHED, BlockPeers, BlockStore, Payload, StoreCounts, TransferCounts
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.contract.roles import LATE_SECONDS, latest_arrival
from quire_engine.contract.types import TRANSFER_EVENTS, EngineStats, GenerationRequest
from quire_engine.scheduling.blocks import PrefixMatch
from quire_engine.scheduling.cached_blocks import CachedBlocks
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.log.step_log import StepLog
from quire_engine.scheduling.sequence import Sequence
from quire_engine.scheduling.swapping import SwapCost, Swapping, allocator_for

LEAST_TOKENS = 512  # of a prompt that is kept though no other request has begun with its blocks
_PATIENCE = 5.0  # seconds without any block read, after which requests compute instead
_TRUST = 0.95  # of the time that reading took, whenever computing was preferred to it
SHORTEST, LONGEST = 1.0, 32.0  # seconds in which an engine is left alone: doubled each time that it was late once more
_TICK = 0.0005  # seconds at least that are waited at a time
_LITTLE = 0.5  # share of what was fetched: with less in time it would have been sooner to compute


Allocate = Callable[[SchedulerConfig], KVAllocator]


def allocator_with(
    config: SchedulerConfig, host_keys: Collection[bytes], store: BlockStore | None, peers: BlockPeers | None
) -> tuple[KVAllocator, Swapping | None]:
    """The allocator, and who decides what is swapped: nothing is where prefixes are kept or lent."""
    if store is None and peers is None:
        return allocator_for(config, host_keys)
    return KeepingAllocator(config, store, peers), None


class KeepingAllocator(KVAllocator):
    """A `KVAllocator` that offers full blocks with applied results to a store, and to other engines.

    Kept are the blocks of a prompt of `LEAST_TOKENS` or more, as soon as they are computed, and blocks that a further
    request begins with, when it enters. Lent is whatever can be matched.
    """

    def __init__(self, config: SchedulerConfig, store: BlockStore | None, peers: BlockPeers | None) -> None:
        limits = config.limits
        super().__init__(
            num_blocks=config.num_blocks,
            block_size=limits.block_size,
            enable_prefix_caching=limits.enable_prefix_caching,
            groups=config.kv_groups,
        )
        self.tell(config)
        self._store, self._peers = store, peers

    def seat(self, sequence: Sequence, match: PrefixMatch) -> None:
        super().seat(sequence, match)
        group = sequence.group
        if group.first_scheduled is None and not group.is_resumed:  # else it finds its own blocks
            self._keep(sequence, 0, min(len(match.blocks), sequence.num_prompt_tokens // self.block_size))

    def invalidate(self, sequences: Iterable[Sequence]) -> None:
        sequences = list(sequences)
        super().invalidate(sequences)
        if self._store is not None:
            self._store.remove({key for sequence in sequences for key in sequence.kv.block_hashes})

    def forget_cached(self, kept: Collection[bytes] = ()) -> tuple[int, tuple[int, ...]]:
        if self._store is not None:
            self._store.clear()
        if self._peers is not None:
            self._peers.clear()
        return super().forget_cached(kept)

    def _commit_blocks(self, sequence: Sequence, full: int) -> None:
        first = sequence.kv.num_committed
        super()._commit_blocks(sequence, full)
        if sequence.num_prompt_tokens >= LEAST_TOKENS:
            self._keep(sequence, first, min(full, sequence.num_prompt_tokens // self.block_size))
        if self._peers is not None:
            for key in sequence.kv.block_hashes[first:full]:
                block = self._cache.block(key)
                if block is not None:
                    self._peers.offer(key, block)

    def _keep(self, sequence: Sequence, first: int, end: int) -> None:
        """Keep the prompt's blocks from `first` up to `end`, and count all before them as used."""
        if first >= end or self._store is None:
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
            if self._store is not None:
                self._store.lose(content)
            if self._peers is not None:
                self._peers.lose(content)
        return content


class KeptPrefixes:
    """Brings kept blocks, and those of other engines, into the pool for requests whose prompts begin with them.

    That is before they enter the queue. There they are cached prefixes like any other. Without a store and without
    peers no request waits.
    """

    def __init__(
        self, kv: CachedBlocks, log: StepLog | None, store: BlockStore | None, peers: BlockPeers | None = None
    ) -> None:
        self._kv, self._log, self._store, self._peers = kv, log, store, peers
        self._cost = SwapCost(0.0)
        self._waits: dict[str, Wait] = {}  # by request
        self._coming: dict[bytes, Coming] = {}  # by key what is under way
        self._trust = 1.0  # share of the measured time of reading
        self._peer_trust = PeerTrust()
        self._now = 0.0  # when a request last asked whether it is ready, or blocks were taken in
        self._reported = StoreCounts(), TransferCounts(), frozenset[str]()
        self._waited: tuple[str, str, float] = "", "", 0.0  # the latest request that has waited: id, for what, seconds
        self._transfer_seconds = 0.0  # of all waits for other engines

    @property
    def is_reading(self) -> bool:
        return bool(self._waits)

    def is_ready(self, request: GenerationRequest, clock: Callable[[], float], *, is_alone: bool = False) -> bool:
        """Whether the request has nothing to wait for; what is kept of its prompt begins to be read, or fetched.

        `is_alone`: nothing else is computed here, so that its prompt takes what its tokens take.
        """
        if self._store is None and self._peers is None:
            return True
        wait, now = self._waits.get(request.request_id), clock()
        self._now = now
        if wait is None:
            wait = self._begin(request, now, is_alone=is_alone)
            if wait is None:
                return True
        wait.keys &= self._coming.keys()
        if wait.keys and now < wait.over_at:
            return False
        if wait.peer:
            self._judge(wait, now)
        self.withdraw(request.request_id)
        seconds = now - wait.began
        self._waited = request.request_id, "files" if wait.seconds is None else "transfer", seconds
        if wait.seconds is not None:
            self._transfer_seconds += seconds
        return True

    def _judge(self, wait: Wait, now: float) -> None:
        """A request's own fetch is over: learn whether it pays to ask that engine."""
        if wait.num_lost + len(wait.keys) > (1.0 - _LITTLE) * wait.num_keys:
            self._peer_trust.was_late(wait.peer, now)
        elif not wait.keys and not wait.num_lost:
            self._peer_trust.was_good(wait.peer)

    def waited(self, request_id: str) -> tuple[str, float]:
        """The reason why the request that has just become ready had waited, and the seconds; empty: it had not."""
        name, reason, seconds = self._waited
        return (reason, seconds) if name == request_id else ("", 0.0)

    def withdraw(self, request_id: str) -> None:
        """The request does not wait any more."""
        wait = self._waits.pop(request_id, None)
        if wait is None:
            return
        if wait.peer and self._peers is not None:
            self._peers.cancel(request_id)
            for key in wait.keys:
                coming = self._coming.get(key)
                if coming is not None and coming.is_fetched and coming.request.request_id == request_id:
                    del self._coming[key]  # others that wait for it compute it
        if not self._waits:
            self._coming.clear()
            if self._store is not None:
                self._store.cancel()

    def take_in(self, now: float) -> None:
        """Bring into the pool what has come. Call it between steps, with none in flight."""
        if not self._waits:
            return
        self._now = now
        for source in (self._store, self._peers):
            if source is not None:
                self._take_from(source, now)

    def _take_from(self, source: BlockStore | BlockPeers, now: float) -> None:
        run: list[tuple[bytes, Payload]] = []  # blocks that follow each other in one prompt
        owner, first = None, 0
        for key, payload in source.take():
            found = self._coming.pop(key, None)
            if found is None:
                continue
            for wait in self._waits.values():
                wait.moved_at = now
            if payload is None:
                self._lost(found)
                continue
            request, depth = found.request, found.depth
            if owner is not None and (request is not owner or depth != first + len(run)):
                self._place(owner, first, run, source)
                owner, run = None, []
            if owner is None:
                owner, first = request, depth
            run.append((key, payload))
        if owner is not None:
            self._place(owner, first, run, source)

    def _lost(self, content: Coming) -> None:
        """Count a content that will not come."""
        wait = self._waits.get(content.request.request_id)
        if wait is not None and content.is_fetched:
            wait.num_lost += 1

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
            self._kv.adopt(key, depth, request, parent)
            for depth, (key, parent) in enumerate(zip(keys, parents, strict=False), first)
        ]

    def wait(self, seconds: float) -> None:
        """Wait until a block has come or one request's wait is over, at most `seconds`."""
        fetches = any(wait.peer for wait in self._waits.values())
        source = self._peers if fetches else self._store
        if source is not None:
            first = min((wait.over_at for wait in self._waits.values()), default=math.inf)
            source.wait(min(seconds, max(first - self._now, _TICK)))

    def name_model(self, digest: str) -> None:
        """The model's name on all machines, without which no block is lent or fetched."""
        if self._peers is not None:
            self._peers.name_model(digest)

    def learn(self, *, prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """Learn from a step's size and its seconds what computing takes."""
        self._cost.learn(prompt_tokens=prompt_tokens, num_decodes=num_decodes, seconds=seconds)

    def has_news(self) -> bool:
        """Whether the counts are others than the last statistics had."""
        return self._counts() != self._reported

    def add_to(self, stats: EngineStats) -> EngineStats:
        """The statistics, completed by those of the store and of the transfers."""
        if self._store is None and self._peers is None:
            return stats
        kept, passed, left_alone = self._reported = self._counts()
        return replace(
            stats,
            kept_blocks=kept.blocks,
            total_kept_written=kept.written,
            total_kept_read=kept.read,
            total_kept_dropped=kept.dropped,
            total_kept_refused=kept.refused,
            leased_blocks=passed.leased,
            total_transfers={event: getattr(passed, event) for event in TRANSFER_EVENTS},
            total_transfer_bytes={"sent": passed.sent_bytes, "received": passed.received_bytes},
            total_transfer_wait_seconds=self._transfer_seconds,
            late_peers=left_alone,
        )

    def _counts(self) -> tuple[StoreCounts, TransferCounts, frozenset[str]]:
        kept = StoreCounts() if self._store is None else self._store.counts
        passed = TransferCounts() if self._peers is None else self._peers.counts
        return kept, passed, self._peer_trust.left_alone(self._now)

    def _place(
        self, request: GenerationRequest, first: int, run: list[tuple[bytes, Payload]], source: BlockStore | BlockPeers
    ) -> None:
        blocks = self.adopt(request, first, [key for key, _ in run])
        for (key, payload), block in zip(run, blocks, strict=True):
            if block is not None:
                source.place(payload, block)
                if self._peers is not None:
                    self._peers.offer(key, block)

    def _begin(self, request: GenerationRequest, now: float, *, is_alone: bool) -> Wait | None:
        """Begin to bring in what others have of a prompt; None where there is nothing, or computing is sooner."""
        if request.sampling.num_prompt_logprobs is not None or request.pooling == "mean":
            return None  # every row is computed
        wanted, pending, beyond = self._kept(request)
        if wanted and self._store is not None:
            if self._is_slower(len(wanted), self._trust * self._store.seconds_per_block):
                self._trust *= _TRUST  # or one slow read would be the last
                return None
            self._trust = 1.0
            self._coming |= {key: Coming(request, depth) for key, depth in wanted.items()}
            self._store.read(wanted)
        fetched, queue_seconds = self._fetch(request, beyond, now, is_alone=is_alone)
        if not wanted and not pending and not fetched:
            return None
        seconds = sum(self._coming[key].seconds for key in (*pending, *fetched) if self._coming[key].is_fetched)
        wait = self._waits[request.request_id] = Wait(keys={*wanted, *pending, *fetched}, began=now, moved_at=now)
        if fetched and request.kv_source is not None:
            wait.peer, wait.queue_seconds = request.kv_source.address, queue_seconds
        if seconds:
            wait.seconds, wait.num_keys = seconds, len(wait.keys)
        return wait

    def _fetch(
        self, request: GenerationRequest, beyond: dict[bytes, int], now: float, *, is_alone: bool
    ) -> tuple[list[bytes], float]:
        """Begin to fetch these contents where the request says; returns those that come.

        And the seconds that the request would have to wait before its own prompt is computed.
        """
        source = request.kv_source
        if source is None or self._peers is None or not beyond or not self._peer_trust.asks(source.address, now):
            return [], 0.0
        # What is predicted for the whole prompt counts for the rest of it, unless it is known what that takes.
        computed = self._cost.seconds(len(beyond) * self._kv.block_size)
        own_seconds = max(source.own_seconds, LATE_SECONDS)
        if computed:
            own_seconds = computed if is_alone else max(own_seconds, computed)
        a_block = 0.0 if self._peer_trust.is_tried(source.address) else self._peers.block_seconds(source.address)
        if a_block * len(beyond) > own_seconds or self._is_slower(len(beyond), a_block):
            self._peer_trust.was_late(source.address, now, is_known=True)
            return [], 0.0
        seconds = (computed or own_seconds) / len(beyond)
        self._coming |= {key: Coming(request, depth, is_fetched=True, seconds=seconds) for key, depth in beyond.items()}
        self._peers.fetch(request.request_id, source.address, list(beyond), is_computed=source.is_computing)
        return list(beyond), own_seconds - computed if computed else 0.0

    def _is_slower(self, num_blocks: int, seconds_per_block: float) -> bool:
        """Whether bringing so many blocks in takes longer than computing their tokens."""
        self._cost.measured(seconds_per_block)
        return not self._cost.prefers_restoring(num_blocks=num_blocks, num_tokens=num_blocks * self._kv.block_size)

    def _kept(self, request: GenerationRequest) -> tuple[dict[bytes, int], list[bytes], dict[bytes, int]]:
        """The prompt's first blocks: those to read, those under way, and those that only another engine can have.

        Each with its depth. At least one token is left to compute, and no more come in than the pool has room for.
        """
        tokens, size = request.prompt_token_ids, self._kv.block_size
        room = min(self._kv.num_available, MOST_FETCHED)
        wanted: dict[bytes, int] = {}
        beyond: dict[bytes, int] = {}
        pending: list[bytes] = []
        fetches = request.kv_source is not None and self._peers is not None
        key = root_hash(request.cache_salt)
        for depth in range((len(tokens) - 1) // size):
            key = block_hash(key, tokens[depth * size : (depth + 1) * size])
            if not beyond and self._kv.can_match(key):
                continue
            if not beyond and key in self._coming:
                pending.append(key)
            elif len(wanted) + len(beyond) == room:
                break
            elif not beyond and self._store is not None and self._store.holds(key):
                wanted[key] = depth
            elif fetches and key not in self._coming:
                beyond[key] = depth
            else:
                break
        return wanted, pending, beyond


@dataclass(frozen=True, slots=True)
class Coming:
    """A content that is under way: the first request for it, and the depth in its prompt."""

    request: GenerationRequest
    depth: int
    is_fetched: bool = False  # from another engine
    seconds: float = 0.0  # that computing it is predicted to take


@dataclass(slots=True)
class Wait:
    """A request that waits for blocks to come in."""

    keys: set[bytes]  # that were under way when it came
    began: float
    moved_at: float  # when the last block came, or it came itself
    peer: str = ""  # the engine that it fetches from itself; empty: it fetches nothing
    seconds: float | None = None  # that computing all of them is predicted to take; None: none is fetched
    queue_seconds: float = 0.0  # that it would have to wait before its prompt is computed
    num_keys: int = 0  # when it came
    num_lost: int = 0  # of those that it fetches itself: they will not come

    @property
    def over_at(self) -> float:
        """The time from which on a request computes what has not come.

        Fetched blocks must come about as fast as they would be computed. So a request whose fetch fails at any time has
        its first token at most `LATE_SHARE` and `LATE_SECONDS` later than by computing all of its prompt.
        """
        if self.seconds is None:
            return self.moved_at + _PATIENCE
        come = 1.0 - len(self.keys) / self.num_keys
        return self.began + latest_arrival(self.seconds, come, self.queue_seconds)


@dataclass(slots=True)
class _Lateness:
    """The lateness of one engine."""

    pause: float  # seconds, after it has been late once more
    until: float = 0.0  # when it is asked again


class PeerTrust:
    """The engines that blocks are fetched from: one from which they came late is left alone for a while.

    Every engine is asked again after `LONGEST` seconds at the latest.
    """

    def __init__(self) -> None:
        self._late: dict[str, _Lateness] = {}

    def asks(self, peer: str, now: float) -> bool:
        """Whether a request may fetch from there."""
        found = self._late.get(peer)
        return found is None or now >= found.until

    def is_tried(self, peer: str) -> bool:
        """Whether it was late the last time, so that what is known of it may be no longer true."""
        return peer in self._late

    def was_late(self, peer: str, now: float, *, is_known: bool = False) -> None:
        """A request has waited for it in vain. Requests that waited at once count once.

        The first time is forgiven, since a connection may have had to be made; not if it `is_known` to be slow.
        """
        found = self._late.get(peer)
        if found is None:
            found = self._late[peer] = _Lateness(pause=SHORTEST if is_known else 0.0)
        if now >= found.until:
            found.until, found.pause = now + found.pause, min(max(2 * found.pause, SHORTEST), LONGEST)

    def was_good(self, peer: str) -> None:
        """All that a request fetched there has come."""
        self._late.pop(peer, None)

    def left_alone(self, now: float) -> frozenset[str]:
        """The engines that are not asked now."""
        return frozenset([peer for peer, found in self._late.items() if now < found.until])
