"""Livelocks, starvation and thrashing that other engines had, as scenarios.

Named by what went wrong there; each ends here with everybody served, in a stated number of steps.
"""

from __future__ import annotations

import pytest

from quire_engine.contract.errors import InfeasibleRequest
from support.fake_executor import expected_tokens, new_run, produced_alone, request


def test_a_request_the_pool_can_never_hold_is_refused_not_retried() -> None:
    run, wanted = new_run(num_blocks=63), request("r", 1000, 24)
    with pytest.raises(InfeasibleRequest, match=r"needs 64 blocks, pool has 63; largest max_tokens is 9$"):
        run.add(wanted)
    assert not run.scheduler.has_work
    roomy = new_run(num_blocks=64)
    roomy.add(wanted)
    roomy.to_end(limit=40)
    assert produced_alone(roomy, wanted)


def test_requests_near_the_pools_size_are_not_recomputed_for_ever() -> None:
    run = new_run(num_blocks=20)
    wanted = [request(f"r{i}", 200, 120) for i in range(4)]
    run.add(*wanted)
    run.to_end(limit=4 * 130)
    assert produced_alone(run, *wanted)


def test_a_head_that_cannot_enter_does_not_strand_the_others() -> None:
    run = new_run(num_blocks=20, max_num_seqs=8)
    wanted = [request("holder", 100, 60), request("head", 250, 4), *(request(f"r{i}", 16, 4) for i in range(3))]
    run.add(*wanted)
    run.to_end(limit=100)
    assert produced_alone(run, *wanted)
    assert max(run.finish_step[f"r{i}"] for i in range(3)) < run.finish_step["head"]


def test_waiting_and_running_together_may_exceed_the_slots() -> None:
    run = new_run(num_blocks=12, max_num_seqs=2)
    wanted = [request(f"r{i}", 60, 40, n=1 + i % 2) for i in range(8)]
    run.add(*wanted)
    run.to_end(limit=500)
    assert produced_alone(run, *wanted)


def test_chunked_prefills_do_not_ping_pong() -> None:
    """Two long prompts and decodes that grow: each preemption is paid for by progress of an older request."""
    run = new_run(num_blocks=30, max_num_batched_tokens=96, prefill_chunk=64, max_num_seqs=16)
    wanted = [*(request(f"decode{i}", 16, 60) for i in range(4)), *(request(f"long{i}", 300, 10) for i in range(2))]
    run.add(*wanted)
    run.to_end(limit=400)
    assert produced_alone(run, *wanted)
    assert run.scheduler.stats().total_preemptions <= 10


def test_a_preempted_request_enters_only_with_a_block_to_spare() -> None:
    run = new_run(num_blocks=8, enable_prefix_caching=False)
    run.add(request("old", 48, 70), request("young", 60, 40))
    while not run.scheduler.stats().total_preemptions:
        run.one_step()
    seen = run.scheduler.stats().total_preemptions
    run.to_end()
    assert run.scheduler.stats().total_preemptions == seen == 1


def test_a_head_blocked_by_blocks_lets_smaller_ones_pass() -> None:
    run = new_run(num_blocks=10)
    run.add(request("holder", 96, 30))
    run.one_step()
    run.add(request("head", 100, 4), request("small", 16, 4))
    run.one_step()
    assert run.scheduler.stats().waiting["kv"] == 1
    assert ("small", 0) in run.tokens


def test_a_preempted_request_keeps_its_place() -> None:
    run = new_run(num_blocks=10, max_bypasses=0)
    run.add(request("old", 40, 100), request("victim", 60, 30))
    while not run.scheduler.stats().total_preemptions:
        run.one_step()
    run.add(*(request(f"new{i}", 60, 30) for i in range(3)))
    run.to_end()
    order = sorted(run.finish_step, key=lambda name: run.finish_step[name])
    assert order.index("victim") < min(order.index(f"new{i}") for i in range(3))


def test_nobody_waits_while_the_pool_is_empty() -> None:
    run = new_run(num_blocks=8)
    run.add(request("whole", 128, 1))
    assert run.one_step() is not None
    run.to_end()
    run.add(request("again", 100, 28))
    assert run.one_step() is not None
    assert run.scheduler.stats().running == 1


def test_pressure_preempts_one_not_everybody() -> None:
    run = new_run(num_blocks=17, max_num_seqs=16, enable_prefix_caching=False)
    run.add(*(request(f"r{i}", 32, 40) for i in range(8)))
    before = 0
    for _ in range(40):
        run.one_step()
        stats = run.scheduler.stats()
        assert stats.total_preemptions - before <= 4, "8 decodes that cross a block together need 8 blocks: 4 victims"
        before = stats.total_preemptions
    run.to_end()


def test_a_stream_of_small_requests_does_not_starve_a_large_one() -> None:
    run = new_run(num_blocks=16, max_num_seqs=4, scheduling_policy="priority", elder_age_steps=16)
    large = request("large", 200, 20, priority=9)
    run.add(*(request(f"first{i}", 30, 6) for i in range(4)), large)
    bound = run.scheduler.wait_bound("large")
    name = 0
    while ("large", 0) not in run.finishes:
        assert run.step <= bound
        run.add(request(f"r{name}", 30, 6))
        name += 1
        run.one_step()
    assert tuple(run.tokens["large", 0]) == expected_tokens(large, 0)
    assert name > 4


def test_throughput_does_not_collapse_after_preemptions() -> None:
    """A pool at half of what all need: at most twice the computed tokens of a pool that holds all."""
    wanted = [request(f"r{i}", 64, 64) for i in range(16)]
    computed = {}
    for num_blocks in (64, 128):
        run = new_run(num_blocks=num_blocks, max_num_seqs=16, enable_prefix_caching=False)
        run.add(*wanted)
        run.to_end()
        assert produced_alone(run, *wanted)
        computed[num_blocks] = sum(batch.num_tokens for batch in run.log)
    assert computed[128] == 16 * 127
    assert computed[64] <= 2 * computed[128]


def test_what_a_preemption_frees_is_not_given_away_in_the_same_step() -> None:
    run = new_run(num_blocks=8, max_num_seqs=2, enable_prefix_caching=False)
    run.add(request("old", 40, 60), request("victim", 60, 30), request("small", 8, 4))
    while not run.scheduler.stats().total_preemptions:
        batch = run.one_step()
    assert batch is not None
    assert [item.num_prompt_tokens for item in batch.items] == [40]
    assert run.scheduler.stats().waiting == {"kv": 2, "slots": 0, "budget": 0, "prefix": 0}
    run.to_end()
