"""Beam searches among other requests in pools that are too small: what they find is what they find alone.

Each run draws a small pool, searches and other requests from its seed, and preempts at random: the device is said to
have no memory. An executor that remembers what each slot holds notices a wrong block, a plain search what was lost.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from quire_engine.contract.types import BeamParams, GenerationRequest
from quire_engine.engine import Engine
from quire_engine.scheduling.beam_forks import BeamForks
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.scheduling.sequence import Group
from support.fake_executor import CorruptKV, FakeExecutor, Run, expected_tokens, request
from support.fake_model import expected_beams
from support.limits import scheduler_config
from support.scheduler_model import policies, shrunk_to_fit

NUM_RUNS = 100  # `make property-test` does many times as many
FIRST_SEED = 220  # from where on few runs have seen all that is asked for below


class Searches:
    """One run, by an engine whose executor may have two steps in flight."""

    def __init__(self, seed: int, seen: Counter[str]) -> None:
        dice = self.dice = random.Random(seed)
        self.seen = seen
        min_chunk, max_num_seqs = dice.randint(4, 6), dice.randint(4, 8)
        self.config = scheduler_config(
            num_blocks=dice.randint(10, 40),
            block_size=dice.randint(1, 5),
            max_model_len=48,
            plans_ahead=dice.random() < 0.5,
            max_num_seqs=max_num_seqs,
            min_chunk=min_chunk,
            max_num_batched_tokens=max_num_seqs + min_chunk + dice.randint(0, 8),
            prefill_chunk=min_chunk + dice.randint(0, 4),
            itl_target=0.0,
            enable_prefix_caching=dice.random() < 0.5,
        )
        limits = self.config.limits
        self.executor = FakeExecutor(limits.block_size, max_in_flight=1 + self.config.plans_ahead)
        self.run = Run(scheduler=Scheduler(self.config, policies=policies(limits)), executor=self.executor)
        self.steps = 0
        self.engine = Engine(self.run.scheduler, self.executor, check_invariants=True, clock=lambda: float(self.steps))
        self.engine.on_step = lambda step: self.run.take(list(step.outputs))
        self.requests: dict[str, GenerationRequest] = {}

    def submit(self) -> None:
        dice, name = self.dice, f"r{len(self.requests)}"
        beam = BeamParams(
            width=dice.randint(2, 4),
            length_penalty=dice.choice([-0.5, 0.0, 1.0, 1.5]),
            early_stopping=dice.choice([False, True, "never"]),
        )
        searched = dice.random() < 0.7
        wanted = request(
            name,
            tuple(range(dice.randint(1, 20))),
            dice.choice([1, 3, 8, 16, 24]),
            n=dice.randint(1, 2),
            stop=tuple(range(0, dice.choice([0, 200]), 3)),
            beam=beam if searched else None,
            # With a cache what was computed by others is read: the batch has to say what that was.
            penalty=float(self.config.limits.enable_prefix_caching),
        )
        self.requests[name] = shrunk_to_fit(self.config, wanted)
        self.engine.submit(self.requests[name])

    def play(self) -> None:
        for _ in range(self.dice.randint(2, 5)):
            self.submit()
        deadlines = {name: self.run.scheduler.wait_bound(name) for name in self.requests}
        failing = set(self.dice.sample(sorted(self.requests), 1)) if self.dice.random() < 0.1 else set()
        while self.engine.has_work:
            sequences = self.run.scheduler._roster.sequences
            if sequences and self.dice.random() < 0.25:
                self.starve(sequences[self.dice.choice(list(sequences))].group)
            for name in failing & self.run.scheduler._roster.live.keys():
                self.executor.errors[self.run.scheduler._roster.live[name].sequences[-1].sequence_id] = "it failed"
            self.steps += 1
            self.engine.step()
            starved = sum(group.num_starved for group in self.run.scheduler._roster.live.values())
            if not starved:  # the bound is of a device that has its memory
                live = self.run.scheduler._roster.live
                assert all(self.steps < deadline for name, deadline in deadlines.items() if name in live)
        self.check_end()

    def starve(self, group: Group) -> None:
        """Preempt whatever it is doing; three times at most, then it would be an error."""
        marked = any(sequence.sequence_id in self.executor.starved for sequence in group.sequences)
        if group.num_starved < 3 and group.computing and not marked:
            self.executor.starved.add(self.dice.choice(group.computing).sequence_id)
            if group.beams is not None and group.state == "running":
                self.seen["preempted while some beams wait for others"] += bool(group.beams._offers)

    def check_end(self) -> None:
        assert self.run.scheduler.stats().blocks_used == 0
        self.seen["copies"] += self.executor.num_copies
        for name, wanted in self.requests.items():
            for choice in range(wanted.n):
                end, said = self.run.finishes[name, choice], tuple(self.run.tokens[name, choice])
                if end.finish == "error":
                    assert end.error == "it failed"
                    self.seen["failed"] += 1
                elif wanted.beam is None:
                    assert said == expected_tokens(wanted, choice)
                else:
                    assert (said, end.beam_score, end.finish) == expected_beams(wanted)[choice]
                    self.seen[end.finish] += 1
                    self.seen["preempted"] += end.timing.num_preemptions


def play_all(num_runs: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + num_runs):
        Searches(seed, seen).play()
    return seen


def test_searches_find_what_they_find_alone(request: pytest.FixtureRequest) -> None:
    num_runs = NUM_RUNS * int(request.config.getoption("--times", 1))
    seen = play_all(num_runs)
    wanted = ("copies", "failed", "stop", "length", "preempted", "preempted while some beams wait for others")
    assert min(seen[name] for name in wanted) > min(10, num_runs / 30), seen


def test_a_beam_without_its_own_blocks_is_noticed(monkeypatch) -> None:
    """The check can fail: lanes that are given another beam's past and keep their own blocks."""

    def rename(_: BeamForks, group: Group, continuations: list[tuple[int, int]]) -> list[int]:
        pasts = [sequence.token_ids[:-1] for sequence in group.sequences]
        for lane, (parent, token_id) in enumerate(continuations):
            group.sequences[lane].extend_beam(pasts[parent], token_id)
        return list(range(len(continuations)))

    monkeypatch.setattr(BeamForks, "_fork", rename)
    with pytest.raises(CorruptKV):
        play_all(10)
