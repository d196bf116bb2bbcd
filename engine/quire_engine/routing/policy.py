"""Route policies: predicted time to first token, and the four that it is compared with.

Promises: equal calls give equal routes; ties are broken by load, never by the order of the replicas. Must not know:
sockets, clocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from quire_engine.contract.errors import ConfigError
from quire_engine.routing.prediction import NEVER_SLOWER, predicted_ttft
from quire_engine.routing.views import Blocks, NoReplica, ReplicaView, Route, RoutePolicy, RouteRequest

RoutePolicyName = Literal["predicted_ttft", "round_robin", "least_requests", "least_tokens", "cache_aware"]
_EQUAL = 0.05  # share by which scores may differ and still count as equal
_EVICTED = 1.0  # of the own work, once more where its blocks displace as many cached ones
_MOST_SCORED = 16  # replicas
_NO_BLOCK_SECONDS = 1.0  # by which a replica without a free block counts as more loaded
_MOST_SESSIONS = 65_536  # remembered, the longest unused forgotten first


def candidates(request: RouteRequest, views: Sequence[ReplicaView]) -> list[ReplicaView]:
    """The replicas that may take the request: of its cohort, ready, not excluded, none that has become very slow
    while others have not. Raises NoReplica.
    """
    excluded, cohort = request.excluded, request.cohort
    able = [
        view
        for view in views
        if view.state == "ready" and (not cohort or view.cohort == cohort) and view.name not in excluded
    ]
    if not able:
        states = ", ".join(f"{view.name} {view.state}" for view in views[:8]) or "there is none"
        of = f" of cohort {cohort}" if cohort else ""
        raise NoReplica(f"no replica{of} may take the request: {states}")
    return [view for view in able if view.slowness <= NEVER_SLOWER] or able


class RoundRobin:
    """Each replica in turn."""

    reads_blocks = False

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: RouteRequest, views: Sequence[ReplicaView], index: Blocks, now: float) -> Route:  # noqa: ARG002
        able = candidates(request, views)
        self._turn += 1
        return _route(able[self._turn % len(able)], request, index, "its turn")


class LeastRequests:
    """The replica with the fewest unfinished requests, of equals the one with fewer tokens."""

    reads_blocks = False

    def choose(self, request: RouteRequest, views: Sequence[ReplicaView], index: Blocks, now: float) -> Route:  # noqa: ARG002
        best = min(candidates(request, views), key=_load)
        return _route(best, request, index, f"the fewest requests, {best.requests:,}")


class LeastTokens:
    """The replica with the fewest prompt tokens ahead and tokens of decodes; of equals the one with fewer requests."""

    reads_blocks = False

    def choose(self, request: RouteRequest, views: Sequence[ReplicaView], index: Blocks, now: float) -> Route:  # noqa: ARG002
        best = min(candidates(request, views), key=lambda view: (view.prompt_tokens_ahead + view.decodes, _load(view)))
        return _route(best, request, index, f"the fewest tokens ahead, {best.prompt_tokens_ahead:,}")


class CacheAware:
    """The published rule of SGLang's gateway with its defaults, made anew here to be compared with.

    Unless loads differ much, the longest match wins where it is long enough, else the replica with the smallest tree.
    Its tree of what was sent is our exact index; ties go to the replica with fewer requests.
    """

    reads_blocks = True

    match = 0.3  # least share of the prompt that decides
    most_apart = 64  # requests between the most and the least loaded
    most_ratio = 1.5

    def __init__(self) -> None:
        self._sent: dict[str, int] = {}  # blocks that each replica did not have and was sent

    def choose(self, request: RouteRequest, views: Sequence[ReplicaView], index: Blocks, now: float) -> Route:  # noqa: ARG002
        able = candidates(request, views)
        depths = index.depths(request.blocks)
        most, least = max(view.requests for view in able), min(view.requests for view in able)
        depth = max((depths.get(view.name, 0) for view in able), default=0)
        hit = depth * able[0].limits.block_size / max(request.prompt_tokens, 1)
        if most - least > self.most_apart and most > self.most_ratio * least:
            best, why = min(able, key=_load), f"loads differ, {least} to {most} requests"
        elif hit > self.match:
            holders = [view for view in able if depths.get(view.name, 0) == depth]
            best, why = min(holders, key=_load), f"the longest match, {min(hit, 1.0):.0%}"
        else:
            best, why = min(able, key=lambda view: (self._tree(view), _load(view))), "the smallest tree"
        held = depths.get(best.name, 0)
        self._sent[best.name] = self._tree(best) + best.limits.num_blocks_for(request.prompt_tokens) - held
        return _scored(best, request, held).route(why)

    def _tree(self, view: ReplicaView) -> int:
        """Blocks in the replica's tree, which is as large as its pool at most."""
        sent = self._sent.get(view.name, 0)
        return min(sent, view.blocks_total) if view.blocks_total else sent


@dataclass(frozen=True, slots=True)
class _Scored:
    view: ReplicaView
    depth: int
    ttft: float
    score: float  # seconds, with the own work once more

    def route(self, why: str) -> Route:
        return Route(name=self.view.name, predicted_ttft=self.ttft, hit_blocks=self.depth, why=why)


