"""What the step log tells: plain values, one `StepRecord` a step, one `RequestEvent` for what came from outside.

Tokens are counted and never told, nor anything that could be tried against texts.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from secrets import token_bytes
from typing import Any, Literal

from quire_engine.scheduling.step_plan import Decision
from quire_engine.types import FinishReason

FORMAT = 2
EventKind = Literal["submit", "abort", "fail", "expire", "hold", "release", "end", "reset"]
# A whole slice, what was to be sampled of it, or the device had no memory for it.
FailedPart = Literal["slice", "sample", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step: its plan, why it is as it is, and what came of it.

    The log as JSON lines, which `quire trace --json` writes and a replay reads:

        {"kind": "config", "format": 2, "config": {SchedulerConfig}, "first_step": n, "restored_blocks": n}  once, first
        {"kind": "submit" | "abort" | "fail" | "expire" | "hold" | "release" | "end" | "reset", ...a RequestEvent}
        {"kind": "step", ...the fields of StepRecord}

    Every call that changes the scheduler's state has an ordinal, in the order of the calls: an event has one, a step
    two: of its plan (`ordinal`) and of the application of its result (`applied_ordinal`), between which another step
    may have been planned. Lines come in the order of `ordinal`, and no ordinal is missing in a log that is whole. A log
    that begins with step 1 has every input of the plans, but for `restored_blocks` whose contents were on disk from an
    earlier run.

        plan     at the time `planned_at`, for the policies that measure.
        apply    at the time `applied_at`. Each sequence with `wants_sample` in the step gets one token, or as many as
                 `forced` says; who ends by it is in `ends`, after so many tokens of output in all, and what could not
                 be computed in `failed`. A beam search whose beams all came a token further is in `beams`.
    """

    step_id: int
    ordinal: int
    planned_at: float  # seconds on the engine's clock
    applied_at: float | None  # None: not computed yet
    applied_ordinal: int | None
    seconds: float  # from its beginning to its result; 0: not known yet, or nothing was to be computed
    slices: tuple[tuple[str, int, int, int], ...]  # (request_id, choice, start, num_tokens), in the batch's order
    prefill_tokens: int
    decode_tokens: int
    copies: tuple[tuple[int, int], ...]  # (source block, target block)
    swaps: tuple[int, int] = (0, 0)  # blocks copied to the host's memory, blocks copied from it
    decisions: tuple[Decision, ...]
    running: int  # sequences, after the plan
    waiting: int  # requests, after the plan
    blocks_used: int  # after the plan
    ends: tuple[tuple[str, int, FinishReason, int], ...]  # (request_id, choice, why, tokens of output)
    forced: tuple[tuple[str, int, int], ...]  # (request_id, choice, tokens) where one step brought several
    starved: tuple[str, ...]  # requests that were preempted because the device had no memory for them
    failed: tuple[tuple[str, int, FailedPart], ...]  # (request_id, choice, what)
    beams: tuple[tuple[str, tuple[int, ...]], ...]  # (request_id, for each sequence whose beam it continues)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEvent:
    """Something about one request, or about all, that is not a plan's decision. By `kind`:

        submit   `request` has what was asked in numbers; its prompt is a content.
        end      a content: the prompt with what a choice said until its end. Of a search one for each beam that is
                 given up, in their order, and one for each that is left at its end; in between a sequence follows one
                 beam.
        hold     nobody takes the request's tokens: it is set aside until its `release`.
        abort    the client has left. `fail`: the request ends with an error that no step has made. `expire`: its
                 deadline has passed, at the time `at`; with several at one time the first call ends all.
        reset    the operator has emptied the prefix cache; of no request.

    A content is the tokens of a submit or an end, `num_tokens` of them. `shared` names by its ordinal another content
    that came before, and how many tokens both begin with; no other has more in common with it, and with every other it
    has in common what the named one has, up to that number. Who makes up tokens in this order has equal beginnings just
    where they were equal. The engine compares with the last four contents for each step of its log, at most 16,384,
    less where they exceed 8 KiB a step or 32 MiB: of those before `complete_from` some may begin more alike than is
    told. What was said by requests that live when the log ends is not told; nor is any content without a prefix cache,
    where no plan follows from it.
    """

    kind: EventKind
    ordinal: int
    after_step: int  # the last step that was planned before
    at: float
    request_id: str
    choice: int = 0  # of an end; of a search the sequence
    request: dict[str, Any] = field(default_factory=dict)  # of a submission
    num_tokens: int = 0  # of a content
    shared: tuple[int, int] = (0, 0)  # (the ordinal of another content, the tokens that both begin with)
    complete_from: int = 0  # the first ordinal of those that it was surely compared with


