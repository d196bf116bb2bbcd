"""The choice of models that make way for one that is asked for: the least recently used, within a budget of memory.

Promises: the models that stay fit the budget; a pinned model stays, and a busy one has its turn first. Must not know:
the event loop, clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A model as the budget sees it. Bytes; times in seconds of one clock."""

    name: str
    weights: int  # of its packed weights
    engine: int  # of its pool and its process, beside the weights
    is_loaded: bool = False  # it has an engine, or will have one when its move has ended
    keeps_weights: bool = False  # its weights are in memory, also without an engine
    is_moving: bool = False  # its engine starts or ends now
    held_now: int | None = None  # while it moves: what it takes until the move has ended; None: what it takes after it
    is_busy: bool = False  # it has unfinished requests
    pinned: bool = False
    priority: int = 0
    last_used: float = 0.0
    loaded_at: float = 0.0

    @property
    def taken(self) -> int:
        """The bytes that it takes, after its move."""
        return self.weights * (self.is_loaded or self.keeps_weights) + self.engine * self.is_loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The engines that end and the weights that go so that a model can be loaded."""

    sleep: tuple[str, ...] = ()  # engines that end
    forget: tuple[str, ...] = ()  # weights without an engine that leave the memory, some of them of engines that end
    is_free: bool = False  # it can be loaded now
    wait: float | None = None  # seconds until a turn ends that would help; None: no turn does


def room_for(wanted: Resident, others: Sequence[Resident], budget: int, *, now: float, turn: float) -> Room:
    """The room for a model without an engine.

    Idle models make way in the order of their last use: first a model's engine ends, then, where that is not enough,
    its weights go. Then busy models of no higher priority whose turn is over, the longest loaded first, so that as few
    as possible are held. Nothing is done where it would not be enough.
    """
    needed = wanted.weights + wanted.engine
    free = budget - sum(other.taken for other in others)
    if needed <= free:
        held = sum(other.taken if other.held_now is None else other.held_now for other in others)
        return Room(is_free=needed <= budget - held)
    movable = [other for other in others if not other.pinned and not other.is_moving and other.taken]
    idle = sorted((other for other in movable if not other.is_busy), key=lambda each: (each.priority, each.last_used))
    busy = [other for other in movable if other.is_busy and other.is_loaded and other.priority <= wanted.priority]
    # The weights of models that have held requests and no engine go last: they will be wanted next.
    held_ones = [other for other in movable if other.is_busy and not other.is_loaded]
    ripe = sorted((other for other in busy if other.loaded_at + turn <= now), key=lambda each: each.loaded_at)
    steps = _steps(idle, ripe, held_ones)
    chosen, freed = _enough(steps, needed - free)
    if freed < needed - free:
        waits = [other.loaded_at + turn - now for other in busy if other not in ripe]
        return Room(wait=min(waits, default=None))
    return Room(
        sleep=tuple(each.name for each, kind, _ in chosen if kind == _SLEEP),
        forget=tuple(each.name for each, kind, _ in chosen if kind == _FORGET),
    )


_SLEEP, _FORGET = "sleep", "forget"
_Step = tuple[Resident, str, int]


def _steps(idle: Sequence[Resident], ripe: Sequence[Resident], held: Sequence[Resident]) -> list[_Step]:
    """All that may be done, what costs least first."""
    steps: list[_Step] = []
    for each in idle:
        steps += _of(each)
    for number, each in enumerate(ripe):
        steps.append(_of(each)[0])
        if number == 0:
            steps += [step for other in held for step in _of(other)]
        steps.append(_of(each)[1])
    return steps if ripe else steps + [step for other in held for step in _of(other)]


def _of(each: Resident) -> list[_Step]:
    """The steps of one model, in their order."""
    ends = [(each, _SLEEP, each.engine)] if each.is_loaded else []
    return [*ends, (each, _FORGET, each.weights)]


def _enough(steps: Sequence[_Step], missing: int) -> tuple[list[_Step], int]:
    """The first steps that free what is missing, without those that turn out not to be needed."""
    chosen: list[_Step] = []
    freed = 0
    for step in steps:
        if freed >= missing:
            break
        chosen.append(step)
        freed += step[2]
    for step in reversed(list(chosen)):  # of two that are not needed both, the one used more lately is spared
        each, kind, size = step
        has_to_end = kind == _SLEEP and any(other is each and what == _FORGET for other, what, _ in chosen)
        if freed - size >= missing and not has_to_end:
            chosen.remove(step)
            freed -= size
    return chosen, freed
