"""Random schedules whose decodes get drafts, against the executor that pretends a pool and accepts what is right.

The invariants are checked after every step, tokens are those of a request alone, and no rejected token stays in the
prefix cache: what a later request finds there is read slot by slot.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest

from property.test_scheduler_ahead import Ahead
from quire_engine.contract.batch import Batch, SampledToken, ScheduledSequence, StepResult
from quire_engine.contract.drafts import Draft, Wish
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.engine import Engine
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.scheduling.speculation import Speculation, Waiting
from support.fake_executor import FakeExecutor, Run
from support.fake_model import VOCAB_SIZE, extend, sample
from support.scheduler_model import WINDOWS, policies
from support.seeds import naming

NUM_RUNS = 54  # `make property-test` does many times as many


class Verifier(FakeExecutor):
    """Writes all of a slice, drafts included, and returns the tokens up to the first draft that is wrong."""

    def execute(self, batch: Batch) -> StepResult:
        result = super().execute(batch)
        for item in batch.items:
            samples = result.samples.get(item.sequence_id)
            if item.num_drafts and samples is not None and samples[-1].error is None:
                result.samples[item.sequence_id] = tuple(self._accepted(item))
        return result

    def _accepted(self, item: ScheduledSequence) -> Iterator[SampledToken]:
        """By the chain up to the item's own token, then by each right draft."""
        chain = self._chains[item.sequence_id][item.start + 1]
        drafts = item.token_ids[1:]
        for draft in (*drafts, None):
            token = sample(chain, item.choice)
            yield SampledToken(token_id=token)
            if token != draft:
                return
            chain = extend(chain, token)


class Guesses:
    """Right, wrong or random tokens, as many as are asked for or fewer."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self.is_costly = dice.random() < 0.5
        self.choices: dict[int, int] = {}

    def draft(self, wishes: Sequence[Wish]) -> list[Draft]:
        return [self._guess(wish) for wish in wishes]

    def _guess(self, wish: Wish) -> Draft:
        chain, found = 0, []
        for token in wish.token_ids:
            chain = extend(chain, token)
        for _ in range(self._dice.randint(0, wish.most)):
            token = sample(chain, self.choices.get(wish.sequence_id, 0))
            if self._dice.random() < 0.3:
                token = self._dice.randrange(VOCAB_SIZE)
            found.append(token)
            chain = extend(chain, token)
        return Draft(tuple(found), self._dice.randint(2, 20))

    def note_end(self, token_ids: Sequence[int], scope: str) -> None:
        pass

    def forget(self, sequence_id: int) -> None:
        pass


class ByTurns(Waiting):
    """Plans ahead or waits, as it falls."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__(has_choice=True)
        self._dice = dice

    def learn(self, rate: float) -> None:
        self.waits = self._dice.random() < 0.6


class Speculating(Ahead):
    """One run, with an executor that computes one step at a time, or is a step ahead of its results at times."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        config, guesses = self.config, Guesses(random.Random(seed))
        ahead = config.plans_ahead
        self.executor = Verifier(config.limits.block_size, windows=config.windows, max_in_flight=1 + ahead)
        speculate = partial(Speculation, guesses, most=4, plans_ahead=ahead)
        scheduler = Scheduler(config, policies=policies(config.limits), speculate=speculate)
        if ahead and scheduler._speculation is not None:
            scheduler._speculation._waiting = ByTurns(random.Random(seed))
        self.run = Run(scheduler=scheduler, executor=self.executor)
        self.engine = Engine(scheduler, self.executor, check_invariants=True, clock=lambda: float(self.steps))
        self.engine.on_step = self.take

    def draw_config(self) -> SchedulerConfig:
        config, windows = super().draw_config(), self.dice.choice(WINDOWS)
        num_blocks = config.num_blocks * len(windows)
        return replace(config, num_blocks=num_blocks, windows=windows, plans_ahead=self.dice.random() < 0.4)


def test_random_schedules_with_drafts_give_the_tokens_without(request: pytest.FixtureRequest) -> None:
    num_runs = NUM_RUNS * int(request.config.getoption("--times", 1))
    seen: Counter[str] = Counter()
    for seed in range(num_runs):
        speculating = Speculating(seed)
        with naming(seed):
            speculating.play()
        seen += speculating.seen
        stats = speculating.run.scheduler.stats()
        seen["drafts"] += stats.total_draft_tokens
        seen["drafts planned ahead"] += stats.total_draft_tokens * (speculating.seen["ahead"] > 0)
        seen["accepted"] += stats.total_accepted_tokens
    print(dict(seen))
    assert seen["drafts"] > seen["accepted"] > num_runs
    assert seen["preempted"] > num_runs / 10
    assert seen["drafts planned ahead"] > num_runs / 2
