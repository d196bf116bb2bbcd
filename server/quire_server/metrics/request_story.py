"""What one HTTP request had the engine do, gathered while it is served: for its line in the log, and its trace.

Promises: every prompt that is accepted on behalf of the request is in its story, in whatever task that happens; nothing
is noted per token. Must not know: HTTP, routes, what was said.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from quire_server.metrics.request_record import RequestRecord, RequestSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryTotals:
    """All of a request's prompts and choices together. Seconds are None where it did not come to that."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reasons: tuple[str, ...]  # each once
    queue_seconds: float | None  # the longest of its prompts
    ttft_seconds: float | None  # from the first acceptance to the first token of any
    tpot_seconds: float | None
    e2e_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStory:
    """Belongs to one HTTP request; `CURRENT` has it while that is served."""

    carrier: dict[str, str] = field(default_factory=dict)  # headers that say which trace the request is a part of
    records: list[RequestRecord] = field(default_factory=list)

    def summaries(self) -> list[RequestSummary]:
        """One for each prompt, in the order of their acceptance."""
        return [record.summary() for record in self.records]


# Set for a request's task and inherited by those that it starts.
CURRENT: ContextVar[RequestStory | None] = ContextVar("request story", default=None)


def totals(summaries: list[RequestSummary]) -> StoryTotals | None:
    """None for a request that had nothing computed."""
    if not summaries:
        return None
    started = min(each.started for each in summaries)
    first = min((each.first for each in summaries if each.first is not None), default=None)
    following = sum(each.following_tokens for each in summaries)
    return StoryTotals(
        prompt_tokens=sum(each.prompt_tokens for each in summaries),
        cached_tokens=sum(each.cached_tokens for each in summaries),
        output_tokens=sum(each.output_tokens for each in summaries),
        finish_reasons=tuple(dict.fromkeys(each.outcome for each in summaries)),
        queue_seconds=max((each.queue_seconds for each in summaries if each.queue_seconds is not None), default=None),
        ttft_seconds=None if first is None else first - started,
        tpot_seconds=sum(each.token_seconds for each in summaries) / following if following else None,
        e2e_seconds=max(each.ended for each in summaries) - started,
    )
