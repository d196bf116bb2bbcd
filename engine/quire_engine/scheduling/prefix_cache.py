"""The prefix cache: blocks by the hash of their tokens, and partial blocks by their first tokens.

A hash covers the block's tokens, all tokens before them and the cache salt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from quire_engine.contract.block_hashes import MOST_ROUTED, short_name
from quire_engine.contract.invariants import require
from quire_engine.contract.kv_groups import KVGroup
from quire_engine.contract.types import CacheEvent, GenerationRequest, PrefixChanges
from quire_engine.scheduling.blocks import PASSED

NOT_TOLD = -1  # in place of a block's depth: routers do not learn of it
_MOST_TOLD = 4096  # blocks in one frame
_MOST_IN_SNAPSHOT = 16_384  # blocks, the shallowest: a router keeps no more


class ToldPrefixes:
    """Frames for routers about the prompt blocks that can be matched: which are new, and which are forgotten.

    Off until a router asks. A block that comes and goes between two frames is in neither. All routers get the same
    frames, so that any of them may ask for a snapshot.
    """

    __slots__ = ("_changes", "_number", "_told", "is_on")

    def __init__(self) -> None:
        self.is_on = False
        self._told: dict[int, int] = {}  # depth by name: what routers believe
        self._changes: dict[int, int] = {}  # by name, in order: its depth, or NOT_TOLD where it is forgotten
        self._number = 0

    def register(self, content: bytes, depth: int) -> None:
        """A block can be matched; `depth`: blocks before it in its prompt."""
        if not 0 <= depth < MOST_ROUTED:
            return
        name = short_name(content)
        if name in self._told:
            self._changes.pop(name, None)
        else:
            self._changes[name] = depth

    def forget(self, content: bytes) -> None:
        """Forget a content that cannot be matched any more."""
        self._forget(short_name(content))

    def keep_only(self, contents: Iterable[bytes]) -> None:
        """No others can be matched any more."""
        kept = set(map(short_name, contents))
        for name in [name for name in (*self._told, *self._changes) if name not in kept]:
            self._forget(name)

    def take(self) -> PrefixChanges | None:
        """The next frame, of 4,096 blocks at most; None where nothing has changed."""
        if not self._changes:
            return None
        self._number += 1
        changes = dict(islice(self._changes.items(), _MOST_TOLD))
        for name in changes:
            del self._changes[name]
        registered = {name: depth for name, depth in changes.items() if depth != NOT_TOLD}
        forgotten = tuple([name for name, depth in changes.items() if depth == NOT_TOLD])
        self._told |= registered
        for name in forgotten:
            del self._told[name]
        return PrefixChanges(
            number=self._number,
            registered=tuple(registered),
            depths=tuple(registered.values()),
            forgotten=forgotten,
        )

    def snapshot(self) -> PrefixChanges:
        """The sum of all frames so far, with the number of the last one; of too many blocks the shallowest."""
        told = sorted(self._told.items(), key=lambda item: item[1])[:_MOST_IN_SNAPSHOT]
        return PrefixChanges(
            number=self._number,
            registered=tuple([name for name, _ in told]),
            depths=tuple([depth for _, depth in told]),
        )

    def _forget(self, name: int) -> None:
        if name in self._told:
            self._changes[name] = NOT_TOLD
        else:
            self._changes.pop(name, None)


class ToldBlocks:
    """Events of all full blocks with their tokens, for routers of others, who name blocks in ways of their own.

    They are those since the last frame, in order. Blocks that follow each other in one prompt are one event.
    """

    __slots__ = ("_events", "is_on")

    def __init__(self) -> None:
        self.is_on = False  # until then a block costs one look at this
        self._events: list[_Open] = []

    def stored(
        self, content: bytes, parent: bytes, tokens: Iterable[int], *, request: GenerationRequest, group: int = 0
    ) -> None:
        """A full block can be matched by that group of layers; `parent`: the content before it, or empty.

        `request`: whose salt and adapter the content depends on.
        """
        last = self._events[-1] if self._events else None
        name, before = short_name(content), short_name(parent) if parent else None
        if last is not None and last.tokens and last.group == group and last.blocks[-1] == before:
            last.blocks.append(name)
            last.tokens += tokens
        else:
            self._events.append(_Open(group, [name], [*tokens], before, request))

    def forgotten(self, group: int, contents: Iterable[bytes]) -> None:
        """Note contents that cannot be matched any more."""
        names = [short_name(content) for content in contents]
        last = self._events[-1] if self._events else None
        if last is not None and not last.tokens and last.group == group:
            last.blocks += names
        elif names:
            self._events.append(_Open(group, names))

    def take(self) -> tuple[CacheEvent, ...]:
        """The events of the next frame."""
        if not self._events:
            return ()
        events, self._events = self._events, []
        return tuple([each.event() for each in events])


@dataclass(slots=True)
class _Open:
    """An event that the next block may still belong to."""

    group: int
    blocks: list[int]
    tokens: list[int] = field(default_factory=list)
    parent: int | None = None
    request: GenerationRequest | None = None  # that stored them

    def event(self) -> CacheEvent:
        adapter = None if self.request is None else self.request.adapter
        return CacheEvent(
            blocks=tuple(self.blocks),
            token_ids=tuple(self.tokens),
            parent=self.parent,
            group=self.group,
            salt="" if self.request is None else self.request.cache_salt,
            adapter="" if adapter is None else adapter.name,
        )


class Recorder(Protocol):
    """Learns which blocks can be matched; `recorded_pool.RecordedPool`."""

    def register(self, block: int, content: bytes, group: int) -> None: ...
    def forget(self, block: int) -> None: ...


class PrefixCache:
    """Two maps that mirror each other: one block per hash, one hash per block.

    A block can be matched until it is forgotten.
    """

    __slots__ = ("_block_of", "_hash_of", "group", "recorder", "told", "told_blocks")

    def __init__(self, group: int = 0, told_blocks: ToldBlocks | None = None) -> None:
        """`group`: the place of its layers among the groups; `told_blocks`: learns of what is forgotten."""
        self.told = ToldPrefixes()
        self.told_blocks = ToldBlocks() if told_blocks is None else told_blocks
        self.group = group
        self.recorder: Recorder | None = None
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def holds(self, block: int) -> bool:
        """Whether the block's content can be matched."""
        return block in self._hash_of

    def blocks(self) -> Set[int]:
        """All blocks whose content can be matched."""
        return self._hash_of.keys()

    def block(self, content: bytes) -> int | None:
        """The block with this content, if there is one."""
        return self._block_of.get(content)

    def contents(self) -> Iterable[bytes]:
        """The hashes of all blocks that can be matched."""
        return self._block_of.keys()

    def longest_match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of cached hashes from the first on."""
        blocks: list[int] = []
        for content in hashes:
            block = self._block_of.get(content)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register(self, content: bytes, block: int, depth: int = NOT_TOLD) -> bool:
        """Make a finished block matchable; False if another block already holds the same content."""
        if content in self._block_of:
            return False
        require(block not in self._hash_of, f"block {block} is registered twice")
        self._block_of[content] = block
        self._hash_of[block] = content
        if self.recorder is not None:
            self.recorder.register(block, content, self.group)
        if self.told.is_on:
            self.told.register(content, depth)
        return True

    def forget(self, block: int) -> bytes | None:
        """Remove a block before it is reused; returns its hash, or None if it was not registered."""
        content = self._hash_of.pop(block, None)
        if content is not None:
            del self._block_of[content]
            if self.recorder is not None:
                self.recorder.forget(block)
            if self.told.is_on:
                self.told.forget(content)
            if self.told_blocks.is_on:
                self.told_blocks.forgotten(self.group, (content,))
        return content

    def keep_only(self, contents: Collection[bytes]) -> None:
        """Remove every content except these."""
        if self.told_blocks.is_on:
            self.told_blocks.forgotten(self.group, [content for content in self._block_of if content not in contents])
        if self.recorder is not None:
            for content, block in self._block_of.items():
                if content not in contents:
                    self.recorder.forget(block)
        self._block_of = {content: block for content, block in self._block_of.items() if content in contents}
        self._hash_of = {block: content for content, block in self._block_of.items()}
        if self.told.is_on:
            self.told.keep_only(self._block_of)

    def check(self) -> None:
        """Raise InvariantViolation unless both maps mirror each other."""
        require(len(self._block_of) == len(self._hash_of), "the prefix cache's two maps differ in size")
        for content, block in self._block_of.items():
            require(self._hash_of.get(block) == content, f"block {block} and its hash do not name each other")


class GroupCaches:
    """The prefix cache of each group of layers: a block belongs to one of them, by the same hashes."""

    def __init__(self, groups: tuple[KVGroup, ...], block_size: int) -> None:
        self.told_blocks = ToldBlocks()
        self.each = tuple([PrefixCache(number, self.told_blocks) for number, _ in enumerate(groups)])
        self.first = self.each[0]
        self._groups, self._block_size = groups, block_size

    def holds(self, block: int) -> bool:
        """Whether the block's content can be matched."""
        return any(cache.holds(block) for cache in self.each)

    def blocks(self) -> set[int]:
        """All blocks whose content can be matched."""
        return set().union(*[cache.blocks() for cache in self.each])

    def longest_match(self, hashes: list[bytes]) -> tuple[tuple[int, ...], ...]:
        """The longest prefix of which every group has all blocks that its layers will see: its entries by group."""
        count = len(hashes)
        for group, cache in zip(self._groups, self.each, strict=True):
            if group.window is None:
                count = len(cache.longest_match(hashes[:count]))
        while count and (missing := self._missing(hashes, count)) is not None:
            count = missing  # every longer prefix sees that block too, or ends in it
        return tuple(
            [(PASSED,) * first + tuple(cache.longest_match(hashes[first:count])) for first, cache in self._seen(count)]
        )

    def forget(self, block: int) -> bytes | None:
        """Remove a block before it is reused; returns its hash, or None if it was not registered."""
        for cache in self.each:
            content = cache.forget(block)
            if content is not None:
                return content
        return None

    def keep_only(self, contents: Collection[bytes]) -> None:
        """Remove every content except these."""
        for cache in self.each:
            cache.keep_only(contents)

    def check(self) -> None:
        """Raise InvariantViolation unless the maps of every group mirror each other."""
        for cache in self.each:
            cache.check()

    def _missing(self, hashes: list[bytes], count: int) -> int | None:
        """The last of `count` blocks that the rows behind them see and some group has not; None: all are there."""
        for first, cache in self._seen(count):
            for index in range(count - 1, first - 1, -1):
                if cache.block(hashes[index]) is None:
                    return index
        return None

    def _seen(self, count: int) -> Iterator[tuple[int, PrefixCache]]:
        """Yield for each group the first of `count` blocks that rows behind them see."""
        for group, cache in zip(self._groups, self.each, strict=True):
            yield group.first_seen(count * self._block_size) // self._block_size, cache


