"""Groups of layers in the KV pool: a block holds the keys and values of one group's layers, and no others.

A layer with a sliding window needs no block behind it. Layers that share their blocks keep them as long as the one that
sees farthest, so layers of one window make groups of their own, with a page table for each group. All blocks have the
same size: every group has the same number of layers, but for padding.

Promises: the layout follows from the model alone. Must not know: torch, sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Window = int | None  # a row at position p sees positions p - window + 1 .. p; None: all before it

_MOST_EXTRA = 1 / 8  # memory of a sequence that fewer groups, and so fewer tables, are worth


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Where each layer's keys and values lie."""

    windows: tuple[Window, ...]  # of each group, the widest first
    places: tuple[tuple[int, int], ...]  # of each layer: its group, and its place in the group's blocks
    layers_per_block: int


def one_group(num_layers: int, window: Window = None) -> KVLayout:
    """All layers in one group, none of which sees farther than this window."""
    return KVLayout((window,), tuple((0, layer) for layer in range(num_layers)), num_layers)


def kv_layout(windows: Sequence[Window], positions: int) -> KVLayout:
    """The layout for layers with these windows, of a model for sequences of so many positions.

    The fewest groups with which a sequence of full length takes at most an eighth more memory than with one layer a
    block.

    >>> kv_layout([512, 512, 512, 512, 512, None] * 4, 32_768).windows
    (None, 512, 512, 512, 512, 512)
    >>> kv_layout([4096] * 32, 32_768).windows
    (4096,)
    """
    kinds: dict[Window, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window if window is not None and window < positions else None, []).append(layer)
    widest_first = sorted(kinds, key=lambda window: -(window or positions))

    def num_groups(size: int) -> int:
        return sum(-(-len(layers) // size) for layers in kinds.values())

    def cost(size: int) -> int:
        return sum(size * -(-len(layers) // size) * (window or positions) for window, layers in kinds.items())

    cheap = [size for size in range(1, len(windows) + 1) if cost(size) <= cost(1) * (1 + _MOST_EXTRA)]
    size = min(cheap, key=lambda size: (num_groups(size), cost(size)))
    places: dict[int, tuple[int, int]] = {}
    groups: list[Window] = []
    for window in widest_first:
        for index, layer in enumerate(kinds[window]):
            places[layer] = len(groups) + index // size, index % size
        groups += [window] * -(-len(kinds[window]) // size)
    if cost(size) > (1 - _MOST_EXTRA) * len(windows) * (widest_first[0] or positions):
        return one_group(len(windows), widest_first[0])
    return KVLayout(tuple(groups), tuple(places[layer] for layer in range(len(windows))), size)


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
