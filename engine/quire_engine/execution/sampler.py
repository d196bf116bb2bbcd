"""Chooses the next tokens of a step from their logits, where the kernels do not.

Promises: the token of a row is bitwise the same whatever other rows are in the call; a bad row fails alone; nothing is
copied back to the host. Must not know: sequences, blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire_engine.execution import distribution
from quire_engine.execution.constrained.grammars import Mask, MaskWriter
from quire_engine.execution.distribution import uniform
from quire_engine.execution.finishing import Ruled
from quire_engine.execution.logit_rules import SampleRow, apply_rules


class Chosen(NamedTuple):
    """The tokens of R choices, on the device."""

    ids: Tensor  # [R] int64; of no meaning where one of the others is false
    finite: Tensor  # [R] bool, whether the logits are
    possible: Tensor  # [R] bool, whether rules and truncation left a token to choose


class Sampler:
    """Rows are worked on in slices of about `slice_bytes` of float32 logits."""

    def __init__(self, slice_bytes: int = distribution.SLICE_BYTES) -> None:
        self._mask_writer = MaskWriter()
        self._slice_bytes = slice_bytes

    def choose(
        self,
        logits: Tensor,
        logits_rows: Sequence[int],
        rows: Sequence[SampleRow],
        ruled: Ruled | None = None,
        failed: Collection[int] = (),
    ) -> Chosen:
        """The next token of each of `rows` from the row of logits [S, V] float32 (not changed) named beside it.

        Order: the masks of grammars and thinking, then `apply_rules`, for the `ruled`; temperature (0: the maximum, of
        equals the lowest id); top-k; top-p; min-p; a draw with the one uniform number of (seed, choice, position). The
        rules of `failed` rows, by index, are not looked at. A row with an `opener` gets it if it is the token without
        the mask.
        """
        masks = {} if ruled is None else {at: ruled.allowed.masks.get(i) for i, at in enumerate(ruled.places)}
        chosen = self._choose_sliced(logits, logits_rows, rows, masks, failed)
        opening = None if ruled is None else ruled.opening()
        if opening is not None:
            wanted = [logits_rows[at] for at in opening.places]
            free = self._choose_sliced(logits, wanted, opening.rows, dict.fromkeys(range(len(wanted))))
            opening.keep(free.ids, free.possible, (chosen.ids, chosen.possible))
        return chosen

    def _choose_sliced(
        self,
        logits: Tensor,
        logits_rows: Sequence[int],
        rows: Sequence[SampleRow],
        masks: Mapping[int, Mask | None],
        failed: Collection[int] = (),
    ) -> Chosen:
        """`choose`; `masks`: those of the rows with rules, by index."""
        size = distribution.rows_per_slice(logits.shape[1], self._slice_bytes)
        parts: list[Chosen] = []
        for start in range(0, len(rows), size):
            part = range(start, min(start + size, len(rows)))
            wanted = list(logits_rows[start : part.stop])
            values = logits
            if wanted != list(range(len(logits))):
                values = logits[torch.tensor(wanted, device=logits.device)]
            plain = [i - start for i in part if i in failed or (rows[i].is_greedy and i not in masks)]
            found = {i - start: mask for i in part if (mask := masks.get(i)) is not None}
            parts.append(self._choose_slice(values, rows[start : part.stop], plain, found))
        if not parts:
            flags = torch.empty(0, dtype=torch.bool, device=logits.device)
            return Chosen(torch.empty(0, dtype=torch.int64, device=logits.device), flags, flags)
        return parts[0] if len(parts) == 1 else Chosen(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def change(self, values: Tensor, ruled: Ruled) -> None:
        """Apply masks and rules to logits [n, V] in place, row i those of the i-th of the `ruled`."""
        self._mask_writer.apply(values, ruled.allowed.masks)
        apply_rules(values, ruled.rows)

    def _choose_slice(
        self, logits: Tensor, rows: Sequence[SampleRow], plain: list[int], masks: dict[int, Mask]
    ) -> Chosen:
        """A token from each row of logits: of the `plain` rows the maximum, of the others as they ask."""
        finite = distribution.is_finite(logits)
        possible = torch.ones_like(finite)
        if len(plain) == len(rows):
            return Chosen(logits.argmax(dim=1), finite, possible)  # of equal maxima the first
        ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        if plain:
            index = torch.tensor(plain, device=logits.device)
            ids[index] = logits[index].argmax(dim=1)
        rest = sorted(set(range(len(rows))).difference(plain))
        index = torch.tensor(rest, device=logits.device)
        of_rest = {at: masks[i] for at, i in enumerate(rest) if i in masks}
        copied = self._mask_writer.masked(logits[index] if plain else logits, of_rest)
        ids[index], possible[index] = _choose(copied, [rows[i] for i in rest])
        return Chosen(ids, finite, possible)


def _choose(logits: Tensor, rows: Sequence[SampleRow]) -> tuple[Tensor, Tensor]:
    """Token ids [S] after rules and truncation, and whether each row had a candidate [S] bool.

    The logits, which are consumed, are as `distribution.padded` makes them.
    """
    apply_rules(logits, rows)
    token_ids = logits.argmax(dim=1)
    highest = logits.amax(dim=1)
    possible = highest > -torch.inf
    drawn = [i for i, row in enumerate(rows) if not row.is_greedy]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        values = logits if len(drawn) == len(rows) else logits[index]
        ids, any_left = _draw(values, [rows[i] for i in drawn])
        token_ids[index] = ids
        possible[index] &= any_left
    return token_ids, possible


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> tuple[Tensor, Tensor]:
    """Draw from logits [S, V'], which are consumed."""
    device, vocab_size = logits.device, logits.shape[1]
    params = [row.sampling for row in rows]
    temperatures = torch.tensor([p.temperature for p in params], dtype=logits.dtype, device=device).unsqueeze(1)
    # The maximum goes first, so that a low temperature cannot overflow to infinity.
    logits = logits.sub_(logits.amax(dim=1, keepdim=True)).div_(temperatures)
    limited = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size]
    if limited:
        index = torch.tensor(limited, device=device)
        values = logits[index]
        keep = distribution.keep_top_k(values, [params[i].top_k for i in limited])
        logits[index] = values.masked_fill_(~keep, -torch.inf)
    probabilities = torch.softmax(logits, dim=1)
    limited = [i for i, p in enumerate(params) if p.top_p < 1.0]
    if limited:
        index = torch.tensor(limited, device=device)
        values = probabilities[index]
        keep = distribution.keep_top_p(values, [params[i].top_p for i in limited])
        probabilities[index] = values.masked_fill_(~keep, 0.0)
    limited = [i for i, p in enumerate(params) if p.min_p > 0.0]
    if limited:
        index = torch.tensor(limited, device=device)
        values = probabilities[index]
        keep = distribution.keep_min_p(values, [params[i].min_p for i in limited])
        probabilities[index] = values.masked_fill_(~keep, 0.0)
    return distribution.draw(probabilities, [uniform(row.sampling.seed, row.stream, row.position) for row in rows])
