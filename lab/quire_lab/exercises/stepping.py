"""Exercises on single steps: S1.3, S2.2, S2.3, S3.1.

Promises: the live server's steps beside the simulator's, slice for slice; requests are told apart by their lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from quire_bench.servers import BenchError
from quire_engine.contract.batch import Batch
from quire_lab.exercises.own import OwnServers
from quire_lab.exercises.paced import paused
from quire_lab.facts import batching, steps
from quire_lab.facts.fact import Fact, NotShown, equal, renamed
from quire_lab.facts.live import Live
from quire_lab.facts.logs import arrivals_of, lengths_by_request, recorded
from quire_lab.simulation.lengths import exercise_setup, rows_of
from quire_lab.simulation.outcome import Moment, Outcome
from quire_lab.simulation.plotting import svg, terminal
from quire_lab.simulation.recorded import Recording
from quire_lab.simulation.replaying import Replay, Replayer
from quire_lab.simulation.requests import number_of
from quire_lab.simulation.simulator import simulate

LENGTHS = (32, 128, 64, 256)
ARRIVALS = (0, 2, 4, 6)  # in steps
_ENDS = "32, 130, 68, 262"  # after so many steps

Slice = tuple[int, int, int]  # the request's length, start, tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps of some requests alone, from the one that first computes one of them to the last."""

    slices: tuple[frozenset[Slice], ...]
    blocks: tuple[int, ...]  # that they hold in each step

    def ends(self, lengths: Sequence[int]) -> list[int]:
        """Return after how many steps each has ended; 0 for one that was never computed."""
        last = {length: step for step, each in enumerate(self.slices, start=1) for length, _, _ in each}
        return [last.get(length, 0) for length in lengths]


def jobs(live: Live, own: OwnServers) -> list[Fact]:
    """S3.1: jobs of 10, 50, 100 and 200 tokens take 200 iterations and 360 token-steps, four at once at most."""
    together = _entering(own.narrow(), steps.LENGTHS, (0, 0, 0, 0))
    return [
        *renamed("S3.1", steps.finish_steps(live)),
        *alike("S3.1 entering together,", together, simulated(steps.LENGTHS, (0, 0, 0, 0))),
        equal("S3.1 entering together, token-steps", sum(steps.LENGTHS), sum(map(len, together.slices))),
    ]


def at_once(live: Live, own: OwnServers) -> list[Fact]:
    """S1.3: four lengths at once, beside static slots; the same plans by the simulator."""
    begin = live.last_step()
    live.together([partial(live.complete, live.prompt(1), length) for length in LENGTHS])
    live.until_idle()
    told = recorded(live, begin)
    facts = [
        planned_alike("S1.3 steps of this server that its requests alone bring about again", told, _replayed(told))
    ]
    expected = simulated(LENGTHS, (0, 0, 0, 0))
    facts += alike("S1.3", _entering(own.narrow(), LENGTHS, (0, 0, 0, 0)), expected)
    return [*facts, *renamed("S1.3", [*batching.static_batching(live), *batching.block_growth(live)])]


def staggered(own: OwnServers, plot: str | None) -> list[Fact]:
    """S2.2, S2.3: the same lengths, entering two steps apart: 262 steps, at most 16 blocks."""
    live = _entering(own.narrow(), LENGTHS, ARRIVALS)
    if plot is not None:
        _draw(live, plot)
    ends = ", ".join(map(str, live.ends(LENGTHS)))
    return [
        *alike("S2.2", live, simulated(LENGTHS, ARRIVALS)),
        Fact(name="S2.2 steps after which they end", expected=_ENDS, got=ends, ok=ends == _ENDS),
        equal("S2.3 blocks at once, peak", 16, max(live.blocks, default=0)),
        equal("S2.3 step of the peak, counted from 0", 118, _peak_step(live)),
        equal("S2.3 blocks at once, mean", 11.3, round(sum(live.blocks) / max(len(live.blocks), 1), 1)),
    ]


