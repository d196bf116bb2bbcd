"""The statistics of several engines as those of one: gauges are added up, totals never fall when an engine is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any, TypeVar, cast

from quire_engine.contract.types import EngineStats, TenantStats

_Record = TypeVar("_Record", EngineStats, TenantStats)
# Of one step, not of an engine.
OF_A_STEP = (
    *("prefill_tokens", "decode_tokens", "step_rows"),
    *("step_seconds", "host_seconds", "seen_seconds", "predicted_seconds"),
)


class StatsSum:
    """The latest statistics of each engine, and the totals of engines before them."""

    def __init__(self) -> None:
        self._latest: dict[str, EngineStats] = {}
        self._ended: dict[str, EngineStats] = {}  # the totals of engines that are gone; their gauges are 0

    def take(self, name: str, stats: EngineStats) -> EngineStats:
        """The sum after a step of the engine of this name; what belongs to a step is that step's."""
        self._latest[name] = stats
        parts = [*self._latest.values(), *self._ended.values()]
        of_step = {field: getattr(stats, field) for field in OF_A_STEP}
        since = [each.kv_waiting_since for each in self._latest.values() if each.kv_waiting_since is not None]
        tenants = _tenants(each for part in parts for each in part.tenants)
        return _added(parts, kv_waiting_since=min(since, default=None), tenants=tenants, **of_step)

    def lost(self, name: str) -> EngineStats:
        """The sum after an engine has ended: the next one of its name begins empty, and its totals at 0."""
        latest = self._latest.get(name, EngineStats())
        before = self._ended.get(name, EngineStats())
        tenants = _tenants(_totals(each) for part in (before, latest) for each in part.tenants)
        self._ended[name] = _totals(_added([before, latest], kv_waiting_since=None, tenants=tenants))
        return self.take(name, _idle(EngineStats(), latest))

    def away(self, name: str) -> EngineStats:
        """The sum after an engine is out of reach: nothing runs there, and its totals may go on from where they are."""
        latest = self._latest.get(name, EngineStats())
        return self.take(name, _idle(_totals(latest), latest))

    def of(self, name: str) -> EngineStats:
        """The latest statistics of one engine."""
        return self._latest.get(name, EngineStats())


def _idle(kept: EngineStats, latest: EngineStats) -> EngineStats:
    """An engine with memory of the latest sizes, and nothing in it."""
    return replace(
        kept,
        blocks_total=latest.blocks_total,
        blocks_free=latest.blocks_total,
        host_blocks_total=latest.host_blocks_total,
    )


def _added(parts: Iterable[_Record], **given: object) -> _Record:
    """All numbers added up, by key in tables and by place in rows, and sets united; `given`: fields that are not."""
    parts = list(parts)
    kind = type(parts[0])
    added = {
        field.name: _sum([getattr(part, field.name) for part in parts])
        for field in fields(kind)
        if field.name not in given
    }
    return cast("Callable[..., _Record]", kind)(**added, **given)


def _sum(values: list[Any]) -> Any:
    match values[0]:
        case Mapping():
            keys = dict.fromkeys(key for value in values for key in value)
            return {key: sum(value.get(key, 0) for value in values) for key in keys}
        case tuple():
            return tuple(map(sum, zip_longest(*values, fillvalue=0)))
        case frozenset():
            return frozenset().union(*values)
    return sum(values)


def _tenants(parts: Iterable[TenantStats]) -> tuple[TenantStats, ...]:
    by_name: dict[str, list[TenantStats]] = {}
    for part in parts:
        by_name.setdefault(part.tenant, []).append(part)
    return tuple(_added(own, tenant=name) for name, own in by_name.items())


def _totals(stats: _Record) -> _Record:
    """Return only the fields that count since the start, and the tenants' names."""
    kept = {
        field.name: getattr(stats, field.name)
        for field in fields(stats)
        if field.name.startswith("total_") or field.name in ("tenant", "tenants")
    }
    return cast("Callable[..., _Record]", type(stats))(**kept)
