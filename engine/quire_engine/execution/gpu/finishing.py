"""What follows the choice of tokens: requests' own rules, log-probabilities, and the step's result.

Promises: log-probabilities are computed on the device and waited for by nobody; rows with rules may wait, and those
that ask for certain ids. A bad row fails alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire_engine.batch import SampledToken, StepResult
from quire_engine.execution.gpu.device import HostBuffer, Packed
from quire_engine.execution.gpu.forward import Model, Region, read_region
from quire_engine.execution.gpu.step_arrays import StepArrays
from quire_engine.execution.logit_rules import apply_rules
from quire_engine.execution.pooling import pooled_columns, read_columns
from quire_engine.execution.sampler import (
    NO_CANDIDATE,
    NON_FINITE,
    Sampler,
    asked_columns,
    is_finite,
    logprob_columns,
    token_logprobs,
)
from quire_engine.types import TokenLogprobs
from quire_kernels.kernel_set import ChoiceRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Rows of logits that are there at once, and what is asked of them: ranges of the step's arrays."""

    rows: slice
    choices: slice
    told: slice
    scores: slice

    @classmethod
    def whole(cls, step: StepArrays) -> Span:
        return next(spans(step, max(1, step.num_logit_rows)))


def spans(step: StepArrays, size: int) -> Iterator[Span]:
    """The step's rows of logits, `size` at a time."""
    for start in range(0, step.num_logit_rows, size):
        end = min(start + size, step.num_logit_rows)
        choices = _between(step.choice_rows, start, end)
        yield Span(
            rows=slice(start, end),
            choices=choices,
            told=_between(step.told, choices.start, choices.stop),
            scores=_between(step.score_rows, start, end),
        )