def planned_alike(name: str, told: Recording, found: Replay) -> Fact:
    """Whether a scheduler that gets the same requests at the same steps makes the same plans."""
    count = sum(1 for _ in told.steps)
    got = f"{found.steps} of {found.requests} requests"
    if found.difference is not None:
        got += f"; step {found.difference.step_id} differs in {found.difference.what}"
    return Fact(
        name=name,
        expected=f"{count} of {len(LENGTHS)} requests",
        got=got,
        ok=found.difference is None and (found.steps, found.requests) == (count, len(LENGTHS)),
    )


def alike(number: str, live: Steps, expected: Steps) -> list[Fact]:
    """The live steps beside the simulated ones."""
    count = len(expected.slices)
    facts = [equal(f"{number} steps", count, len(live.slices))]
    for what, ours, theirs in (
        ("slices", live.slices, expected.slices),
        ("used blocks", live.blocks, expected.blocks),
    ):
        same = sum(one == other for one, other in zip(ours, theirs, strict=False))
        facts.append(equal(f"{number} steps whose {what} are the simulated ones", count, same))
    return facts


def simulated(lengths: Sequence[int], arrivals: Sequence[float]) -> Steps:
    """Simulate requests by the scheduler that serves, on a clock whose second is a step."""
    rows = rows_of(lengths, arrivals)
    slices: list[frozenset[Slice]] = []

    def watch(batch: Batch, begins: float, ends: float) -> None:  # noqa: ARG001
        slices.append(
            frozenset((lengths[number_of(one.prompt_token_ids)], one.start, one.num_tokens) for one in batch.items)
        )

    outcome = simulate(exercise_setup(rows), rows, watch=watch)
    return Steps(slices=tuple(slices), blocks=tuple(moment.blocks_used for moment in outcome.moments))


def steps_of(told: Recording, lengths: Sequence[int]) -> Steps:
    """Return what a log tells of the requests with these lengths.

    Others in the same steps must be shorter than a block, and so hold one each.
    """
    known = lengths_by_request(told)
    slices: list[frozenset[Slice]] = []
    blocks: list[int] = []
    for step in told.steps:
        all_of_it = [(known.get(request, 0), start, count) for request, _, start, count in step["slices"]]
        ours = frozenset(one for one in all_of_it if one[0] in lengths)
        if ours:
            slices.append(ours)
            blocks.append(step["blocks_used"] - (len(all_of_it) - len(ours)))
    return Steps(slices=tuple(slices), blocks=tuple(blocks))


def _replayed(told: Recording) -> Replay:
    return Replayer(told).run()


def _entering(own: Live, lengths: Sequence[int], arrivals: Sequence[int]) -> Steps:
    """The steps of requests that arrive so many steps after the first of them, between two steps of a paused server."""
    begin = own.last_step()
    with paused(own, len(lengths)) as pause:
        for length, wait in zip(lengths, (0, *(b - a for a, b in pairwise(arrivals))), strict=True):
            if wait:
                pause.step(wait)
            pause.send(partial(own.complete, own.prompt(1), length))
        pause.replies()
    told = recorded(own, begin)
    came = arrivals_of(told, lengths)
    if came != list(arrivals):
        raise NotShown(f"requests came after {', '.join(map(str, came))} steps: the pause ended early")
    return steps_of(told, lengths)


def _peak_step(found: Steps) -> int:
    return found.blocks.index(max(found.blocks)) if found.blocks else -1


def _draw(found: Steps, plot: str) -> None:
    """Draw the live steps as `quire simulate --plot` draws simulated ones."""
    moments = [
        Moment(at=float(step), blocks_used=blocks, running=len(slices), waiting=0)
        for step, (slices, blocks) in enumerate(zip(found.slices, found.blocks, strict=True))
    ]
    peak = max(found.blocks, default=0)
    outcome = Outcome(
        num_blocks=peak, moments=moments, seconds=len(moments), peak_blocks=peak, peak_step=_peak_step(found)
    )
    print("\n".join(terminal(outcome, time_unit="steps")))
    if plot != "-":
        try:
            Path(plot).write_text(svg(outcome, title="KV blocks, S2.3, live", time_unit="steps"), encoding="utf-8")
        except OSError as error:
            raise BenchError(f"--plot {plot} cannot be written: {error.strerror}") from None
