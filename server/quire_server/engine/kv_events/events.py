"""The settings and the wire format of KV events: those of vLLM 0.24 and later, since which an event is a map.

A batch is an array (time, events, data-parallel rank) in msgpack. vLLM's own names are kept where they are a format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import msgspec

from quire_engine.contract.errors import ConfigError
from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import CacheEvent

FLAG = "--kv-events-config"
_POOL = "GPU"  # vLLM's name of the pool that an engine computes in, whatever its device


class CacheListener(Protocol):
    """Learns of one engine's cache after the other; `publisher.Publisher`, or a fake in tests."""

    def begins(self, plan: EnginePlan) -> None:
        """An engine is ready, with nothing cached."""
        ...

    def changes(self, events: Sequence[CacheEvent]) -> None:
        """Take the blocks that an engine's cache has gained and lost in a step, in order."""
        ...

    def ends(self) -> None:
        """The engine is gone, and its cache with it."""
        ...

    def close(self) -> None:
        """No engine will come any more. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """The keys of `--kv-events-config`, with vLLM's names and defaults."""

    endpoint: str = "tcp://*:5557"  # bound where it has a * or ::, or is no TCP; else connected to
    replay_endpoint: str | None = None  # bound; answers what subscribers have missed
    topic: str = ""
    buffer_steps: int = 10_000  # batches kept for those
    hwm: int = 100_000  # batches that wait for a slow subscriber, who loses what comes then
    max_queue_size: int = 100_000  # steps that wait to be published, before all of them become one dump

    def of_rank(self, rank: int) -> KVEventsConfig:
        """Return the settings of one of several engines: the rank is added to the ports or names of its endpoints."""
        ends = [_of_rank(each, rank) for each in (self.endpoint, self.replay_endpoint or "")]
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return KVEventsConfig(**{**named, "endpoint": ends[0], "replay_endpoint": ends[1] or None})


def _of_rank(endpoint: str, rank: int) -> str:
    if not endpoint or rank == 0:
        return endpoint
    base, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    if not port.isdecimal():
        raise ConfigError(f"{FLAG}: {endpoint!r} has no port; each replica takes the next one")
    return f"{base}:{int(port) + rank}"


# ---------------------------------------------------------------- the wire


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Full blocks of one chain can be matched."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None  # of each block: what its hash covers beside tokens
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks cannot be matched any more."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """No block can be matched."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One message: what happened in a step."""

    ts: float  # seconds since 1970
    events: list[WireEvent]
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The facts of an engine's pool that events repeat."""

    block_size: int
    windows: tuple[int | None, ...]  # of each group of layers

    @staticmethod
    def of(plan: EnginePlan) -> PoolShape:
        return PoolShape(plan.scheduler.limits.block_size, plan.scheduler.windows)

    def wire(self, event: CacheEvent) -> BlockStored | BlockRemoved:
        """An engine's event as others read it."""
        if not event.token_ids:
            return BlockRemoved(block_hashes=list(event.blocks), medium=_POOL, group_idx=event.group)
        salt, window = event.salt.partition("\1")[0], self.windows[event.group]
        adapter = (event.adapter,) if event.adapter else ()
        first = (*adapter, salt) if salt and event.parent is None else adapter
        return BlockStored(
            block_hashes=list(event.blocks),
            parent_block_hash=event.parent,
            token_ids=event.token_ids,
            block_size=self.block_size,
            lora_id=None,
            medium=_POOL,
            lora_name=event.adapter or None,
            extra_keys=[first or None, *[adapter or None] * (len(event.blocks) - 1)],
            group_idx=event.group,
            kv_cache_spec_kind="full_attention" if window is None else "sliding_window",
            kv_cache_spec_sliding_window=window,
        )


class KnownBlocks:
    """All blocks that can be matched, with their tokens: for subscribers that have missed a batch."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], CacheEvent] = {}  # by group and name

    def __len__(self) -> int:
        return len(self._held)

    def clear(self) -> None:
        self._held.clear()

    def apply(self, event: CacheEvent) -> None:
        """Take in what an engine tells."""
        if not event.token_ids:
            for name in event.blocks:
                self._held.pop((event.group, name), None)
            return
        size, parent = len(event.token_ids) // len(event.blocks), event.parent
        for index, name in enumerate(event.blocks):
            self._held[event.group, name] = CacheEvent(
                blocks=(name,),
                token_ids=event.token_ids[index * size : (index + 1) * size],
                parent=parent,
                group=event.group,
                salt=event.salt,
                adapter=event.adapter,
            )
            parent = name

    def chains(self) -> Iterator[CacheEvent]:
        """All blocks, each one after the block before it in its prompt, where that is held."""
        children: dict[tuple[int, int], list[CacheEvent]] = {}
        roots: list[CacheEvent] = []
        for each in self._held.values():
            before = (each.group, each.parent) if each.parent is not None else None
            if before is not None and before in self._held:
                children.setdefault(before, []).append(each)
            else:
                roots.append(each)
        while roots:
            chain = [roots.pop()]
            while found := children.pop((chain[0].group, chain[-1].blocks[0]), None):
                chain.append(found[0])
                roots += found[1:]
            yield _joined(chain)


def _joined(chain: Sequence[CacheEvent]) -> CacheEvent:
    first = chain[0]
    return CacheEvent(
        blocks=tuple([each.blocks[0] for each in chain]),
        token_ids=tuple([token for each in chain for token in each.token_ids]),
        parent=first.parent,
        group=first.group,
        salt=first.salt,
        adapter=first.adapter,
    )


def whole(known: KnownBlocks, shape: PoolShape | None) -> list[WireEvent]:
    """The events after which a subscriber has just these blocks."""
    stored: Iterable[WireEvent] = () if shape is None else map(shape.wire, known.chains())
    return [AllBlocksCleared(), *stored]
