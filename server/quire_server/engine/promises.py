"""What refused requests have been promised: that they are taken when they come again at the time they were told.

Owns the promises. Promises: each is kept for one request, which is known by its content, and is forgotten a few
seconds after its time. Must not know: what is promised, clocks, HTTP.

Without them the room that a refused client waits for would be taken by those who come in the meantime, and the time
that it was told would be a guess.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from quire_engine.types import GenerationRequest

LONGEST_SECONDS = 59.0  # from 60 on, older OpenAI SDKs retry when they like, and none obeys above 120
GRACE_SECONDS = 3.0  # Retry-After is whole seconds for most, and the way back takes some
_MOST = 10_000  # different requests with promises at once
_MOST_ALIKE = 8
_CLOCK_SECONDS = 0.001  # what a time in milliseconds may be short of


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
        key = ticket(request)
        promises = self._by_ticket.get(key, [])
        while promises and promises[0].at <= now + _CLOCK_SECONDS:
            promise = promises.pop(0)
            self._drop(key, promise)
            if promise.at + GRACE_SECONDS >= now:
                return True
        return False

    def place(self, request: GenerationRequest, *, now: float, seconds: float, amount: float) -> float:
        """Seconds after which the request may come again.

        Clients may send the same request, so each refusal has a time of its own, up to a number: who comes again and
        again before its time is told the last one.
        """
        known = self._by_ticket.get(ticket(request), [])
        if len(known) >= _MOST_ALIKE and known[-1].at > now:
            return known[-1].at - now
        if seconds > LONGEST_SECONDS or len(self._by_ticket) >= _MOST:
            return LONGEST_SECONDS  # too far away to be promised
        insort(self._by_ticket.setdefault(ticket(request), []), _Promise(now + seconds, amount), key=_time)
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


def _time(promise: _Promise) -> float:
    return promise.at


def ticket(request: GenerationRequest) -> int:
    """Of two requests with the same content the same number."""
    return hash((request.tenant, request.prompt_token_ids, request.stop.max_new_tokens, request.n))