class PredictedTtft:
    """The least predicted time to first token, plus the request's own work once more.

    The last term is what the request takes from those that come after it: without it a short queue would win over a
    cached prefix too often. Where its blocks displace as much that is cached it counts a third time: without that a
    replica with nothing cached would stay empty while the others evict.

    Replicas within 5 % of the best are equal. Of these the session's last one wins, then the deepest hit, then the
    fewest tokens that decodes attend to.

    Only replicas with the request's first block, and the least loaded one of each kind, can win, so only those are
    scored; of equal kind and with no deeper hit a more loaded one cannot win either.
    """

    reads_blocks = True

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, str] = OrderedDict()  # the replica that each was last sent to

    def choose(self, request: RouteRequest, views: Sequence[ReplicaView], index: Blocks, now: float) -> Route:  # noqa: ARG002
        able = candidates(request, views)
        depths = index.depths(request.blocks)
        last = self._sessions.get(request.session, "") if request.session else ""
        scored = [_scored(view, request, depths.get(view.name, 0)) for view in _contenders(able, request, depths, last)]
        least = min(one.score for one in scored)
        equals = [one for one in scored if one.score <= least * (1 + _EQUAL)]
        best = min(equals, key=lambda one: (one.view.name != last, -one.depth, one.view.context, _load(one.view)))
        if request.session:
            self._sessions[request.session] = best.view.name
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return best.route(_why(best, scored, last))


def route_policy(name: str) -> RoutePolicy:
    """The policy of that name. Raises ConfigError."""
    if name == "predicted_ttft":
        return PredictedTtft()
    if name == "round_robin":
        return RoundRobin()
    if name == "least_requests":
        return LeastRequests()
    if name == "least_tokens":
        return LeastTokens()
    if name == "cache_aware":
        return CacheAware()
    raise ConfigError(f"route policy {name!r} is unknown; use {', '.join(get_args(RoutePolicyName))}")


def _contenders(
    able: Sequence[ReplicaView], request: RouteRequest, depths: dict[str, int], last: str
) -> list[ReplicaView]:
    """The replicas that can win, at most `_MOST_SCORED` of those that hold something; and the session's last one.

    Replicas that evict for the request, and those that need not, are of two kinds.
    """
    kinds: dict[tuple[int, int, bool], list[ReplicaView]] = {}
    lacking = able[0].limits.num_blocks_for(request.prompt_tokens)
    for view in able:
        kinds.setdefault((id(view.cost), id(view.limits), view.blocks_blank < lacking), []).append(view)
    few: list[tuple[float, int, int, ReplicaView]] = []
    for views in kinds.values():
        least = float("inf")
        works = _works(views)
        held = [-depths.get(view.name, 0) for view in views] if depths else [0] * len(views)
        requests = [view.requests for view in views]  # of equals those with fewer
        for depth, work, _, number in sorted(zip(held, works, requests, range(len(views)), strict=True)):
            if work < least:
                least = work
                few.append((work, depth, number, views[number]))
    if len(few) > _MOST_SCORED:
        deepest = min(few, key=lambda entry: entry[1])
        few = [
            deepest,
            *[entry for entry in sorted(few, key=lambda entry: entry[:3])[:_MOST_SCORED] if entry is not deepest],
        ]
    found = [entry[-1] for entry in few]
    if last and all(view.name != last for view in found):
        found += [view for view in able if view.name == last]
    return found


def _works(views: Sequence[ReplicaView]) -> list[float]:
    """The load of each replica of one kind, in seconds; `prediction` knows it better, but is slower."""
    cost, budget = views[0].cost, views[0].limits.max_num_batched_tokens
    per_token, per_context = cost.prompt_seconds(budget) / budget, cost.context
    return [
        (
            (view.prompt_tokens_ahead + view.decodes) * per_token
            + per_context * view.context
            + view.step_ends_in
            + (0.0 if view.blocks_free > 0 else _NO_BLOCK_SECONDS)
        )
        * view.slowness
        for view in views
    ]


def _load(view: ReplicaView) -> tuple[int, int, int]:
    """The load that breaks ties."""
    return view.requests, view.prompt_tokens_ahead, view.context


def _scored(view: ReplicaView, request: RouteRequest, depth: int) -> _Scored:
    ttft, own = predicted_ttft(view, request, depth)
    lacking = max(view.limits.num_blocks_for(request.prompt_tokens) - depth, 1)
    evicted = max(lacking - view.blocks_blank, 0) / lacking
    return _Scored(view, depth, ttft, ttft + own * (1 + _EVICTED * evicted))


def _route(view: ReplicaView, request: RouteRequest, index: Blocks, why: str) -> Route:
    return _scored(view, request, index.depths(request.blocks).get(view.name, 0)).route(why)


def _why(best: _Scored, scored: Sequence[_Scored], last: str) -> str:
    """Return the choice in words: the hit, the prompts ahead, and by how much the next one would have been later."""
    size = best.view.limits.block_size
    parts = [f"predicted {best.ttft:.3f} s", f"{best.depth * size:,} tokens cached"]
    parts.append(f"{best.view.prompt_tokens_ahead:,} ahead")
    if best.view.name == last:
        parts.append("the session's last")
    others = [one.ttft for one in scored if one is not best]
    if others:
        parts.append(f"the next {min(others):.3f} s")
    return ", ".join(parts)
