"""The printed bound on waiting, against adversaries: random victims, chunks, orders, pools and arrivals.

With the elder rule no run may break it; without the rule many must, or the test could not fail.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from itertools import islice

import pytest

from quire_engine.contract.batch import Batch, SampledToken, StepResult
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_engine.scheduling.policies import AsOrdered, ElderRule, policies_for
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.scheduling.sequence import Group
from support.limits import scheduler_config

NUM_RUNS = 110  # `make schedule-test` does many times as many


class AnyVictim:
    """Preempts whoever the dice name."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    def choose(self, running: list[Group], elder: Group | None) -> Group | None:
        others = [group for group in running if group is not elder]
        return self._dice.choice(others) if others else None


class AnyChunk:
    """Gives a prompt anything from nothing to all."""

    def __init__(self, dice: random.Random, cap: int) -> None:
        self._dice, self._cap = dice, cap

    def size(self, *, pending: int, planned: int, budget: int, others: bool) -> int:
        return self._dice.randint(0, min(pending, self._cap - planned, budget))


class AnyItl:
    """Leaves prompts beside decodes anything from nothing."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    def prompt_tokens(self, num_decodes: int) -> int:
        return self._dice.randint(0, 10)

    def learn(self, *, prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        pass


class LatestFirst:
    """Serves and admits the youngest first: the order that starves best."""

    def key(self, group: Group) -> tuple[int, ...]:
        return (-group.arrival,)


class AnyQueue:
    """Asks in any order, anew in every step."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    def arrange(self, waiting: list[Group], num_cached_tokens: Callable[[Group], int]) -> list[Group]:
        for group in waiting:
            num_cached_tokens(group)
        return self._dice.sample(waiting, len(waiting))


class NoElder(ElderRule):
    """Prints the same bound and does nothing for it."""

    def choose(self, live: object, step: int) -> Group | None:
        return None


def adversarial_config(dice: random.Random) -> SchedulerConfig:
    min_chunk, max_num_seqs = dice.randint(1, 6), dice.randint(1, 6)
    return scheduler_config(
        num_blocks=dice.randint(3, 24),
        block_size=dice.randint(1, 5),
        max_model_len=64,
        max_num_seqs=max_num_seqs,
        min_chunk=min_chunk,
        max_num_batched_tokens=max_num_seqs + min_chunk + dice.randint(0, 10),
        prefill_chunk=min_chunk + dice.randint(0, 8),
        max_num_partial_prefills=dice.randint(1, 3),
        max_bypasses=dice.randint(0, 4),
        elder_age_steps=dice.randint(0, 8),
        enable_prefix_caching=dice.random() < 0.5,
    )


def feasible_request(dice: random.Random, config: SchedulerConfig, name: int) -> GenerationRequest:
    from quire_engine.contract.errors import InfeasibleRequest
    from quire_engine.scheduling.gate import check_request

    while True:
        length, same = dice.randint(1, 24), dice.choice([0, 0, 8, 16])  # so many tokens as others have them
        wanted = GenerationRequest(
            request_id=str(name),
            prompt_token_ids=tuple(dice.randint(0, 1) if position > same else 0 for position in range(length)),
            sampling=SamplingParams(),
            stop=StopParams(max_new_tokens=dice.randint(0, 20)),
            n=dice.choice([1, 1, 1, 2, 3]),
        )
        try:
            check_request(config, wanted)
        except InfeasibleRequest:
            continue
        return wanted


def answer(batch: Batch) -> StepResult:
    """A token for everything that wants one."""
    result = StepResult()
    for item in batch.items:
        if item.wants_sample:
            for sequence_id in [item.sequence_id, *(fork.sequence_id for fork in item.forks)]:
                result.samples[sequence_id] = (SampledToken(token_id=item.end % 2),)
    return result


def held_or_released(scheduler: Scheduler, dice: random.Random, held: set[str], chance: float) -> set[str]:
    """Hold a few requests, most often the elder, and release one; who was released. With no chance all are, in turn."""
    live = list(scheduler._roster.live)
    held &= set(live)
    if live and chance and dice.random() < chance:
        elder = scheduler._planner.elder
        is_elders_turn = elder is not None and elder.state != "finished" and dice.random() < 0.7
        names = [elder.request.request_id] if is_elders_turn else dice.sample(live, dice.randint(1, min(3, len(live))))
        held |= {name for name in names if scheduler.hold(name)}
    if held and (not chance or dice.random() < 2 * chance or not scheduler.has_work):
        name = dice.choice(sorted(held))
        held.discard(name)
        assert scheduler.release(name)
        return {name}
    return set()


