"""A request's changes to its logits before they become a distribution: masks, penalties, bias.

Promises: every id is checked against the vocabulary before a tensor is touched; a row is changed by its own rules only.
Must not know: distributions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire_engine.contract.batch import ScheduledSequence
from quire_engine.contract.types import SamplingParams, StopParams

_MIN_TEMPERATURE = 1e-5
SECOND_STREAM = 1 << 32  # more than there are choices


class SampleRow(NamedTuple):
    """One token to choose. Several rows may share a row of logits (the first token of the n choices of a request)."""

    sampling: SamplingParams
    stop: StopParams
    choice: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # all between prompt and position, where the sampling `reads_output`
    position: int  # of the token to choose
    logits_row: int
    sequence_id: int = 0
    num_drafts: int = 0  # guessed tokens before the position: the last of the output, where that is given

    @classmethod
    def of(cls, item: ScheduledSequence, sequence_id: int, choice: int, logits_row: int) -> SampleRow:
        """The token behind the item's slice, for the item itself or for one of its forks."""
        return cls(
            item.sampling,
            item.stop,
            choice,
            item.prompt_token_ids,
            item.output_token_ids,
            item.end,
            logits_row,
            sequence_id,
        )

    def behind(self, drafts: tuple[int, ...]) -> SampleRow:
        """The row of the token after these, where this one's come first; its logits are as many rows further on."""
        count = len(drafts)
        output = (*self.output_token_ids, *drafts) if self.sampling.reads_output else self.output_token_ids
        return self._replace(
            output_token_ids=output,
            position=self.position + count,
            logits_row=self.logits_row + count,
            num_drafts=count,
        )

    @property
    def num_output(self) -> int:
        return self.position - len(self.prompt_token_ids)

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar or a limit of thinking decides what the token may be."""
        return is_constrained(self.sampling)

    @property
    def opener(self) -> int | None:
        """The token that may come here only if it is chosen without a mask; None where there is none."""
        return self.sampling.thinking_opener if self.sampling.grammar and self.num_output == 0 else None

    @property
    def stream(self) -> int:
        """The stream of random numbers for the choice.

        A row with an `opener` is drawn from without its mask first. Behind another result of the same number the draw
        within the mask would not be a fair one, so it has the second stream of the choice.
        """
        return self.choice if self.opener is None else self.choice + SECOND_STREAM

    def without_mask(self) -> SampleRow:
        """Return the row with its other rules but without a grammar's mask."""
        return self._replace(sampling=replace(self.sampling, grammar="", thinking_opener=None))

    @property
    def masks_stop_tokens(self) -> bool:
        """Whether no stop token may come yet. A grammar's mask has them left out already, unless it allows no other."""
        too_soon = self.num_output < self.sampling.min_tokens
        return too_soon and bool(self.stop.stop_token_ids) and not self.sampling.grammar

    @property
    def is_greedy(self) -> bool:
        """Whether the token is the maximum: below this a temperature selects just that, and dividing would overflow."""
        return not draws(self.sampling)

    @property
    def has_rules(self) -> bool:
        """Whether the logits differ from the model's before the temperature applies."""
        return self.masks_stop_tokens or self.is_constrained or _has_own(self.sampling)


def may_have_rules(sampling: SamplingParams) -> bool:
    """Whether some row of such a request `has_rules`: at worst until `min_tokens` are there."""
    return bool(sampling.min_tokens or sampling.grammar or sampling.thinking is not None or _has_own(sampling))


def is_constrained(sampling: SamplingParams) -> bool:
    """Whether some row of such a request `is_constrained`: those have masks, which are not applied here."""
    return bool(sampling.grammar) or sampling.thinking is not None


def draws(sampling: SamplingParams) -> bool:
    """Whether the token is drawn; else it is the maximum."""
    return sampling.temperature >= _MIN_TEMPERATURE


def asks_for_masked_argmax(sampling: SamplingParams) -> bool:
    """Whether every token is the maximum of what a mask leaves of the model's own logits, and no more is asked."""
    return (
        is_constrained(sampling)
        and not draws(sampling)
        and sampling.num_logprobs is None
        and (sampling.min_tokens == 0 or bool(sampling.grammar))  # whose mask knows of stop tokens
        and not _has_own(sampling)
    )


