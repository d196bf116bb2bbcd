"""How the step log keeps steps and events: as flat numbers, of which there are thousands.

Promises: what is kept of a step with n slices is 16 bytes for each in most steps; no token is kept here.
Must not know: who reads them, how long they are kept.
"""

from __future__ import annotations

from array import array

from quire_engine.batch import PENDING, Batch, ScheduledSequence
from quire_engine.scheduling.contents import NOTHING
from quire_engine.scheduling.request_life import RequestLife
from quire_engine.scheduling.sequence import Group, Sequence
from quire_engine.scheduling.step_plan import Decision
from quire_engine.scheduling.step_records import EventKind, FailedPart
from quire_engine.types import FinishReason

_NO_ITEMS: tuple[ScheduledSequence, ...] = ()


class Step:
    """One step as it is kept: flat numbers, since thousands of steps with hundreds of sequences each are."""

    __slots__ = (
        *("step_id", "ordinal", "planned_at", "applied_at", "applied_ordinal", "seconds"),
        *("ids", "starts", "sizes", "num_tokens", "num_decodes", "copies", "swaps", "decisions"),
        *("running", "waiting", "blocks_used", "ends", "forced", "starved", "failed", "beams", "turning"),
    )

    def __init__(self, step_id: int, ordinal: int, batch: Batch | None, decisions: list[Decision], now: float) -> None:
        items = batch.items if batch is not None else _NO_ITEMS
        self.step_id = step_id
        self.ordinal = ordinal
        self.planned_at = now
        self.applied_at: float | None = None
        self.applied_ordinal: int | None = None
        self.seconds = 0.0
        self.ids = array("q", [item.sequence_id for item in items])
        self.starts = array("q", [item.start for item in items])
        self.num_tokens = batch.num_tokens if batch is not None else 0
        self.num_decodes = batch.num_decodes if batch is not None else 0
        # None: one token each, as in most steps.
        self.sizes = array("q", [item.num_tokens for item in items]) if self.num_tokens != len(items) else None
        self.copies = batch.copies if batch is not None else ()
        self.swaps = (len(batch.swap_out), len(batch.swap_in)) if batch is not None else (0, 0)
        self.decisions = decisions
        self.running = self.waiting = self.blocks_used = 0
        self.ends: list[tuple[str, int, FinishReason, int]] = []
        self.forced: list[tuple[str, int, int]] = []
        self.starved: list[str] = []
        self.failed: list[tuple[str, int, FailedPart]] = []
        self.beams: list[tuple[str, tuple[int, ...]]] = []
        self.turning: list[tuple[RequestLife, int]] = []  # whose prompts are computed with it, and in which run


class Event:
    """What came from outside, or what a choice had said at its end."""

    __slots__ = (
        *("after_step", "asked", "at", "choice", "complete_from", "kind", "num_tokens", "ordinal"),
        *("request_id", "shared"),
    )

    def __init__(
        self,
        kind: EventKind,
        request_id: str,
        *,
        ordinal: int,
        after_step: int,
        at: float,
        choice: int = 0,
        asked: dict[str, object] | None = None,
    ) -> None:
        self.kind = kind
        self.request_id = request_id
        self.ordinal = ordinal
        self.after_step = after_step
        self.at = at
        self.choice = choice
        self.asked = asked or {}
        self.num_tokens = 0
        self.shared = NOTHING
        self.complete_from = 0


def num_known_tokens(sequence: Sequence) -> int:
    """Its tokens without those in flight."""
    num_known = len(sequence.token_ids)
    while sequence.token_ids[num_known - 1] == PENDING:
        num_known -= 1
    return num_known


def asked_of(group: Group) -> dict[str, object]:
    """What plans follow from, of a request; how it samples, and its tokens, are its own affair."""
    request = group.request
    return {
        "num_prompt_tokens": group.num_prompt_tokens,
        "max_new_tokens": group.max_new_tokens,
        "n": request.n,
        "priority": request.priority,
        "arrival_time": request.arrival_time,
        "num_resumed_tokens": [len(token_ids) for token_ids in request.resumed_token_ids],
        "finished_choices": list(request.finished_choices),
        "reads_cache": group.reads_cache,
        "reads_output": group.reads_output,
        "pooling": request.pooling,
        "tenant": request.tenant,
        "weight": request.weight,
        "max_running": request.max_running,
        "service_class": request.service_class,
        "deadline": request.deadline,
        "num_beams": 0 if request.beam is None else request.beam.width,
    }
