"""Expected lengths, the margin and the expected peak; and what admission by growth does to a pool that is too small."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence as Values

import pytest

from quire_engine.contract.types import EngineStats
from quire_engine.scheduling.blocks import NO_MATCH, PageTable, SequenceKV
from quire_engine.scheduling.forecast import _MOST_KINDS, WORTH, ByExpectedPeak, Margin, OutputLengths
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.sequence import Group, Sequence
from quire_engine.scheduling.step_prices import StepPrices
from support.fake_executor import DEAR, Run, new_run, produced_alone, request

NUM_CASES = 600  # of the exact peak; `make schedule-test` does many times as many
SIZE = 16
NEVER = 5000  # no token has this number: an output may stop at any time, and none does


def choice(
    done: int = 0, max_tokens: int = 1000, *, prompt: int = 8, tenant: str = "", stop: tuple[int, ...] = (NEVER,)
) -> Sequence:
    """A choice that has `done` output tokens."""
    wanted = dataclasses.replace(request("r", prompt, max_tokens, stop=stop), tenant=tenant)
    group = Group(request=wanted, arrival=0, added_step=0, footprint=-(-(prompt + max_tokens - 1) // SIZE))
    tokens = [*wanted.prompt_token_ids, *[7] * done]
    one = Sequence(
        sequence_id=0,
        choice=0,
        group=group,
        own_token_ids=tokens,
        num_prompt_tokens=prompt,
        kv=SequenceKV(tables=(PageTable(SIZE),)),
    )
    group.add_choice(one)
    return one


def learned(*lengths: int, max_tokens: int = 1000, tenant: str = "") -> OutputLengths:
    known = OutputLengths()
    for length in lengths:
        known.note(choice(length, max_tokens, tenant=tenant))
    return known


# ---- expected lengths ----------------------------------------------------------------------------------------------


def test_three_quarters_of_past_outputs_were_no_longer() -> None:
    known = learned(*range(10, 90, 10))
    assert known.left(choice()) == 70
    assert known.left(choice(30)) == 70 - 30, "three of 40, 50, 60, 70 and 80 are shorter"
    assert known.left(choice(60)) == 80 - 60


def test_seven_outputs_are_too_few_to_learn_from() -> None:
    assert learned(*[10] * 7).left(choice()) == 500, "half of max_tokens"
    assert learned(*[10] * 8).left(choice()) == 10


def test_an_output_that_is_longer_than_all_past_ones_doubles() -> None:
    known = learned(*[10] * 20)
    assert known.left(choice(10)) == 10
    assert known.left(choice(100)) == 100


def test_an_expectation_holds_until_it_is_reached() -> None:
    """Else every step would look up every running sequence."""
    known, one = learned(*[100] * 8), choice()
    assert known.left(one) == 100
    known.note(choice(900))
    one.own_token_ids += [7] * 60
    assert known.left(one) == 40
    one.own_token_ids += [7] * 40
    assert known.left(one) == 800, "of those that are longer than what it has"


def test_an_expectation_is_never_beyond_the_limit_and_never_nothing() -> None:
    assert learned(*[900] * 8).left(choice(0, 600)) == 600
    assert OutputLengths().left(choice(4, 5)) == 1
    assert OutputLengths().left(choice(5, 5)) == 1


def test_without_stop_tokens_the_length_is_known() -> None:
    known = learned(*[10] * 8)
    assert known.left(choice(100, 1000, stop=())) == 900
    for _ in range(100):
        known.note(choice(1000, 1000, stop=()))
    assert known.left(choice()) == 10, "what had to reach its limit says nothing of those that stop"


def test_expectations_are_those_of_the_tenant_then_those_of_everyone() -> None:
    known = learned(*[20] * 8, tenant="brief")
    for _ in range(8):
        known.note(choice(500, tenant="long"))
    assert known.left(choice(tenant="brief")) == 20
    assert known.left(choice(tenant="long")) == 500
    assert known.left(choice(tenant="new")) == 500
    assert known.left(choice(20, tenant="brief")) == 480, "longer than any of its own: like those of others"


def test_expectations_are_those_of_requests_with_about_that_limit() -> None:
    known = learned(*[20] * 8, max_tokens=100)
    for _ in range(8):
        known.note(choice(3000, 4000))
    assert known.left(choice(0, 127)) == 20
    assert known.left(choice(0, 2048)) == 2048
    assert known.left(choice(0, 4095)) == 3000
    assert known.left(choice(0, 1000)) == 500, "of that order nothing is known"


def test_old_lengths_are_forgotten() -> None:
    known = learned(*[500] * 100, *[20] * 64)
    assert known.left(choice()) == 20
    assert known.left(choice(20)) == 20, "none that is longer is left"
    assert {len(newest) for newest in known._newest.values()} == {64}
    assert {len(newest) for newest in known._sorted.values()} == {64}


def test_kinds_are_bounded_and_the_oldest_are_forgotten() -> None:
    known = OutputLengths()
    for number in range(2 * _MOST_KINDS):
        for _ in range(8):
            known.note(choice(100 + number % 7, tenant=f"t{number}"))
    assert len(known._newest) == len(known._sorted) == _MOST_KINDS
    assert (None, 10) in known._newest, "what everyone uses stays"
    assert ("t0", 10) not in known._newest
    assert known.left(choice(tenant=f"t{2 * _MOST_KINDS - 1}")) == 100 + (2 * _MOST_KINDS - 1) % 7


# ---- the margin ----------------------------------------------------------------------------------------------------


def test_the_margin_widens_with_each_preemption_and_halves_in_256_steps() -> None:
    margin = Margin()
    assert margin.at(1000) == 0.0
    margin.widen(1000)
    assert margin.at(1000) == 1 / 64
    assert margin.at(1256) == 1 / 128
    margin.widen(1256)
    assert margin.at(1256) == 1 / 128 + 1 / 64
    for _ in range(100):
        margin.widen(1256)
    assert margin.at(1256) == 1 / 4
    assert margin.at(1256 + 512) == 1 / 16


# ---- the expected peak ---------------------------------------------------------------------------------------------


def seated(kv: KVAllocator, *ones: Sequence) -> list[Group]:
    for one in ones:
        kv.seat(one, NO_MATCH)
        one.group.enter(0.0)
        one.kv.num_computed = len(one.token_ids) - 1
    return [one.group for one in ones]


def pool(num_blocks: int) -> KVAllocator:
    return KVAllocator(num_blocks=num_blocks, block_size=SIZE, enable_prefix_caching=False)


def fits(
    kv: KVAllocator,
    one: Sequence,
    running: Values[Group],
    policy: ByExpectedPeak | None = None,
    *,
    is_shared: bool = False,
) -> bool:
    need, policy = one.blocks_for_known, policy or ByExpectedPeak(StepPrices())
    assert need <= kv.num_available
    return policy.will_fit(one.group, need=need, kv=kv, running=running, step=1, is_shared=is_shared)


def test_two_outputs_in_step_share_a_pool_that_holds_both_ends() -> None:
    """48 + 200 tokens each: 16 blocks at the end."""
    for num_blocks, expected in ((32, True), (30, False), (20, False)):
        kv = pool(num_blocks)
        running = seated(kv, choice(1, 200, prompt=48, stop=()))
        assert fits(kv, choice(0, 200, prompt=48, stop=()), running) is expected


def test_outputs_far_apart_share_a_pool_that_would_not_hold_them_in_step() -> None:
    """The first one has 24 tokens left when the second begins: it ends long before the other needs its blocks."""
    kv = pool(20)
    running = seated(kv, choice(216, 240, prompt=16, stop=()))
    assert fits(kv, choice(0, 240, prompt=16, stop=()), running)
    assert 2 * running[0].footprint > kv.num_blocks


def test_what_an_early_end_frees_is_counted_for_the_entry_too() -> None:
    """A short answer to a long prompt enters beside a long output, which takes its blocks after its end."""
    kv = pool(32)
    running = seated(kv, choice(1, 400, prompt=16, stop=()))
    assert fits(kv, choice(0, 8, prompt=240, stop=()), running)


def test_a_preempted_entry_may_pay_before_the_pool_is_full() -> None:
    """A short prompt gains eight times its tokens before the pool is short; a long one does not."""
    kv = pool(64)
    running = seated(kv, choice(1, 900, prompt=16, stop=()))
    assert running[0].footprint + choice(0, 900, prompt=8).group.footprint > kv.num_blocks
    assert fits(kv, choice(0, 900, prompt=8, stop=()), running)
    assert not fits(kv, choice(0, 900, prompt=80, stop=()), running)


def test_beside_other_tenants_an_entry_is_to_gain_more() -> None:
    """Computing again takes no time here, and yet lengthens the steps of all."""
    prices = StepPrices()
    kv, policy = pool(64), ByExpectedPeak(prices)
    prices.learn(prompt_tokens=0, num_decodes=1, seconds=1.0)
    prices.learn(prompt_tokens=64, num_decodes=0, seconds=1.0)
    running = seated(kv, choice(1, 900, prompt=16, stop=()))
    for prompt, enters in ((8, True), (80, False)):
        late = choice(0, 900, prompt=prompt, stop=())
        assert fits(kv, late, running, policy)
        assert fits(kv, late, running, policy, is_shared=True) is enters


def test_after_preemptions_less_is_let_in() -> None:
    """Ten blocks each when the short one ends, and the other goes on to sixteen."""
    kv, policy = pool(22), ByExpectedPeak(StepPrices())
    running = seated(kv, choice(1, 200, prompt=48, stop=()))
    short = choice(0, 100, prompt=48, stop=())
    assert short.group.footprint + running[0].footprint > kv.num_blocks
    assert fits(kv, short, running, policy)
    for _ in range(12):
        policy.note_preemption(1)
    assert not policy.will_fit(short.group, need=3, kv=kv, running=running, step=1)
    assert policy.will_fit(short.group, need=3, kv=kv, running=running, step=2000)


def test_an_empty_machine_takes_everything() -> None:
    assert fits(pool(4), choice(0, 10_000, prompt=16), [])


def exact_peak(running: Values[Sequence], entry: Sequence) -> int:
    """The most blocks that are held at once until the entry has paid, with outputs that end at their limits."""
    worst, worth = 0, WORTH * len(entry.token_ids)
    left = {one: one.group.max_new_tokens - one.num_output_tokens for one in (*running, entry)}
    for step in range(min(worth, max(left.values())) + 1):
        held = sum(-(-(len(one.token_ids) + step) // SIZE) for one, steps in left.items() if step <= steps)
        worst = max(worst, held)
    return worst


def test_the_expected_peak_is_the_exact_one_but_for_half_a_block_each(pytestconfig: pytest.Config) -> None:
    dice, seen = random.Random(7), {True: 0, False: 0}
    for _ in range(NUM_CASES * int(pytestconfig.getoption("--times", 1))):
        kv = pool(dice.randint(20, 90))
        running: list[Sequence] = []
        for _ in range(dice.randint(1, 8)):
            limit = dice.randint(20, 300)
            one = choice(dice.randint(1, limit - 1), limit, prompt=dice.randint(1, 120), stop=())
            if one.blocks_for_known <= kv.num_available:
                running += [each.leader for each in seated(kv, one)]
        entry = choice(0, dice.randint(1, 300), prompt=dice.randint(1, 150), stop=())
        if not running or entry.blocks_for_known > kv.num_available:
            continue
        decision = fits(kv, entry, [one.group for one in running])
        peak, error = exact_peak(running, entry), (len(running) + 1) / 2 + 1
        if abs(peak - kv.num_blocks) > error:
            assert decision == (peak < kv.num_blocks), f"{peak} of {kv.num_blocks} blocks"
            seen[decision] += 1
    assert min(seen.values()) > 50


# ---- whole runs ----------------------------------------------------------------------------------------------------


def test_a_group_that_would_double_the_pool_waits_and_enters_before_the_other_ends() -> None:
    """17 blocks each at their ends, and 30 in all: they may not be in step, and nothing is computed twice."""
    run = new_run(num_blocks=30, admission="expected", seconds_per_token=DEAR)
    first, second = request("a", 120, 151), request("b", 120, 151)
    run.add(first, second)
    for _ in range(5):
        run.one_step()
    waiting = run.scheduler._roster.waiting
    assert [(group.request.request_id, group.wait_reason) for group in waiting] == [("b", "kv")]
    run.to_end()
    assert produced_alone(run, first, second)
    assert 150 + 20 < run.finish_step["b"] < 2 * 151
    assert run.scheduler.stats().total_preemptions == 0


def test_a_group_that_fits_only_alone_enters_when_the_other_has_ended() -> None:
    run = new_run(num_blocks=17, admission="expected")
    run.add(request("a", 120, 151), request("b", 140, 131))
    run.to_end()
    assert run.finish_step["b"] >= run.finish_step["a"] + 131
    assert run.scheduler.stats().total_preemptions == 0


@functools.cache
def thrash(admission: str, *, stop: tuple[int, ...] = (), token: float = DEAR, **policies: str) -> Run:
    """Sixteen outputs of 150 tokens at once, on a pool that holds one and a half of them."""
    limits = {"num_blocks": 16, "max_num_seqs": 16, "admission": admission, **policies}
    run = new_run(seconds_per_token=token, **limits)
    wanted = [request(f"r{number}", 8, 150, stop=stop) for number in range(16)]
    run.add(*wanted)
    run.to_end()
    assert produced_alone(run, *wanted)
    return run


def recomputed(stats: EngineStats) -> float:
    """Tokens that were computed again, by those that are computed once."""
    return stats.total_recomputed_tokens / (16 * 157)


@pytest.mark.parametrize(("stop", "most", "part"), [((), 0.2, 0.3), ((NEVER,), 0.7, 0.8)])
def test_a_pool_far_too_small_computes_less_twice(stop: tuple[int, ...], most: float, part: float) -> None:
    """Without stop tokens the lengths are known; with them all groups are expected to be far shorter at first."""
    run, greedy = thrash("expected", stop=stop), thrash("prompt", stop=stop)
    stats, without = run.scheduler.stats(), greedy.scheduler.stats()
    assert stats.total_preemptions <= 2 * 16
    assert recomputed(stats) <= most < recomputed(without)
    assert stats.total_preemptions < without.total_preemptions / 2
    assert run.step * stats.total_recomputed_tokens < part * greedy.step * without.total_recomputed_tokens


def test_where_computing_again_is_cheap_seats_are_filled() -> None:
    """What a token takes beside the second of every step decides, and is learned from the steps."""
    cheap, dear = thrash("expected", token=0.001), thrash("expected", stop=())
    assert cheap.step < 0.9 * dear.step
    assert dear.scheduler.stats().total_preemptions < cheap.scheduler.stats().total_preemptions <= 3 * 16


@pytest.mark.parametrize("policy", ["fcfs", "wfq"])
def test_the_elder_enters_however_little_is_expected_to_fit(policy: str) -> None:
    """It needs the whole pool, and a new short request comes with each step."""
    run = new_run(num_blocks=16, admission="expected", elder_age_steps=20, scheduling_policy=policy)
    large = request("large", 200, 56)
    run.add(request("first", 8, 100), large)
    bound = run.scheduler.wait_bound("large")
    while "large" not in run.finish_step:
        run.add(request(f"short{run.step}", 8, 20))
        run.one_step()
    assert run.step < bound
    assert produced_alone(run, large)