MOST_BYTES = 32 << 20  # about eight million tokens
MOST_CONTENTS = 16384  # of which a list is shifted when one comes or goes
BYTES_PER_STEP, CONTENTS_PER_STEP = 8192, 4  # a short log is one that takes little memory
_ENTRY_BYTES = 210  # what the objects around one content take
_SALT_BYTES = 8
_TOKEN_BYTES = 4
Shared = tuple[int, int]  # (the content's number, how many of the first tokens)
NOTHING: Shared = (0, 0)


class Contents:
    """Which prompts and answers begin alike, for a log that tells no token: each is compared with those before it.

    Of all contents before it, one that has most tokens in common with a new one is named, and how many those are. This
    is enough for every pair: with any third content the new one has in common what the named one has, but at most that
    many. Contents are kept sorted as bytes, where those that have most in common with a new one are its neighbours.
    They are numbered in the order in which they were told. The token ids of what was compared lately stay here, within
    the limits above, and only numbers leave, with the number from which on comparisons are complete.
    """

    def __init__(self, max_bytes: int = MOST_BYTES, max_contents: int = MOST_CONTENTS) -> None:
        """With 0 bytes nothing is compared."""
        self.complete_from = 0  # those with lower numbers may be compared with no more
        self._max_bytes = max_bytes
        self._max_contents = max_contents
        self._key = token_bytes(16)  # nobody can try out salts against their names
        self._sorted: list[tuple[bytes, int]] = []
        self._of: dict[int, bytes] = {}  # by number, the oldest first
        self._num_bytes = 0

    @classmethod
    def beside(cls, num_steps: int) -> Contents:
        """For a log of this many steps; with none nothing is compared."""
        return cls(min(MOST_BYTES, BYTES_PER_STEP * num_steps), min(MOST_CONTENTS, CONTENTS_PER_STEP * num_steps))

    @property
    def compares(self) -> bool:
        return self._max_bytes > 0

    def name_of(self, salt: str) -> str:
        """Equal for equal salts; empty for none."""
        return self._root(salt).hex() if salt else ""

    def tell(self, number: int, salt: str, token_ids: Iterable[int]) -> Shared:
        """A content of its own; which one before it begins most alike."""
        return self._add(number, self._root(salt) + array("i", token_ids).tobytes())

    def extend(self, number: int, before: int, salt: str, token_ids: list[int], num_before: int) -> Shared:
        """One that goes on where content `before`, its first `num_before` tokens, ends; that one is needed no more."""
        known = self._of.get(before)
        if known is None or len(known) != _SALT_BYTES + num_before * _TOKEN_BYTES:
            return self.tell(number, salt, token_ids)
        shared = self._add(number, known + array("i", token_ids[num_before:]).tobytes())
        self._forget(before)
        return shared

    def _root(self, salt: str) -> bytes:
        """Contents with different salts have nothing in common, whatever their tokens."""
        return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_SALT_BYTES, key=self._key).digest()

    def _add(self, number: int, content: bytes) -> Shared:
        entry = content, number
        index = bisect_left(self._sorted, entry)
        shared = NOTHING
        for other, of in self._sorted[max(0, index - 1) : index + 1]:
            num_tokens = (_num_common(content, other) - _SALT_BYTES) // _TOKEN_BYTES
            if num_tokens > shared[1]:
                shared = of, num_tokens
        self._sorted.insert(index, entry)
        self._of[number] = content
        self._num_bytes += len(content) + _ENTRY_BYTES
        while self._num_bytes > self._max_bytes or len(self._of) > self._max_contents:
            oldest = next(iter(self._of))
            self._forget(oldest)
            self.complete_from = oldest + 1
        return shared

    def _forget(self, number: int) -> None:
        content = self._of.pop(number)
        del self._sorted[bisect_left(self._sorted, (content, number))]
        self._num_bytes -= len(content) + _ENTRY_BYTES


def _num_common(one: bytes, other: bytes) -> int:
    """Bytes that both begin with; slices are compared, which is much faster than bytes one by one."""
    low, high = 0, min(len(one), len(other)) + 1  # the first `low` are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
