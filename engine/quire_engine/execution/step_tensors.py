"""The record of a step that every executor works from: which rows it computes and what is asked of them.

Promises: `step_tensors` follows from the batch alone; token ids are checked before a tensor is made of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from quire_engine.contract.batch import PENDING, Batch, ScheduledSequence
from quire_engine.contract.decodes import BatchInColumns, Decodes
from quire_engine.execution.logit_rules import SampleRow, draws, id_error, may_have_rules


def _wide() -> array[int]:
    return array("q")


class Pooled(NamedTuple):
    """Rows of a prompt whose vector is wanted, which need no logits."""

    item: ScheduledSequence
    rows: slice  # of the sample rows


@dataclass(slots=True)
class StepTensors:
    """A step of T rows, B sequences and S sample rows in the order of the batch, as arrays of the host.

    Decodes in columns come first, and are not among the `items`.

    With rows apart each row of a decode with drafts counts as a sequence in the arrays of those, with the same blocks.

    Sample rows are the rows that are needed behind the last layer. Those of a prompt that is pooled end in a sum; the
    others are the rows of logits, among which `choices` and `score_rows` count.
    """

    items: tuple[ScheduledSequence, ...] = ()  # [B], without columns
    decodes: Decodes | None = None
    released: tuple[int, ...] = ()  # sequences that need nothing any more of what the model keeps for them
    # Of the rows.
    ids: array[int] = field(default_factory=_wide)  # [T]; 0 where the token is pending
    pending: dict[int, int] = field(default_factory=dict)  # by row: the sequence whose token the step before samples
    positions: array[int] = field(default_factory=_wide)  # [T]
    kv_slots: array[int] = field(default_factory=_wide)  # [T], block_id * block_size + offset
    other_slots: tuple[array[int], ...] = ()  # [T] each, of the pool's groups of layers after the first
    sample_rows: array[int] = field(default_factory=_wide)  # [S], ascending
    adapters: list[str] = field(default_factory=list)  # digests, each once
    adapter_slots: array[int] = field(default_factory=lambda: array("i"))  # [T] with adapters: each row's, or -1
    # Of the sequences.
    query_starts: array[int] = field(default_factory=lambda: array("i", [0]))  # [B + 1]
    sampled_starts: array[int] = field(default_factory=lambda: array("i", [0]))  # [B + 1], of the sample rows alone
    context_lens: array[int] = field(default_factory=lambda: array("i"))  # [B], tokens present after this step
    # Of the tokens to choose.
    choices: list[SampleRow] = field(default_factory=list)
    choice_rows: array[int] = field(default_factory=_wide)  # their rows of logits, ascending
    rules: dict[int, SampleRow] = field(default_factory=dict)  # by index of the choice: those that change their logits
    errors: dict[int, str] = field(default_factory=dict)  # by index of the choice: why its rules cannot apply
    draws: bool = False  # whether some token is drawn, not the maximum
    told: list[int] = field(default_factory=list)  # choices whose log-probabilities are asked for
    drafted: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by index of a decode's choice: its drafts
    # Of the prompts' next tokens to score.
    score_rows: array[int] = field(default_factory=_wide)  # rows of logits, ascending
    score_ids: array[int] = field(default_factory=_wide)
    score_items: list[ScheduledSequence] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)  # sequence ids
    # Of the prompts to pool.
    pooled: list[Pooled] = field(default_factory=list)
    num_pooled_rows: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.ids)

    @property
    def num_decodes(self) -> int:
        """Rows of columns."""
        return 0 if self.decodes is None else len(self.decodes)

    @property
    def num_logit_rows(self) -> int:
        return len(self.sample_rows) - self.num_pooled_rows

    @property
    def samples_at_most_once(self) -> bool:
        """Whether no sequence is asked for more than its last row."""
        return not self.scored and not self.pooled

    def add_choice(self, row: SampleRow, vocab_size: int) -> None:
        """Choose one more token. An id outside the vocabulary in the rules of the row becomes its error."""
        index, sampling = len(self.choices), row.sampling
        self.choices.append(row)
        self.choice_rows.append(row.logits_row)
        if draws(sampling):
            self.draws = True
        if sampling.num_logprobs is not None:
            self.told.append(index)
        if may_have_rules(sampling) or sampling.logprob_token_ids:
            error = id_error(row, vocab_size)
            if error is not None:
                self.errors[index] = error
            elif row.has_rules:
                self.rules[index] = row

    def add_score(self, item: ScheduledSequence, logits_row: int, token_id: int) -> None:
        """Score one more token of a prompt."""
        self.score_rows.append(logits_row)
        self.score_ids.append(token_id)
        self.score_items.append(item)

    def asked(self) -> dict[str, array[int]]:
        """The arrays that `finishing` takes as tensors, by name."""
        found = {"told": array("q", self.told), "score_rows": self.score_rows, "score_ids": self.score_ids}
        if self.pooled:
            pooled = {row for each in self.pooled for row in range(each.rows.start, each.rows.stop)}
            found["logit_rows"] = array("q", (row for row in range(len(self.sample_rows)) if row not in pooled))
        return found


CheckDrafts = Callable[[ScheduledSequence], int]  # how many drafts of an item, from the first on, may be right


def step_tensors(
    batch: Batch,
    block_size: int,
    vocab_size: int,
    check_drafts: CheckDrafts | None = None,
    *,
    rows_apart: bool = False,
) -> StepTensors:
    """The record of a batch's step. Drafts that cannot be right are left out: those outside the vocabulary, those
    that `check_drafts` knows of, and all behind them. `rows_apart`: see `StepTensors`.

    An item that wants prompt log-probabilities, or is pooled whole, has a sample row for every row of its slice, else
    one that wants a sample or is pooled at its end has its last row, else none. Raises ValueError for a token id
    outside the vocabulary: a GPU answers an index out of range by ending the process.
    """
    items = batch.others
    others = items[0].other_block_ids if items else ()
    if batch.num_drafts:
        items = tuple([_with_possible_drafts(item, vocab_size, check_drafts) for item in items])
    step = StepTensors(items=items, released=batch.released, other_slots=tuple(_wide() for _ in others))
    _add_decodes(step, batch, block_size, vocab_size)
    for item in items:
        start, num_tokens = item.start, len(item.token_ids)
        if num_tokens == 1:  # a decode: most items of most steps
            _add_row(step, item, start, block_size, vocab_size)
        else:
            _add_rows(step, item, block_size, vocab_size)
        end, count = len(step.ids), item.num_last_rows
        if rows_apart and item.num_drafts:
            _set_apart(step, start, num_tokens)
        step.query_starts.append(end)
        step.context_lens.append(start + num_tokens)
        if count == 1:
            step.sample_rows.append(end - 1)
        elif count:
            step.sample_rows.extend(range(end - count, end))
        last = len(step.sample_rows)
        step.sampled_starts.append(last)
        if item.pooling:
            step.pooled.append(Pooled(item, slice(last - count, last)))
            step.num_pooled_rows += count
        elif item.wants_prompt_logprobs:
            _add_scores(step, item, vocab_size)
        if item.num_drafts:
            _add_drafted(step, item, last - step.num_pooled_rows - count, vocab_size)
        elif item.wants_sample:
            row = last - step.num_pooled_rows - 1
            step.add_choice(SampleRow.of(item, item.sequence_id, item.choice, row), vocab_size)
            for fork in item.forks:
                step.add_choice(SampleRow.of(item, fork.sequence_id, fork.choice, row), vocab_size)
    _add_adapters(step)
    return step


def _add_decodes(step: StepTensors, batch: Batch, block_size: int, vocab_size: int) -> None:
    """The first rows of a step are those in columns: a decode each, whose token is chosen by no rules."""
    if not isinstance(batch, BatchInColumns):
        return
    step.decodes = decodes = batch.decodes
    count = len(decodes)
    ids, ends = decodes.token_ids, decodes.positions + 1
    if int(ids.max()) >= vocab_size or int(ids.min()) < 0:
        for row, token in enumerate(ids.tolist()):
            if token == PENDING:
                step.pending[row] = decodes.rows[row].sequence_id
            elif not 0 <= token < vocab_size:
                raise _outside(vocab_size)
        ids = ids.clip(0)
    step.ids.frombytes(ids.tobytes())
    step.positions.frombytes(decodes.positions.tobytes())
    step.kv_slots.frombytes(decodes.kv_slots(block_size).tobytes())
    step.context_lens.frombytes(ends.astype("i").tobytes())
    step.query_starts.extend(range(1, count + 1))
    step.sampled_starts.extend(range(1, count + 1))
    step.sample_rows.extend(range(count))
    step.choice_rows.extend(range(count))
    places = zip(decodes.rows, ends.tolist(), range(count), strict=True)
    step.choices.extend(
        [
            SampleRow(row.sampling, row.stop, row.choice, row.prompt_token_ids, (), end, at, row.sequence_id)
            for row, end, at in places
        ]
    )
    if decodes.draws:
        step.draws = any(draws(row.sampling) for row in decodes.rows)


def _add_row(step: StepTensors, item: ScheduledSequence, start: int, block_size: int, vocab_size: int) -> None:
    (token,) = item.token_ids
    if not 0 <= token < vocab_size:
        if token != PENDING:
            raise _outside(vocab_size)
        step.pending[len(step.ids)] = item.sequence_id
        token = 0
    step.ids.append(token)
    step.positions.append(start)
    index, offset = divmod(start, block_size)
    step.kv_slots.append(item.block_ids[index] * block_size + offset)
    for slots, block_ids in zip(step.other_slots, item.other_block_ids, strict=True):
        slots.append(block_ids[index] * block_size + offset)


def _add_rows(step: StepTensors, item: ScheduledSequence, block_size: int, vocab_size: int) -> None:
    ids, start, end = item.token_ids, item.start, item.end
    _check_ids(ids, vocab_size)
    step.ids.extend(ids)
    step.positions.extend(range(start, end))
    for index in range(start // block_size, -(-end // block_size)):
        low = max(start - index * block_size, 0)
        high = min(end - index * block_size, block_size)
        base = item.block_ids[index] * block_size
        step.kv_slots.extend(range(base + low, base + high))
        for slots, block_ids in zip(step.other_slots, item.other_block_ids, strict=True):
            base = block_ids[index] * block_size
            slots.extend(range(base + low, base + high))


def _add_adapters(step: StepTensors) -> None:
    step.adapters = list(dict.fromkeys([item.adapter for item in step.items if item.adapter]))
    if step.adapters:
        step.adapter_slots.extend((-1,) * step.num_decodes)
        for item in step.items:
            slot = step.adapters.index(item.adapter) if item.adapter else -1
            step.adapter_slots.extend((slot,) * len(item.token_ids))


def _set_apart(step: StepTensors, start: int, num_tokens: int) -> None:
    """All rows of a decode with drafts but the last one, each as a sequence that ends with it."""
    first, sampled = step.query_starts[-1], step.sampled_starts[-1]
    step.query_starts.extend(range(first + 1, first + num_tokens))
    step.context_lens.extend(range(start + 1, start + num_tokens))
    step.sampled_starts.extend(range(sampled + 1, sampled + num_tokens))


def _with_possible_drafts(
    item: ScheduledSequence, vocab_size: int, check_drafts: CheckDrafts | None
) -> ScheduledSequence:
    """The item without the drafts that cannot be right, which are no fault of its request."""
    drafts = item.token_ids[len(item.token_ids) - item.num_drafts :]
    count = next((at for at, token in enumerate(drafts) if not 0 <= token < vocab_size), len(drafts))
    if count and check_drafts is not None:
        count = min(count, check_drafts(item))
    if count == len(drafts):
        return item
    return replace(item, token_ids=item.token_ids[: len(item.token_ids) - len(drafts) + count], num_drafts=count)


def _add_drafted(step: StepTensors, item: ScheduledSequence, first: int, vocab_size: int) -> None:
    """A choice for each row of a decode and its drafts, as if the drafts before it were true."""
    drafts = item.token_ids[1:]
    step.drafted[len(step.choices)] = drafts
    row = SampleRow.of(item, item.sequence_id, item.choice, first)._replace(position=item.start + 1)
    for count in range(len(drafts) + 1):
        step.add_choice(row.behind(drafts[:count]), vocab_size)


def _add_scores(step: StepTensors, item: ScheduledSequence, vocab_size: int) -> None:
    """The prompt's tokens that follow the item's rows."""
    _check_ids(item.prompt_token_ids[item.end : item.end + 1], vocab_size)
    step.scored.append(item.sequence_id)
    first = step.num_logit_rows - item.num_tokens
    for i in range(min(item.end, item.num_prompt_tokens - 1) - item.start):
        step.add_score(item, first + i, item.prompt_token_ids[item.start + i + 1])


def _check_ids(ids: tuple[int, ...], vocab_size: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        raise _outside(vocab_size)


def _outside(vocab_size: int) -> ValueError:
    return ValueError(f"a token id is outside the vocabulary of {vocab_size}")
