"""The scheduler one step ahead of its results: a plan is made before the tokens of the last one are known.

Each run draws a small pool, requests, aborts and failures from its seed, and steps a real engine over an executor that
computes as late as it may: when a result is asked for, after the next step has been planned and launched. Every choice
must have the tokens that it has alone, which are those without overlap.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import get_args

import pytest

from quire_engine.contract.batch import PENDING, Batch, StepResult
from quire_engine.contract.limits import PolicyName, SchedulerConfig
from quire_engine.contract.types import GenerationRequest, StepOutput
from quire_engine.engine import Engine
from quire_engine.scheduling.scheduler import Scheduler
from support.fake_executor import CorruptKV, FakeExecutor, Run, expected_tokens, request
from support.limits import scheduler_config
from support.scheduler_model import check_prompt_logprobs, policies, shrunk_to_fit, truly_resumed
from support.seeds import naming

NUM_RUNS = 140  # `make schedule-test` does many times as many


class Ahead:
    """One run: an engine whose executor has a step in flight while the next one is planned."""

    salts = ("", "", "tenant")

    def __init__(self, seed: int, executor: Callable[[int], FakeExecutor] | None = None) -> None:
        self.dice = random.Random(seed)
        config = self.config = self.draw_config()
        size = config.limits.block_size
        self.executor = (
            FakeExecutor(size, max_in_flight=2, windows=config.windows) if executor is None else executor(size)
        )
        self.run = Run(scheduler=Scheduler(config, policies=policies(config.limits)), executor=self.executor)
        self.engine = Engine(self.run.scheduler, self.executor, check_invariants=True, clock=lambda: float(self.steps))
        self.engine.on_step = self.take
        self.steps = 0
        self.penalties = self.dice.random() < 0.2  # else nothing makes the engine wait for a result
        self.requests: dict[str, GenerationRequest] = {}
        self.aborted: set[str] = set()
        self.deadline: dict[str, int] = {}
        self.held: set[str] = set()
        self.seen: Counter[str] = Counter()

    def draw_config(self) -> SchedulerConfig:
        dice = self.dice
        min_chunk, max_num_seqs = dice.randint(1, 6), dice.randint(2, 6)
        return scheduler_config(
            num_blocks=dice.randint(5, 24),
            block_size=dice.randint(1, 5),
            max_model_len=dice.randint(24, 48),
            plans_ahead=True,
            max_num_seqs=max_num_seqs,
            min_chunk=min_chunk,
            max_num_batched_tokens=max_num_seqs + min_chunk + dice.randint(0, 12),
            prefill_chunk=min_chunk + dice.randint(0, 8),
            itl_target=dice.choice([0.0, 0.2, 0.8]),
            max_num_partial_prefills=dice.randint(1, 3),
            max_bypasses=dice.randint(0, 4),
            elder_age_steps=dice.randint(0, 8),
            enable_prefix_caching=dice.random() < 0.5,
            scheduling_policy=dice.choice(get_args(PolicyName)),
            admission=dice.choice(("prompt", "prompt", "expected")),
        )

    def submit(self) -> None:
        dice, name = self.dice, f"r{len(self.requests)}"
        length, family = dice.randint(1, 24), dice.randint(0, 2)
        wanted = request(
            name,
            tuple(p if p < 9 + family else p + 50 * family for p in range(length)),
            dice.choice([0, 1, 2, 5, 8, 12, 16, 20]),
            n=dice.choice([1, 1, 1, 2, 3, 4]),
            stop=tuple(range(dice.choice([0, 0, 60, 200]))),
            priority=dice.randint(0, 2),
            salt=dice.choice(self.salts),
            prompt_logprobs=dice.choice([None, None, None, 1]),
            penalty=float(self.penalties and dice.random() < 0.5),
        )
        wanted = shrunk_to_fit(self.config, wanted)
        if wanted.sampling.reads_output and dice.random() < 0.5:  # the batch says what it resumes with
            resumed = tuple((0,) * dice.randint(0, 6) for _ in range(wanted.n))
            wanted = truly_resumed(dataclasses.replace(wanted, resumed_token_ids=resumed))
        self.requests[name] = wanted
        self.engine.submit(wanted)
        self.deadline[name] = self.steps + self.run.scheduler.wait_bound(name)

    def play(self) -> None:
        """Random calls, then steps to the end."""
        dice = self.dice
        for _ in range(dice.randint(3, 25)):
            deed = dice.random()
            if deed < 0.3:
                self.submit()
            elif deed < 0.36 and (live := self.live()):
                self.abort(dice.choice(live))
            elif deed < 0.4 and self.run.scheduler._roster.sequences:
                self.executor.errors[self.any_sequence()] = "the model failed"
            elif deed < 0.43 and self.run.scheduler._roster.sequences:
                self.executor.starved.add(self.any_sequence())
            elif deed < 0.49 and (live := self.live()):
                self.hold_or_release(dice.choice(live))
            else:
                self.step()
        while self.engine.has_work or self.held:
            if self.held and (not self.engine.has_work or dice.random() < 0.2):
                self.hold_or_release(dice.choice(sorted(self.held)))
            self.step()
        self.check_end()

    def hold_or_release(self, name: str) -> None:
        if name not in self.held:
            self.engine.hold_request(name)
            self.held.add(name)
            self.seen["held"] += 1
            return
        self.engine.release_request(name)
        self.held.discard(name)
        self.deadline[name] = self.steps + self.run.scheduler.wait_bound(name)

    def any_sequence(self) -> int:
        return self.dice.choice(list(self.run.scheduler._roster.sequences))

    def live(self) -> Sequence[str]:
        return list(self.run.scheduler._roster.live)

    def abort(self, name: str) -> None:
        self.engine.abort(name)
        self.aborted.add(name)
        self.held.discard(name)

    def step(self) -> None:
        assert self.steps < 5000, "it does not end"
        self.steps += 1
        launched = len(self.executor.log)
        self.engine.step()
        for batch in self.executor.log[launched:]:
            self.seen["ahead"] += any(PENDING in item.token_ids for item in batch.items)
            self.seen["copies"] += bool(batch.copies)
            self.seen["forks"] += any(item.forks for item in batch.items)
        for name in set(self.live()) - self.held:
            assert self.steps < self.deadline[name], "it is alive after the printed bound"

    def take(self, step: StepOutput) -> None:
        self.run.take([output for output in step.outputs if output.request_id not in self.aborted])
        self.seen["stopped"] += sum(output.finish == "stop" for output in step.outputs)

    def check_end(self) -> None:
        """Every choice has ended once, with its tokens; nothing is held."""
        stats = self.run.scheduler.stats()
        assert stats.blocks_used == 0
        self.seen["preempted"] += stats.total_preemptions
        for name, wanted in self.requests.items():
            for choice in range(wanted.n):
                if name in self.aborted or choice in wanted.finished_choices:
                    continue
                end = self.run.finishes[name, choice]
                resumed = wanted.resumed_token_ids[choice] if wanted.resumed_token_ids else ()
                said, alone = (*resumed, *self.run.tokens[name, choice]), expected_tokens(wanted, choice)
                if end.finish == "error":
                    assert end.error in ("the model failed", "the device has no memory left to compute this request")
                    assert said == alone[: len(said)]
                    continue
                assert said == alone
                assert end.finish == ("stop" if alone and alone[-1] in wanted.stop.stop_token_ids else "length")
                check_prompt_logprobs(wanted, choice, self.run.outputs)


def test_random_schedules_give_the_tokens_they_give_without_overlap(request: pytest.FixtureRequest) -> None:
    num_runs = NUM_RUNS * int(request.config.getoption("--times", 1))
    seen: Counter[str] = Counter()
    for seed in range(num_runs):
        ahead = Ahead(seed)
        with naming(seed):
            ahead.play()
        seen += ahead.seen
    print(dict(seen))
    wanted = ("ahead", "copies", "forks", "preempted", "stopped", "held")
    assert all(seen[what] > num_runs / 5 for what in wanted), seen


class OutOfOrder(FakeExecutor):
    """A planted fault: block copies run when a step is launched, before the step in flight."""

    def launch(self, batch: Batch) -> None:
        super().copy(batch)
        super().launch(batch)

    def copy(self, batch: Batch) -> None:
        pass


class EarlyReuse(FakeExecutor):
    """A planted fault: a step writes its blocks when it is launched, while the step before it still reads them."""

    def launch(self, batch: Batch) -> None:
        for item in batch.items:
            for index in range(item.start // self._block_size, -(-item.end // self._block_size)):
                for offset in range(self._block_size):
                    if index * self._block_size + offset >= item.start:
                        self.slots.pop((item.block_ids[index], offset), None)
        super().launch(batch)


class StaleIds(FakeExecutor):
    """A planted fault: pending ids are those of two steps ago."""

    def execute(self, batch: Batch) -> StepResult:
        before = getattr(self, "_before", {})
        self._before, self._sampled = self._sampled, before
        return super().execute(batch)


@pytest.mark.parametrize("executor", [OutOfOrder, EarlyReuse, StaleIds])
def test_a_planted_fault_is_found(executor: type[FakeExecutor]) -> None:
    found = 0
    for seed in range(60):
        try:
            Ahead(seed, lambda size: executor(size, max_in_flight=2)).play()
        except (CorruptKV, AssertionError):
            found += 1
        if found > 2:
            return
    pytest.fail(f"it was found {found} times")
