"""One step's work, from the scheduler to the runner, and its result on the way back.

Promises: plain Python values; a `Batch` is a snapshot, which nothing that the scheduler does later shows in.
Must not know: torch, queues, policies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire_engine.types import Pooling, SamplingParams, StopParams, TokenLogprobs

PENDING = -1  # a token id that the step launched before samples: its executor has it, the host not yet

POOLED_BITS = 32  # a pooled value counts in units of 2 ** -32


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A further choice that samples its first token from the same row as the sequence it hangs on."""

    sequence_id: int
    choice: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequence:
    """A slice of one sequence to compute: the `token_ids` at positions start .. end - 1.

    Position p lives in block `block_ids[p // block_size]` at offset `p % block_size`. All tuples are values of this
    step alone: they stay as they are when the sequence grows, is preempted or ends. The prompt is the request's own
    and costs nothing to carry; the output is copied for those only who need it, so that a step's cost does not grow
    with what the sequences have already said. A step that is launched before the last one's tokens are known has
    PENDING for them: at most one a sequence, the last of its ids.
    """

    sequence_id: int
    choice: int
    run: int = 0  # how often its group had been preempted: a result of an earlier run is void
    prompt_token_ids: tuple[int, ...]  # the whole prompt
    output_token_ids: tuple[int, ...]  # all that is known, where `sampling.reads_output`; else none
    token_ids: tuple[int, ...]  # the slice's, of prompt and output
    start: int
    block_ids: tuple[int, ...]
    wants_sample: bool  # the slice ends at the last known token: sample the next one
    wants_prompt_logprobs: bool  # the slice's rows are scored against the prompt's next tokens
    forks: tuple[Fork, ...]  # with wants_sample: choices that sample from the same row
    sampling: SamplingParams
    stop: StopParams
    pooling: Pooling = ""  # the slice's rows, or its last one alone, are a part of the prompt's vector

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """One token of output, not a part of the prompt."""
        return len(self.token_ids) == 1 and self.start >= len(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_last_rows(self) -> int:
        """Of the slice's rows, how many of the last ones are needed behind the last layer."""
        if self.wants_prompt_logprobs or self.pooling == "mean":
            return len(self.token_ids)
        return int(self.wants_sample or self.pooling == "last")

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one step computes."""

    step_id: int
    items: tuple[ScheduledSequence, ...]
    num_tokens: int
    num_decodes: int = 0  # items that are
    # Copies of whole blocks, (source, target) each, done in this order and before any write of the step: from the pool
    # to the host's blocks, from those to the pool, and inside the pool. Each reads what the ones before it left.
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    swap_keys: tuple[bytes, ...] = ()  # of `swap_out`: the hash of the content, empty where it is of use to nobody else
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """A next token of one sequence, or the reason why there is none (`error`, one line for the client)."""

    token_id: int = -1
    logprobs: TokenLogprobs | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The runner's answer: plain ints and floats, after one device-to-host copy.

    `samples` has an entry for every item that wants a sample and for each of its forks: its next tokens in order, one
    or more, or a lone error; `prompt_logprobs[id]` holds one entry per position p of the slice whose next token p + 1
    is a prompt token; `pooled[id]` is the sum of the slice's pooled rows after the final norm, each value rounded to
    units of 2 ** -POOLED_BITS, so that sums do not depend on how the prompt was cut; `errors[id]` fails that sequence,
    whatever it wanted. Items in `starved` were not computed: the device had no memory for them even alone; they may be
    tried again. What is in `non_finite` has an error as well: its row held a value that is no number, so nobody may be
    given what its blocks hold.
    """

    samples: dict[int, tuple[SampledToken, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    pooled: dict[int, tuple[int, ...]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    starved: set[int] = field(default_factory=set)  # sequence ids
    non_finite: set[int] = field(default_factory=set)  # sequence ids
    num_padding_rows: int = field(default=0, compare=False)  # computed for nobody, beside the batch's own
