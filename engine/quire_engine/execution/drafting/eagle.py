"""Drafts by an EAGLE-3 head: from the model's own hidden rows, which it sees as they are computed.

The head has a KV pool of its own, by its own count of positions: the rows of a cached prefix are not computed, so a
sequence begins where it is first seen. Rows of prompts go into the pool at once, those of decodes when guesses are
wanted; what the model computed for rejected drafts is dropped. Promises: the model's bits are what they are without; a
fault costs drafts, never a request. Must not know: the scheduler.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from quire_engine.batch import Batch, ScheduledSequence
from quire_engine.drafts import MOST_DRAFTS, Wish
from quire_engine.execution.drafting.eagle_head import EagleHead
from quire_engine.execution.drafting.model import PooledDrafter
from quire_engine.execution.model_input import ModelInput, model_input
from quire_engine.execution.models.decoder import Decoder
from quire_engine.execution.models.served import ModelFacts
from quire_engine.execution.step_tensors import step_tensors
from quire_engine.types import SamplingParams, StopParams
from quire_kernels.kernel_set import ChoiceRows

_MOST_PENDING = 64  # rows of a sequence that are kept until a guess is wanted
_GREEDY, _STOP = SamplingParams(temperature=0.0), StopParams(max_new_tokens=1)
_CPU = torch.device("cpu")


@dataclass(slots=True)
class _Seen:
    """A sequence from the first row on that the head has seen. Positions count from there."""

    first: int  # its position in the sequence
    num_done: int = 0  # positions in the pool, with tokens that are the sequence's own
    ids: list[int] = field(default_factory=list)  # the tokens of the rows behind those
    rows: list[Tensor] = field(default_factory=list)  # [n, 3H] each: the rows
    block_ids: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The position in the sequence behind the last row."""
        return self.first + self.num_done + len(self.ids)

    def cut(self, end: int) -> None:
        """Drop the rows from this position on, which is no earlier than what is done."""
        count = end - self.first - self.num_done
        if count < len(self.ids):
            rows = torch.cat(self.rows)[:count]
            self.ids, self.rows = self.ids[:count], [rows] if count else []

    def take(self, count: int) -> Tensor:
        """Remove the first rows, [count, 3H]: they go into the pool."""
        rows = torch.cat(self.rows)
        self.ids = self.ids[count:]
        self.rows = [rows[count:].clone()] if self.ids else []
        self.num_done += count
        return rows[:count]


class _Work(NamedTuple):
    """Rows of one sequence to compute: the token behind each, the first one's position in the pool, the rows."""

    token_ids: tuple[int, ...]
    start: int
    joined: Tensor  # [n, H]


