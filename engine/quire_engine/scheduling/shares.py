"""Shares of the machine: of seats and blocks for each tenant, and of tokens for batch requests.

A tenant's share is lent while the tenant does not want it, and given back when it does. Without shares, long outputs of
one tenant would fill the pool, and short requests of another would wait for their ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Values
from itertools import chain, takewhile

from quire_engine.scheduling.account import Account
from quire_engine.scheduling.fairness import Accounts
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.sequence import Group
from quire_engine.scheduling.step_plan import StepPlan


class TenantShares:
    """Shares by weight, among the tenants that have requests running or waiting.

    A tenant within its share may enter although the pool is expected to run short, and may preempt groups of tenants
    above their shares. A tenant above its share loses a group at a time, until it is within the share: so none is
    starved by others' shares, and the elder's guarantee is as before.
    """

    def __init__(self, roster: Roster, accounts: Accounts, *, max_num_seqs: int, num_blocks: int) -> None:
        self._roster = roster
        self._accounts = accounts
        self._seats, self._blocks = max_num_seqs, num_blocks

    @property
    def are_kept(self) -> bool:
        """Whether there are several tenants: of one alone nothing is owed."""
        return self._accounts.num_tenants > 1

    @property
    def are_divided(self) -> bool:
        """Whether groups of several tenants run or wait."""
        if not self.are_kept:
            return False
        groups = chain(self._roster.running, self._roster.waiting)
        payers = (group.payer for group in groups if group.payer is not None)
        first = next(payers, None)
        return any(payer is not first for payer in payers)

    def is_owed(self, group: Group, need: int) -> bool:
        """Whether a waiting group, which would take `need` blocks, stays within its tenant's share."""
        payer, weights = group.payer, self._weights()
        if payer is None or len(weights) < 2:
            return False
        share = payer.weight / sum(weights.values())
        seats, blocks = self._held(payer)
        seats, blocks = seats + len(group.sequences), blocks + need
        return seats <= max(share * self._seats, 1) and blocks <= share * self._blocks

    def most_above(self, elder: Group | None) -> list[Group]:
        """The running groups of the tenant that holds most above its share, except the elder; empty if none does."""
        weights = self._weights()
        if len(weights) < 2:
            return []
        everyone, worst, most = sum(weights.values()), None, 1.0
        for payer, weight in weights.items():
            share = weight / everyone
            seats, blocks = self._held(payer)
            used = max(seats / max(share * self._seats, 1), blocks / (share * self._blocks))  # one seat is no excess
            if used > most:
                worst, most = payer, used
        return [group for group in self._roster.running if group.payer is worst and group is not elder] if worst else []

    def _weights(self) -> dict[Account, float]:
        """The weights of the tenants with a running or waiting group; empty where all requests are of one tenant."""
        if not self.are_kept:
            return {}
        groups = (*self._roster.running, *self._roster.waiting)
        return {payer: payer.weight for group in groups if (payer := group.payer) is not None}

    def _held(self, payer: Account) -> tuple[int, int]:
        """The tenant's seats and blocks."""
        own = [group for group in self._roster.running if group.payer is payer]
        return sum(len(group.sequences) for group in own), sum(group.num_held_blocks for group in own)


WINDOW_STEPS = 128  # about as many steps make up the window of the share
MAX_CLASS_PREEMPTIONS = 4  # per group: after them it is not preempted for its class


class ClassShares:
    """Service classes: interactive requests go first; batch requests get the rest, and at least their share.

    Queues come in the order of `ByClass`, batch last. Without batch requests nothing changes. A batch group is
    preempted for interactive ones only while batch has its share, and at most `MAX_CLASS_PREEMPTIONS` times.
    """

    def __init__(self, min_share: float) -> None:
        self.is_due = False  # whether batch requests have had less than their share
        self._min_share = min_share
        self._all = 0.0  # useful tokens of the last steps, in a decaying sum
        self._batch = 0.0

    def parts(self, waiting: list[Group]) -> list[list[Group]]:
        """The queue by class, in the order of admission."""
        if not waiting or not waiting[-1].is_batch:
            return [waiting]
        middle = bisect_left(waiting, True, key=lambda group: group.is_batch)
        interactive, batch = waiting[:middle], waiting[middle:]
        return [batch, interactive] if self.is_due else [interactive, batch]

    def victims(self, group: Group, running: Values[Group], elder: Group | None) -> list[Group]:
        """The batch groups that may be preempted for a waiting interactive group, the last one first."""
        if self.is_due or group.is_batch:
            return []
        batch = takewhile(lambda other: other.is_batch, reversed(running))
        return [other for other in batch if other is not elder and other.num_class_preemptions < MAX_CLASS_PREEMPTIONS]

    def note(self, plan: StepPlan, running: list[Group], waiting: list[Group], *, batch_rows: int = 0) -> None:
        """Add a step's tokens to the shares, without tokens that are computed again; `batch_rows`: of the columns."""
        if not any(queue and queue[-1].is_batch for queue in (running, waiting)):
            self._all = self._batch = 0.0
            self.is_due = False
            return
        batch, total = batch_rows, plan.num_rows
        for sequence, num_tokens in plan.slices.items():
            group = sequence.group
            start = sequence.kv.num_computed
            useful = max(start + num_tokens - max(start, group.num_computed_before), 0)
            total += useful
            if group.is_batch:
                batch += useful
        keep = 1 - 1 / WINDOW_STEPS
        self._all = self._all * keep + total
        self._batch = self._batch * keep + batch
        self.is_due = self._batch < self._min_share * self._all
