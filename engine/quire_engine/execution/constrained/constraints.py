"""Constraints on a step's rows: token masks before a token is chosen, forced tokens after it.

Both follow from the row's output tokens alone: a choice that was preempted, resumed or batched differently gets the
same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from quire_engine.contract.batch import ScheduledSequence
from quire_engine.contract.types import SamplingParams, ThinkingParams
from quire_engine.execution.constrained.grammars import GrammarError, Grammars, Mask, first_line
from quire_engine.execution.logit_rules import SampleRow

_SPARE_FOLLOWERS = 16  # kept beside those of a step; a choice preempted for longer is parsed from its start again
_USED_UP = "too many states"  # in the library's error when the lexer's states, which outputs share, are used up
_LASTING_TOKENS = 32  # that an output must have grown by before it is followed anew again: what it costs is bounded
MAX_FORCED = 7  # tokens that one step adds to the one it computed: with max_num_seqs rows the next step still has room


@dataclass(slots=True)
class Allowed:
    """The token masks of a step's constrained rows, valid until the next step's are computed in the same memory."""

    bits: NDArray[np.int32]  # [n, whole words of 64 bits], a line for each of those rows in order; no mask: all are set
    masks: dict[int, Mask] = field(default_factory=dict)  # by the row's index; a row without one may choose any token
    errors: dict[int, str] = field(default_factory=dict)  # by the row's index: why its grammar cannot be followed

    def words(self, at: Collection[int], num_rows: int) -> Tensor:
        """[num_rows, words of 64 bits], as `KernelSet.greedy` takes them: those of the constrained rows at `at`."""
        words = self.bits.view(np.int64)
        if len(words) < num_rows:
            every = np.full((num_rows, words.shape[1]), -1, dtype=np.int64)
            every[list(at)] = words
            words = every
        return torch.from_numpy(words)


class Constraints:
    """The constraints on the rows of one runner, whose steps it sees in order."""

    def __init__(self, grammars: Grammars | None, *, max_forced: int = MAX_FORCED) -> None:
        self._grammars, self._max_forced = grammars, max_forced
        self._bits = np.empty(0, dtype=np.int32)
        self._followers: OrderedDict[tuple[int, int], Follower] = OrderedDict()  # least recently used first
        self._copy: tuple[tuple[int, int], Follower] | None = None  # the last that has taken drafts, and whose

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
                        if row.opener is not None:
                            clear_bits(octets[at : at + size], (row.opener,))
                        self._set_ends(follower, row, octets[at : at + size], vocab_size)
                    found.masks[i] = mask
                else:
                    mask.fill(-1)
            except GrammarError as error:
                self._forget(row)
                found.errors[i] = str(error)
                mask.fill(0)
            at += line
        while len(self._followers) > len(rows) + _SPARE_FOLLOWERS:
            self._followers.popitem(last=False)
        return found

    def possible(self, item: ScheduledSequence) -> int:
        """How many of the item's drafts, from the first on, its grammar allows."""
        drafts = item.token_ids[-item.num_drafts :]
        if not item.sampling.grammar:
            return len(drafts)
        try:
            return self._follower(SampleRow.of(item, item.sequence_id, item.choice, 0)).num_allowed(drafts)
        except GrammarError:
            return 0  # the row without drafts fails for the same reason, and says so

    def forced(self, row: SampleRow, token_id: int) -> tuple[int, ...]:
        """The tokens that must follow `token_id`, the row's choice; they need no forward pass.

        No more than the request's token limit leaves; none where it asks for log-probabilities or forbids tokens.
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
        if row.num_drafts:
            return self._follower_of_drafts(row)
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

    def _forget(self, row: SampleRow) -> None:
        """A follower has failed at this row: the copy that took its drafts, or the choice's own."""
        if row.num_drafts:
            self._copy = None
        else:
            self._followers.pop(_key(row), None)

    def _follower_of_drafts(self, row: SampleRow) -> Follower:
        """A copy that takes the drafts before the row, which the choice's own follower may never see."""
        key, tokens = _key(row), tuple(row.output_token_ids)
        if self._copy is None or self._copy[0] != key or not self._copy[1].follows(row.sampling, tokens):
            own = self._follower(row._replace(output_token_ids=tokens[: -row.num_drafts], num_drafts=0))
            self._copy = key, own.copy()
        follower = self._copy[1]
        follower.take(tokens)
        return follower

    def _room(self, num_rows: int, words: int) -> NDArray[np.int32]:
        """Memory for masks, kept: fresh pages for those of a large vocabulary cost as much as most masks."""
        if self._bits.size < num_rows * words:
            self._bits = np.empty(num_rows * words, dtype=np.int32)
        return self._bits[: num_rows * words].reshape(num_rows, words)

    def _set_ends(self, follower: Follower, row: SampleRow, octets: memoryview, vocab_size: int) -> None:
        """Allow stop tokens where the grammar is complete; before `min_tokens` only if nothing else can come."""
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


