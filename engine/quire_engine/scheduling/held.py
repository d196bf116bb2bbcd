"""Requests that are set aside because nobody takes their tokens: no seat, no blocks, no claim until their release.

Owns nothing: who is held is in the roster. Promises: a request goes on after its release with the very tokens that it
would have had; those who go on meanwhile wait no longer for it; each release bounds its wait anew. Must not know:
clients, buffers, why a request is held.

A held group is a preempted one that does not wait. What it had computed stays matchable in the pool as prefixes do that
nobody holds: it is found again by its release, unless others needed the blocks, who take them before anyone that runs
is preempted. So holding costs nothing, and a release the rest of a block, or at worst a preemption's recomputation.

Why the bound on waiting holds (`policies.elder`): a held group is never the elder, and stops being it. Released, it is
to the elder rule as a request that has just come: the last of the live ones, its age 0, its bound counted from now. So
none that was live then ever waits for it as one that came before. In the queue it has its old place, on which no bound
rests.
"""

from __future__ import annotations

from quire_engine.limits import SchedulerConfig
from quire_engine.scheduling.planner import Planner
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.step_log import StepLog


class Held:
    """Holds live requests and releases them, between two steps; neither depends on what is in flight."""

    def __init__(self, config: SchedulerConfig, roster: Roster, planner: Planner, log: StepLog | None) -> None:
        self._limits = config.limits
        self._roster = roster
        self._planner = planner
        self._log = log

    def hold(self, request_id: str) -> bool:
        """Set a request aside, whether it runs or waits. False if it is not live, or is held already."""
        group = self._roster.live.get(request_id)
        if group is None or group.state == "held":
            return False
        if self._log is not None:
            self._log.held(request_id)
        self._planner.let_go(group)
        self._roster.hold(group)
        return True

    def release(self, request_id: str) -> bool:
        """Let a held request wait for its seat again. False if it is not held."""
        group = self._roster.held.get(request_id)
        if group is None:
            return False
        live = self._roster.live.values()
        others = sum(other.work for other in live if other.state != "held")
        self._planner.accounts.open(group.request, self._roster.waiting)  # the time in which it was held is no credit
        bound = self._limits.wait_bound(group.work, others)
        self._roster.release(group, step=self._planner.step, wait_bound=bound)
        if self._log is not None:
            self._log.released(group)
        return True
