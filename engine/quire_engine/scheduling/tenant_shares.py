"""Each tenant's share of seats and blocks: lent while the tenant does not want it, and given back when it does.

Without shares, long outputs of one tenant would fill the pool, and short requests of another would wait for their ends.
"""

from __future__ import annotations

from quire_engine.scheduling.account import Account
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.sequence import Group


class TenantShares:
    """Shares by weight, among the tenants that have requests running or waiting.

    A tenant within its share may enter although the pool is expected to run short, and may preempt groups of tenants
    above their shares. A tenant above its share loses a group at a time, until it is within the share: so none is
    starved by others' shares, and the elder's guarantee is as before.
    """

    def __init__(self, roster: Roster, *, max_num_seqs: int, num_blocks: int) -> None:
        self._roster = roster
        self._seats, self._blocks = max_num_seqs, num_blocks

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
            seats, blocks = self._held(payer, elder)
            used = (
                max((seats - 1) / self._seats, blocks / self._blocks) * everyone / weight
            )  # a single seat is no excess
            if used > most:
                worst, most = payer, used
        return [group for group in self._roster.running if group.payer is worst and group is not elder] if worst else []

    def _weights(self) -> dict[Account, float]:
        """The weights of the tenants with a running or waiting group."""
        groups = (*self._roster.running, *self._roster.waiting)
        return {payer: payer.weight for group in groups if (payer := group.payer) is not None}

    def _held(self, payer: Account, elder: Group | None = None) -> tuple[int, int]:
        """The tenant's seats and blocks, without those of the elder."""
        own = [group for group in self._roster.running if group.payer is payer and group is not elder]
        return sum(len(group.sequences) for group in own), sum(group.num_held_blocks for group in own)
