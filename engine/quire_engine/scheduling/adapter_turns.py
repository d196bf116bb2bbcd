"""Turns of adapters: where more are asked for than may be there at once, each computes for a while, then others do.

Promises: requests are set aside only for others that wait for their adapter's place, after `turn_steps` steps of that
wait and with their prompts computed; they go on, with the same tokens, once those others have run or ended.
Must not know: torch, sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import GenerationRequest, HoldReason
from quire_engine.scheduling.roster import Roster


class AdapterTurns:
    """The requests that are set aside, which the scheduler holds, and the requests that go before them."""

    def __init__(self, roster: Roster, limits: SchedulerLimits, hold: Callable[[str, HoldReason], bool]) -> None:
        """`hold` is the scheduler's."""
        self.in_use = roster.adapters.in_use  # follows every change
        self.turn_steps = max(1, limits.elder_age_steps)  # the least wait for the end of a turn
        self._roster, self._hold, self._most = roster, hold, limits.max_loras
        self._steps = 0  # since when, in steps, a request waits for a place
        self._ahead: dict[str, set[str]] = {}  # ids by the id of a request that is set aside: the requests before it

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._ahead

    def step(self, leaving: Collection[str], preparing: Mapping[str, GenerationRequest]) -> Iterable[GenerationRequest]:
        """Another step: the requests that are set aside with it.

        `leaving`: digests of adapters whose place in memory requests in `preparing` wait for.
        """
        for ahead in self._distinct():
            ahead -= {each for each in ahead if each not in preparing and not self._waits(each)}
        lacking = self._roster.adapters.waiting_for_room(self._most)
        if not lacking and not (leaving and preparing):
            self._steps = 0
            return ()
        self._steps += 1
        if self._steps < self.turn_steps:
            return ()
        # Running adapters give way in the order in which they began, others where their place in memory is wanted.
        for digest in [*(self._roster.adapters.running if lacking else leaving)]:
            ahead = {each.request.request_id for each in self._roster.waiting if each.adapter in lacking}
            ended = self._end(digest)
            if not ended:
                continue
            self._steps = 0
            ahead |= {each for each, request in preparing.items() if _digest(request) not in ("", digest)}
            for request in ended:
                self._drop_from_others(request.request_id)
            self._ahead |= dict.fromkeys([request.request_id for request in ended], ahead)
            return ended
        return ()

    def come_back(self, request_id: str) -> GenerationRequest | None:
        """A held request that is to be released, if it has an adapter: it waits for its place from now on."""
        group = self._roster.held.get(request_id)
        if group is None or not group.adapter:
            return None
        self._ahead[request_id] = set()
        return group.request

    def is_over(self, request: GenerationRequest) -> bool:
        """Whether a request that was set aside has ended."""
        return request.request_id not in self._roster.held

    def may_go_on(self, request: GenerationRequest) -> bool:
        """Whether no request goes before it any more, or its adapter runs anyway."""
        return not self._ahead[request.request_id] or _digest(request) in self._roster.adapters.running

    def forget(self, request_id: str) -> None:
        """The request goes on, has ended, or is held for its client."""
        if self._ahead.pop(request_id, None) is not None:
            self._drop_from_others(request_id)

    def _waits(self, request_id: str) -> bool:
        group = self._roster.live.get(request_id)
        return group is not None and group.state in ("waiting", "preempted")

    def _end(self, adapter: str) -> list[GenerationRequest]:
        """Hold all groups with the adapter of this digest, so that another one may take its place; returns them.

        Empty while none of them runs, or one has not computed its prompt: its steps would be lost before they were of
        use.
        """
        groups = [group for group in self._roster.contenders() if group.adapter == adapter]
        running = [group for group in groups if group.state == "running"]
        if not running or any(group.is_prefilling for group in running):
            return []
        for group in groups:
            self._hold(group.request.request_id, "adapters")
        return [group.request for group in groups]

    def _drop_from_others(self, request_id: str) -> None:
        for ahead in self._distinct():
            ahead.discard(request_id)

    def _distinct(self) -> Iterable[set[str]]:
        """Requests that are set aside together have one set."""
        return {id(ahead): ahead for ahead in self._ahead.values()}.values()


def _digest(request: GenerationRequest) -> str:
    return "" if request.adapter is None else request.adapter.digest
