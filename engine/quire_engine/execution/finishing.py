"""The results of a step from its logits: the rows with rules, log-probabilities, scores, pooled sums, forced tokens.

Promises: nothing here waits for a device, except where rows have rules, whose masks the host computes. A bad row fails
alone.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire_engine.contract.batch import POOLED_BITS, SampledToken, ScheduledSequence, StepResult
from quire_engine.contract.types import NO_CANDIDATE, NON_FINITE, TokenLogprobs
from quire_engine.execution import distribution
from quire_engine.execution.constrained.constraints import Allowed, Constraints
from quire_engine.execution.logit_rules import SampleRow
from quire_engine.execution.model_input import host_tensor
from quire_engine.execution.models.served import ModelFacts
from quire_engine.execution.step_tensors import StepTensors

# Of one pooled value. Behind a norm they are a few thousand at most; 2^17 rows of such values fit 64 bits in units.
MOST_POOLED = float(1 << 13)
_POOLED_ROWS = 256  # at once, in float64


class Model(Protocol):
    """The part of `models.decoder.Decoder` that finishing uses."""

    @property
    def config(self) -> ModelFacts: ...
    def normed(self, hidden: Tensor) -> Tensor: ...


class Sections(Protocol):
    """The arrays of `StepTensors.asked` where the model computes, by name: the host's, or a GPU's `Packed`."""

    def __getitem__(self, name: str) -> Tensor: ...


class HostSections:
    """Arrays of the host, which become tensors when they are asked for."""

    def __init__(self, arrays: Mapping[str, array[int]], device: torch.device) -> None:
        self._arrays, self._device = arrays, device

    def __getitem__(self, name: str) -> Tensor:
        return host_tensor(self._arrays[name], self._device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Rows of logits that are there at once, and what is asked of them: ranges of the step's arrays."""

    rows: slice
    choices: slice
    told: slice
    scores: slice

    @classmethod
    def whole(cls, step: StepTensors) -> Span:
        return next(spans(step, max(1, step.num_logit_rows)))


def spans(step: StepTensors, size: int) -> Iterator[Span]:
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


class Ruled(NamedTuple):
    """The choices of a span whose logits change before a token is taken."""

    places: list[int]  # among the span's choices
    rows: list[SampleRow]
    allowed: Allowed  # their masks, by index in `rows`

    def opening(self) -> Opening | None:
        """The choices that may open a block of thoughts, if there are any."""
        found = [(at, row, row.opener) for at, row in zip(self.places, self.rows, strict=True)]
        openers = [(at, row, opener) for at, row, opener in found if opener is not None]
        if not openers:
            return None
        places, rows, ids = zip(*openers, strict=True)
        return Opening(list(places), [row.without_mask() for row in rows], list(ids))


class Opening(NamedTuple):
    """Choices of a span which are made without their masks too: where that gives the opener, it stands."""

    places: list[int]  # among the span's choices
    rows: list[SampleRow]  # without their grammars
    openers: list[int]

    def keep(self, ids: Tensor, possible: Tensor, into: tuple[Tensor, Tensor]) -> None:
        """`ids` and `possible` [n]: as chosen without masks. `into`: those of all of the span's choices, to change."""
        all_ids, all_possible = into
        at = torch.tensor(self.places, device=ids.device)
        openers = torch.tensor(self.openers, device=ids.device)
        opens = possible & (ids == openers)
        all_ids.index_copy_(0, at, torch.where(opens, openers, all_ids.index_select(0, at)))
        all_possible.index_copy_(0, at, opens | all_possible.index_select(0, at))