def set_bits(octets: memoryview, ids: tuple[int, ...]) -> None:
    """Allow ids that are within the vocabulary."""
    for token_id in ids:
        octets[token_id >> 3] |= 1 << (token_id & 7)


def clear_bits(octets: memoryview, ids: tuple[int, ...]) -> None:
    """Forbid ids that are within the vocabulary."""
    for token_id in ids:
        octets[token_id >> 3] &= 255 ^ (1 << (token_id & 7))


class Follower:
    """The state of one choice's output in its grammar and its thinking budget, and the tokens that may come next.

    The state follows from the output's tokens alone. A token that the grammar refuses, or a grammar that costs too
    much to follow, is a GrammarError. Where other outputs have used up the lexer that all of a grammar share, the
    output is followed anew with one of its own.
    """

    def __init__(self, sampling: SamplingParams, grammars: Grammars | None) -> None:
        """Raises GrammarError."""
        if sampling.grammar and grammars is None:
            raise GrammarError("this engine follows no grammars")
        self._sampling = sampling
        self._tokens: tuple[int, ...] = ()  # the tuple itself: the next step mostly passes the same object
        self._ahead: list[int] = []  # behind those, one by one
        self._thinking = None if sampling.thinking is None else Thinking(sampling.thinking)
        self._grammars = grammars
        self._renewed_at: int | None = None  # tokens of the output when it was followed anew
        self._matcher: LLMatcher | None = None
        if sampling.grammar and grammars is not None:
            self._matcher = grammars.matcher(sampling.grammar)

    def follows(self, sampling: SamplingParams, tokens: tuple[int, ...]) -> bool:
        """Whether the tokens seen so far are a prefix of these, under the same grammar and budget."""
        mine, known, ahead = self._sampling, self._tokens, self._ahead
        if mine is not sampling and (mine.grammar != sampling.grammar or mine.thinking != sampling.thinking):
            return False
        if known is tokens:
            return not ahead
        middle = len(known)
        if ahead and tokens[middle : middle + len(ahead)] != tuple(ahead):
            return False
        return tokens[:middle] == known

    def stands_behind(self, sampling: SamplingParams, tokens: Sequence[int]) -> bool:
        """Whether these are the very objects of the last call, so that nothing has to be compared."""
        return self._tokens is tokens and self._sampling is sampling and not self._ahead

    def take(self, tokens: tuple[int, ...]) -> None:
        """Advance to the end of these tokens, which it `follows`. Raises GrammarError."""
        taken = len(self._tokens) + len(self._ahead)
        if len(tokens) > taken:
            for at in range(taken, len(tokens)):
                if not self._push(tokens[at]):
                    self._follow_anew(tokens[:at])
                    self._consume(tokens[at])
        self._tokens = tokens
        if self._ahead:
            self._ahead = []

    def copy(self) -> Follower:
        """Another follower at the same place."""
        other = copy(self)
        other._ahead = [*self._ahead]
        other._thinking = deepcopy(self._thinking)
        if self._matcher is not None:
            other._matcher = self._matcher.deep_copy()
        return other

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these the grammar would take here, one after the other, from the first on."""
        if self._matcher is None:
            return len(tokens)
        return int(self._matcher.validate_tokens(list(tokens)))

    def take_one(self, token_id: int) -> None:
        """Advance by one token. Raises GrammarError."""
        if not self._push(token_id):
            self._follow_anew(self._seen())
            self._consume(token_id)
        self._ahead.append(token_id)

    @property
    def forced(self) -> int | None:
        """The only token that may come next, where that is known without a mask.

        Raises GrammarError.
        """
        forced = None if self._thinking is None else self._thinking.forced
        if self._matcher is None:
            return forced
        if forced is not None:
            self._check_allows(forced)
            return forced
        # The mask has the first of these alone. What follows depends on how it is written on from there.
        ahead = self._matcher.compute_ff_tokens()
        if self._matcher.is_error():
            self._follow_anew(self._seen())
            ahead = self._matcher.compute_ff_tokens()
            self._check()
        return ahead[0] if ahead else None

    @property
    def ends_thinking(self) -> bool:
        """Whether the spent thinking budget forces the next token."""
        return self._thinking is not None and self._thinking.forced is not None

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows nothing but the end of the text."""
        return self._matcher is not None and self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def may_end(self) -> bool:
        """Whether the output may end here. Without a grammar it always may."""
        return self._matcher is None or self._matcher.is_accepting()

    def fill(self, bits: Mask, address: int, size: int) -> bool:
        """Write one bit for each id that may come next, the ids that end a text among them. False if every id may.

        `address` is that of `bits`, `size` its bytes: asking numpy for them in every row costs more than most masks.

        Raises GrammarError.
        """
        forced = None if self._thinking is None else self._thinking.forced
        if forced is not None:
            if self._matcher is not None:
                self._check_allows(forced)
            bits.fill(0)
            set_bits(bits.view(np.uint8).data, (forced,))
            return True
        if self._matcher is None:
            return False
        self._matcher.unsafe_compute_mask_ptr(address, size)
        if self._matcher.is_error():
            self._follow_anew(self._seen())
            self._matcher.unsafe_compute_mask_ptr(address, size)
            self._check()
        return True

    def _seen(self) -> tuple[int, ...]:
        return (*self._tokens, *self._ahead)

    def _push(self, token_id: int) -> bool:
        """False: there was an error before the token, which is not taken. Raises GrammarError."""
        if self._thinking is not None:
            self._thinking.push(token_id)
        if self._matcher is None or self._matcher.consume_token(token_id):
            return True
        if not self._matcher.is_error():
            raise GrammarError(f"the grammar does not allow token {token_id}")
        return False

    def _consume(self, token_id: int) -> None:
        if self._matcher is not None and not self._matcher.consume_token(token_id):
            self._check()
            raise GrammarError(f"the grammar does not allow token {token_id}")

    def _follow_anew(self, tokens: tuple[int, ...]) -> None:
        """Follow the tokens with a new lexer if the old one is used up and not recent. Raises GrammarError."""
        is_early = self._renewed_at is not None and len(tokens) - self._renewed_at < _LASTING_TOKENS
        if self._grammars is None or self._matcher is None or is_early or _USED_UP not in self._matcher.get_error():
            self._check()
            return
        self._renewed_at = len(tokens)
        self._matcher = self._grammars.used_up(self._sampling.grammar)
        for token_id in tokens:
            self._consume(token_id)

    def _check(self) -> None:
        """Refuse a matcher with an error, after which nothing that it reports may be used. Raises GrammarError."""
        if self._matcher is not None and self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed any further: {first_line(self._matcher.get_error())}")

    def _check_allows(self, token_id: int) -> None:
        if self._matcher is not None and self._matcher.validate_tokens([token_id]) != 1:
            if self._matcher.is_error():
                self._follow_anew(self._seen())
                if self._matcher.validate_tokens([token_id]) == 1:
                    return
            self._check()
            raise GrammarError("the grammar does not allow thinking to end where its budget is spent")


