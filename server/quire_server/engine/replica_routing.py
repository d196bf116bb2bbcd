"""The front's knowledge of its replicas for choosing among them: load, cached prompts, the time of their steps.

The choice itself is a policy of `quire_engine.routing`. A wrong guess here costs time, never tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quire_engine.contract.block_hashes import routed_names
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import EngineStats, GenerationRequest, StepOutput, TokenOutput
from quire_engine.cost_model import CostModel
from quire_engine.routing.fleet import TenantService, Wanted, WantedReplicas, request_seconds
from quire_engine.routing.index import PrefixIndex
from quire_engine.routing.policy import route_policy
from quire_engine.routing.prediction import Slowness, predicted_ttft
from quire_engine.routing.views import NoReplica, ReplicaState, ReplicaView, Route, RouteRequest
from quire_server.engine.recovery import JournalEntry

_KEEP = 0.95  # of the mean with each further step
_FIRST_STEP, _FIRST_TOKEN = 0.01, 0.0005  # seconds; before the first steps were seen, when all replicas are alike
_FIRST_LENGTH = 64.0  # tokens of an answer, before any was seen
_MOST_ENDS = 256.0  # answers that the mean length goes back
_LEARNED = 32  # steps after which the model is made anew


class LiveCost:
    """The cost model of engines of one kind, from the steps that they have made."""

    def __init__(self) -> None:
        self._step, self._token = _FIRST_STEP, _FIRST_TOKEN
        self._num_seen = 0
        self.model = self._made()

    def learn(self, stats: EngineStats) -> None:
        """Take in a step."""
        seconds, tokens = stats.step_seconds, stats.prefill_tokens
        if seconds <= 0.0 or not (tokens or stats.decode_tokens):
            return
        if not tokens:
            self._step = _KEEP * self._step + (1 - _KEEP) * seconds
        elif 2 * tokens > stats.decode_tokens:
            more = max(seconds - self._step, 0.1 * seconds) / tokens
            self._token = _KEEP * self._token + (1 - _KEEP) * more
        self._num_seen += 1
        if self._num_seen % _LEARNED == 0:
            self.model = self._made()

    def _made(self) -> CostModel:
        step, token = self._step, self._token
        return CostModel(step=step, prompt=((1, step + token), (1025, step + 1025 * token)))


_SLOW_FACTOR, _SLOW_SECONDS = 2.0, 1.0  # a first token is slow that is so much later than predicted


@dataclass(slots=True, kw_only=True)
class RouteTaken:
    """The replica that got a request, and why: for operators."""

    replica: str
    reason: str  # of a fixed set
    why: str  # the policy's words
    predicted: float  # seconds to its first output
    sent_at: float
    seen: float | None = None  # seconds to it

    @property
    def is_slow(self) -> bool:
        """Whether the first output came much later than predicted."""
        return self.seen is not None and self.seen > max(_SLOW_FACTOR * self.predicted, self.predicted + _SLOW_SECONDS)

    def plain(self) -> dict[str, object]:
        """Return the route in plain values for JSON."""
        return {
            "replica": self.replica,
            "reason": self.reason,
            "why": self.why,
            "predicted_ttft_seconds": round(self.predicted, 6),
            "seen_ttft_seconds": None if self.seen is None else round(self.seen, 6),
        }

    def __str__(self) -> str:
        return f"replica {self.replica} ({self.reason}): {self.why}"


class OutputLengths:
    """The mean length of answers, in tokens, the later ones counting more."""

    def __init__(self) -> None:
        self._tokens, self._ends = _FIRST_LENGTH, 1.0

    def learn(self, outputs: Sequence[TokenOutput]) -> None:
        """Take in outputs."""
        for output in outputs:
            self._tokens += len(output.token_ids)
            self._ends += output.finish is not None
        if self._ends > _MOST_ENDS:
            self._tokens, self._ends = self._tokens / 2, self._ends / 2

    @property
    def mean(self) -> float:
        return self._tokens / self._ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A replica's part of a view that only its owner knows."""

    name: str
    cohort: str
    state: ReplicaState
    limits: SchedulerLimits
    tokens_ahead: int
    requests: int
    stats: EngineStats


