"""Exercises on blocks and tables: S1.1, S1.2, S1.4.

Promises: what is counted is read off the live pool and the live step log.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from quire_lab.facts import sharing, steps
from quire_lab.facts.fact import Fact, equal, not_shown, renamed
from quire_lab.facts.live import Live
from quire_lab.facts.logs import recorded
from quire_lab.simulation.recorded import Recording

_REQUESTS = 24
_LONGEST_PROMPT, _LONGEST_ANSWER = 96, 128
_CHATS, _PREFIX = 16, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The pool at one moment: an audit, and blocks by what they are."""

    clean: bool
    disagreement: str
    references: int
    total: int
    used: int
    cached: int
    free: int


def audited_under_load(live: Live) -> list[Fact]:
    """S1.1: every reference counted anew is what the pool says, under a random load and after it."""
    dice = random.Random(1)
    calls = [
        partial(live.complete, live.prompt(dice.randint(1, _LONGEST_PROMPT)), dice.randint(1, _LONGEST_ANSWER))
        for _ in range(_REQUESTS)
    ]
    looks = []
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(live.together, calls)
        while not load.done():
            looks.append(_look(live))
        load.result()
    live.until_idle()
    by_state = sum(live.metric("quire_kv_blocks", state=state) for state in ("used", "cached", "free"))
    return [*audits(looks, _look(live)), equal("S1.1 blocks by state", live.metric("quire_kv_pool_blocks"), by_state)]


def audits(looks: Sequence[Look], after: Look) -> list[Fact]:
    """Return facts on the pool as seen under load, and when all was over."""
    everywhere = [*looks, after]
    wrong = next((look.disagreement for look in everywhere if not look.clean), "")
    clean = sum(look.clean for look in everywhere)
    return [
        Fact(
            name="S1.1 audits that found nothing wrong",
            expected=f"{len(everywhere)} of {len(everywhere)}",
            got=f"{clean} of {len(everywhere)}{': ' if wrong else ''}{wrong}"[:160],
            ok=clean == len(everywhere),
        ),
        most_references(looks),
        equal("S1.1 references at the end", 0, after.references),
        equal(
            "S1.1 looks in which free, cached and used blocks are not the pool",
            0,
            sum(look.free + look.cached + look.used != look.total for look in everywhere),
        ),
        equal("S1.1 blocks used at the end", 0, after.used),
    ]


def most_references(looks: Sequence[Look]) -> Fact:
    """Whether an audit had something to count; else the load was over before the first one."""
    name, most = "S1.1 most references that an audit counted", max((look.references for look in looks), default=0)
    if not most:
        return not_shown(name, f"none in {len(looks)} audits: the load was over")
    return Fact(name=name, expected="1 or more", got=f"{most:,}", ok=True)


def _look(live: Live) -> Look:
    audit, blocks = live.debug("kv/audit"), live.debug("kv")["blocks"]
    return Look(
        clean=audit["clean"],
        disagreement=audit["disagreement"] or "",
        references=audit["counted"]["references"],
        **{name: blocks[name] for name in ("total", "used", "cached", "free")},
    )


def place_of_a_token(live: Live) -> list[Fact]:
    """S1.2: position 37 is at offset 5 of the third block."""
    return renamed("S1.2", steps.place_of_a_token(live))


def shared_prefix(live: Live) -> list[Fact]:
    """S1.4: a prompt of 200 tokens is held once by those who have it, its half-filled block until somebody writes."""
    limits = live.debug("steps?limit=1&events=true")["config"]["limits"]
    choices = min(_CHATS, int(limits["max_num_seqs"]), int(limits["min_chunk"]))
    begin = live.last_step()
    live.complete(live.prompt(_PREFIX), 2, n=choices, temperature=1)
    live.until_idle()
    facts = copied_on_write(recorded(live, begin), choices=choices, block_size=live.block_size)
    return [*facts, *renamed("S1.4", sharing.shared_prefix(live))]


def copied_on_write(told: Recording, *, choices: int, block_size: int) -> list[Fact]:
    """Return facts on choices of one prompt: blocks while they only have it, and what the first write copies."""
    blocks, partial_block = -(-_PREFIX // block_size), int(_PREFIX % block_size > 0)
    found = [step for step in told.steps if step["slices"]]
    shared = next(
        (
            step["blocks_used"]
            for step in found
            if any(start + count == _PREFIX for _, _, start, count in step["slices"])
        ),
        0,
    )
    separate = choices * blocks
    return [
        Fact(
            name=f"S1.4 blocks of {choices} choices with a prompt of {_PREFIX} tokens, and saved of {separate}",
            expected=f"{blocks}, {separate - blocks}",
            got=f"{shared}, {separate - shared}",
            ok=shared == blocks,
        ),
        equal(
            "S1.4 copies at the first write; the last owner writes in place",
            (choices - 1) * partial_block,
            sum(len(step["copies"]) for step in found),
        ),
    ]
