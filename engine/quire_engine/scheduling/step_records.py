"""What the step log tells: one `StepRecord` a step, one `RequestEvent` for what came from outside between two steps.

Promises: plain values; tokens are counted and never told, nor anything that could be tried against texts: of contents
it is told which of them begin alike, and how far. Must not know: queues, blocks, policies, how any of it was kept.

The log as JSON lines, which `quire trace --json` writes and a replay reads:

    {"kind": "config", "format": 2, "config": {SchedulerConfig}, "first_step": n, "restored_blocks": n}     once, first
    {"kind": "submit" | "abort" | "fail" | "expire" | "hold" | "release" | "end" | "reset", ...fields of RequestEvent}
    {"kind": "step", ...the fields of StepRecord}

Every call that changes the scheduler's state has an ordinal, in the order of the calls: an event has one, a step two:
of its plan (`ordinal`) and of the application of its result (`applied_ordinal`), between which another step may have
been planned. Lines come in the order of `ordinal`, and no ordinal is missing in a log that is whole. A log that begins
with step 1 has every input of the plans, but for `restored_blocks` whose contents were on disk from an earlier run:
    submit   `request` has what was asked in numbers; its prompt is a content.
    plan     at the time `planned_at`, for the policies that measure.
    apply    at the time `applied_at`. Each sequence with `wants_sample` in the step gets one token, or as many as
             `forced` says; who ends by it is in `ends`, after so many tokens of output in all, and what could not be
             computed in `failed`. A beam search whose beams all came a token further is in `beams`.
    end      a content: the prompt with what a choice said until its end. Of a search one for each beam that is given
             up, in their order, and one for each that is left at its end; in between a sequence follows one beam.
    hold     nobody takes the request's tokens: it is set aside until its `release`.
    abort    the client has left. `fail`: the request ends with an error that no step has made. `expire`: its deadline
             has passed, at the time `at`; with several at one time the first call ends all.
    reset    the operator has emptied the prefix cache; of no request.

A content is the tokens of a submit or an end, `num_tokens` of them. `shared` names by its ordinal another content that
came before, and how many tokens both begin with; no other has more in common with it, and with every other it has in
common what the named one has, up to that number. Who makes up tokens in this order has equal beginnings just where they
were equal. The engine compares with the last four contents for each step of its log, at most 16,384, less where they
exceed 8 KiB a step or 32 MiB: of those before `complete_from` some may begin more alike than is told. What was said by
requests that live when the log ends is not told; nor is any content without a prefix cache, where no plan follows from
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from quire_engine.scheduling.step_plan import Decision
from quire_engine.types import FinishReason

FORMAT = 2
EventKind = Literal["submit", "abort", "fail", "expire", "hold", "release", "end", "reset"]
# A whole slice, what was to be sampled of it, or the device had no memory for it.
FailedPart = Literal["slice", "sample", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step: its plan, why it is as it is, and what came of it."""

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
    """Something about one request, or about all, that is not a plan's decision."""

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
