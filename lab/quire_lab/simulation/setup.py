"""The setup of a simulation: a scheduler's limits and pool, the limits of the server's queue, the cost of steps.

Promises: one frozen record; a setting is changed by its name, and refused by name when it cannot be. Must
not know: the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from quire_engine.contract.errors import ConfigError
from quire_engine.contract.limits import (
    LIMIT_NAMES,
    LeastShares,
    PolicyName,
    SchedulerConfig,
    SchedulerLimits,
    first_claim,
)
from quire_engine.cost_model import UNIT_STEPS, CostModel

MatchName = Literal["whole", "blocks", "radix"]
MATCH_NAMES: tuple[MatchName, ...] = ("whole", "blocks", "radix")
_POOL_NAMES = ("num_blocks", "max_model_len", "plans_ahead", "windows")
_QUEUE_NAMES = ("max_num_queued_reqs", "max_num_queued_tokens")
CHANGEABLE = (*LIMIT_NAMES, *_POOL_NAMES, *_QUEUE_NAMES, "speculation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The properties of a server that determine its times."""

    scheduler: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(num_blocks=4096, max_model_len=65536))
    cost: CostModel = UNIT_STEPS
    max_num_queued_reqs: int = 256
    max_num_queued_tokens: int | None = None
    prefix_match: MatchName = "radix"  # how cached prefixes are found; a server's way is radix
    speculation: float = 0.0  # share of guessed tokens that are right, each if those before were; 0: none are guessed

    @property
    def max_sequences(self) -> int:
        """Choices that may be accepted and unfinished."""
        return self.scheduler.limits.max_num_seqs + self.max_num_queued_reqs

    @property
    def _claims_as_served(self) -> bool:
        """Whether the oldest request's claim is what a server gives it, and follows the other limits."""
        return self.scheduler.limits.min_chunk == _served_claim(self.scheduler.limits)

    def with_settings(self, pairs: Iterable[tuple[str, object]]) -> Setup:
        """A changed and checked copy; values are typed, or texts of a command line. Raises ConfigError."""
        limits: dict[str, Any] = {}
        pool: dict[str, Any] = {}
        queue: dict[str, Any] = {}
        for given, value in pairs:
            name = given.lstrip("-").replace("-", "_")
            if name in LIMIT_NAMES:
                limits[name] = _typed(name, value, getattr(self.scheduler.limits, name))
            elif name in _POOL_NAMES:
                pool[name] = _typed(name, value, getattr(self.scheduler, name))
            elif name in _QUEUE_NAMES:
                queue[name] = None if value in (None, "", "none") else _typed(name, value, 0)
            elif name == "speculation":
                queue[name] = share = float(str(_typed(name, value, 0.0)))
                if not 0.0 <= share <= 1.0:
                    raise ConfigError(f"speculation is {value!r}, must be the share of guesses that are right, 0 to 1")
            else:
                raise ConfigError(f"{given} is no setting that a simulation has; it has {', '.join(CHANGEABLE)}")
        changed = replace(self.scheduler.limits, **limits)
        if "min_chunk" not in limits and self._claims_as_served:
            changed = replace(changed, min_chunk=_served_claim(changed))
        scheduler = replace(self.scheduler, **pool, limits=changed)
        scheduler.check()
        if any((queue.get(name) or 0) < 0 for name in _QUEUE_NAMES):
            raise ConfigError("max_num_queued_reqs and max_num_queued_tokens must be at least 0")
        return replace(self, scheduler=scheduler, **queue)

    def of_ranks(self, ranks: int, exchanges: int, exchange_seconds: float, *, pools: bool = False) -> Setup:
        """The server as `ranks` processes that compute one model, see `CostModel.of_ranks`.

        `pools`: each brings the memory of a whole server.
        """
        cost = self.cost.of_ranks(ranks, exchanges, exchange_seconds)
        made = replace(self, cost=cost)
        return made.with_settings([("num_blocks", ranks * self.scheduler.num_blocks)]) if pools else made

    def settings(self) -> dict[str, Any]:
        """All settings that `with_settings` can change, by name; shares of classes as a text."""
        limits = {one.name: getattr(self.scheduler.limits, one.name) for one in fields(SchedulerLimits)}
        limits["class_share"] = str(self.scheduler.limits.class_share)
        pool = {name: getattr(self.scheduler, name) for name in _POOL_NAMES}
        return {**limits, **pool, **{name: getattr(self, name) for name in (*_QUEUE_NAMES, "speculation")}}


def setup(plain: Mapping[str, Any], cost: CostModel) -> Setup:
    """The setup from `settings` in a file of `quire calibrate`. Raises ConfigError.

    Where steps are units of time nothing is asked of the gaps between tokens: every step would be too long.
    """
    named = {**({"itl_target": 0.0} if cost == UNIT_STEPS else {}), **plain.get("settings", {})}
    return Setup(cost=cost).with_settings((name, value) for name, value in named.items() if name in CHANGEABLE)


def parse_settings(texts: Iterable[str]) -> list[tuple[str, object]]:
    """Pairs from texts `name=value`. Raises ConfigError."""
    pairs: list[tuple[str, object]] = []
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"{text!r} should be NAME=VALUE, such as max_num_seqs=32")
        pairs.append((name, value))
    return pairs


def _served_claim(limits: SchedulerLimits) -> int:
    return first_claim(limits.max_num_batched_tokens, limits.max_num_seqs, limits.prefill_chunk)


def _windows(name: str, value: object) -> tuple[int | None, ...]:
    """Parse windows from a list, or from a text such as none,512,512. Raises ConfigError."""
    parts = value.split(",") if isinstance(value, str) else value
    try:
        found = tuple(None if part in {None, "none"} else int(part) for part in parts)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        found = ()
    if not found or any(window is not None and window < 1 for window in found):
        raise ConfigError(f"{name} is {value!r}, must be the window of each group of layers, such as none,512,512")
    return found


def _typed(name: str, value: object, like: object) -> object:
    """The value in the type of the setting. Raises ConfigError."""
    if isinstance(like, tuple):
        return _windows(name, value)
    if isinstance(like, LeastShares):
        return LeastShares.parse(value)
    if not isinstance(value, str):
        return value
    try:
        if isinstance(like, bool):
            return {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}[value.lower()]
        if isinstance(like, int | float):
            return type(like)(value)
    except (KeyError, ValueError):
        raise ConfigError(f"{name} is {value!r}, must be like {like}") from None
    if name == "scheduling_policy" and value not in get_args(PolicyName):
        raise ConfigError(f"{name} is {value!r}, must be {' or '.join(get_args(PolicyName))}")
    return value
