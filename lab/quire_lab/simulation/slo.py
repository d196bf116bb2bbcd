"""Latency objectives such as `ttft_p95=2s,itl_p99=150ms`: parsing and comparison with measurements.

Promises: an objective that cannot be parsed is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire_engine.contract.errors import ConfigError
from quire_engine.cost_model import seconds

QUANTITIES = ("ttft", "itl", "tpot", "e2e", "queue")
STATISTICS = ("p50", "p90", "p95", "p99", "max", "mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A statistic of a latency, and its upper bound."""

    quantity: str
    statistic: str
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.quantity}_{self.statistic}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """A set of objectives; the empty set is met by everything."""

    objectives: tuple[Objective, ...] = ()

    def misses(self, value: Callable[[str, str], float | None]) -> dict[str, float]:
        """The missed objectives with their measured values; what was not measured is not missed."""
        found = {}
        for one in self.objectives:
            measured = value(one.quantity, one.statistic)
            if measured is not None and measured > one.seconds:
                found[one.name] = measured
        return found

    def is_good(self, *, ttft: float, tpot: float | None, e2e: float) -> bool:
        """Whether a single request meets the objectives: TTFT, mean time per token, end-to-end time."""
        measured = {"ttft": ttft, "itl": tpot, "tpot": tpot, "e2e": e2e}
        return all((measured.get(one.quantity) or 0.0) <= one.seconds for one in self.objectives)

    def __str__(self) -> str:
        return ",".join(f"{one.name}={one.seconds:g}s" for one in self.objectives)


def parse_slo(text: str) -> Slo:
    """Parse objectives such as `ttft_p95=2s,itl_p99=150ms`. Raises ConfigError."""
    objectives = []
    for pair in text.split(","):
        name, _, value = pair.strip().partition("=")
        quantity, _, statistic = name.partition("_")
        if quantity not in QUANTITIES or statistic not in STATISTICS:
            raise ConfigError(
                f"objective {pair!r}: write QUANTITY_STATISTIC=TIME, such as ttft_p95=2s; quantities are"
                f" {', '.join(QUANTITIES)}, statistics {', '.join(STATISTICS)}"
            )
        objectives.append(
            Objective(quantity=quantity, statistic=statistic, seconds=seconds(value, f"objective {name}"))
        )
    return Slo(objectives=tuple(objectives))
