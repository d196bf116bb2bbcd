"""A batch as arrays of the host: what a step sends, and what its results will mean.

Promises: nothing of the device is touched; ids, lengths and blocks are checked before anything is sent.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire_engine.batch import PENDING, Batch, ScheduledSequence
from quire_engine.execution.gpu.tables import RULES, SlotTables, padded_rows
from quire_engine.execution.logit_rules import SampleRow, id_error
from quire_engine.execution.model_input import extend_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What the arrays are checked against."""

    block_size: int
    vocab_size: int
    max_model_len: int


class Pooled(NamedTuple):
    """Rows of a prompt whose vector is wanted, which need no logits."""

    item: ScheduledSequence
    rows: slice  # of the sample rows


class Choice(NamedTuple):
    """One token to choose."""

    sequence_id: int
    num_logprobs: int | None
    logprob_token_ids: tuple[int, ...]


@dataclass(slots=True)
class StepArrays:
    """A step of T rows, B sequences, S rows of logits and R choices, all in the order of the batch."""

    # Of the rows.
    ids: array[int] = field(default_factory=lambda: array("q"))  # [T]; 0 where `source` is another word
    source: array[int] = field(default_factory=lambda: array("q"))  # [T], the word of the device that holds the id
    positions: array[int] = field(default_factory=lambda: array("q"))  # [T]
    kv_slots: array[int] = field(default_factory=lambda: array("q"))  # [T]
    sample_rows: array[int] = field(default_factory=lambda: array("q"))  # [S]
    # Of the sequences.
    table_slots: array[int] = field(default_factory=lambda: array("q"))  # [B]
    query_starts: array[int] = field(default_factory=lambda: array("i", [0]))  # [B + 1]
    sampled_starts: array[int] = field(default_factory=lambda: array("i", [0]))  # [B + 1], of the sampled rows alone
    context_lens: array[int] = field(default_factory=lambda: array("i"))  # [B]
    # Of the choices.
    choice_slots: array[int] = field(default_factory=lambda: array("q"))  # [R], and spare ones
    choice_rows: array[int] = field(default_factory=lambda: array("q"))  # [R], rows of logits
    choice_positions: array[int] = field(default_factory=lambda: array("q"))  # [R], of the token to choose
    choices: list[Choice] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)  # by index of the choice: why its rules cannot apply
    rules: dict[int, SampleRow] = field(default_factory=dict)  # by index of the choice
    told: list[int] = field(default_factory=list)  # choices whose log-probabilities are asked for
    # Of the prompt's next tokens to score.
    score_rows: array[int] = field(default_factory=lambda: array("q"))  # rows of logits, ascending
    score_ids: array[int] = field(default_factory=lambda: array("q"))
    score_items: list[ScheduledSequence] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)  # sequence ids
    pooled: list[Pooled] = field(default_factory=list)
    num_pooled_rows: int = 0
    flags: int = 0  # of all choices
    num_padding_rows: int = 0  # of the rows, at their end: so that a step has one of few sizes

    @property
    def num_rows(self) -> int:
        return len(self.ids)

    @property
    def num_logit_rows(self) -> int:
        """S without those that are pooled: "rows of logits" are counted among these."""
        return len(self.sample_rows) - self.num_pooled_rows

    @property
    def samples_at_most_once(self) -> bool:
        """Whether no sequence is asked for more than its last row."""
        return not self.scored and not self.pooled

    @property
    def only_decodes(self) -> bool:
        """Whether every sequence has one row, and one token is chosen from each; nothing is scored or pooled."""
        return self.samples_at_most_once and len(self.ids) == len(self.table_slots) == len(self.choices) == len(
            self.sample_rows
        )

    def fixed(self) -> dict[str, array[int]]:
        """The sections whose lengths follow from T, B, S and R: sent first, so that they stay where they are.

        R's are the last of them: where the others lie does not follow from it.
        """
        return {
            "ids": self.ids,
            "source": self.source,
            "positions": self.positions,
            "kv_slots": self.kv_slots,
            "table_slots": self.table_slots,
            "query_starts": self.query_starts,
            "context_lens": self.context_lens,
            "sample_rows": self.sample_rows,
            **({"sampled_starts": self.sampled_starts} if len(self.sample_rows) < len(self.ids) else {}),
            "choice_slots": self.choice_slots,
            "choice_positions": self.choice_positions,
            "choice_rows": self.choice_rows,
        }

    def variable(self) -> dict[str, array[int]]:
        """The other sections."""
        found = {"told": array("q", self.told), "score_rows": self.score_rows, "score_ids": self.score_ids}
        if self.pooled:
            pooled = {row for each in self.pooled for row in range(each.rows.start, each.rows.stop)}
            found["logit_rows"] = array("q", (row for row in range(len(self.sample_rows)) if row not in pooled))
        return found


