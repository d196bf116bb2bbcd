"""The values that a route is chosen from, and the route itself.

Promises: frozen, plain; times are seconds, names of blocks are the first 8 bytes of their hashes. Must not know:
sockets, clocks.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Literal, Protocol

from quire_engine.contract.errors import QuireError
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.cost_model import CostModel

ReplicaState = Literal["ready", "draining", "silent"]


class NoReplica(QuireError):
    """No replica may take the request now: all drain, are silent, are excluded or belong to another cohort."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One replica as a front sees it, from its HELLO, the stats of its latest step and the front's own account.

    Replicas of one kind share their `cost` and `limits` objects: of those with equal hits only the least loaded is
    scored.
    """

    name: str
    cohort: str  # replicas of one name compute the same bits
    state: ReplicaState
    cost: CostModel
    limits: SchedulerLimits
    prompt_tokens_ahead: int = 0  # uncached, sent and not answered: of all fronts by its stats, and of this one since
    requests: int = 0  # sent and unfinished
    decodes: int = 0  # running sequences that get a token in every step
    context: int = 0  # tokens that they attend to together
    blocks_total: int = 0  # of its pool
    blocks_free: int = 0  # free or cached without a reference
    blocks_blank: int = 0  # of those: without cached content, so that nothing is lost when they are taken
    blocks_freed_rate: float = 0.0  # blocks that ending requests give back, a second; 0: unknown
    step_ends_in: float = 0.0  # seconds until the running step ends
    slowness: float = 1.0  # seen TTFT over the predicted one, a running mean


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """The properties of a request that its route depends on."""

    request_id: str
    prompt_tokens: int  # with the tokens that a moved stream has already
    blocks: tuple[int, ...] = ()  # short names of its prompt's blocks, from the first on; `block_hashes.routed_names`
    max_new_tokens: int = 1
    tenant: str = ""
    session: str = ""  # of the client; a tie-break only
    cohort: str = ""  # of a stream that moves; empty: any
    excluded: Set[str] = frozenset()  # replicas that must not get it, as those that were lost with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The choice."""

    name: str  # of the replica
    predicted_ttft: float  # seconds from now
    hit_blocks: int = 0  # blocks of its prompt that the replica is known to have
    why: str = ""  # for the access log and for "why slow"


class Blocks(Protocol):
    """The part of the prefix index that a policy reads: `index.PrefixIndex`, and a fleet's index of the past."""

    def depths(self, blocks: Sequence[int]) -> dict[str, int]:
        """Return how many blocks each replica has in a row from the first on, for those that have the first."""
        ...


class RoutePolicy(Protocol):
    """Chooses a replica for each request. May keep state of its own, such as sessions."""

    @property
    def reads_blocks(self) -> bool:
        """Whether the choice depends on what the replicas' caches hold; if not, requests need not name their blocks."""
        ...

    def choose(self, request: RouteRequest, views: Sequence[ReplicaView], index: Blocks, now: float) -> Route:
        """Raises NoReplica if no replica may take the request now."""
        ...
