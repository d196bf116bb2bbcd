"""Replicas on paper that compute prompts for others: who is asked, when the blocks have come, when it is given up.

Promises: decides and waits by the same rules as a front and a node that serve (`roles`). Must not know: policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from quire_bench.traces import TraceRow
from quire_engine.contract.roles import is_worth_passing_on, latest_arrival
from quire_engine.contract.types import PrefixChanges
from quire_engine.routing.index import PrefixIndex
from quire_engine.routing.prediction import predicted_ttft, prompt_seconds, prompt_tokens_a_step
from quire_engine.routing.views import ReplicaView, Route, RouteRequest
from quire_lab.simulation.outcome import Outcome, Served

_LOOKS = 8  # in the time that computing the prompt would take: whether its blocks come as fast


class FirstToken(NamedTuple):
    """A request has its first token, or has ended without one."""

    number: int
    at: float


class PromptReplica(Protocol):
    """A replica, as far as it computes prompts: `fleet.StepReplica`."""

    @property
    def block_size(self) -> int: ...
    @property
    def chunk(self) -> int:
        """Tokens of a prompt that are computed at a time."""
        ...

    def computed_tokens(self, number: int) -> int:
        """Return how many tokens of a live request's prompt are computed, the cached ones included."""
        ...

    def advance(self, until: float) -> None: ...
    def view(self, now: float, slowness: float = 1.0) -> ReplicaView: ...
    def send(self, row: TraceRow, number: int, at: float, blocks: tuple[int, ...], hit_blocks: int) -> Served: ...
    def first_tokens(self) -> list[FirstToken]: ...
    def prefixes(self) -> list[PrefixChanges]: ...
    def finish(self) -> Outcome: ...


class Arrival(NamedTuple):
    """A request goes on where it is answered, with the first tokens of its prompt from elsewhere."""

    at: float
    number: int
    taker: int  # the replica that answers
    tokens: int  # whose blocks have come


@dataclass(slots=True, eq=False)
class _Prompt:
    row: TraceRow
    taker: int
    there: PromptReplica
    sent_at: float
    hit_tokens: int  # that the taker has
    is_computed: bool = False


class PromptReplicas:
    """The replicas of one fleet that compute prompts alone."""

    def __init__(self, replicas: Sequence[PromptReplica], token_seconds: float) -> None:
        """`token_seconds`: of one token's blocks on the wire."""
        self._replicas, self._token_seconds = replicas, token_seconds
        self._index = PrefixIndex()
        for number in range(len(replicas)):
            self._index.add(str(number))
        self._prompts: dict[int, _Prompt] = {}
        self._due: list[tuple[float, int, float]] = []  # (time, request, share that has to be there; 2: all of it is)
        self.num_passed = 0  # prompts that were sent here
        self.num_late = 0  # of those: the rest was computed where they are answered

    def takes(
        self, row: TraceRow, number: int, at: float, blocks: tuple[int, ...], *, route: Route, taker: int
    ) -> bool:
        """Whether a request's prompt is computed here for the replica that its route names; then it begins."""
        size = self._replicas[0].block_size
        hit_tokens = route.hit_blocks * size
        request = RouteRequest(request_id=str(number), prompt_tokens=row.input_tokens, blocks=blocks)
        depths = self._index.depths(blocks)
        views = [replica.view(at) for replica in self._replicas]
        hits = [depths.get(str(place), 0) for place in range(len(views))]
        seconds = [predicted_ttft(view, request, hit)[0] for view, hit in zip(views, hits, strict=True)]
        best = min(range(len(seconds)), key=seconds.__getitem__)
        chunk, missing = views[best].limits.prefill_chunk, row.input_tokens - hit_tokens
        if not is_worth_passing_on(missing=missing, chunk=chunk, here=route.predicted_ttft, there=seconds[best]):
            return False
        there = self._replicas[best]
        if there.send(replace(row, output_tokens=1, max_tokens=None), number, at, blocks, hits[best]).refused:
            return False
        self._index.sent(str(best), str(number), blocks)
        self._prompts[number] = _Prompt(row, taker, there, at, hit_tokens)
        self.num_passed += 1
        own = min(prompt_seconds(views[best], missing, prompt_tokens_a_step(views[best])), route.predicted_ttft)
        for look in range(_LOOKS + 1):
            come = look / _LOOKS
            heappush(self._due, (at + latest_arrival(own, come, route.predicted_ttft - own), number, come))
        return True

    def arrivals(self, until: float) -> list[Arrival]:
        """The requests that go on until then, in order."""
        found: list[Arrival] = []
        while True:
            at = min(self._due[0][0], until) if self._due else until
            for place, replica in enumerate(self._replicas):
                replica.advance(at)
                for first in replica.first_tokens():
                    self._index.answered(str(first.number))
                    self._computed(first.number, first.at)
                for changes in replica.prefixes():
                    self._index.apply(str(place), changes)
            if not self._due or self._due[0][0] > until:
                return found
            self._look(*heappop(self._due), found)

    def outcomes(self) -> list[Outcome]:
        """Finish the replicas at the end of a simulation, and return their outcomes."""
        return [replica.finish() for replica in self._replicas]

    def _computed(self, number: int, at: float) -> None:
        prompt = self._prompts.get(number)
        if prompt is None:
            return
        prompt.is_computed = True
        sent = prompt.row.input_tokens - prompt.hit_tokens
        last = min(prompt.there.chunk, sent) * self._token_seconds
        heappush(self._due, (max(at + last, prompt.sent_at + sent * self._token_seconds), number, 2.0))

    def _look(self, at: float, number: int, share: float, found: list[Arrival]) -> None:
        """All has come, or it is looked whether as much has come as has to be there by now."""
        prompt = self._prompts.get(number)
        if prompt is None:
            return
        whole, hit = prompt.row.input_tokens, prompt.hit_tokens
        come = whole
        if share <= 1.0:
            by_wire = int((at - prompt.sent_at) / self._token_seconds) if self._token_seconds else whole
            computed = whole if prompt.is_computed else prompt.there.computed_tokens(number)
            come = hit + min(max(computed - hit, 0), by_wire)
            if come < whole and come - hit >= share * (whole - hit):
                return
            self.num_late += come < whole
        del self._prompts[number]
        found.append(Arrival(at, number, prompt.taker, come))
