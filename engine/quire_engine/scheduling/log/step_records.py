"""The step log's records: one `StepRecord` per step and one `RequestEvent` per call from outside, in plain values.

Records have numbers of tokens, but no tokens, and nothing from which texts could be guessed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from secrets import token_bytes
from typing import Any, Literal

from quire_engine.contract.types import FinishReason
from quire_engine.scheduling.step_plan import Decision

FORMAT = 2
EventKind = Literal["submit", "abort", "fail", "expire", "hold", "release", "end", "reset", "adopt"]
# The whole slice failed; its sample failed; the device had no memory for it; or its values were not finite, beside what
# came of that.
FailedPart = Literal["slice", "sample", "memory", "values"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step: its plan, the reasons for it, and its result.

    The log as JSON lines, which `quire trace --json` writes and a replay reads:

        {"kind": "config", "format": 2, "config": {SchedulerConfig}, "first_step": n, "restored_blocks": n}  once, first
        {"kind": "submit" | "abort" | "fail" | "expire" | "hold" | "release" | "end" | "reset" | "adopt",
         ...a RequestEvent}
        {"kind": "step", ...the fields of StepRecord}

    Every call that changes the scheduler's state has an ordinal, in the order of the calls. An event has one. A step
    has two, of its plan (`ordinal`) and of the application of its result (`applied_ordinal`); another step may be
    planned between them. Lines come in the order of `ordinal`, and no ordinal is missing in a complete log. A log that
    begins with step 1 has every input of the plans, except the contents of the `restored_blocks` that were there from
    an earlier run.

        plan     at the time `planned_at`, for policies that use measured times.
        apply    at the time `applied_at`. Each sequence with `wants_sample` in the step gets one token, or as many as
                 `forced` says, or one more than the accepted ones of its `drafts`, which are the last of its slice;
                 drafts are given in their order here, to blocks that are free. A choice that ends is in `ends` with
                 its output tokens in all; slices and samples that failed are in `failed`; a beam search whose beams all
                 got a token is in `beams`.
    """

    step_id: int
    ordinal: int
    planned_at: float  # seconds on the engine's clock
    applied_at: float | None  # None: not applied yet
    applied_ordinal: int | None
    seconds: float  # from the step's start to its result; 0: not known yet, or no batch
    slices: tuple[tuple[str, int, int, int], ...]  # (request_id, choice, start, num_tokens), in the batch's order
    prefill_tokens: int
    decode_tokens: int
    copies: tuple[tuple[int, int], ...]  # (source block, target block)
    swaps: tuple[int, int] = (0, 0)  # blocks copied to the host's memory, blocks copied from it
    decisions: tuple[Decision, ...]
    running: int  # sequences, after the plan
    waiting: int  # requests, after the plan
    blocks_used: int  # after the plan
    ends: tuple[tuple[str, int, FinishReason, int], ...]  # (request_id, choice, finish reason, output tokens)
    forced: tuple[tuple[str, int, int], ...]  # (request_id, choice, tokens) of choices with several tokens in one step
    drafts: tuple[tuple[str, int, int, int], ...] = ()  # (request_id, choice, guessed tokens, those accepted)
    rank_seconds: tuple[float, ...] = ()  # that each rank waited for the others, where several compute the model
    starved: tuple[str, ...]  # requests preempted for lack of device memory
    failed: tuple[tuple[str, int, FailedPart], ...]  # (request_id, choice, failed part)
    beams: tuple[tuple[str, tuple[int, ...]], ...]  # (request_id, the parent beam of each sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEvent:
    """A call from outside about one request or all, or a content. By `kind`:

        submit   `request` has the request's fields in numbers; its prompt is a content.
        end      a content: the prompt and the output of a choice that ends. A beam search has one for each pruned beam,
                 in their order, and one for each final beam; between two prunings a sequence continues one beam.
        hold     the client does not read the request's tokens: it is held until its `release`.
        abort    the client has left. `fail`: the request ends with an error that no step has made. `expire`: its
                 deadline has passed, at the time `at`; with several at one time the first call ends all.
        reset    the operator has emptied the prefix cache; of no request.
        adopt    a content: a prompt up to the end of blocks that an earlier run has kept, which can be matched from now
                 on; `request` has their number and the first one's. The request itself may be submitted later.

    A content is the tokens of a submit, end or adopt, `num_tokens` of them. `shared` names an earlier content by its
    ordinal, and the length of the common prefix. No earlier content has a longer common prefix with the new one; with
    any third content, the new one shares what the named one shares, up to that length. So a replay that makes up tokens
    in this order gets common prefixes of the same lengths. The engine compares a content with the last ones: four for
    each step of its log, at most 16,384, fewer where they exceed 8 KiB a step or 32 MiB. Contents before
    `complete_from` may share more than is recorded. Outputs of requests that are live when the log ends are not
    recorded. Without a prefix cache no content is, since no plan depends on it.
    """

    kind: EventKind
    ordinal: int
    after_step: int  # the last step that was planned before
    at: float
    request_id: str
    choice: int = 0  # for an end; in a beam search the sequence
    request: dict[str, Any] = field(default_factory=dict)  # for a submit or an adopt
    num_tokens: int = 0  # length of a content
    shared: tuple[int, int] = (0, 0)  # (ordinal of another content, length of the common prefix in tokens)
    complete_from: int = 0  # contents from this ordinal on were all compared


