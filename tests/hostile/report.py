"""What a run of hostile requests has shown, for people: counts by class, the worst of each kind, what was broken.

Promises: a figure is printed for every promise, kept or not. Must not know: servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hostile.verdict import Verdict

WORST = 10
MOST_BROKEN = 60


def lines(verdicts: Sequence[Verdict], seconds: float) -> Iterator[str]:
    kinds = dict.fromkeys(verdict.case.kind for verdict in verdicts)
    yield f"{'class':<20} {'requests':>8} {'kept':>6} {'broken':>6}  statuses"
    for kind in kinds:
        mine = [verdict for verdict in verdicts if verdict.case.kind == kind]
        kept = sum(verdict.is_kept for verdict in mine)
        yield f"{kind:<20} {len(mine):>8} {kept:>6} {len(mine) - kept:>6}  {_statuses(mine)}"
    kept = sum(verdict.is_kept for verdict in verdicts)
    yield f"{'all':<20} {len(verdicts):>8} {kept:>6} {len(verdicts) - kept:>6}  in {seconds:.0f} s"
    yield ""
    yield from _worst(verdicts, "how long the event loop was held", lambda verdict: verdict.seen.stall)
    yield from _worst(verdicts, "how long another's stream was silent beyond the usual", lambda each: each.seen.beyond)
    yield from _worst(verdicts, "how long /health/live took", lambda verdict: verdict.seen.live)
    broken = sorted((each for each in verdicts if not each.is_kept), key=lambda each: not each.faults)
    if broken:
        yield f"{len(broken)} requests broke promises:"
    for verdict in broken[:MOST_BROKEN]:
        yield f"  {verdict.case.kind}: {verdict.case.name}"
        for fault in (*verdict.faults, *verdict.late):
            yield f"      {fault}"
    if len(broken) > MOST_BROKEN:
        yield f"  and {len(broken) - MOST_BROKEN} more"


def _statuses(verdicts: Sequence[Verdict]) -> str:
    counts: dict[int, int] = {}
    for verdict in verdicts:
        counts[verdict.status] = counts.get(verdict.status, 0) + 1
    return ", ".join(f"{status or 'closed'}: {count}" for status, count in sorted(counts.items()))


def _worst(verdicts: Sequence[Verdict], title: str, figure: Callable[[Verdict], float]) -> Iterator[str]:
    yield f"The worst ten by {title}:"
    for verdict in sorted(verdicts, key=figure, reverse=True)[:WORST]:
        yield f"  {figure(verdict) * 1000:8.1f} ms  {verdict.case.kind}: {verdict.case.name}"
    yield ""
