"""Keeps the books of the scheduler: the statistics of a moment for operators.

They change nothing, and their cost does not depend on the size of the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from quire_engine.contract.types import WAIT_REASONS, EngineStats, WaitReason
from quire_engine.scheduling.cached_blocks import CachedBlocks
from quire_engine.scheduling.planner import Planner
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.running_decodes import RunningDecodes
from quire_engine.scheduling.sequence import Group
from quire_engine.scheduling.speculation import Speculation
from quire_engine.scheduling.step_prices import AppliedStep


class Books:
    """The statistics for operators: gauges of this moment, and counters since the start.

    A part of the scheduler that has an attribute called like a `total_...` of `EngineStats` is its counter.
    """

    def __init__(
        self,
        kv: CachedBlocks,
        roster: Roster,
        decodes: RunningDecodes,
        planner: Planner,
        speculation: Speculation | None,
    ) -> None:
        self._kv, self._roster, self._decodes, self._planner = kv, roster, decodes, planner
        names = [field.name for field in fields(EngineStats) if field.name.startswith("total_")]
        parts = (kv, roster, planner.admission, speculation)
        self._totals = [(name, part) for part in parts for name in names if hasattr(part, name)]

    def stats(self, *, last: AppliedStep, samples: Mapping[str, Any]) -> EngineStats:
        """The statistics now. The cost does not depend on the size of the pool.

        `last`: the last step; `samples`: fields of what is sampled.
        """
        kv, roster = self._kv, self._roster
        waiting: dict[WaitReason, int] = dict.fromkeys(WAIT_REASONS, 0)
        for group in roster.waiting:
            waiting[group.wait_reason] += len(group.sequences)
        used = kv.num_used
        has_adapters = any(roster.adapters.in_use)
        return EngineStats(
            running=roster.num_running,
            waiting=waiting,
            held=sum(len(group.sequences) for group in roster.held.values()),
            blocks_total=kv.num_blocks,
            blocks_used=used,
            blocks_cached=kv.num_cached,
            blocks_free=kv.num_available - kv.num_cached,
            blocks_pinned=len(kv.pins),
            blocks_shared=kv.num_shared,
            blocks_unshared=used - kv.num_shared,
            blocks_saved=kv.num_saved,
            slots_allocated=used * kv.block_size,
            slots_unused=self._decodes.num_unused_slots,
            prefill_tokens=last.prompt_tokens,
            decode_tokens=last.num_decodes,
            step_rows=last.num_rows,
            seen_seconds=last.seconds,
            predicted_seconds=last.predicted,
            **samples,
            **{name: _copied(getattr(part, name)) for name, part in self._totals},
            total_preemptions_by_mode={"recompute": roster.total_preemptions, "swap": 0},
            total_pins=kv.pins.totals(),
            kv_waiting_since=self._planner.admission.kv_waiting_since,
            tenants=self._planner.accounts.stats(roster.running, roster.waiting),
            running_adapters=_adapter_names(roster.running) if has_adapters else frozenset(),
            waiting_adapters=_adapter_names([*roster.waiting, *roster.held.values()]) if has_adapters else frozenset(),
        )


def _copied(value: Any) -> Any:
    """A number, or the numbers of a table or a list as they are now."""
    match value:
        case dict():
            return dict(value)
        case list():
            return tuple(value)
    return value


def _adapter_names(groups: Iterable[Group]) -> frozenset[str]:
    return frozenset([group.request.adapter.name for group in groups if group.request.adapter is not None])
