"""What the step log tells: one `StepRecord` a step, one `RequestEvent` for what came from outside between two steps.

Promises: plain values; tokens are counted and never told, blocks are named by salted hashes, so that equal contents can
be recognised and none can be read. Must not know: queues, blocks, policies, how any of it was kept.

The log as JSON lines, which `quire trace --json` writes and a replay reads:

    {"kind": "config", "format": 1, "config": {SchedulerConfig}, "first_step": n}      once, first
    {"kind": "submit" | "abort" | "fail" | "end", ...the fields of RequestEvent}
    {"kind": "step", ...the fields of StepRecord}

Every call that changes the scheduler's state has an ordinal, in the order of the calls: an event has one, a step two:
of its plan (`ordinal`) and of the application of its result (`applied_ordinal`), between which another step may have
been planned. Lines come in the order of `ordinal`. A log that begins with step 1 has every input of the plans:
    submit   `request` has what was asked in numbers, `block_hashes` names the prompt's full blocks as far as they
             were looked for: equal hashes are equal contents with all before them. An empty list: nothing could match.
    plan     at the time `planned_at`, for the policies that measure.
    apply    at the time `applied_at`. Each sequence with `wants_sample` in the step gets one token, or as many as
             `forced` says; who ends by it is in `ends`, after so many tokens of output in all. `starved` could not be
             computed; `ends` with "error" failed.
    end      the hashes of the blocks behind the prompt's last full one, for who matches an earlier answer.
    abort    the client has left. `fail`: the request ends with an error that no step has made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from quire_engine.scheduling.step_plan import Decision
from quire_engine.types import FinishReason

FORMAT = 1
EventKind = Literal["submit", "abort", "fail", "end"]


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
    starved: tuple[str, ...]  # requests for which the device had no memory


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEvent:
    """Something about one request that is not a plan's decision."""

    kind: EventKind
    ordinal: int
    after_step: int  # the last step that was planned before
    at: float
    request_id: str
    choice: int = 0  # of an end
    request: dict[str, Any] = field(default_factory=dict)  # of a submission
    block_hashes: tuple[str, ...] = ()