MOST_BYTES = 32 << 20  # about eight million tokens
MOST_CONTENTS = 16384  # an insertion shifts a list of this length
BYTES_PER_STEP, CONTENTS_PER_STEP = 8192, 4  # so that a short log takes little memory
_ENTRY_BYTES = 210  # bytes of the Python objects around one content
_SALT_BYTES = 8
_TOKEN_BYTES = 4
Shared = tuple[int, int]  # (number of the other content, length of the common prefix in tokens)
NOTHING: Shared = (0, 0)


class Contents:
    """Finds common prefixes of prompts and outputs for a log that has no tokens.

    For each new content it names an earlier one with the longest common prefix, and that prefix's length in tokens.
    This determines the common prefix of every pair: with any third content, the new one shares what the named one
    shares, but at most that length. Contents are kept sorted as bytes, so that the one with the longest common prefix
    is a neighbour of the new one. They are numbered in the order of insertion. The token ids of the last contents stay
    here, within the limits above; only numbers leave, with the number from which on comparisons are complete.
    """

    def __init__(self, max_bytes: int = MOST_BYTES, max_contents: int = MOST_CONTENTS) -> None:
        """Make a set of contents, empty; with 0 bytes nothing is compared."""
        self.complete_from = 0  # contents with lower numbers may be dropped
        self._max_bytes = max_bytes
        self._max_contents = max_contents
        self._key = token_bytes(16)  # so that salts cannot be guessed from their names
        self._sorted: list[tuple[bytes, int]] = []
        self._of: dict[int, bytes] = {}  # contents by number, the oldest first
        self._num_bytes = 0

    @classmethod
    def for_log(cls, num_steps: int) -> Contents:
        """Return the contents for a log of `num_steps` steps; without steps nothing is compared."""
        return cls(min(MOST_BYTES, BYTES_PER_STEP * num_steps), min(MOST_CONTENTS, CONTENTS_PER_STEP * num_steps))

    @property
    def compares(self) -> bool:
        return self._max_bytes > 0

    def salt_name(self, salt: str) -> str:
        """A name for a cache salt: equal for equal salts, empty for none. Its scope's name comes first, as in the salt.

        Plans depend on scopes too, since cached blocks are kept by them.
        """
        scope, divider, _ = salt.partition("\0")
        named = self._root(salt).hex() if salt else ""
        return f"{self._root(scope).hex()}\0{named}" if divider else named

    def add(self, number: int, salt: str, token_ids: Iterable[int]) -> Shared:
        """Add a content; returns the earlier one with the longest common prefix."""
        return self._insert(number, self._root(salt) + array("i", token_ids).tobytes())

    def extend(self, number: int, before: int, salt: str, token_ids: list[int], num_before: int) -> Shared:
        """Add a content that continues content `before` (`num_before` tokens), and drop that one."""
        known = self._of.get(before)
        if known is None or len(known) != _SALT_BYTES + num_before * _TOKEN_BYTES:
            return self.add(number, salt, token_ids)
        shared = self._insert(number, known + array("i", token_ids[num_before:]).tobytes())
        self._forget(before)
        return shared

    def token_at(self, number: int, position: int) -> int | None:
        """The token of a content at a position; None where it has ended before, or is not kept any more."""
        begin = _SALT_BYTES + position * _TOKEN_BYTES
        piece = self._of.get(number, b"")[begin : begin + _TOKEN_BYTES]
        return array("i", piece)[0] if piece else None

    def _root(self, salt: str) -> bytes:
        """The first bytes of a content: contents with different salts share nothing."""
        return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_SALT_BYTES, key=self._key).digest()

    def _insert(self, number: int, content: bytes) -> Shared:
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
    """The length of the common prefix in bytes, by bisection over slices, which is much faster than a byte loop."""
    low, high = 0, min(len(one), len(other)) + 1  # the first `low` are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
