"""One step's work, from the scheduler to the runner, and its result on the way back.

Promises: plain Python values; a `Batch` is a snapshot, and later changes in the scheduler do not show in it. Must not
know: torch, queues, policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire_engine.contract.types import Pooling, SamplingParams, StopParams, TokenLogprobs

PENDING = -1  # stands for a token that the previous step samples: the device has it, the host does not yet

POOLED_BITS = 32  # a pooled value counts in units of 2 ** -32


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Another choice that samples its first token from the same row."""

    sequence_id: int
    choice: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequence:
    """A slice of one sequence to compute: the `token_ids` at positions start .. end - 1.

    Position p lives in block `block_ids[p // block_size]` at offset `p % block_size`, for the pool's first group of
    layers; `other_block_ids` has the same for each of the others. All tuples are values of this
    step alone: they stay as they are when the sequence grows, is preempted or ends. The prompt is the request's own
    tuple and costs nothing. The output is copied only where the executor reads it, so that a step's cost does not grow
    with the length of the outputs. A step that is launched before the previous step's tokens are known has PENDING for
    them: at most one per sequence, the last of its ids.
    """

    sequence_id: int
    choice: int
    run: int = 0  # number of preemptions of its group: results of an earlier run are ignored
    prompt_token_ids: tuple[int, ...]  # the whole prompt
    output_token_ids: tuple[int, ...]  # all known output with `sampling.reads_output`, else empty
    token_ids: tuple[int, ...]  # the slice's tokens, from prompt and output
    start: int
    block_ids: tuple[int, ...]
    other_block_ids: tuple[tuple[int, ...], ...] = ()
    wants_sample: bool  # the slice ends at the last known token: sample the next one
    wants_prompt_logprobs: bool  # the slice's rows are scored against the prompt's next tokens
    forks: tuple[Fork, ...]  # with wants_sample: choices that sample from the same row
    sampling: SamplingParams
    stop: StopParams
    pooling: Pooling = ""  # "mean": all rows of the slice are pooled; "last": its last row
    num_drafts: int = 0  # guessed tokens at the end of `token_ids`; the one before them is a decode
    adapter: str = ""  # the digest of the adapter that computes it; empty: the model alone

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """One output token, not a part of the prompt."""
        return len(self.token_ids) == 1 + self.num_drafts and self.start >= len(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_last_rows(self) -> int:
        """The number of the slice's last rows that are needed after the last layer."""
        if self.wants_prompt_logprobs or self.pooling == "mean" or self.num_drafts:
            return len(self.token_ids)
        return int(self.wants_sample or self.pooling == "last")

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The work of one step."""

    step_id: int
    items: tuple[ScheduledSequence, ...]
    num_tokens: int
    num_decodes: int = 0  # items with `is_decode`
    # Copies of whole blocks, (source, target) each, made in this order before any write of the step: from the pool to
    # host blocks, from host blocks to the pool, inside the pool. Each copy sees the effect of the copies before it.
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    swap_keys: tuple[bytes, ...] = ()  # for each `swap_out`: the content's hash, empty for private blocks
    copies: tuple[tuple[int, int], ...] = ()
    released: tuple[int, ...] = ()  # sequences that have lost their blocks since the batch before

    @property
    def others(self) -> tuple[ScheduledSequence, ...]:
        """The slices that are not rows of columns: all, but for a `decodes.BatchInColumns`."""
        return self.items

    @property
    def num_items(self) -> int:
        """The number of items, known without making them."""
        return len(self.items)

    @property
    def rows_context(self) -> int:
        """Tokens that the rows of columns attend to together, their own included."""
        return 0

    def whole(self) -> Batch:
        """The batch without columns."""
        return self

    @property
    def num_drafts(self) -> int:
        """Guessed tokens of all items, which `num_tokens` counts too."""
        return sum([item.num_drafts for item in self.others])

    @property
    def num_prefills(self) -> int:
        """Tokens of prompts, and of outputs that are computed once more: those that are neither decodes nor drafts."""
        rest = self.num_tokens - self.num_decodes
        return rest - self.num_drafts if rest else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """A next token of one sequence, or the reason why there is none (`error`, one line for the client)."""

    token_id: int = -1
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    is_forced: bool = False  # by a grammar or a limit of thinking, so that no row was computed for it


def num_accepted(samples: Sequence[SampledToken]) -> int:
    """How many drafts were right, of an item that has these samples."""
    return 0 if len(samples) == 1 else sum([not sample.is_forced for sample in samples]) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a step: plain ints and floats, after one device-to-host copy.

    `samples` has an entry for every item that wants a sample and for each of its forks: its next tokens in order, one
    or more, or a lone error. Of an item with drafts they are those drafts that are right, from the first on, and one
    more. Forced tokens come last, and like the one before them are not computed yet. `prompt_logprobs[id]` holds one
    entry per position p of the slice whose next token p + 1 is a prompt token; `pooled[id]` is the sum of the slice's
    pooled rows after the final norm, each value rounded to units of 2 ** -POOLED_BITS, so that sums do not depend on
    how the prompt was cut; `errors[id]` fails that sequence.
    Items in `starved` were not computed, because the device had no memory for them even alone; they may be tried again.
    Items in `non_finite` have an error too: a row held NaN or infinity, so their blocks must not be shared.

    Where the batch has decodes in columns, `decoded` may have the token of each row instead of `samples`; a row with a
    negative number has its entry in `samples` or in `errors`.
    """

    samples: dict[int, tuple[SampledToken, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    pooled: dict[int, tuple[int, ...]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    starved: set[int] = field(default_factory=set)  # sequence ids
    non_finite: set[int] = field(default_factory=set)  # sequence ids
    decoded: Sequence[int] | None = None
    num_padding_rows: int = field(default=0, compare=False)  # rows that were computed in addition to the batch's own
    # Of each rank that computes the model, the seconds that it waited for the others in this step; empty without ranks.
    rank_seconds: tuple[float, ...] = field(default=(), compare=False)
