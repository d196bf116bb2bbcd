"""Drafts by a smaller model with the same tokens, which decodes a few of them greedily for all sequences at once.

The draft model has a KV pool of its own. It computes the tokens of a sequence when it guesses for it first, a bounded
number in each call, later only those that are new; of a rejected guess nothing stays but slots that are written again.
When the pool is full, the sequence that was guessed for longest ago gives up its blocks. Where a client predicts the
output, that goes first. Promises: a fault of the model
costs drafts, never a request; the same calls give the same guesses. Must not know: the scheduler.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from quire_engine.contract.batch import Batch, ScheduledSequence
from quire_engine.contract.drafts import NO_DRAFT, Draft, Wish
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.types import SamplingParams, StopParams
from quire_engine.execution.drafting.suffix import SuffixDrafter
from quire_engine.execution.models.options import read_json_object
from quire_engine.execution.runner import Runner
from quire_engine.gguf import typed_name

_log = logging.getLogger(__name__)
_CHUNK = 64  # tokens computed in the first round of a call, of all sequences: streams wait for them
_GREEDY, _STOP = SamplingParams(temperature=0.0), StopParams(max_new_tokens=1)


class ModelDrafter:
    """See `drafts.Drafter`."""

    is_costly = True

    def __init__(self, runner: Runner, *, num_blocks: int, block_size: int, max_model_len: int) -> None:
        """`runner` has the model and a pool of so many blocks; longer sequences than `max_model_len` have no drafts."""
        self._runner, self._block_size, self._max_model_len = runner, block_size, max_model_len
        self._free = list(range(num_blocks))
        self._held: OrderedDict[int, _Known] = OrderedDict()  # by sequence; last the one that was guessed for last
        self._predictions = SuffixDrafter()
        self._failed: set[int] = set()  # sequences whose guesses failed
        self._has_logged = False

    def warm_up(self) -> None:
        """Compute a few tokens, as the first call of a process takes many times as long as later ones."""
        self.draft([Wish(-1, (0,) * min(8, self._max_model_len - 1), 2)])
        self.forget(-1)

    def draft(self, wishes: Sequence[Wish]) -> list[Draft]:
        drafts: dict[int, Draft] = {}
        for wish in wishes:
            if wish.prediction and (predicted := self._predictions.guess(*wish)).is_predicted:
                drafts[wish.sequence_id] = predicted
        wanted = [wish for wish in wishes if wish.sequence_id not in drafts and wish.sequence_id not in self._failed]
        try:
            with torch.inference_mode():
                drafts |= {sequence_id: Draft(tuple(found)) for sequence_id, found in self._guess(wanted).items()}
        except Exception as error:  # whatever it is: the requests do without drafts
            for wish in wanted:
                self._fail(wish.sequence_id, str(error) or type(error).__name__)
        return [drafts.get(wish.sequence_id, NO_DRAFT) for wish in wishes]

    def note_end(self, token_ids: Sequence[int], scope: str) -> None:
        """The model learns nothing."""

    def forget(self, sequence_id: int) -> None:
        self._predictions.forget(sequence_id)
        self._failed.discard(sequence_id)
        if (known := self._held.pop(sequence_id, None)) is not None:
            self._free += known.block_ids

    def _guess(self, wishes: Sequence[Wish]) -> dict[int, list[int]]:
        """The guesses by sequence; none of those whose own tokens are not all computed yet."""
        slices, most = self._first_slices(wishes)
        found: dict[int, list[int]] = {sequence_id: [] for sequence_id in most}
        while slices:
            sampled, slices = self._step(slices, most), {}
            for sequence_id, token in sampled.items():
                found[sequence_id].append(token)
                if len(found[sequence_id]) < most[sequence_id]:
                    slices[sequence_id] = (token,)
        return {sequence_id: tokens for sequence_id, tokens in found.items() if tokens}

    def _first_slices(self, wishes: Sequence[Wish]) -> tuple[dict[int, tuple[int, ...]], dict[int, int]]:
        """The tokens to compute of each sequence, and how many to guess behind those that are then complete."""
        slices: dict[int, tuple[int, ...]] = {}
        most: dict[int, int] = {}
        asked = {wish.sequence_id for wish in wishes}
        left = _CHUNK
        lacking: list[tuple[int, Wish]] = []
        for wish in wishes:
            known = self._held.setdefault(wish.sequence_id, _Known())
            self._held.move_to_end(wish.sequence_id)
            known.keep_common(wish.token_ids)
            lacking.append((len(wish.token_ids) - len(known.token_ids), wish))
        for num_lacking, wish in sorted(lacking, key=lambda each: each[0]):  # those that can guess at once first
            room = min(wish.most, self._max_model_len - len(wish.token_ids) + 1)
            known, count = self._held[wish.sequence_id], min(num_lacking, left)
            if room <= 0 or count <= 0 or not self._reserve(known, len(wish.token_ids) + room - 1, asked):
                continue
            start, left = len(known.token_ids), left - count
            slices[wish.sequence_id] = tuple(wish.token_ids[start : start + count])
            if count == num_lacking:
                most[wish.sequence_id] = room
        return slices, most

    def _reserve(self, known: _Known, num_tokens: int, asked: Collection[int]) -> bool:
        """Whether there are blocks for so many tokens, also those of sequences that are not asked for now."""
        needed = -(-num_tokens // self._block_size) - len(known.block_ids)
        while needed > len(self._free):
            idle = next((i for i, other in self._held.items() if i not in asked and other.block_ids), None)
            if idle is None:
                return False
            self._free += self._held.pop(idle).block_ids
        if needed > 0:
            known.block_ids += tuple(self._free.pop() for _ in range(needed))
        return True

    def _step(self, slices: Mapping[int, tuple[int, ...]], most: Collection[int]) -> dict[int, int]:
        """Compute these tokens; the next ones of the sequences in `most`, which have all of theirs then."""
        items = tuple(self._item(i, token_ids, wants_sample=i in most) for i, token_ids in slices.items())
        result = self._runner.begin(Batch(step_id=0, items=items, num_tokens=sum(map(len, slices.values())))).result()
        sampled = {}
        for sequence_id, token_ids in slices.items():
            self._held[sequence_id].token_ids.extend(token_ids)
            if sequence_id in most:
                (sample,) = result.samples[sequence_id]
                if sample.error is None:
                    sampled[sequence_id] = sample.token_id
                else:
                    self._fail(sequence_id, sample.error)
        return sampled

    def _item(self, sequence_id: int, token_ids: tuple[int, ...], *, wants_sample: bool) -> ScheduledSequence:
        known = self._held[sequence_id]
        return ScheduledSequence(
            sequence_id=sequence_id,
            choice=0,
            prompt_token_ids=(),
            output_token_ids=(),
            token_ids=token_ids,
            start=len(known.token_ids),
            block_ids=known.block_ids,
            wants_sample=wants_sample,
            wants_prompt_logprobs=False,
            forks=(),
            sampling=_GREEDY,
            stop=_STOP,
        )

    def _fail(self, sequence_id: int, reason: str) -> None:
        """Guess no more for the sequence. The log has one line, of the first fault."""
        self.forget(sequence_id)
        self._failed.add(sequence_id)
        if not self._has_logged:
            _log.warning("the draft model failed, and requests where it does go on without guesses: %s", reason)
        self._has_logged = True


@dataclass(slots=True)
class _Known:
    """The tokens of a sequence whose keys and values are in the pool, guesses among them."""

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    num_own: int = 0  # tokens that were the sequence's own when it was last looked at
    block_ids: tuple[int, ...] = ()

    def keep_common(self, token_ids: Sequence[int]) -> None:
        """Keep the tokens that the sequence has too, but its last one, which is computed anew for what follows it."""
        known, count = self.token_ids, self.num_own
        if count and (count > len(token_ids) or known[count - 1] != token_ids[count - 1]):
            count = 0  # another sequence
        most = min(len(known), len(token_ids) - 1)
        while count < most and known[count] == token_ids[count]:
            count += 1
        self.num_own = min(count, most)
        del known[self.num_own :]


def check_same_tokens(tokenizer: Path, other: Path, vocab_sizes: tuple[int, int]) -> None:
    """Raise ConfigError unless the folders' tokenizers have the same ids; without them the models' widths must agree.

    With the same tokenizer widths may differ: models of one family are padded to different ones.
    """
    ours, theirs = _token_ids(tokenizer), _token_ids(other)
    if ours is None and theirs is None:
        if vocab_sizes[0] != vocab_sizes[1]:
            raise ConfigError(
                f"it has {vocab_sizes[1]} tokens and the model {vocab_sizes[0]}; use a model of its family"
            )
    elif ours is None or theirs is None:
        raise ConfigError(
            f"{typed_name(tokenizer if ours is None else other)} has no tokenizer.json to compare the tokens by"
        )
    elif ours != theirs:
        token = next(token for token in (*ours, *theirs) if ours.get(token) != theirs.get(token))
        raise ConfigError(
            f"its tokenizer differs: {token[:40]!r} is {theirs.get(token, 'no token')} there and"
            f" {ours.get(token, 'no token')} in the model's; use a model of its family"
        )


def _token_ids(folder: Path) -> dict[str, int] | None:
    """The ids of the tokens in the folder's tokenizer.json; None where there is none. Raises ModelLoadError."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return None
    described = read_json_object(file)
    model, added = described.get("model"), described.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = {str(token): number for token, number in vocab.items()} if isinstance(vocab, dict) else {}
    if isinstance(vocab, list):  # pieces with their scores, in order
        ids = {str(piece[0]): number for number, piece in enumerate(vocab) if isinstance(piece, list) and piece}
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict):
            ids[str(token.get("content"))] = token.get("id")
    return ids
