"""Masks of bits, one for each row of logits that has one, and their way onto the logits.

Promises: what has no bit becomes -inf, whatever the width of the logits; nothing else changes.
Must not know: grammars, requests, how the bits came about.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_engine.execution.distribution import padded, padded_width

_FEW_CELLS = 1 << 17  # of logits; of fewer all rows at once cost less than a look at each row's mask
_MAX_KEPT = 256  # masks whose ids are remembered
_MAX_IDS = 8  # of a vocabulary at least one in so many is listed, or the table is used


Mask: TypeAlias = NDArray[np.int32]  # bit i is id i, for every id of the vocabulary


@dataclass(slots=True)
class MaskWriter:
    """Applies masks. Remembers what the ids of a mask are: most steps of most grammars allow what others did."""

    _tables: dict[torch.device, Tensor] = field(default_factory=dict)
    _kept: OrderedDict[bytes, tuple[bool, NDArray[np.int64]] | None] = field(default_factory=OrderedDict)

    def masked(self, logits: Tensor, masks: Mapping[int, Mask]) -> Tensor:
        """`distribution.padded` of logits [S, V], with the masks applied to the rows that have one."""
        if not masks or logits.device.type != "cpu":
            copy = padded(logits)
            self.apply(copy, masks)
            return copy
        if logits.numel() <= _FEW_CELLS:
            return _masked_together(logits, masks)
        width = logits.shape[1]
        copy = logits.new_empty(len(logits), padded_width(width))
        sources, targets = logits.numpy(), copy.numpy()
        targets[:, width:] = -np.inf
        for row, source in enumerate(sources):
            mask = masks.get(row)
            if mask is None:
                targets[row, :width] = source
            else:
                self._mask_row(source, targets[row, :width], mask)
        return copy

    def apply(self, logits: Tensor, masks: Mapping[int, Mask]) -> None:
        """Change the rows of logits [S, V] that have a mask, in place."""
        if masks:
            self._apply_table(logits, masks)

    def _apply_table(self, logits: Tensor, masks: Mapping[int, Mask]) -> None:
        """Eight cells at a time: 0 or -inf to add, looked up by the eight bits."""
        octets = np.stack(list(masks.values())).view(np.uint8)
        known = min(8 * octets.shape[1], logits.shape[1])
        index = torch.from_numpy(octets).to(logits.device, torch.int32)
        added = torch.nn.functional.embedding(index, self._table(logits)).flatten(1)[:, :known]
        # Columns beyond the vocabulary are there for alignment, and -inf already.
        if len(masks) == len(logits):
            logits[:, :known].add_(added)
        else:
            logits[:, :known].index_add_(0, torch.tensor(list(masks), device=logits.device), added)

    # numpy's indexing takes half the time of torch's.
    def _mask_row(self, source: NDArray[np.float32], target: NDArray[np.float32], bits: Mask) -> None:
        """Into `target`, as wide as the source and not initialised."""
        key = bits.tobytes()
        if key in self._kept:
            self._kept.move_to_end(key)
            found = self._kept[key]
        else:
            found = self._kept[key] = _listed(bits, len(source))
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        if found is None:
            target[:] = source
            self._apply_table(torch.from_numpy(target).unsqueeze(0), {0: bits})
            return
        is_allowed, ids = found
        if is_allowed:
            target.fill(-np.inf)
            target[ids] = source[ids]
        else:
            target[:] = source
            target[ids] = -np.inf

    def _table(self, like: Tensor) -> Tensor:
        """[256, 8]: what eight bits add to eight cells."""
        table = self._tables.get(like.device)
        if table is None:
            bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1, bitorder="little")
            table = torch.where(torch.from_numpy(bits).bool(), 0.0, -torch.inf).to(like.device, like.dtype)
            self._tables[like.device] = table
        return table


def _masked_together(logits: Tensor, masks: Mapping[int, Mask]) -> Tensor:
    lines = np.concatenate(list(masks.values())).view(np.uint8).reshape(len(masks), -1)
    if len(masks) < len(logits):
        every = np.full((len(logits), lines.shape[1]), 255, dtype=np.uint8)
        every[list(masks)] = lines
        lines = every
    flags = np.unpackbits(lines, axis=1, bitorder="little", count=logits.shape[1]).view(np.bool_)
    found = torch.where(torch.from_numpy(flags), logits, -torch.inf)
    return found if padded_width(logits.shape[1]) == logits.shape[1] else padded(found)


def _listed(bits: Mask, width: int) -> tuple[bool, NDArray[np.int64]] | None:
    """The ids that a mask allows, or those that it does not, whichever are few; None if neither are."""
    flags = np.unpackbits(bits.view(np.uint8), bitorder="little", count=width).view(np.bool_)
    num_allowed, few = int(np.count_nonzero(flags)), width // _MAX_IDS
    if num_allowed <= few:
        return True, np.flatnonzero(flags)
    if width - num_allowed <= few:
        return False, np.flatnonzero(~flags)
    return None
