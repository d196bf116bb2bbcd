"""One step's work, from the scheduler to the runner, and its result on the way back.

Promises: plain Python values; a `Batch` is valid until the scheduler's next call.
Must not know: torch, queues, policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire_engine.types import SamplingParams, StopParams, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A further choice that samples its first token from the same row as the sequence it hangs on."""

    sequence_id: int
    choice: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequence:
    """A slice of one sequence to compute: `token_ids[start : start + num_tokens]`.

    `token_ids` (prompt, then output) and `block_ids` are the scheduler's own lists, lent for the step: read only.
    Position p lives in block `block_ids[p // block_size]` at offset `p % block_size`.
    """

    sequence_id: int
    choice: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    start: int
    num_tokens: int
    block_ids: Sequence[int]
    wants_sample: bool  # the slice ends at the last known token: sample the next one
    wants_prompt_logprobs: bool  # the slice's rows are scored against the prompt's next tokens
    forks: tuple[Fork, ...]  # with wants_sample: choices that sample from the same row
    sampling: SamplingParams
    stop: StopParams

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one step computes."""

    step_id: int
    items: tuple[ScheduledSequence, ...]
    num_tokens: int
    copies: tuple[tuple[int, int], ...] = ()  # (source block, target block), done before any write of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """The next token of one sequence, or the reason why there is none (`error`, one line for the client)."""

    token_id: int = -1
    logprobs: TokenLogprobs | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The runner's answer: plain ints and floats, after one device-to-host copy.

    `samples` has an entry for every item that wants a sample and for each of its forks; `prompt_logprobs[id]`
    holds one entry per position p of the slice whose next token p + 1 is a prompt token;
    `errors[id]` fails that sequence, whatever it wanted.
    """

    samples: dict[int, SampledToken] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
