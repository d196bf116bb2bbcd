"""Exercise S4.2: every decision of the scheduler has a reason, and `quire trace` names the rule that it follows from.

Promises: decisions of live servers' own logs, of requests that enter, wait and are preempted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire_lab.commands.trace import narrate
from quire_lab.exercises.alone import crowd, large_jobs, outgrowing, small_jobs
from quire_lab.exercises.own import OwnServers
from quire_lab.facts.fact import Fact, not_shown
from quire_lab.facts.live import Live
from quire_lab.facts.logs import recorded

_NEEDED = ("enters", "preempted", "waits")
_RULE = re.compile(r"\[([^\[\]]+)\]$")
# What is told of a reason that the narration does not know, by the kind of decision; of other kinds it is their name.
_NO_RULE = {"waits": "queue", "preempted": "preemption"}

Step = Mapping[str, Any]


def every_decision(live: Live, own: OwnServers) -> list[Fact]:
    """S4.2, of this server's steps and of those of one whose pool is too small."""
    begin = live.last_step()
    crowd(live, small_jobs(live))
    facts = explained("S4.2 decisions of this server", list(recorded(live, begin).steps), needed=("enters",))
    tight = own.tight()
    begin = tight.last_step()
    outgrowing(tight, large_jobs(tight))
    return [*facts, *explained("S4.2 decisions of a small pool", list(recorded(tight, begin).steps), needed=_NEEDED)]


def explained(name: str, steps: Sequence[Step], *, needed: Iterable[str]) -> list[Fact]:
    """How many decisions have a rule, and which kinds of them there were."""
    told = [(decision, rule_of(step, place)) for step in steps for place, decision in enumerate(step["decisions"])]
    without = [decision for decision, rule in told if not rule]
    seen = {(decision["kind"], decision["reason"]) for decision, _ in told}
    kinds = sorted({" for ".join(filter(None, each)) for each in seen})
    examples = {f"{one['kind']} {one['reason']!r}" for one in without}
    missing = sorted(set(needed) - {kind for kind, _ in seen})
    what = f"{name}, their kinds"
    shown = not_shown(what, f"nothing {' or '.join(missing)}: {', '.join(kinds) or 'no decision'}")
    return [
        Fact(
            name=f"{name} with a rule",
            expected=f"{len(told)} of {len(told)}",
            got=f"{len(told) - len(without)} of {len(told)}{': not ' if examples else ''}{', '.join(sorted(examples))}",
            ok=bool(told) and not without,
        ),
        shown if missing else Fact(name=what, expected=", ".join(needed), got=", ".join(kinds), ok=True),
    ]


def rule_of(step: Step, place: int) -> str:
    """The rule that the narration of a step names for one of its decisions; empty where it knows none."""
    decision = step["decisions"][place]
    line = list(narrate(dict(step), since=0.0))[1 + place]  # behind the line of the step itself
    found = _RULE.search(line)
    rule = found[1] if found else ""
    return "" if rule == _NO_RULE.get(decision["kind"], decision["kind"]) else rule
