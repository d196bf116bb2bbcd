"""Chooses the next tokens of a step from their logits and reports their log-probabilities.

Promises: a row's token and log-probabilities are bitwise the same whatever other rows are in the call; a bad row fails
alone; one device-to-host copy a slice of rows. Must not know: sequences, blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire_engine.batch import SampledToken
from quire_engine.execution import distribution
from quire_engine.execution.constrained.constraints import Constraints
from quire_engine.execution.constrained.grammars import Mask, MaskWriter
from quire_engine.execution.distribution import uniform
from quire_engine.execution.logit_rules import SampleRow, apply_rules, id_error
from quire_engine.types import NO_CANDIDATE, NON_FINITE, TokenLogprobs

__all__ = [
    "NON_FINITE",
    "NO_CANDIDATE",
    "SampleRow",
    "Sampler",
    "asked_columns",
    "is_finite",
    "logprob_columns",
    "token_logprobs",
]

_OK, _NON_FINITE, _NO_CANDIDATE = 0, 1, 2
_ERRORS = {_NON_FINITE: NON_FINITE, _NO_CANDIDATE: NO_CANDIDATE}


class Sampler:
    """Rows are worked on in slices of about `slice_bytes` of float32 logits."""

    def __init__(self, slice_bytes: int = 32 << 20, *, constraints: Constraints | None = None) -> None:
        """Without `constraints` requests for grammars fail."""
        self.constraints = constraints or Constraints(None)
        self.mask_writer = MaskWriter()
        self._slice_bytes = slice_bytes

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """The next token of each of `rows`, from logits [S, V] float32 (not changed).

        Order: log-probabilities from the raw logits; the masks of grammars and thinking; `apply_rules`; temperature
        (0: the maximum, of equals the lowest id); top-k; top-p; min-p; a draw with the one uniform number of (seed,
        choice, position). What cannot be sampled (non-finite logits, ids outside the vocabulary, everything masked, a
        grammar that fails) has `error` set, on that row only.
        """
        vocab_size = logits.shape[1]
        results: list[SampledToken | None] = [None] * len(rows)
        allowed = self.constraints.allowed(rows, vocab_size)
        good: list[int] = []
        for i, row in enumerate(rows):
            error = id_error(row, vocab_size) or allowed.errors.get(i)
            if error is None:
                good.append(i)
            else:
                results[i] = SampledToken(error=error)
        size = self.rows_per_slice(vocab_size)
        for start in range(0, len(good), size):
            part = good[start : start + size]
            masks = {at: allowed.masks[i] for at, i in enumerate(part) if i in allowed.masks}
            for i, sampled in zip(part, self._sample_slice(logits, [rows[i] for i in part], masks), strict=True):
                results[i] = sampled
        return [result for result in results if result is not None]

    def with_forced(self, row: SampleRow, sampled: SampledToken) -> tuple[SampledToken, ...]:
        """The row's token and those that must follow it, which no step has to compute."""
        if sampled.error is not None or not row.is_constrained:
            return (sampled,)
        forced = self.constraints.forced(row, sampled.token_id)
        return (sampled, *[SampledToken(token_id=token) for token in forced]) if forced else (sampled,)

    def score(self, logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs | None]:
        """Log-probabilities of `token_ids[i]` under row i of logits [S, V]; None where the row is not finite.

        The ids must be within the vocabulary: they are prompt tokens, which the embedding has already looked up.
        """
        scored: list[TokenLogprobs | None] = []
        num_top = min(num_top, logits.shape[1])
        size = self.rows_per_slice(logits.shape[1])
        for start in range(0, len(token_ids), size):
            part = logits[start : start + size]
            ids = token_ids[start : start + size]
            columns = logprob_columns(part, torch.tensor(ids, device=logits.device), num_top)
            finite = is_finite(part).to(torch.float64).unsqueeze(1)
            for token, row in zip(ids, torch.cat([finite, columns], dim=1).tolist(), strict=True):
                scored.append(token_logprobs(token, row[1:], num_top) if row[0] else None)
        return scored

    def rows_per_slice(self, vocab_size: int) -> int:
        return max(1, self._slice_bytes // (4 * vocab_size))

    def _sample_slice(self, logits: Tensor, rows: Sequence[SampleRow], masks: Mapping[int, Mask]) -> list[SampledToken]:
        wanted = [row.logits_row for row in rows]
        if wanted != list(range(logits.shape[0])):
            logits = logits[torch.tensor(wanted, device=logits.device)]
        status = torch.where(is_finite(logits), _OK, _NON_FINITE)
        plain = [i for i, row in enumerate(rows) if row.is_greedy and not row.has_rules]
        if len(plain) == len(rows):
            token_ids = logits.argmax(dim=1)  # of equal maxima the first
        else:
            token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
            if plain:
                index = torch.tensor(plain, device=logits.device)
                token_ids[index] = logits[index].argmax(dim=1)
            rest = [i for i, row in enumerate(rows) if not (row.is_greedy and not row.has_rules)]
            index = torch.tensor(rest, device=logits.device)
            of_rest = {at: masks[i] for at, i in enumerate(rest) if i in masks}
            copied = self.mask_writer.masked(logits[index] if plain else logits, of_rest)
            token_ids[index], possible = _choose(copied, [rows[i] for i in rest])
            status[index] = torch.where(possible | (status[index] != _OK), status[index], _NO_CANDIDATE)

        packed = [status.to(torch.float64).unsqueeze(1), token_ids.to(torch.float64).unsqueeze(1)]
        scored = [i for i, row in enumerate(rows) if row.sampling.num_logprobs is not None]
        num_top = min(max((rows[i].sampling.num_logprobs or 0 for i in scored), default=0), logits.shape[1])
        if scored:
            index = torch.tensor(scored, device=logits.device)
            ids = [rows[i].sampling.logprob_token_ids for i in scored]
            asked = asked_columns(ids, max(map(len, ids)), logits.device)
            scores = logprob_columns(logits[index], token_ids[index], num_top, asked)
            columns = scores.new_zeros(len(rows), scores.shape[1])
            columns[index] = scores
            packed.append(columns)
        values = torch.cat(packed, dim=1).tolist()  # the copy to the host
        return [_sampled_token(row, some, num_top) for row, some in zip(rows, values, strict=True)]


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
    return distribution.draw(probabilities, [uniform(row.sampling.seed, row.choice, row.position) for row in rows])


def asked_columns(ids: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor | None:
    """What `logprob_columns` takes as `asked`: one list of ids a row, each filled up to the width of the longest."""
    if not width:
        return None
    return torch.tensor([[*some, *[0] * (width - len(some))] for some in ids], device=device)


def logprob_columns(logits: Tensor, token_ids: Tensor, num_top: int, asked: Tensor | None = None) -> Tensor:
    """[S, 2 + 2k + a] float64 of raw logits [S, V]: the token's log-probability and rank, the top ids, theirs.

    Last those of the ids `asked` [S, a]. Does not wait for a device.
    """
    logits = distribution.padded(logits)
    logprobs = torch.log_softmax(logits, dim=1)
    keys = distribution.order_keys(logits)
    token_ids = token_ids.unsqueeze(1)
    rank = (keys > keys.gather(1, token_ids)).sum(dim=1, keepdim=True) + 1
    columns = [logprobs.gather(1, token_ids), rank]
    if num_top:
        top = distribution.key_ids(keys.topk(num_top, dim=1).values, logits.shape[1])
        columns += [top, logprobs.gather(1, top)]
    if asked is not None:
        columns.append(logprobs.gather(1, asked))
    return torch.cat([column.to(torch.float64) for column in columns], dim=1)


def _sampled_token(row: SampleRow, values: Sequence[float], num_top: int) -> SampledToken:
    status, token_id = int(values[0]), int(values[1])
    if status != _OK:
        return SampledToken(error=_ERRORS[status])
    if row.sampling.num_logprobs is None:
        return SampledToken(token_id=token_id)
    asked = row.sampling.logprob_token_ids
    entry = token_logprobs(token_id, values[2:], num_top, row.sampling.num_logprobs, asked)
    return SampledToken(token_id=token_id, logprobs=entry)


def token_logprobs(
    token_id: int, values: Sequence[float], num_top: int, wanted: int | None = None, asked: tuple[int, ...] = ()
) -> TokenLogprobs:
    """One row of `logprob_columns` computed with `num_top`, of which `wanted` are reported, and the ids `asked`."""
    count = num_top if wanted is None else min(wanted, num_top)
    return TokenLogprobs(
        token_id=token_id,
        logprob=values[0],
        rank=int(values[1]),
        top_ids=tuple(int(token) for token in values[2 : 2 + count]),
        top_logprobs=tuple(values[2 + num_top : 2 + num_top + count]),
        asked_ids=asked,
        asked_logprobs=tuple(values[2 + 2 * num_top : 2 + 2 * num_top + len(asked)]),
    )


def is_finite(logits: Tensor) -> Tensor:
    """[S] bool, by the extremes: both propagate NaN."""
    low, high = torch.aminmax(logits, dim=1)
    return torch.isfinite(low) & torch.isfinite(high)