def _has_own(sampling: SamplingParams) -> bool:
    """Whether the request itself names tokens to forbid, to allow alone, to prefer or to repeat less."""
    return bool(
        sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.banned_token_ids
        or sampling.banned_sequences
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


def id_error(row: SampleRow, vocab_size: int) -> str | None:
    """Why this row's ids cannot be applied to `vocab_size` columns, or None.

    A tensor index outside the row would write into a neighbour's logits. Stop ids outside are not an error: such a
    token can never be drawn, so there is nothing to mask.
    """
    sampling = row.sampling
    named: list[tuple[str, Iterable[int]]] = [
        ("logit_bias", (token for token, _ in sampling.logit_bias)),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("banned_token_ids", sampling.banned_token_ids),
        ("banned_sequences", (sequence[-1] for sequence in sampling.banned_sequences)),
        ("logprob_token_ids", sampling.logprob_token_ids),
        ("thinking_opener", () if sampling.thinking_opener is None else (sampling.thinking_opener,)),
    ]
    if sampling.repetition_penalty != 1.0:
        named.append(("the prompt", row.prompt_token_ids))
    if sampling.has_penalties:
        named.append(("the output", row.output_token_ids))
    for name, ids in named:
        for token in ids:
            if not 0 <= token < vocab_size:
                return f"token id {token} in {name} is outside the model's vocabulary of {vocab_size}"
    return None


@dataclass(slots=True)
class _Cells:
    """Cells of the logits to change: no cell twice, so that the order of writing cannot matter."""

    rows: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, row: int, ids: Iterable[int], value: float) -> None:
        for token in ids:
            self.add_one(row, token, value)

    def add_one(self, row: int, token: int, value: float) -> None:
        self.rows.append(row)
        self.ids.append(token)
        self.values.append(value)

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.rows, device=device), torch.tensor(self.ids, device=device)

    def value(self, like: Tensor) -> Tensor:
        return torch.tensor(self.values, dtype=like.dtype, device=like.device)


def apply_rules(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Change logits [S, V] in place, row i by `rows[i]`, whose ids `id_error` has passed.

    The order is: allowed and banned ids, ends of banned sequences and stop ids masked; the repetition penalty over
    prompt and output; presence and frequency penalties over the output; the logit bias.
    """
    _mask_not_allowed(logits, rows)
    masked, repeated, generated, biased = _Cells(), _Cells(), _Cells(), _Cells()
    vocab_size = logits.shape[1]
    for i, row in enumerate(rows):
        sampling = row.sampling
        masked.add(i, sampling.banned_token_ids, -torch.inf)
        masked.add(i, _ends_of_banned_sequences(row), -torch.inf)
        if row.masks_stop_tokens:
            masked.add(i, (token for token in row.stop.stop_token_ids if 0 <= token < vocab_size), -torch.inf)
        if sampling.repetition_penalty != 1.0:
            repeated.add(i, sorted({*row.prompt_token_ids, *row.output_token_ids}), sampling.repetition_penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            for token, count in Counter(row.output_token_ids).items():
                generated.add_one(i, token, sampling.presence_penalty + sampling.frequency_penalty * count)
        for token, bias in dict(sampling.logit_bias).items():
            biased.add_one(i, token, bias)
    if masked.rows:
        logits[masked.index(logits.device)] = -torch.inf
    if repeated.rows:
        index = repeated.index(logits.device)
        before, penalty = logits[index], repeated.value(logits)
        logits[index] = torch.where(before > 0, before / penalty, before * penalty)
    if generated.rows:
        index = generated.index(logits.device)
        logits[index] = logits[index] - generated.value(logits)
    if biased.rows:
        index = biased.index(logits.device)
        logits[index] = logits[index] + biased.value(logits)


def _ends_of_banned_sequences(row: SampleRow) -> set[int]:
    """The ids that would complete a sequence whose beginning the output ends with."""
    said = row.output_token_ids
    return {
        last
        for *beginning, last in row.sampling.banned_sequences
        if len(said) >= len(beginning) and list(said[len(said) - len(beginning) :]) == beginning
    }


def _mask_not_allowed(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    for i, row in enumerate(rows):
        if row.sampling.allowed_token_ids:
            ids = torch.tensor(row.sampling.allowed_token_ids, device=logits.device)
            allowed = logits[i, ids]
            logits[i].fill_(-torch.inf)
            logits[i, ids] = allowed
