"""Sources of a prompt's KV blocks for a request's replica: one that has them, or one that computes them for it.

A replica computes a prompt for another one as a request of its own, without output. Promises: it
changes when the first token comes, never the tokens; it ends when its stream has an output, ends or leaves its replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, cast

from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.roles import is_worth_passing_on
from quire_engine.contract.types import EngineStats, GenerationRequest, KVSource, SamplingParams, StopParams
from quire_engine.routing.views import Route
from quire_server.engine.recovery import JournalEntry
from quire_server.engine.replica_routing import Router

SourceKind = Literal["prefill", "cached"]
FEWEST_BLOCKS = 8  # that another replica has more than the one that was chosen
_PREFIX = "prefill-"  # of these requests' names; none of a stream begins so


class Lender(Protocol):
    """A replica, as far as this module needs it: `replicas.Replica`."""

    name: str
    tokens_ahead: int

    @property
    def plan(self) -> EnginePlan | None: ...
    @property
    def is_ready(self) -> bool:
        """Whether it takes something new."""
        ...

    def adopt(self, entry: JournalEntry) -> None: ...
    def abort(self, request_id: str) -> None: ...


@dataclass(slots=True, eq=False)
class _Prefill:
    """A prompt that one replica computes for another."""

    taker: str  # the other's name
    lender: Lender
    name: str  # of the request
    tokens: int  # that it is expected to compute


class PromptSources:
    """The prompts that are computed for others now, by the request that they are for."""

    def __init__(self, router: Router) -> None:
        self.on_source: Callable[[SourceKind], None] = lambda _: None
        self._router = router
        self._prefills: dict[str, _Prefill] = {}
        self._by_name: dict[str, str] = {}  # the request by the name of its prefill
        self._late: dict[str, frozenset[str]] = {}  # by a taker's name: where it fetches nothing for now

    def choose(
        self, entry: JournalEntry, route: Route, blocks: tuple[int, ...], taker: Lender, others: Iterable[Lender]
    ) -> KVSource | None:
        """A source for a request that goes to `taker`; None: there is none that would be as fast.

        `others`: the other replicas. A prompt that is to be computed by one of them is sent there.
        """
        request, plan = entry.request, taker.plan
        if plan is None or not plan.transfer.address or not _reads_blocks(request):
            return None
        late = self._late.get(taker.name, frozenset())
        able = [each for each in others if each.is_ready and _lends(each.plan, plan, late)]
        size = plan.scheduler.limits.block_size
        if plan.transfer.role != "prefill" and not entry.has_tokens:
            for_prompts = [each for each in able if _plan(each).transfer.role == "prefill"]
            lender = self._computing(entry, route, blocks, for_prompts)
            if lender is not None:
                self._begin(request, taker, lender, blocks)
                return self._source("prefill", lender, route)
        depths = self._router.depths(blocks)
        holder = max(able, key=lambda each: depths.get(each.name, 0), default=None)
        most = (len(request.prompt_token_ids) - 1) // size
        if holder is None or min(depths.get(holder.name, 0), most) < route.hit_blocks + FEWEST_BLOCKS:
            return None
        return self._source("cached", holder, route)

    def ends(self, name: str) -> None:
        """A request of this name has ended, which may be a prompt that was computed for another one."""
        owner = self._by_name.get(name)
        if owner is not None:
            self._forget(owner)

    def withdraw(self, request_id: str) -> None:
        """The request needs nothing of its prompt any more."""
        prefill = self._prefills.get(request_id)
        if prefill is not None:
            self._forget(request_id)
            prefill.lender.abort(prefill.name)

    def told(self, taker: str, stats: EngineStats) -> None:
        """A replica fetches nothing from its late peers for now: what is computed there for it, it computes itself."""
        late = stats.late_peers
        if not stats.blocks_total or late == self._late.get(taker, frozenset()):
            return
        self._late[taker] = late
        for owner, each in list(self._prefills.items()):
            if each.taker == taker and _plan(each.lender).transfer.address in late:
                self.withdraw(owner)

    def lost(self, lender: Lender) -> None:
        """A replica has no engine any more: what it computed for others, they compute themselves."""
        self._late.pop(lender.name, None)
        for owner in [owner for owner, each in self._prefills.items() if each.lender is lender]:
            self._forget(owner)

    def _computing(
        self, entry: JournalEntry, route: Route, blocks: tuple[int, ...], able: list[Lender]
    ) -> Lender | None:
        """The replica that computes the prompt, if that is worth it."""
        if not able:
            return None
        depths, prompt = self._router.depths(blocks), len(entry.request.prompt_token_ids)
        predicted = {each.name: self._router.predicted(each.name, entry, depths.get(each.name, 0)) for each in able}
        best = min(able, key=lambda each: (predicted[each.name], each.tokens_ahead, each.name))
        limits = _plan(best).scheduler.limits
        missing = prompt - route.hit_blocks * limits.block_size
        seconds = {"here": route.predicted_ttft, "there": predicted[best.name]}
        return best if is_worth_passing_on(missing=missing, chunk=limits.prefill_chunk, **seconds) else None

    def _begin(self, request: GenerationRequest, taker: Lender, lender: Lender, blocks: tuple[int, ...]) -> None:
        asked = replace(
            request,
            request_id=f"{_PREFIX}{request.request_id}",
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_new_tokens=0),
            n=1,
            beam=None,
            prediction=(),
            speculates=False,
            max_running=0,  # the quota is kept where the answer is computed
            kv_source=None,
        )
        made = _Prefill(taker.name, lender, asked.request_id, len(request.prompt_token_ids))
        lender.tokens_ahead += made.tokens
        self._prefills[request.request_id], self._by_name[asked.request_id] = made, request.request_id
        self._router.prompt_sent(lender.name, asked.request_id, blocks)
        lender.adopt(JournalEntry(asked))

    def _source(self, kind: SourceKind, lender: Lender, route: Route) -> KVSource:
        self.on_source(kind)
        return KVSource(
            address=_plan(lender).transfer.address, is_computing=kind == "prefill", own_seconds=route.predicted_ttft
        )

    def _forget(self, owner: str) -> None:
        prefill = self._prefills.pop(owner)
        del self._by_name[prefill.name]
        prefill.lender.tokens_ahead -= prefill.tokens
        self._router.forget(prefill.name)


def _plan(lender: Lender) -> EnginePlan:
    return cast(EnginePlan, lender.plan)  # of one that is ready


def _lends(plan: EnginePlan | None, to: EnginePlan, late: frozenset[str]) -> bool:
    """Whether blocks can be had there. `late`: where none are fetched for now."""
    if plan is None or plan.transfer.address in {"", *late}:
        return False
    return plan.identity.numerics == to.identity.numerics


def _reads_blocks(request: GenerationRequest) -> bool:
    """Whether its engine may use blocks that it has not computed."""
    return (
        request.sampling.num_prompt_logprobs is None and request.pooling != "mean" and request.stop.max_new_tokens > 0
    )
