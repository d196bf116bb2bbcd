"""Holds and releases requests of an engine at random, between its steps.

Promises: whoever is held is released again, so that every request ends. Must not know: what the tokens are.
"""

from __future__ import annotations

import random

from quire_engine.engine import Engine


class Holding:
    """To be called before each step."""

    def __init__(self, seed: int, *, chance: float = 0.3) -> None:
        self.num_holds = 0
        self._dice = random.Random(seed)
        self._chance = chance
        self._held: set[str] = set()

    def __call__(self, engine: Engine) -> None:
        dice, live = self._dice, list(engine._scheduler._roster.live)
        self._held &= set(live)
        free = [name for name in live if name not in self._held]
        if free and dice.random() < self._chance:
            name = dice.choice(free)
            engine.hold_request(name)
            self._held.add(name)
            self.num_holds += 1
        while self._held and (not engine.has_work or dice.random() < self._chance):
            name = dice.choice(sorted(self._held))
            engine.release_request(name)
            self._held.discard(name)
