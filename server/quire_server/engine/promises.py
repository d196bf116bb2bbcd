"""What refused requests have been promised: that they are taken when they come again at the time they were told.

Owns the promises. Promises: each is kept for one request, which is known by its content, and is forgotten a few
seconds after its time. Must not know: what is promised, clocks, HTTP.

Without them the room that a refused client waits for would be taken by those who come in the meantime, and the time
that it was told would be a guess.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_engine.types import GenerationRequest

LONGEST_SECONDS = 59.0  # from 60 on, older OpenAI SDKs retry when they like, and none obeys above 120
GRACE_SECONDS = 3.0  # Retry-After is whole seconds for most, and the way back takes some
_MOST = 10_000  # promises at once


@dataclass(frozen=True, slots=True)
class _Promise:
    at: float
    amount: float


class Promises:
    """By the request's content: the same prompt with the same limits is the same request."""

    def __init__(self) -> None:
        self._by_ticket: dict[int, list[_Promise]] = {}
        self._reserved = 0.0
        self._next_look = 0.0

    def reserved(self, now: float) -> float:
        """What is promised to those who may still come."""
        if now >= self._next_look:
            self._forget(now)
            self._next_look = now + 0.5
        return self._reserved

    def redeem(self, request: GenerationRequest, now: float) -> bool:
        """Whether the request was promised this moment, or an earlier one; the promise is used up."""
        self._forget(now)
        promises = self._by_ticket.get(ticket(request), [])
        if not promises or promises[0].at > now + 0.001:
            return False
        self._drop(ticket(request), promises.pop(0))
        return True

    def place(self, request: GenerationRequest, *, now: float, seconds: float, amount: float) -> float:
        """Seconds after which the request may come again; who comes too early is told the rest of the first time."""
        known = self._by_ticket.get(ticket(request))
        if known and known[0].at > now:
            return known[0].at - now
        if seconds > LONGEST_SECONDS or len(self._by_ticket) >= _MOST:
            return LONGEST_SECONDS  # too far away to be promised
        self._by_ticket.setdefault(ticket(request), []).append(_Promise(now + seconds, amount))
        self._reserved += amount
        return seconds

    def _forget(self, now: float) -> None:
        for key, promises in list(self._by_ticket.items()):
            while promises and promises[0].at + GRACE_SECONDS < now:
                self._drop(key, promises.pop(0))

    def _drop(self, key: int, promise: _Promise) -> None:
        self._reserved -= promise.amount
        if not self._by_ticket[key]:
            del self._by_ticket[key]
        if not self._by_ticket:
            self._reserved = 0.0  # no rest of rounding


def ticket(request: GenerationRequest) -> int:
    """Of two requests with the same content the same number."""
    return hash((request.tenant, request.prompt_token_ids, request.stop.max_new_tokens, request.n))
