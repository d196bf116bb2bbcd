"""Whether it pays to give nodes roles: prompts on some of them, answers on the others, against all of them alike.

Promises: every way was simulated step by step with the rules that serve; roles count as paying only where they are
clearly better than the best way without them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire_bench.traces import TraceRow
from quire_engine.contract.errors import ConfigError
from quire_lab.simulation.fleet import Fleet, simulate_steps
from quire_lab.simulation.fleet_report import FleetReport, fleet_report
from quire_lab.simulation.slo import Slo

CLEARLY = 0.95  # of the other way's strain at most
_MOST_SPLITS = 4  # numbers of nodes for prompts that are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run the nodes, simulated."""

    replicas: int
    for_prompts: int
    itl_target: float  # seconds; 0: prompts take whole steps
    strain: float  # the worst of the measured times over their objectives; above 1 one is missed
    at: FleetReport

    @property
    def keeps(self) -> bool:
        return self.strain <= 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolesPlan:
    """All ways, and the best one with roles and without."""

    ways: tuple[Way, ...]
    without: Way
    roles: Way

    @property
    def pays(self) -> bool:
        """Whether roles keep the objectives with fewer nodes, or with as many are clearly further from missing them."""
        if self.roles.keeps and self.without.keeps and self.roles.replicas != self.without.replicas:
            return self.roles.replicas < self.without.replicas
        return self.roles.strain <= CLEARLY * self.without.strain


def plan_roles(fleet: Fleet, rows: Sequence[TraceRow], slo: Slo, *, speed: float = 1.0) -> RolesPlan:
    """Compare on this load. `fleet`: without roles, of as many nodes as keep the objectives. Raises ConfigError."""
    if fleet.replicas < 2:
        raise ConfigError("roles need two nodes, and one keeps the objectives; leave --roles out")
    own = fleet.replica.scheduler.limits.itl_target

    def way(replicas: int, for_prompts: int, itl_target: float = own) -> Way:
        setup = fleet.replica.with_settings([("itl_target", itl_target)])
        asked = replace(fleet, replica=setup, replicas=replicas, for_prompts=for_prompts)
        found = fleet_report(asked, simulate_steps(asked, rows, speed=speed), slo)
        return Way(
            replicas=replicas, for_prompts=for_prompts, itl_target=itl_target, strain=_strain(found, slo), at=found
        )

    counts = [count for count in (fleet.replicas, fleet.replicas - 1) if count > 1]
    without = [way(count, 0, target) for count in counts for target in dict.fromkeys([own, *_targets(slo)])]
    roles = [way(count, split) for count in counts for split in range(1, min(count - 1, _MOST_SPLITS) + 1)]
    return RolesPlan(ways=(*without, *roles), without=_best(without), roles=_best(roles))


def _targets(slo: Slo) -> list[float]:
    """Steps that are as short as the gaps between tokens have to be."""
    return [one.seconds for one in slo.objectives if one.quantity in {"itl", "tpot"}][:1]


def _best(ways: Sequence[Way]) -> Way:
    """The fewest nodes that keep the objectives, then the least strain."""
    return min(ways, key=lambda way: (not way.keeps, way.replicas if way.keeps else 0, way.strain))


def _strain(found: FleetReport, slo: Slo) -> float:
    if any(reason != "infeasible" for reason in found.report.refused):
        return math.inf
    measured = [(found.report.value(one.quantity, one.statistic), one.seconds) for one in slo.objectives]
    return max((value / most for value, most in measured if value is not None), default=0.0)
