"""Plain decodes in columns change nothing that can be seen: two schedulers get the same calls, one without columns.

Each run draws a pool, limits, requests and calls from its seed: arrivals, ends, aborts, holds, deadlines, failures,
preemptions by recomputation and by swaps, with steps planned ahead or not. After every step the batches are equal once
they are expanded, and so are outputs, statistics, bounds and, at the end, the whole logs.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, deque
from typing import get_args

import pytest

from quire_engine.contract.batch import Batch
from quire_engine.contract.decodes import BatchInColumns
from quire_engine.contract.limits import AdmissionName, PolicyName, SchedulerConfig, VictimName
from quire_engine.contract.types import GenerationRequest, TokenOutput
from quire_engine.scheduling.scheduler import Scheduler
from support.fake_executor import FakeExecutor, Run, expected_tokens, request
from support.limits import scheduler_config
from support.scheduler_model import policies, shrunk_to_fit, truly_resumed
from support.seeds import naming

NUM_RUNS = 40  # `make property-test` does 10,000
FIRST_SEED = 60  # from where on few runs have seen all that is asked for below


class Side:
    """One of the two schedulers, with what came out of it."""

    def __init__(self, config: SchedulerConfig, columns_from: int | None) -> None:
        scheduler = Scheduler(config, policies=policies(config.limits), columns_from=columns_from)
        ahead = 2 if config.plans_ahead else 1
        self.executor = FakeExecutor(config.limits.block_size, max_in_flight=ahead, windows=config.windows)
        self.run = Run(scheduler=scheduler, executor=self.executor)
        self.in_flight: deque[Batch] = deque()
        self.outputs: list[TokenOutput] = []  # of the last step

    def step(self, now: float) -> Batch | None:
        scheduler = self.run.scheduler
        self.outputs = scheduler.expire(now)
        if self.in_flight and scheduler.needs_results:
            self.collect(now)
        batch = scheduler.schedule(now)
        if batch is not None:
            self.executor.launch(batch)
            self.in_flight.append(batch)
        if self.in_flight and (batch is None or len(self.in_flight) == self.executor.max_in_flight):
            self.collect(now)
        return batch

    def collect(self, now: float) -> None:
        batch = self.in_flight.popleft()
        self.outputs += self.run.scheduler.apply(batch, self.executor.collect(), now + 0.5)


class Twins:
    """One run: the same calls for a scheduler with columns from the first decode on, and one without."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        min_chunk, max_num_seqs = dice.randint(1, 6), dice.randint(2, 12)
        swaps = dice.random() < 0.3
        self.config = scheduler_config(
            num_blocks=dice.randint(6, 60),
            block_size=dice.randint(1, 5),
            max_model_len=dice.randint(24, 64),
            plans_ahead=dice.random() < 0.5,
            max_num_seqs=max_num_seqs,
            num_host_blocks=dice.randint(1, 40) if swaps else 0,
            swap_seconds=dice.choice([0.0, 0.01, 1.0]) if swaps else 0.0,
            min_chunk=min_chunk,
            max_num_batched_tokens=max_num_seqs + min_chunk + dice.randint(0, 24),
            prefill_chunk=min_chunk + dice.randint(0, 12),
            itl_target=dice.choice([0.0, 0.2, 0.8]),
            max_num_partial_prefills=dice.randint(1, 3),
            max_bypasses=dice.randint(0, 4),
            elder_age_steps=dice.randint(0, 8),
            enable_prefix_caching=dice.random() < 0.6,
            scheduling_policy=dice.choice(get_args(PolicyName)),
            preemption_victim=dice.choice(get_args(VictimName)),
            admission=dice.choice(get_args(AdmissionName)),
        )
        self.sides = Side(self.config, 0), Side(self.config, None)
        self.requests: dict[str, GenerationRequest] = {}
        self.held: set[str] = set()
        self.steps = 0
        self.plain = dice.choice([1.0, 0.9, 0.5])  # share of requests that may decode in columns
        self.seen: Counter[str] = Counter()

    def play(self) -> None:
        dice = self.dice
        for _ in range(dice.randint(5, 60)):
            deed, live = dice.random(), list(self.scheduler._roster.live)
            if deed < 0.3:
                self.submit()
            elif deed < 0.34 and live:
                self.both("abort", dice.choice(live))
            elif deed < 0.36 and live:
                self.both("fail", dice.choice(live), "out of luck")
            elif deed < 0.41 and live:
                self.hold_or_release(dice.choice(live))
            elif deed < 0.44 and self.scheduler._roster.sequences:
                self.hurt(dice.choice(list(self.scheduler._roster.sequences)))
            elif deed < 0.45:
                self.both("reset_prefix_cache")
            else:
                self.step()
        while self.scheduler.has_work or self.held or self.sides[0].in_flight:
            self.held &= set(self.scheduler._roster.live)
            if self.held and (not self.scheduler.has_work or dice.random() < 0.2):
                self.hold_or_release(dice.choice(sorted(self.held)))
            self.step()
        self.end()

    @property
    def scheduler(self) -> Scheduler:
        return self.sides[0].run.scheduler

    def both(self, name: str, *arguments: object) -> object:
        answers = [getattr(side.run.scheduler, name)(*arguments) for side in self.sides]
        assert answers[0] == answers[1]
        return answers[0]

    def submit(self) -> None:
        dice, name = self.dice, f"r{len(self.requests)}"
        length, family = dice.randint(1, 24), dice.randint(0, 2)
        is_plain = dice.random() < self.plain
        wanted = request(
            name,
            tuple(p if p < 9 + family else p + 50 * family for p in range(length)),
            dice.choice([0, 1, 2, 5, 8, 12, 16, 20, 30]),
            n=1 if is_plain else dice.choice([1, 2, 3, 4]),
            stop=tuple(range(dice.choice([0, 0, 3, 8, 60]))),
            priority=dice.randint(0, 2),
            salt=dice.choice(["", "", "tenant"]),
            prompt_logprobs=None if is_plain else dice.choice([None, None, 1]),
            penalty=0.0 if is_plain else dice.choice([0.0, 1.0]),
        )
        wanted = dataclasses.replace(
            shrunk_to_fit(self.config, wanted),
            tenant=dice.choice(["", "a", "b"]),
            weight=dice.choice([1.0, 3.0]),
            max_running=dice.choice([0, 0, 3]),
            service_class=dice.choice(["interactive", "interactive", "batch"]),
            deadline=dice.choice([None, None, None, self.steps + dice.randint(1, 30)]),
        )
        # Where a prefix may be found, the executor must be told the tokens that a request resumes with.
        if dice.random() < 0.2 and (wanted.sampling.reads_output or not self.config.limits.enable_prefix_caching):
            resumed = tuple((0,) * dice.randint(0, 6) for _ in range(wanted.n))
            wanted = truly_resumed(dataclasses.replace(wanted, resumed_token_ids=resumed))
        self.requests[name] = wanted
        self.both("add", wanted, float(self.steps))
        self.both("wait_bound", name)

    def hold_or_release(self, name: str) -> None:
        if name in self.held:
            self.both("release", name)
            self.both("wait_bound", name)
            self.held.discard(name)
        elif self.both("hold", name):
            self.held.add(name)

    def hurt(self, sequence_id: int) -> None:
        """Its next slice fails, finds no memory, or has a value that is not finite."""
        kind = self.dice.choice(["errors", "starved", "non_finite"])
        for side in self.sides:
            if kind == "errors":
                side.executor.errors[sequence_id] = "the model failed"
            elif kind == "starved":
                side.executor.starved.add(sequence_id)
            else:
                side.executor.non_finite.add(sequence_id)
        self.seen[kind] += 1

    def step(self) -> None:
        self.steps += 1
        assert self.steps < 5000, "it does not end"
        ours, theirs = [side.step(float(self.steps)) for side in self.sides]
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.items == theirs.items
            assert ours.whole() == theirs
            assert (ours.num_prefills, ours.num_drafts) == (theirs.num_prefills, theirs.num_drafts)
            if isinstance(ours, BatchInColumns):
                self.seen["columns"] += len(ours.decodes)
                self.seen["mixed"] += bool(ours.others)
        assert not isinstance(theirs, BatchInColumns)
        assert self.sides[0].outputs == self.sides[1].outputs
        self.seen["ends"] += sum(output.finish in ("stop", "length") for output in self.sides[0].outputs)
        for side in self.sides:
            side.run.scheduler.check_invariants()
            side.run.outputs += side.outputs
        assert self.sides[0].run.scheduler.stats() == self.sides[1].run.scheduler.stats()

    def end(self) -> None:
        stats = self.scheduler.stats()
        self.seen["preempted"] += stats.total_preemptions
        self.seen["swapped"] += stats.total_preemptions_by_mode["swap"]
        assert stats.blocks_used == 0
        after = 0
        while True:
            asked = {"after": after, "limit": 256, "events": True}
            answers = [side.run.scheduler.answer("steps", asked) for side in self.sides]
            for answer in answers:
                for event in answer["events"]:  # type: ignore[index]
                    event.request.pop("cache_salt", None)  # each log has names of its own for them
            assert answers[0] == answers[1]
            if not answers[0]["steps"]:  # type: ignore[index]
                break
            after = answers[0]["steps"][-1].step_id  # type: ignore[index]
        self.both("answer", "requests", {})
        self.both("answer", "kv", {})
        for name, wanted in self.requests.items():
            for choice in range(wanted.n):
                own = [o for o in self.sides[0].run.outputs if (o.request_id, o.choice) == (name, choice)]
                resumed = wanted.resumed_token_ids[choice] if wanted.resumed_token_ids else ()
                said = (*resumed, *(token for output in own for token in output.token_ids))
                assert said == expected_tokens(wanted, choice)[: len(said)]


def test_random_histories_are_the_same_with_columns_and_without(request: pytest.FixtureRequest) -> None:
    num_runs = NUM_RUNS * int(request.config.getoption("--times", 1))
    seen: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + num_runs):
        with naming(seed):
            twins = Twins(seed)
            twins.play()
        seen += twins.seen
    print(dict(seen))
    for what in ("columns", "mixed", "ends", "preempted"):
        assert seen[what] > num_runs, seen
    assert min(seen[what] for what in ("swapped", "errors", "starved", "non_finite")) > num_runs / 30, seen