class EagleDrafter(PooledDrafter[_Seen]):
    """See `drafts.Drafter`."""

    def __init__(
        self, head: EagleHead, kv: Tensor, *, num_blocks: int, block_size: int, max_model_len: int, vocab_size: int
    ) -> None:
        """`kv`: the head's pool, of so many blocks."""
        super().__init__(num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len)
        self._head, self._kv, self._vocab_size = head, kv, vocab_size

    def observe(self, step: ModelInput, entered: Tensor) -> None:
        """The model has computed a step: its rows as they entered three layers, [T, 3H]. Raises nothing."""
        for sequence_id in step.released:
            self.forget(sequence_id)
        try:
            self._observe(step, entered)
        except Exception as error:  # whatever it is: the requests do without drafts
            for sequence_id in step.sequence_ids:
                self._fail(sequence_id, str(error) or type(error).__name__)

    def _observe(self, step: ModelInput, entered: Tensor) -> None:
        ids, due, at = step.input_ids.tolist(), dict[int, int](), 0
        for sequence_id, kv_len, count in zip(step.sequence_ids, step.kv_lens, step.query_lens, strict=True):
            rows, start = slice(at, at + count), kv_len - count
            at += count
            if sequence_id in self._failed or not count:
                continue
            seen = self._held.get(sequence_id)
            if seen is None or not seen.first + seen.num_done <= start <= seen.end:
                self.forget(sequence_id)
                seen = self._held[sequence_id] = _Seen(start)
            seen.cut(start)
            num_certain = len(seen.ids) if count <= 1 + MOST_DRAFTS else len(seen.ids) + count - 1
            seen.ids += ids[rows]
            seen.rows.append(entered[rows].clone())
            if len(seen.ids) > _MOST_PENDING:
                due[sequence_id] = num_certain
        self._ingest(due)

    def _ingest(self, due: Mapping[int, int]) -> None:
        """Put the first rows of some sequences into the pool; each has the token of the row behind it."""
        work: dict[int, _Work] = {}
        for sequence_id, count in due.items():
            seen = self._held[sequence_id]
            if seen.num_done + count > self._max_model_len or not self._reserve(seen, seen.num_done + count, due):
                self.forget(sequence_id)
                continue
            tokens, start = tuple(seen.ids[1 : count + 1]), seen.num_done
            work[sequence_id] = _Work(tokens, start, self._head.joined(seen.take(count)))
        if work:
            self._compute(work, wanted=())

    def _guess(self, wishes: Sequence[Wish]) -> dict[int, list[int]]:
        work: dict[int, _Work] = {}
        most: dict[int, int] = {}
        asked = {wish.sequence_id for wish in wishes}
        for wish in wishes:
            seen, tokens = self._held.get(wish.sequence_id), wish.token_ids
            if seen is None:
                continue
            self._held.move_to_end(wish.sequence_id)
            first, count = seen.first + seen.num_done, len(tokens) - 1 - seen.first - seen.num_done
            if not 0 < count <= len(seen.ids) or list(tokens[first : first + count]) != seen.ids[:count]:
                continue
            room = min(wish.most, self._max_model_len - seen.num_done - count + 1)
            if room <= 0 or not self._reserve(seen, seen.num_done + count + room - 1, asked):
                continue
            seen.cut(first + count)
            behind = tuple(tokens[first + 1 : first + 1 + count])
            work[wish.sequence_id] = _Work(behind, seen.num_done, self._head.joined(seen.take(count)))
            most[wish.sequence_id] = room
        found: dict[int, list[int]] = {sequence_id: [] for sequence_id in work}
        while work:
            hidden = self._compute(work, wanted=work)
            before, work = work, {}
            for i, (sequence_id, token) in enumerate(zip(before, self._head.guess(hidden), strict=True)):
                found[sequence_id].append(token)
                if len(found[sequence_id]) < most[sequence_id]:
                    done = before[sequence_id]
                    work[sequence_id] = _Work((token,), done.start + len(done.token_ids), hidden[i : i + 1])
        return found

    def _compute(self, work: Mapping[int, _Work], wanted: Collection[int]) -> Tensor:
        """[S, H] of the last rows of the sequences that are wanted."""
        items = tuple([self._item(i, each, wants_sample=i in wanted) for i, each in work.items()])
        batch = Batch(step_id=0, items=items, num_tokens=sum(len(each.token_ids) for each in work.values()))
        step = model_input(step_tensors(batch, self._block_size, self._vocab_size), self._block_size, _CPU)
        return self._head.forward(step, torch.cat([each.joined for each in work.values()]), self._kv)

    def _item(self, sequence_id: int, work: _Work, *, wants_sample: bool) -> ScheduledSequence:
        return ScheduledSequence(
            sequence_id=sequence_id,
            choice=0,
            prompt_token_ids=(),
            output_token_ids=(),
            token_ids=work.token_ids,
            start=work.start,
            block_ids=self._held[sequence_id].block_ids,
            wants_sample=wants_sample,
            wants_prompt_logprobs=False,
            forks=(),
            sampling=_GREEDY,
            stop=_STOP,
        )


class Watched:
    """See `ServedModel`: a model whose rows a drafter sees."""

    def __init__(self, model: Decoder, layers: Sequence[int], drafter: EagleDrafter) -> None:
        """`layers`: those whose input is seen."""
        self._model, self._drafter = model, drafter
        self._forward = model.keeping(layers)

    @property
    def config(self) -> ModelFacts:
        return self._model.config

    @property
    def chains_decodes(self) -> bool:
        return self._model.chains_decodes

    @property
    def packed_bytes(self) -> int | None:
        return self._model.packed_bytes

    def forward(self, step: ModelInput, kv: Tensor) -> Tensor:
        hidden, entered = self._forward(step, kv)
        self._drafter.observe(step, entered)
        return hidden

    def normed(self, hidden: Tensor) -> Tensor:
        return self._model.normed(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def greedy(self, hidden: Tensor, allowed: Tensor | None = None) -> tuple[list[int], list[bool]] | None:
        return self._model.greedy(hidden, allowed)

    def choose(self, logits: Tensor, rows: ChoiceRows) -> tuple[Tensor, Tensor, Tensor]:
        return self._model.choose(logits, rows)