class Thinking:
    """Counts one choice's thinking tokens, and forces the end of the thinking block when the budget is spent.

    The state follows from the tokens pushed, in order. The budget covers all thinking blocks of the choice together.
    """

    def __init__(self, params: ThinkingParams) -> None:
        self._params = params
        self._inside = params.is_open
        self._num_thought = 0  # tokens inside, those of a block's end included
        self._num_forced = 0  # of the end of this block
        self._tail: list[int] = []  # the last tokens, as many as a start or an end has
        self._longest = max(len(params.start_ids), len(params.end_ids))

    @property
    def forced(self) -> int | None:
        """The token that must come next; None: any may."""
        params = self._params
        if not self._inside or self._num_thought < params.max_tokens or not params.end_ids:
            return None
        return params.end_ids[self._num_forced % len(params.end_ids)]

    def push(self, token_id: int) -> None:
        """The next token of the output."""
        params, tail = self._params, self._tail
        tail.append(token_id)
        del tail[: -self._longest]
        if not self._inside:
            self._inside = _ends_with(tail, params.start_ids)
            return
        if self._num_thought < params.max_tokens:
            self._num_thought += 1
        else:
            self._num_forced += 1
        if _ends_with(tail, params.end_ids):
            self._inside = False
            self._num_forced = 0


def _ends_with(tail: list[int], ids: tuple[int, ...]) -> bool:
    return bool(ids) and tail[-len(ids) :] == list(ids)
