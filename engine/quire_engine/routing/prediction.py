"""Predicts a request's time to first token on a replica, from the calibrated cost model and what is ahead of it.

Promises: more load, fewer hits or a slower replica never predict less. Must not know: sockets, clocks.
"""

from __future__ import annotations

from math import exp2

from quire_engine.routing.views import ReplicaView, RouteRequest

_KEEP = 0.9  # of the earlier mean with each further first token
_PRIOR_SECONDS = 1.0  # of a replica of which nothing is known, seen and predicted
_LITTLE = 0.05  # seconds that any first token may be late
_FORGET_SECONDS = 30.0  # in which a replica that gets no work is half forgiven
NEVER_SLOWER = 5.0  # slowness beyond which a replica gets no new work while others may have it
_UNKNOWN_SECONDS = 1.0  # of waiting for blocks where nothing is known of how fast they come back


def uncached_tokens(view: ReplicaView, request: RouteRequest, hit_blocks: int) -> int:
    """Prompt tokens that the replica computes for the request: at least one, for the logits."""
    return max(request.prompt_tokens - hit_blocks * view.limits.block_size, 1)


def prompt_tokens_a_step(view: ReplicaView) -> int:
    """Prompt tokens that the planner gives a step, beside the decodes that run now."""
    limits = view.limits
    budget = max(limits.max_num_batched_tokens - view.decodes, limits.min_chunk, 1)
    if not limits.itl_target or not view.decodes:
        return budget
    within = view.cost.prompt_tokens_within(limits.itl_target, budget + view.decodes) - view.decodes
    return max(within, min(limits.min_chunk, budget))


def prompt_seconds(view: ReplicaView, num_tokens: int, a_step: int) -> float:
    """Seconds until `num_tokens` prompt tokens are computed in steps of `a_step`, which the running decodes share."""
    if num_tokens <= 0:
        return 0.0
    cost, decodes = view.cost, view.decodes
    full, rest = divmod(num_tokens, a_step)
    of_decodes = cost.context * view.context
    seconds = full * (cost.prompt_seconds(a_step + decodes) + of_decodes) if full else 0.0
    return seconds + cost.prompt_seconds(rest + decodes) + of_decodes if rest else seconds


def kv_wait(view: ReplicaView, request: RouteRequest, hit_blocks: int) -> float:
    """Seconds until the blocks that the prompt lacks are free, at the rate at which ending requests free them."""
    lacking = view.limits.num_blocks_for(request.prompt_tokens) - hit_blocks - view.blocks_free
    if lacking <= 0:
        return 0.0
    return lacking / view.blocks_freed_rate if view.blocks_freed_rate > 0 else _UNKNOWN_SECONDS


def predicted_ttft(view: ReplicaView, request: RouteRequest, hit_blocks: int) -> tuple[float, float]:
    """(TTFT, its own part of that) in seconds: the end of the running step, the prompts ahead, the request's own.

    A replica that has been slower than predicted is expected to be so again. The own part is what the request takes
    from those that come after it.
    """
    own = uncached_tokens(view, request, hit_blocks)
    a_step = prompt_tokens_a_step(view)
    ahead = prompt_seconds(view, view.prompt_tokens_ahead, a_step)
    until = prompt_seconds(view, view.prompt_tokens_ahead + own, a_step)
    cost = view.cost
    attention = cost.chunk_context * own * (request.prompt_tokens - own / 2)
    waits = kv_wait(view, request, hit_blocks)
    seconds = view.step_ends_in + cost.request + until + attention + waits
    return seconds * view.slowness, (max(until - ahead, 0.0) + attention) * view.slowness


class Slowness:
    """A replica's seen TTFT over the predicted one, as a running mean; without news it returns to 1.

    Sums of seconds are compared, so that the many short first tokens, which a single step makes twice as long, say
    less than the long ones.
    """

    def __init__(self) -> None:
        self._predicted = self._seen = _PRIOR_SECONDS
        self._at = 0.0

    def observe(self, *, predicted: float, seen: float, now: float) -> None:
        """A first token has come, `seen` seconds after its request was sent."""
        self._predicted = _KEEP * self._predicted + (1 - _KEEP) * predicted
        self._seen = _KEEP * self._seen + (1 - _KEEP) * seen
        self._at = now

    def ratio(self, now: float) -> float:
        """The factor on predictions now."""
        age = max(now - self._at, 0.0)
        ratio = (self._seen + _LITTLE) / (self._predicted + _LITTLE)
        return 1.0 + (ratio - 1.0) * exp2(-age / _FORGET_SECONDS)
