"""Shares of the machine: of seats and blocks for each tenant, and of tokens for each service class.

A tenant's share is lent while the tenant does not want it, and given back when it does. Without shares, long outputs of
one tenant would fill the pool, and short requests of another would wait for their ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Values
from itertools import chain, takewhile

from quire_engine.contract.limits import SHARE_WINDOW_STEPS, LeastShares
from quire_engine.contract.types import ServiceClass
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


MAX_CLASS_PREEMPTIONS = 4  # per group: after them it is not preempted for its class


class ClassShares:
    """Service classes: interactive requests go first, and each class gets its least share of the useful tokens.

    Useful tokens are all but those that are computed again after a preemption. They are counted in decaying sums, about
    the last W = `SHARE_WINDOW_STEPS` steps, while batch requests run or wait. A class with less than its share of the
    sums is due and goes first; if none is, interactive does. As the shares add up to 1 at most, both are never due at
    once. A batch group is preempted for interactive ones only while batch has its share, and at most
    `MAX_CLASS_PREEMPTIONS` times. Without batch requests nothing changes.

    A step is short for a class if it leaves out prompt tokens of the class that it could have computed: a running
    prompt gets less than it has left and less than `prefill_chunk`, or a group waits for the step's budget alone. While
    a class is due, a step that is short for it computes nothing of the other class but its decodes and at most 2 C
    prompt tokens, with C = `min_chunk`: the claim of the elder, and a rest too small for a prompt to enter with. For
    the due class's groups enter first, and its running prompts get all that they can take before others get any.

    The bound. Of a step's a useful tokens o are those of a class with the share s, x those of the other one. After the
    step the class is owed d = (1 - 1/W) d' + s a - o, where d' is what it was owed before, and it is due if d > 0.
    Take N steps that are all short for the class, from one on before which d' >= 0: it was due, or batch requests have
    just come. Then it gets at least s times the useful tokens of these steps, less (1 + N/W) (s M + E). M is
    `max_num_batched_tokens`. E is what streams have taken: the sum of x - (1 - s) a over the steps in which the other
    class's decodes and 2 C are more than 1 - s of the step; where they leave room, E is 0.

    Proof, for E = 0. While the class is due, s a - o = x - (1 - s) a <= 0: d falls, and up to the first step with
    d <= 0 the class has had its share. That step has s a - o <= d. Afterwards d <= s M, since only a step before which
    d' <= 0 raises it, by s a at most. So s a - o, which is d - d' + d'/W, sums up to s M + N/W s M over the later
    steps, less the d that they began with, which is no more than what the first steps have given beyond the share.
    Each x - (1 - s) a > 0 raises d, and all that follows, by as much.

    Not promised: tokens in place of the other class's running streams, which never pause; steps that the class cannot
    use, since it waits for blocks, a slot, a place among the partly computed prompts, an adapter, a prefix or its
    tenant's quota; a class that had more than its share in the last steps waits until the sums have forgotten it.
    """

    def __init__(self, least: LeastShares) -> None:
        self.due: ServiceClass | None = None  # the class that has had less than its share
        self._least = least
        self._all = 0.0  # useful tokens of the last steps, in a decaying sum
        self._batch = 0.0

    def goes_first(self, group: Group) -> bool:
        """Whether the group is of the class that goes first."""
        return group.is_batch == (self.due == "batch")

    def parts(self, waiting: list[Group]) -> tuple[list[Group], list[Group]]:
        """The queue of the class that goes first, and that of the other."""
        interactive, batch = waiting, list[Group]()
        if waiting and waiting[-1].is_batch:
            middle = bisect_left(waiting, True, key=lambda group: group.is_batch)
            interactive, batch = waiting[:middle], waiting[middle:]
        return (batch, interactive) if self.due == "batch" else (interactive, batch)

    def victims(self, group: Group, running: Values[Group], elder: Group | None) -> list[Group]:
        """The batch groups that may be preempted for a waiting interactive group, the last one first."""
        if self.due == "batch" or group.is_batch:
            return []
        batch = takewhile(lambda other: other.is_batch, reversed(running))
        return [other for other in batch if other is not elder and other.num_class_preemptions < MAX_CLASS_PREEMPTIONS]

    def note(self, plan: StepPlan, running: list[Group], waiting: list[Group], *, batch_rows: int = 0) -> None:
        """Add a step's tokens to the shares, without tokens that are computed again; `batch_rows`: of batch groups."""
        if not any(queue and queue[-1].is_batch for queue in (running, waiting)):
            self._all = self._batch = 0.0
            self.due = None
            return
        batch, total = batch_rows, plan.num_rows
        for sequence, num_tokens in plan.slices.items():
            group = sequence.group
            start = sequence.kv.num_computed
            useful = max(start + num_tokens - max(start, group.num_computed_before), 0)
            total += useful
            if group.is_batch:
                batch += useful
        keep = 1 - 1 / SHARE_WINDOW_STEPS
        self._all = self._all * keep + total
        self._batch = self._batch * keep + batch
        if self._batch < self._least.batch * self._all:
            self.due = "batch"
        else:
            is_short = self._all - self._batch < self._least.interactive * self._all
            self.due = "interactive" if is_short else None