class Finisher:
    """One step's: gathers columns of log-probabilities, scores and sums, span by span."""

    def __init__(
        self,
        model: Model,
        step: StepTensors,
        sections: Sections,
        constraints: Constraints,
        *,
        slice_bytes: int = distribution.SLICE_BYTES,
    ) -> None:
        vocab_size = model.config.vocab_size
        self._model, self._step, self._sections, self._constraints = model, step, sections, constraints
        self._slice_rows = distribution.rows_per_slice(vocab_size, slice_bytes)
        # An id outside the vocabulary is an error of its row already, and must not reach an index.
        self._told_ids = [() if i in step.errors else step.choices[i].sampling.logprob_token_ids for i in step.told]
        self._told_top = _most((step.choices[i].sampling.num_logprobs for i in step.told), vocab_size)
        self._score_top = _most((item.sampling.num_prompt_logprobs for item in step.score_items), vocab_size)
        self._asked = max(map(len, self._told_ids), default=0)
        self._told: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._pooled: list[Tensor] = []

    def ruled(self, span: Span) -> Ruled | None:
        """The span's choices with rules, if there are any. A grammar that fails becomes the error of its choice."""
        low, high = span.choices.start, span.choices.stop
        indices = [i for i in self._step.rules if low <= i < high] if self._step.rules else []
        if not indices:
            return None
        rows = [self._step.rules[i] for i in indices]
        allowed = self._constraints.allowed(rows, self._model.config.vocab_size)
        self._step.errors |= {indices[at]: error for at, error in allowed.errors.items()}
        return Ruled([i - low for i in indices], rows, allowed)

    def pool(self, hidden: Tensor) -> Tensor:
        """Sum the rows [S, H] of prompts whose vectors are wanted; returns the others, of which logits are."""
        if not self._step.pooled:
            return hidden
        for each in self._step.pooled:
            columns = pooled_columns(self._model, hidden[each.rows])
            self._pooled.append(columns.view(torch.float64))  # the bits: to be copied with the others
        return hidden.index_select(0, self._sections["logit_rows"])

    def finish(self, span: Span, logits: Tensor, logits_rows: Tensor, ids: Tensor) -> None:
        """`ids` [R] have been chosen from the rows `logits_rows` [R] of the span's logits, the model's own."""
        if span.told.start < span.told.stop:
            at = self._sections["told"][span.told] - span.choices.start
            self._tell(logits, logits_rows.index_select(0, at), ids.index_select(0, at), span.told)
        if span.scores.start < span.scores.stop:
            self._score(logits, self._sections["score_rows"][span.scores] - span.rows.start, span.scores)

    def columns(self) -> Tensor | None:
        """All columns, [n] float64, for `Finished.read`."""
        every = self._told + self._scores + self._pooled
        return torch.cat([columns.view(-1) for columns in every]) if every else None

    def finished(self) -> Finished:
        """The reader of the columns, once they are on the host. Holds no tensor of the device."""
        return Finished(
            step=self._step,
            constraints=self._constraints,
            told_top=self._told_top,
            asked=self._asked,
            score_top=self._score_top,
            pooled_width=self._model.config.hidden_size + 1 if self._step.pooled else 0,
        )

    def _tell(self, logits: Tensor, rows: Tensor, ids: Tensor, told: slice) -> None:
        for start in range(0, len(rows), self._slice_rows):
            part = slice(start, start + self._slice_rows)
            asked = _asked_columns(self._told_ids[told][part], self._asked, logits.device)
            self._told.append(logprob_columns(logits.index_select(0, rows[part]), ids[part], self._told_top, asked))

    def _score(self, logits: Tensor, rows: Tensor, scores: slice) -> None:
        ids = self._sections["score_ids"][scores]
        for start in range(0, len(rows), self._slice_rows):
            part = slice(start, start + self._slice_rows)
            some = logits.index_select(0, rows[part])
            finite = distribution.is_finite(some).to(torch.float64).unsqueeze(1)
            self._scores.append(torch.cat([finite, logprob_columns(some, ids[part], self._score_top)], dim=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Makes a step's result of what was copied to the host."""

    step: StepTensors
    constraints: Constraints
    told_top: int
    asked: int  # columns of ids that were asked for
    score_top: int
    pooled_width: int

    def read(
        self,
        ids: Sequence[int],
        finite: Sequence[int],
        possible: Sequence[int],
        columns: memoryview | None = None,
        *,
        num_padding_rows: int = 0,
    ) -> StepResult:
        """Read the result: choices' tokens, finite and possible logits; `columns`: bytes of `Finisher.columns`."""
        step = self.step
        result = StepResult(decoded=self._decoded(ids, finite, possible), num_padding_rows=num_padding_rows)
        values: list[float] = []
        if columns is not None:
            values = columns.cast("d").tolist()  # type: ignore[assignment]
        width = 2 + 2 * self.told_top + self.asked
        told_at = {choice: i * width for i, choice in enumerate(step.told)}

        def sampled(i: int) -> SampledToken:
            error = step.errors.get(i) or (NON_FINITE if not finite[i] else None if possible[i] else NO_CANDIDATE)
            if error is not None:
                return SampledToken(error=error)
            told = None
            if i in told_at:
                told = self._told(step.choices[i], ids[i], values[told_at[i] : told_at[i] + width])
            return SampledToken(token_id=ids[i], logprobs=told)

        i = step.num_decodes
        for at, is_finite in enumerate(finite[:i]) if result.decoded is not None else ():
            if not (is_finite and possible[at]):
                row = step.choices[at]
                result.samples[row.sequence_id] = (sampled(at),)
                if not is_finite:
                    result.non_finite.add(row.sequence_id)
        while i < len(step.choices):
            row, first, drafts = step.choices[i], sampled(i), step.drafted.get(i, ())
            if not finite[i]:
                result.non_finite.add(row.sequence_id)
            taken = (first, *_behind(first, drafts, map(sampled, count(i + 1)))) if drafts else (first,)
            if first.error is None and i in step.rules and row.is_constrained:
                last = step.choices[i + len(taken) - 1]._replace(num_drafts=0)  # those before it are the output now
                forced = self.constraints.forced(last, taken[-1].token_id)
                taken += tuple([SampledToken(token_id=token, is_forced=True) for token in forced])
            result.samples[row.sequence_id] = taken
            i += 1 + len(drafts)
        self._read_scores(values[len(step.told) * width :], result)
        if columns is not None and step.pooled:
            self._read_pooled(columns, result)
        return result

    def _decoded(self, ids: Sequence[int], finite: Sequence[int], possible: Sequence[int]) -> Sequence[int] | None:
        """The tokens of the decodes in columns, -1 of one that failed; None: there are no such decodes."""
        count = self.step.num_decodes
        if not count:
            return None
        if all(finite[:count]) and all(possible[:count]):
            return ids[:count]
        fine = zip(ids[:count], finite, possible, strict=False)
        return [token if is_finite and is_possible else -1 for token, is_finite, is_possible in fine]

    def _told(self, row: SampleRow, token_id: int, values: Sequence[float]) -> TokenLogprobs:
        asked = row.sampling.logprob_token_ids
        return token_logprobs(token_id, values, self.told_top, row.sampling.num_logprobs or 0, asked)

    def _read_scores(self, values: Sequence[float], result: StepResult) -> None:
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

    def _read_pooled(self, columns: memoryview, result: StepResult) -> None:
        """The last columns, which are whole numbers."""
        values: list[int] = columns.cast("q").tolist()
        first = len(values) - len(self.step.pooled) * self.pooled_width
        for number, each in enumerate(self.step.pooled):
            start = first + number * self.pooled_width
            _put_pooled(each.item, values[start : start + self.pooled_width], result)


def _behind(first: SampledToken, drafts: Iterable[int], rows: Iterator[SampledToken]) -> Iterator[SampledToken]:
    """The tokens of the rows behind a decode's own, as far as the drafts before them are the tokens drawn there.

    A row that fails is left to the next step, which has the same row without a draft before it.
    """
    before = first
    for draft in drafts:
        if before.token_id != draft or before.error is not None:
            return
        before = next(rows)
        if before.error is not None:
            return
        yield before


def pooled_columns(model: Model, hidden: Tensor) -> Tensor:
    """[H + 1] int64 on the device: the sum of the rows [R, H] after the final norm, and how many values it lacks.

    Every value is rounded to a whole number of small units first, so that sums do not depend on their order: neither
    on the batch, nor on how the prompt was cut, nor on the device's way to add.
    """
    columns = torch.zeros(hidden.shape[1] + 1, dtype=torch.int64, device=hidden.device)
    for start in range(0, len(hidden), _POOLED_ROWS):
        values = model.normed(hidden[start : start + _POOLED_ROWS])
        counted = values.abs() < MOST_POOLED  # false for what is not a number
        units = torch.where(counted, values * float(1 << POOLED_BITS), 0.0).round().to(torch.int64)
        columns[:-1] += units.sum(dim=0)
        columns[-1] += (~counted).sum()
    return columns


def _put_pooled(item: ScheduledSequence, columns: Sequence[int], result: StepResult) -> None:
    """Put one item's columns into the step's result."""
    *sums, num_lacking = columns
    if num_lacking:
        result.errors[item.sequence_id] = NON_FINITE
        result.non_finite.add(item.sequence_id)
    else:
        result.pooled[item.sequence_id] = tuple(sums)


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


def token_logprobs(
    token_id: int, values: Sequence[float], num_top: int, wanted: int, asked: tuple[int, ...] = ()
) -> TokenLogprobs:
    """One row of `logprob_columns` computed with `num_top`, of which `wanted` are reported, and the ids `asked`."""
    count = min(wanted, num_top)
    return TokenLogprobs(
        token_id=token_id,
        logprob=values[0],
        rank=int(values[1]),
        top_ids=tuple(int(token) for token in values[2 : 2 + count]),
        top_logprobs=tuple(values[2 + num_top : 2 + num_top + count]),
        asked_ids=asked,
        asked_logprobs=tuple(values[2 + 2 * num_top : 2 + 2 * num_top + len(asked)]),
    )


def _asked_columns(ids: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor | None:
    """The `asked` argument of `logprob_columns`: a list of ids a row, each padded to the width of the longest."""
    if not width:
        return None
    return torch.tensor([[*some, *[0] * (width - len(some))] for some in ids], device=device)


def _most(wanted: Iterator[int | None], vocab_size: int) -> int:
    return min(max((number or 0 for number in wanted), default=0), vocab_size)


def _between(values: Sequence[int], low: int, high: int) -> slice:
    """The range of ascending values that are low .. high - 1."""
    return slice(bisect_left(values, low), bisect_left(values, high))