def build_step_arrays(
    batch: Batch, tables: SlotTables, limits: StepLimits, pending: Mapping[int, int], first_word: int
) -> StepArrays:
    """The batch's arrays; `tables` collects what has changed.

    `pending[sequence_id]` is the word of the device that holds the id sampled by the step before, `first_word` the
    word where this step's first id will lie. Raises ValueError for what cannot be computed.
    """
    step = StepArrays()
    tables.begin()
    for item in batch.items:
        slot, flags = tables.find(item.sequence_id, item.choice, item.sampling)
        tables.place(item.sequence_id, item.block_ids)
        _add_rows(step, item, limits, pending, first_word)
        step.table_slots.append(slot)
        step.query_starts.append(len(step.ids))
        step.context_lens.append(item.end)
        step.sample_rows.extend(range(len(step.ids) - item.num_last_rows, len(step.ids)))
        if item.pooling:
            end = len(step.sample_rows)
            step.pooled.append(Pooled(item, slice(end - item.num_last_rows, end)))
            step.num_pooled_rows += item.num_last_rows
        elif item.wants_prompt_logprobs:
            _add_scores(step, item, limits.vocab_size)
        step.sampled_starts.append(len(step.sample_rows))
        if item.wants_sample:
            _add_choice(step, item, item.sequence_id, item.choice, slot, flags, limits.vocab_size)
            for fork in item.forks:
                slot, flags = tables.find(fork.sequence_id, fork.choice, item.sampling)
                _add_choice(step, item, fork.sequence_id, fork.choice, slot, flags, limits.vocab_size)
    pad_slots(step, len(step.choices), tables.spare)
    return step


def pad_slots(step: StepArrays, num_rows: int, spare: int) -> None:
    """Wherever a part of the rows begins, `padded_rows` of it are there."""
    step.choice_slots.extend([spare] * (padded_rows(num_rows) + 4 - len(step.choice_slots)))


def _add_rows(
    step: StepArrays, item: ScheduledSequence, limits: StepLimits, pending: Mapping[int, int], first_word: int
) -> None:
    ids, start = item.token_ids, item.start
    if item.end > limits.max_model_len:
        raise ValueError(f"a sequence of {item.end} tokens is longer than {limits.max_model_len}")
    if len(ids) > 1:
        _check_ids(ids, limits.vocab_size)
        step.source.extend(range(first_word + len(step.ids), first_word + len(step.ids) + len(ids)))
        step.ids.extend(ids)
        step.positions.extend(range(start, start + len(ids)))
        extend_slots(step.kv_slots, item, limits.block_size)
        return
    (token,) = ids
    if token == PENDING:
        if item.sequence_id not in pending:
            raise ValueError(f"the step before samples no token of sequence {item.sequence_id}")
        step.source.append(pending[item.sequence_id])
        token = 0
    else:
        _check_ids(ids, limits.vocab_size)
        step.source.append(first_word + len(step.ids))
    step.ids.append(token)
    step.positions.append(start)
    index, offset = divmod(start, limits.block_size)
    step.kv_slots.append(item.block_ids[index] * limits.block_size + offset)


def _add_scores(step: StepArrays, item: ScheduledSequence, vocab_size: int) -> None:
    """The prompt's tokens that follow the item's rows."""
    _check_ids(item.prompt_token_ids[item.end : item.end + 1], vocab_size)
    step.scored.append(item.sequence_id)
    first = step.num_logit_rows - item.num_tokens
    count = max(0, min(item.end, item.num_prompt_tokens - 1) - item.start)
    step.score_rows.extend(range(first, first + count))
    step.score_ids.extend(item.prompt_token_ids[item.start + 1 : item.start + 1 + count])
    step.score_items += [item] * count


def _add_choice(  # noqa: PLR0917 - what a choice is
    step: StepArrays, item: ScheduledSequence, sequence_id: int, choice: int, slot: int, flags: int, vocab_size: int
) -> None:
    index, row = len(step.choices), step.num_logit_rows - 1
    step.choices.append(Choice(sequence_id, item.sampling.num_logprobs, item.sampling.logprob_token_ids))
    step.choice_slots.append(slot)
    step.choice_rows.append(row)
    step.choice_positions.append(item.end)
    step.flags |= flags & ~RULES
    if item.sampling.num_logprobs is not None:
        step.told.append(index)
    if flags & RULES or item.sampling.logprob_token_ids:
        rules = SampleRow.of(item, sequence_id, choice, row)
        error = id_error(rules, vocab_size)
        if error is not None:
            step.errors[index] = error
            step.choices[index] = step.choices[index]._replace(logprob_token_ids=())
        elif rules.has_rules:
            step.rules[index] = rules


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """A GPU answers an index out of range by ending the process, so it must not get that far."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        raise ValueError(f"a token id is outside the vocabulary of {vocab_size}")
