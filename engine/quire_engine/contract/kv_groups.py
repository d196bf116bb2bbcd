"""Groups of layers in the KV pool: a block holds the keys and values of one group's layers, and no others.

A layer with a sliding window needs no block behind it. Layers that share their blocks keep them as long as the one that
sees farthest, so layers of one window make groups of their own, with a page table for each group. All blocks have the
same size, but for padding: a group has as many layers as its heads leave room for.

Promises: the layout follows from the model alone. Must not know: torch, sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

Window = int | None  # a row at position p sees positions p - window + 1 .. p; None: all before it

_MOST_EXTRA = 1 / 8  # memory of a sequence that fewer groups, and so fewer tables, are worth


class KVHeads(NamedTuple):
    """The heads of a layer's keys, and of its values."""

    number: int
    width: int

    @property
    def values(self) -> int:
        """The number of values in a token's key."""
        return self.number * self.width


class KVPart(NamedTuple):
    """The layers of a block whose heads are alike."""

    num_layers: int
    heads: KVHeads


class KVPlace(NamedTuple):
    """The place of one layer's keys and values: the group, the layer within its part, the part."""

    group: int
    layer: int  # of its part of the group's blocks
    part: int = 0


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The places of all layers' keys and values.

    The parts of one group lie one behind the other in its blocks. Of several groups, each has blocks of one part.
    """

    windows: tuple[Window, ...]  # of each group, the widest first
    places: tuple[KVPlace, ...]  # of each layer
    parts: tuple[KVPart, ...]

    @property
    def layers_per_block(self) -> int:
        """The number of layers in a block of a model whose layers are alike."""
        return self.parts[0].num_layers


def one_group(heads: Sequence[KVHeads], window: Window = None) -> KVLayout:
    """All layers, with these heads, in one group, none of which sees farther than this window."""
    numbers: dict[KVHeads, int] = {}
    places = []
    kinds = list(dict.fromkeys(heads))
    for each in heads:
        numbers[each] = numbers.get(each, 0) + 1
        places.append(KVPlace(0, numbers[each] - 1, kinds.index(each)))
    return KVLayout((window,), tuple(places), tuple(KVPart(number, each) for each, number in numbers.items()))


def kv_layout(heads: Sequence[KVHeads], windows: Sequence[Window], positions: int) -> KVLayout:
    """The layout for layers with these heads and windows, of a model for sequences of so many positions.

    The fewest groups with which a sequence of full length takes at most an eighth more memory than its keys and values.

    >>> kv_layout([KVHeads(1, 256)] * 24, [512, 512, 512, 512, 512, None] * 4, 32_768).windows
    (None, 512, 512, 512, 512, 512)
    >>> kv_layout([KVHeads(8, 128)] * 32, [4096] * 32, 32_768).windows
    (4096,)
    """
    kinds: dict[tuple[Window, KVHeads], list[int]] = {}
    for layer, (window, each) in enumerate(zip(windows, heads, strict=True)):
        seen = window if window is not None and window < positions else None
        kinds.setdefault((seen, each), []).append(layer)
    widest = max(window or positions for window, _ in kinds)

    def num_groups(size: int) -> int:
        return sum(-(-len(layers) // (size // each.values)) for (_, each), layers in kinds.items())

    def cost(size: int) -> int:
        return sum(
            size * -(-len(layers) // (size // each.values)) * (window or positions)
            for (window, each), layers in kinds.items()
        )

    least = max(each.values for each in heads)
    sizes = sorted({each.values * count for each in set(heads) for count in range(1, len(heads) + 1)})
    sizes = [size for size in sizes if size >= least]
    needed = sum(each.values * len(layers) * (window or positions) for (window, each), layers in kinds.items())
    cheap = [size for size in sizes if cost(size) <= needed * (1 + _MOST_EXTRA)] or [min(sizes, key=cost)]
    size = min(cheap, key=lambda size: (num_groups(size), cost(size)))
    if cost(size) > (1 - _MOST_EXTRA) * sum(each.values for each in heads) * widest:
        return one_group(heads, widest if widest < positions else None)
    return _grouped(kinds, size)


def _grouped(kinds: dict[tuple[Window, KVHeads], list[int]], size: int) -> KVLayout:
    """Groups of one window and one kind of heads each, with blocks of `size` values for a token's keys."""
    parts = [KVPart(size // each.values, each) for each in dict.fromkeys(each for _, each in kinds)]
    places: dict[int, KVPlace] = {}
    groups: list[Window] = []
    for window, each in sorted(kinds, key=lambda kind: -(kind[0] or 1 << 62)):
        layers, held = kinds[window, each], size // each.values
        part = parts.index(KVPart(held, each))
        for index, layer in enumerate(layers):
            places[layer] = KVPlace(len(groups) + index // held, index % held, part)
        groups += [window] * -(-len(layers) // held)
    return KVLayout(tuple(groups), tuple(places[layer] for layer in range(len(places))), tuple(parts))


@dataclass(frozen=True, slots=True)
class KVGroup:
    """How many of a sequence's blocks one group needs."""

    window: Window = None
    at_once: int = 1  # tokens of a sequence that are computed, or planned, beyond those whose results are known

    def first_seen(self, num_tokens: int) -> int:
        """The first position that a row behind `num_tokens` tokens sees."""
        return 0 if self.window is None else max(0, num_tokens - self.window + 1)

    def entry_end(self, num_computed: int, num_known: int) -> int:
        """Tokens that have slots when a sequence enters: all known ones, or as many as are computed at once."""
        return num_known if self.window is None else min(num_known, num_computed + self.at_once)

    def most_blocks(self, num_tokens: int, block_size: int) -> int:
        """Blocks that a sequence holds at most on its way to `num_tokens` tokens."""
        return self._blocks(num_tokens, self.at_once, block_size)

    def settled_blocks(self, num_tokens: int, block_size: int) -> int:
        """Blocks that a sequence of `num_tokens` tokens holds at most while it decodes."""
        return self._blocks(num_tokens, 1, block_size)

    def _blocks(self, num_tokens: int, at_once: int, block_size: int) -> int:
        whole = -(-num_tokens // block_size)
        if self.window is None:
            return whole
        # So many positions in a row lie in one block more than they fill, at worst.
        return min(whole, -(-(self.window + at_once) // block_size) + 1)


WHOLE = KVGroup()  # of layers without a window


def kv_groups(windows: Sequence[Window], step_tokens: int, *, plans_ahead: bool) -> tuple[KVGroup, ...]:
    """The groups where a step has at most `step_tokens` tokens of one sequence; with `plans_ahead` two are planned."""
    return tuple([KVGroup(window, step_tokens * (1 + plans_ahead)) for window in windows])


def most_blocks(groups: Sequence[KVGroup], num_tokens: int, block_size: int) -> int:
    """Blocks of all groups that a sequence holds at most on its way to `num_tokens` tokens."""
    return sum([group.most_blocks(num_tokens, block_size) for group in groups])