def perhaps_resumed(dice: random.Random, wanted: GenerationRequest, chance: float) -> GenerationRequest:
    """With tokens of an earlier engine."""
    most = wanted.stop.max_new_tokens - 1
    if most < 1 or not chance or dice.random() > chance:
        return wanted
    given = tuple((0,) * dice.randint(0, most) for _ in range(wanted.n))
    return dataclasses.replace(wanted, resumed_token_ids=given, arrival_time=dice.random())


def worst_ratio(
    seed: int, *, with_elder: bool, holds: float = 0.0, resumed: float = 0.0, seen: Counter[str] | None = None
) -> float:
    """Steps from submission, or release, to the end over the printed bound, the worst of one run, up to a breach.

    `holds`: how likely a request is held, or released, in a step; most often the elder, in the middle of its turn.
    `resumed`: how likely a request comes with tokens.
    """
    dice = random.Random(seed)
    config = adversarial_config(dice)
    elder_rule = ElderRule if with_elder else NoElder
    policies = dataclasses.replace(
        policies_for(config.limits),
        order=LatestFirst() if dice.random() < 0.5 else policies_for(config.limits).order,
        victim=AnyVictim(dice),
        queue=AnyQueue(dice) if dice.random() < 0.5 else AsOrdered(),
        chunk=AnyChunk(dice, config.limits.prefill_chunk),
        itl=AnyItl(dice),
        elder=elder_rule(config.limits.elder_age_steps),
    )
    scheduler = Scheduler(config, policies=policies)
    arrivals = sorted(dice.randint(0, 60) for _ in range(dice.randint(2, 24)))
    live: dict[str, tuple[int, int]] = {}  # submission step, or that of the last release; bound
    held: set[str] = set()
    step, worst = 0, 0.0
    while arrivals or live:
        while arrivals and arrivals[0] <= step:
            wanted = perhaps_resumed(dice, feasible_request(dice, config, len(arrivals)), resumed)
            arrivals.pop(0)
            scheduler.add(wanted, float(step))
            live[wanted.request_id] = (step, scheduler.wait_bound(wanted.request_id))
        for name in held_or_released(scheduler, dice, held, holds if step < 150 else 0.0) & live.keys():
            live[name] = (step, scheduler.wait_bound(name))
            if seen is not None:
                seen["releases"] += 1
        step += 1
        batch = scheduler.schedule(float(step))
        if seen is not None:
            seen["waits for a prefix"] += scheduler.stats().waiting["prefix"] > 0
            seen["copies"] += batch is not None and bool(batch.copies)
        if batch is not None:
            scheduler.apply(batch, answer(batch), float(step))
        for name, (submitted, bound) in list(live.items()):
            if name in held:
                continue
            worst = max(worst, (step - submitted) / bound)
            try:
                scheduler.wait_bound(name)
            except KeyError:
                del live[name]
        if worst > 1.0:
            break
    return worst


def test_no_adversary_breaks_the_printed_bound(request: pytest.FixtureRequest) -> None:
    num_runs = NUM_RUNS * int(request.config.getoption("--times", 1))
    seen: Counter[str] = Counter()
    ratios = [worst_ratio(seed, with_elder=True, seen=seen) for seed in range(num_runs)]
    assert max(ratios) <= 1.0, f"seed {ratios.index(max(ratios))}"
    assert max(ratios) > 0.5, "the adversary never comes near the bound: it shows nothing"
    assert min(seen["waits for a prefix"], seen["copies"]) > NUM_RUNS / 5, seen


def test_holds_and_releases_break_no_bound(request: pytest.FixtureRequest) -> None:
    """Nobody waits longer for a request that is held in the middle of its turn, and again when it has its turn back."""
    num_runs = NUM_RUNS // 10 * int(request.config.getoption("--times", 1))
    seen: Counter[str] = Counter()
    ratios = [worst_ratio(seed, with_elder=True, holds=0.02 + seed % 5 / 10, seen=seen) for seed in range(num_runs)]
    assert max(ratios) <= 1.0, f"seed {ratios.index(max(ratios))}"
    assert max(ratios) > 0.5
    assert seen["releases"] > 3 * num_runs


def test_without_the_elder_rule_the_bound_breaks() -> None:
    """The negative control."""
    broken = (seed for seed in range(120) if worst_ratio(seed, with_elder=False) > 1.0)
    assert len(list(islice(broken, 12))) == 12