class Finisher:
    """One step's, which gathers columns of log-probabilities span by span."""

    def __init__(self, model: Model, step: StepArrays, packed: Packed, sampler: Sampler) -> None:
        vocab_size = model.config.vocab_size
        self._model, self._step, self._packed, self._sampler = model, step, packed, sampler
        self._slice_rows = sampler.rows_per_slice(vocab_size)
        self._told_top = min(max((step.choices[i].num_logprobs or 0 for i in step.told), default=0), vocab_size)
        self._score_top = min(
            max((item.sampling.num_prompt_logprobs or 0 for item in step.score_items), default=0), vocab_size
        )
        self._told_ids = [step.choices[i].logprob_token_ids for i in step.told]
        self._asked = max(map(len, self._told_ids), default=0)
        self._told: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._pooled: list[Tensor] = []

    def finish(self, span: Span, logits: Tensor, rows: ChoiceRows, region: Region, first: int) -> None:
        """`rows` of the span have been chosen from `logits` into the region's rows from `first` on."""
        start = first + span.choices.start
        chosen = slice(start, start + len(rows.logits_rows))
        self._apply_rules(span, logits, rows, region.ids[chosen], region.possible[chosen])
        if span.told.start < span.told.stop:
            at = self._packed["told"][span.told] - span.choices.start
            self._tell(logits, rows.logits_rows.index_select(0, at), region.ids[chosen].index_select(0, at), span.told)
        if span.scores.start < span.scores.stop:
            self._score(logits, self._packed["score_rows"][span.scores] - span.rows.start, span.scores)

    def pool(self, hidden: Tensor) -> Tensor:
        """Sum the rows [S, H] of prompts whose vectors are wanted; returns the others, of which logits are."""
        if not self._step.pooled:
            return hidden
        for each in self._step.pooled:
            columns = pooled_columns(self._model, hidden[each.rows])
            self._pooled.append(columns.view(torch.float64))  # the bits: to be copied with the others
        return hidden.index_select(0, self._packed["logit_rows"])

    def columns(self) -> Tensor | None:
        """All columns, [n] float64, for `Finished.read`."""
        every = self._told + self._scores + self._pooled
        return torch.cat([columns.view(-1) for columns in every]) if every else None

    def finished(self, outcome: HostBuffer, max_rows: int, first: int, columns: HostBuffer | None) -> Finished:
        return Finished(
            step=self._step,
            outcome=outcome,
            max_rows=max_rows,
            first=first,
            columns=columns,
            sampler=self._sampler,
            told_top=self._told_top,
            asked=self._asked,
            score_top=self._score_top,
            pooled_width=self._model.config.hidden_size + 1,
        )

    def _apply_rules(self, span: Span, logits: Tensor, rows: ChoiceRows, ids: Tensor, possible: Tensor) -> None:
        """Choose again for the rows whose logits a request changes. Waits: what it changes is the host's to tell."""
        low, high = span.choices.start, span.choices.stop
        ruled = {i: row for i, row in self._step.rules.items() if low <= i < high}
        if not ruled:
            return
        # The device is at work on the logits meanwhile.
        allowed = self._sampler.constraints.allowed(list(ruled.values()), self._model.config.vocab_size)
        self._step.errors |= {i: allowed.errors[at] for at, i in enumerate(ruled) if at in allowed.errors}
        at = torch.tensor([i - low for i in ruled], device=logits.device)
        values = logits.index_select(0, rows.logits_rows.index_select(0, at))
        self._sampler.mask_writer.apply(values, allowed.masks)
        apply_rules(values, list(ruled.values()))
        some = replace(
            rows,
            logits_rows=torch.arange(len(ruled), device=logits.device),
            temperature=rows.temperature.index_select(0, at),
            top_k=rows.top_k.index_select(0, at),
            top_p=rows.top_p.index_select(0, at),
            min_p=rows.min_p.index_select(0, at),
            seed=rows.seed.index_select(0, at),
            choice=rows.choice.index_select(0, at),
            position=rows.position.index_select(0, at),
        )
        chosen, _, any_left = self._model.choose(values, some)
        ids.index_copy_(0, at, chosen)
        possible.index_copy_(0, at, any_left)

    def _tell(self, logits: Tensor, rows: Tensor, ids: Tensor, told: slice) -> None:
        for start in range(0, len(rows), self._slice_rows):
            part = slice(start, start + self._slice_rows)
            asked = asked_columns(self._told_ids[told][part], self._asked, logits.device)
            self._told.append(logprob_columns(logits.index_select(0, rows[part]), ids[part], self._told_top, asked))

    def _score(self, logits: Tensor, rows: Tensor, scores: slice) -> None:
        ids = self._packed["score_ids"][scores]
        for start in range(0, len(rows), self._slice_rows):
            part = slice(start, start + self._slice_rows)
            some = logits.index_select(0, rows[part])
            finite = is_finite(some).to(torch.float64).unsqueeze(1)
            self._scores.append(torch.cat([finite, logprob_columns(some, ids[part], self._score_top)], dim=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What it takes to make a step's result when its copies have arrived."""

    step: StepArrays
    sampler: Sampler
    outcome: HostBuffer
    max_rows: int  # of the region
    first: int  # of its rows
    columns: HostBuffer | None
    told_top: int
    asked: int  # columns of ids that were asked for
    score_top: int
    pooled_width: int

    def read(self) -> StepResult:
        step, result = self.step, StepResult(num_padding_rows=self.step.num_padding_rows)
        ids, finite, possible = read_region(self.outcome, self.max_rows, self.first, len(step.choices))
        values: list[float] = []
        if self.columns is not None:
            values = self.columns.bytes.cast("d").tolist()  # type: ignore[assignment]
        told_width = 2 + 2 * self.told_top + self.asked
        at = {choice: i * told_width for i, choice in enumerate(step.told)}
        for i, choice in enumerate(step.choices):
            if not finite[i]:
                sampled = SampledToken(error=NON_FINITE)
                result.non_finite.add(choice.sequence_id)
            elif not possible[i]:
                sampled = SampledToken(error=NO_CANDIDATE)
            elif choice.num_logprobs is None:
                sampled = SampledToken(token_id=ids[i])
            else:
                row = values[at[i] : at[i] + told_width]
                entry = token_logprobs(ids[i], row, self.told_top, choice.num_logprobs, choice.logprob_token_ids)
                sampled = SampledToken(token_id=ids[i], logprobs=entry)
            rules = None if i in step.errors else step.rules.get(i)
            samples = (sampled,) if rules is None else self.sampler.with_forced(rules, sampled)
            result.samples[choice.sequence_id] = samples
        for i, error in step.errors.items():
            result.samples[step.choices[i].sequence_id] = (SampledToken(error=error),)
        self._read_scores(values[len(step.told) * told_width :], result)
        self._read_pooled(result)
        return result

    def _read_scores(self, values: list[float], result: StepResult) -> None:
        width = 3 + 2 * self.score_top
        scores: dict[int, list[TokenLogprobs]] = {sequence_id: [] for sequence_id in self.step.scored}
        for i, (item, token) in enumerate(zip(self.step.score_items, self.step.score_ids, strict=True)):
            row = values[i * width : (i + 1) * width]
            if not row[0]:
                result.errors[item.sequence_id] = NON_FINITE
                result.non_finite.add(item.sequence_id)
                continue
            wanted = item.sampling.num_prompt_logprobs or 0
            scores[item.sequence_id].append(token_logprobs(token, row[1:], self.score_top, wanted))
        for sequence_id, entries in scores.items():
            if sequence_id not in result.errors:
                result.prompt_logprobs[sequence_id] = tuple(entries)

    def _read_pooled(self, result: StepResult) -> None:
        """The last columns, which are whole numbers."""
        if self.columns is None or not self.step.pooled:
            return
        values: list[int] = self.columns.bytes.cast("q").tolist()
        first = len(values) - len(self.step.pooled) * self.pooled_width
        for number, each in enumerate(self.step.pooled):
            start = first + number * self.pooled_width
            read_columns(each.item, values[start : start + self.pooled_width], result)


def _between(values: Sequence[int], low: int, high: int) -> slice:
    """The range of ascending values that are low .. high - 1."""
    return slice(bisect_left(values, low), bisect_left(values, high))
