"""What requests demand of their outputs, for a step's rows: masks before a token is chosen, forced tokens after it.

Owns a follower for each choice that was seen lately. Promises: all of it follows from a row's output tokens, so that
choices which were preempted, resumed or batched differently get the same; whose grammar fails fails alone, and is never
free. Must not know: how tokens are chosen, the model, schedules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_engine.execution.constrained.follower import Follower, clear_bits, set_bits
from quire_engine.execution.constrained.grammars import Grammars
from quire_engine.execution.constrained.token_masks import Mask
from quire_engine.execution.constrained.vocabulary import GrammarError
from quire_engine.execution.logit_rules import SampleRow

_SPARE_FOLLOWERS = 16  # kept beside those of a step; who is preempted for longer is followed from the start again
MAX_FORCED = 7  # tokens that one step adds to the one it computed: with max_num_seqs rows the next step still has room


@dataclass(slots=True)
class Allowed:
    """What the constrained rows of a step may choose from: until the next one's are asked for, in the same memory."""

    bits: NDArray[np.int32]  # [n, whole words of 64 bits], a line for each of those rows in order; no mask: all are set
    masks: dict[int, Mask] = field(default_factory=dict)  # by the row's index; whoever has none may choose from all
    errors: dict[int, str] = field(default_factory=dict)  # by the row's index: why there is nothing to choose from

    def words(self, at: Collection[int], num_rows: int) -> Tensor:
        """[num_rows, words of 64 bits], as `KernelSet.greedy` takes them: those of the constrained rows at `at`."""
        words = self.bits.view(np.int64)
        if len(words) < num_rows:
            every = np.full((num_rows, words.shape[1]), -1, dtype=np.int64)
            every[list(at)] = words
            words = every
        return torch.from_numpy(words)


class Constraints:
    """For one runner, whose steps it sees in order."""

    def __init__(self, grammars: Grammars | None, *, max_forced: int = MAX_FORCED) -> None:
        self._grammars, self._max_forced = grammars, max_forced
        self._bits = np.empty(0, dtype=np.int32)
        self._followers: OrderedDict[tuple[int, int], Follower] = OrderedDict()  # least recently used first

    def allowed(self, rows: Sequence[SampleRow], vocab_size: int) -> Allowed:
        """The masks of those of `rows` that have one now; ids are below `vocab_size`."""
        constrained = [(i, row) for i, row in enumerate(rows) if row.is_constrained]
        bits = self._room(len(constrained), -(-vocab_size // 64) * 2)
        found = Allowed(bits)
        if not constrained:
            return found
        bits[:, -1] = 0  # where the vocabulary ends in the middle of a word
        # A step's own loop, for all that is done eight or a hundred times. To ask numpy anything for each row costs
        # more than most masks do, so the bits are written by their addresses and looked at as bytes.
        masks = bits[:, : -(-vocab_size // 32)]
        address, line, size = bits.ctypes.data, bits.strides[0], masks.shape[1] * masks.itemsize
        octets, at = bits.view(np.uint8).reshape(-1).data, 0
        for (i, row), mask in zip(constrained, masks, strict=True):
            try:
                follower = self._follower(row)
                if follower.fill(mask, address + at, size):
                    if row.sampling.grammar and not follower.ends_thinking:
                        self._set_ends(follower, row, octets[at : at + size], vocab_size)
                    found.masks[i] = mask
                else:
                    mask.fill(-1)
            except GrammarError as error:
                self._followers.pop(_key(row), None)
                found.errors[i] = str(error)
                mask.fill(0)
            at += line
        while len(self._followers) > len(rows) + _SPARE_FOLLOWERS:
            self._followers.popitem(last=False)
        return found

    def forced(self, row: SampleRow, token_id: int) -> tuple[int, ...]:
        """The tokens that must come behind `token_id`, the row's choice: nobody has to compute them.

        No more than the request may have; none where it asks for their log-probabilities, or forbids tokens itself.
        """
        sampling = row.sampling
        if token_id in row.stop.stop_token_ids:
            self._followers.pop(_key(row), None)
            return ()
        forbids = sampling.allowed_token_ids or sampling.banned_token_ids or sampling.banned_sequences
        if sampling.num_logprobs is not None or forbids:
            return ()
        forced: list[int] = []
        room = row.stop.max_new_tokens - (row.position - len(row.prompt_token_ids)) - 1
        try:
            follower = self._follower(row)
            follower.take_one(token_id)
            while len(forced) < min(room, self._max_forced):
                following = self._only(follower, row)
                if following is None:
                    break
                forced.append(following)
                if following in row.stop.stop_token_ids:
                    break
                follower.take_one(following)
        except GrammarError:
            # The step that has to choose the next token fails for the same reason, and says so.
            self._followers.pop(_key(row), None)
        return tuple(forced)

    def _follower(self, row: SampleRow) -> Follower:
        key, tokens = (row.sequence_id, row.choice), row.output_token_ids
        follower = self._followers.get(key)
        if follower is not None and follower.stands_behind(row.sampling, tokens):
            self._followers.move_to_end(key)
            return follower
        tokens = tuple(tokens)
        if follower is None or not follower.follows(row.sampling, tokens):
            follower = self._followers[key] = Follower(row.sampling, self._grammars)
        follower.take(tokens)
        self._followers.move_to_end(key)
        return follower

    def _room(self, num_rows: int, words: int) -> NDArray[np.int32]:
        """Memory for masks, kept: fresh pages for those of a large vocabulary cost as much as most masks."""
        if self._bits.size < num_rows * words:
            self._bits = np.empty(num_rows * words, dtype=np.int32)
        return self._bits[: num_rows * words].reshape(num_rows, words)

    def _set_ends(self, follower: Follower, row: SampleRow, octets: memoryview, vocab_size: int) -> None:
        """Where the grammar is complete any stop token may come; before `min_tokens` only if nothing else can."""
        wanted, told = row.stop.stop_token_ids, self._grammars.end_ids if self._grammars is not None else ()
        too_soon = row.num_output < row.sampling.min_tokens
        if told and not too_soon:
            num_told = 0
            for token in told:
                num_told += octets[token >> 3] >> (token & 7) & 1
            # A grammar that is complete allows every end, so that one that allows none is not.
            if not num_told or (num_told == len(told) and wanted == told):
                return
        ends = tuple([token for token in wanted if 0 <= token < vocab_size])
        if told != ends:
            clear_bits(octets, told)  # of those, only what the request stops at
        if too_soon:
            before = bytes(octets)
            clear_bits(octets, ends)
            if np.frombuffer(octets, dtype=np.uint8).any():
                return
            octets[:] = before
        if follower.may_end:
            set_bits(octets, ends)

    def _only(self, follower: Follower, row: SampleRow) -> int | None:
        forced = follower.forced
        if forced is None and len(row.stop.stop_token_ids) == 1 and follower.is_complete:
            return row.stop.stop_token_ids[0]
        return forced


def _key(row: SampleRow) -> tuple[int, int]:
    return row.sequence_id, row.choice
