"""How much of a trace's prompts a prefix cache of some size would have had: no times, one request after the other.

Promises: least recently used blocks go first, the deepest of a prompt before those that it stands on, as in the
allocator. Must not know: the scheduler, steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire_engine.simulation.traces import TraceRow


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRate:
    """Over a whole trace. `blocks`: the cache's size; None: all that ever were."""

    blocks: int | None
    prompt_tokens: int
    hit_tokens: int
    asked_blocks: int
    hit_blocks: int

    @property
    def tokens(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)

    @property
    def of_blocks(self) -> float:
        return self.hit_blocks / max(1, self.asked_blocks)


def hit_rate(rows: Sequence[TraceRow], blocks: int | None = None) -> HitRate:
    """The share of prompt tokens that are in the cache when their request comes; a prefix ends at its first miss."""
    cache: OrderedDict[int, None] = OrderedDict()
    tokens = hits = asked = found = 0
    for row in rows:
        tokens += row.input_tokens
        asked += len(row.blocks)
        matched = 0
        for block in row.blocks:
            if block not in cache:
                break
            matched += 1
        found += matched
        hits += min(matched * row.block_tokens, row.input_tokens)
        _use(cache, reversed(row.blocks), blocks)
    return HitRate(blocks=blocks, prompt_tokens=tokens, hit_tokens=hits, asked_blocks=asked, hit_blocks=found)


def _use(cache: OrderedDict[int, None], used: Iterable[int], limit: int | None) -> None:
    for block in used:
        cache[block] = None
        cache.move_to_end(block)
    while limit is not None and len(cache) > limit:
        cache.popitem(last=False)