class Router:
    """One route policy, and all that it decides by."""

    def __init__(self, policy: str, *, ttft_target: float = 0.0) -> None:
        """Raises ConfigError for a policy that is unknown. `ttft_target`: seconds of p95; 0: none.

        `on_answered` is called at a request's first output: its replica, the TTFT predicted, and seen, in seconds.
        """
        self.on_answered: Callable[[str, float, float], None] = lambda *_: None
        self._policy = route_policy(policy)
        self.reads_blocks = self._policy.reads_blocks
        self._index = PrefixIndex()
        self._tenants = TenantService()
        self._cost = LiveCost()
        self._wanted = WantedReplicas(ttft_target=ttft_target, least=0)
        self._lengths = OutputLengths()
        self._views: dict[str, ReplicaView] = {}  # of the latest choice
        self._slowness: dict[str, Slowness] = {}
        self._predicted: dict[str, tuple[str, float, float]] = {}  # by unanswered request: replica, TTFT, when sent

    def joins(self, name: str) -> None:
        """A replica has a new engine, with nothing cached."""
        self.is_away(name)
        self._tenants.remove(name)

    def is_away(self, name: str) -> None:
        """A replica is out of reach: nothing is known of its cache, but its engine may go on counting."""
        self._index.add(name)
        self._slowness[name] = Slowness()

    def leaves(self, name: str) -> None:
        """A replica is gone for good."""
        self._index.remove(name)
        self._tenants.remove(name)
        self._slowness.pop(name, None)

    def observe(self, name: str, step: StepOutput) -> None:
        """Take in a replica's step."""
        self._lengths.learn(step.outputs)
        self._cost.learn(step.stats)
        if step.stats.tenants:
            self._tenants.observe(name, step.stats.tenants)
        if step.prefixes is not None:
            self._index.apply(name, step.prefixes)  # frames of one socket have no gaps

    def blocks_of(self, request: GenerationRequest, block_size: int, *, lends: bool = False) -> tuple[int, ...]:
        """The names of its prompt's blocks, where the policy asks for them, or replicas lend them to each other.

        At most 256 blocks are hashed, whatever the prompt's length: a quarter of a millisecond with blocks of 16
        tokens, two with 512. Small hashes hold the interpreter's lock, so that a thread would take no less from the
        event loop.
        """
        if not (self.reads_blocks or lends) or not _reads_cache(request):
            return ()
        return routed_names(request.prompt_token_ids, request.cache_salt, block_size)

    def choose(
        self,
        entry: JournalEntry,
        request_id: str,
        cohort: str,
        standings: Sequence[Standing],
        *,
        now: float,
        blocks: tuple[int, ...] = (),
    ) -> Route | None:
        """The route; None where no replica may have it.

        `cohort`: of a request that has tokens; empty: any. `blocks`: see `blocks_of`.
        """
        request = entry.request
        asked = RouteRequest(
            request_id=request_id,
            prompt_tokens=num_known_tokens(entry),
            blocks=blocks,
            max_new_tokens=request.stop.max_new_tokens,
            tenant=request.tenant,
            cohort=cohort,
        )
        self._views = {each.name: self._view(each, now) for each in standings}
        try:
            return self._policy.choose(asked, list(self._views.values()), self._index, now)
        except NoReplica:
            return None

    def depths(self, blocks: tuple[int, ...]) -> dict[str, int]:
        """The first blocks of a prompt that each replica has in a row, for those that have any."""
        return self._index.depths(blocks)

    def predicted(self, name: str, entry: JournalEntry, hit_blocks: int) -> float:
        """Seconds to the first token at a replica of the latest choice, which has so many of the prompt's blocks."""
        asked = RouteRequest(request_id="", prompt_tokens=num_known_tokens(entry))
        return predicted_ttft(self._views[name], asked, hit_blocks)[0]

    def prompt_sent(self, name: str, request_id: str, blocks: tuple[int, ...]) -> None:
        """A replica is about to compute a prompt for another one."""
        self._index.sent(name, request_id, blocks)

    def sent(self, request: GenerationRequest, route: Route, blocks: tuple[int, ...], now: float) -> GenerationRequest:
        """The request goes there; returns it with the service of other replicas."""
        view = self._views[route.name]
        uncached = len(request.prompt_token_ids) - route.hit_blocks * view.limits.block_size
        output = min(self._lengths.mean, request.stop.max_new_tokens) * request.num_sequences
        busy = request_seconds(view, prompt_tokens=max(uncached, 1), output_tokens=int(output))
        self._wanted.offer(busy_seconds=busy, predicted_ttft=route.predicted_ttft, now=now)
        self._index.sent(route.name, request.request_id, blocks)
        self._predicted[request.request_id] = route.name, route.predicted_ttft, now
        elsewhere = self._tenants.elsewhere(route.name, request.tenant)
        return replace(request, service_elsewhere=elsewhere) if elsewhere else request

    def wanted(self, now: float, *, ready: int) -> Wanted:
        """The replicas that the work of the last minute asks for, where `ready` of them serve now."""
        return self._wanted.wanted(now, ready=ready)

    def answered(self, request_id: str, now: float) -> None:
        """Note that a request's first output has come from where it was sent."""
        name, predicted, sent_at = self._predicted.get(request_id, ("", 0.0, 0.0))
        if name:
            self._slowness[name].observe(predicted=predicted, seen=now - sent_at, now=now)
            self.on_answered(name, predicted, now - sent_at)
        self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended or is to be sent elsewhere."""
        self._predicted.pop(request_id, None)
        self._index.answered(request_id)

    def _view(self, standing: Standing, now: float) -> ReplicaView:
        stats = standing.stats
        return ReplicaView(
            name=standing.name,
            cohort=standing.cohort,
            state=standing.state,
            cost=self._cost.model,
            limits=standing.limits,
            prompt_tokens_ahead=standing.tokens_ahead,
            requests=standing.requests,
            decodes=stats.running,
            context=stats.slots_allocated - stats.slots_unused,
            blocks_total=stats.blocks_total,
            blocks_free=stats.blocks_free + stats.blocks_cached,
            blocks_blank=stats.blocks_free,
            slowness=self._slowness[standing.name].ratio(now),
        )


def num_known_tokens(entry: JournalEntry) -> int:
    """The tokens that an engine computes before the request's next one."""
    return len(entry.request.prompt_token_ids) + max(map(len, entry.tokens))


def _reads_cache(request: GenerationRequest) -> bool:
    return request.sampling.num_prompt_logprobs is None and request.pooling != "mean"
