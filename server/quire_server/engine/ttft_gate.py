"""Refuses requests whose first token would come too late, and says when it would not.

Owns the account of prompts that have been accepted and not answered. Promises: who comes again at the time it was told
is taken; batch requests have no such target. Must not know: the engine, HTTP, tenants.

The time to the first token is what is to be computed before it, over the rate at which prompts are computed while some
wait: measured over all steps, those in which nothing of a prompt could be computed included, so that a lack of seats or
memory counts as what it is for those who wait.
"""

from __future__ import annotations

from quire_engine.types import EngineStats, GenerationRequest
from quire_server.engine.promises import Promises

MARGIN = 0.8  # of the target: estimates are not exact, and a step has an end
LEAST_SECONDS = 1.0
_KEEP = 0.95  # of what was measured before, with each step
_FIRST_STEPS = 4  # whole steps of prompts that are accepted before anything is known


class TtftGate:
    """A target, and what stands before a new request."""

    def __init__(self, target: float, *, step_tokens: int) -> None:
        self._target = target * MARGIN
        self._first_tokens = _FIRST_STEPS * step_tokens
        self._pending: dict[str, int] = {}  # prompt tokens, by request
        self._num_pending = 0
        self._promises = Promises()
        self._tokens = self._seconds = 0.0
        self._last_step: float | None = None  # None: nothing waited
        self._last_hits = 0

    @property
    def rate(self) -> float | None:
        """Prompt tokens a second; None while nothing is known."""
        return self._tokens / self._seconds if self._seconds > 0 and self._tokens > 0 else None

    def refusal(self, request: GenerationRequest, now: float) -> float | None:
        """Seconds until the request may come again; None: it may come now. To be asked once for each request."""
        if not _has_target(request) or self._promises.redeem(request, now):
            return None
        own = len(request.prompt_token_ids)
        ahead = self._num_pending + self._promises.reserved(now)
        rate = self.rate
        if rate is None:
            if not ahead or ahead + own <= self._first_tokens:
                return None
            return self._promises.place(request, now=now, seconds=LEAST_SECONDS, amount=own)
        predicted = (ahead + own) / rate
        if predicted <= self._target or not ahead:
            return None
        seconds = max(predicted - self._target, LEAST_SECONDS)
        return self._promises.place(request, now=now, seconds=seconds, amount=own)

    def accept(self, request: GenerationRequest, now: float) -> None:
        """The request is in the queue."""
        if not _has_target(request):
            return
        if not self._pending:
            self._last_step = now
        tokens = len(request.prompt_token_ids)
        self._pending[request.request_id] = tokens
        self._num_pending += tokens

    def answered(self, request_id: str) -> None:
        """Its first token has come, or it has ended without one."""
        self._num_pending -= self._pending.pop(request_id, 0)

    def observe(self, stats: EngineStats, now: float) -> None:
        """A step has ended, of whose outputs those with a first token have been told before."""
        hits = stats.total_prefix_hit_tokens
        found, self._last_hits = max(hits - self._last_hits, 0), hits
        is_full = bool(self._pending) or self.rate is None  # else it had no more to compute than it did
        if self._last_step is not None and is_full:
            self._tokens = self._tokens * _KEEP + stats.prefill_tokens + found
            self._seconds = self._seconds * _KEEP + now - self._last_step
        self._last_step = now if self._pending else None


def _has_target(request: GenerationRequest) -> bool:
    return request.service_class == "interactive" and not request.pooling