Beginning = tuple[bytes, tuple[int, ...]]  # the hash of all blocks before it, the first `least` tokens in it
_MOST_EACH = 4  # blocks kept for one beginning, since a match compares with each of them


class Tails:
    """Blocks by their first tokens: finds one to copy where a prompt diverges from cached ones inside a block.

    It has full blocks, and partial ones whose sequence ended. All tokens that it compares have applied results. A match
    is copied, not shared, because the block has other content after the common tokens, or its sequence continues.
    """

    __slots__ = ("_blocks", "_known", "least")

    def __init__(self, block_size: int, *, finds: bool = True) -> None:
        self.least = least_tail(block_size) if finds else block_size + 1  # more tokens than any block has
        self._known: dict[int, tuple[Beginning, tuple[int, ...]]] = {}  # by block: its key, its computed tokens
        self._blocks: dict[Beginning, list[int]] = {}

    def holds(self, block: int) -> bool:
        """Whether the block can be found by its first tokens."""
        return block in self._known

    def blocks(self) -> Set[int]:
        """All blocks that can be found by their first tokens."""
        return self._known.keys()

    def beginning(self, parent: bytes, tokens: list[int]) -> Beginning | None:
        """The key of a block with these tokens; None if they are too few to be worth a copy."""
        return (parent, tuple(tokens[: self.least])) if len(tokens) >= self.least else None

    def offer(self, block: int, parent: bytes, tokens: list[int]) -> int | None:
        """Register the block's computed tokens anew; returns the block that it displaces, if any."""
        self.forget(block)
        key = self.beginning(parent, tokens)
        if key is None:
            return None
        self._known[block] = key, tuple(tokens)
        blocks = self._blocks.setdefault(key, [])
        blocks.append(block)
        if len(blocks) <= _MOST_EACH:
            return None
        displaced = blocks.pop(0)
        del self._known[displaced]
        return displaced

    def longest(self, parent: bytes, tokens: list[int]) -> tuple[int, int] | None:
        """(block, common tokens) of the block with the most common first tokens; of equals the last offered."""
        key = self.beginning(parent, tokens)
        blocks = self._blocks.get(key) if key is not None else None
        if blocks is None:
            return None
        return max(((block, num_common(self._known[block][1], tokens)) for block in reversed(blocks)), key=_length)

    def forget(self, block: int) -> bool:
        """Remove a block before it is reused; False if it was not registered."""
        known = self._known.pop(block, None)
        if known is None:
            return False
        blocks = self._blocks[known[0]]
        blocks.remove(block)
        if not blocks:
            del self._blocks[known[0]]
        return True

    def clear(self) -> None:
        self._known.clear()
        self._blocks.clear()

    def check(self) -> None:
        """Raise InvariantViolation unless both maps have the same blocks."""
        listed = [block for blocks in self._blocks.values() for block in blocks]
        require(sorted(listed) == sorted(self._known), "the maps of blocks' beginnings differ")
        for key, blocks in self._blocks.items():
            require(0 < len(blocks) <= _MOST_EACH, f"{len(blocks)} blocks are kept for one beginning")
            for block in blocks:
                require(self._known[block][0] == key, f"block {block} is under another beginning")


def least_tail(block_size: int) -> int:
    """The fewest tokens of a partial block that are worth a copy.

    A copy reads and writes one block. That is less than the work of computing even one token in the models we serve, on
    a CPU by an order of magnitude, but a copy also takes a launch, its bookkeeping on the host, and a block that cannot
    be reused in that step. The first tokens of every prompt of one chat template are equal, so without a threshold
    every request would make a copy for those two or three tokens. A quarter of a block is above that, and scales with
    the cost of the copy.
    """
    return max(1, block_size // 4)


def num_common(first: tuple[int, ...] | list[int], second: tuple[int, ...] | list[int]) -> int:
    """The length of the common prefix."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def _length(found: tuple[int, int]) -> int:
    return found[1]
