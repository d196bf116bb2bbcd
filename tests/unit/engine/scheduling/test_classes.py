"""Interactive before batch, batch never less than its share, and prompts that give way."""

from __future__ import annotations

import dataclasses

import pytest

from quire_engine.contract.limits import LeastShares, SchedulerConfig
from quire_engine.contract.types import GenerationRequest
from quire_engine.scheduling.shares import MAX_CLASS_PREEMPTIONS
from support.covering import few
from support.fake_executor import Run, new_run, produced_alone, request
from support.limits import scheduler_config
from support.simulated_tenants import Arrival, History, Machine, simulate


def batch(name: str, prompt: int = 8, max_tokens: int = 8, n: int = 1) -> GenerationRequest:
    return dataclasses.replace(request(name, prompt, max_tokens, n=n), service_class="batch")


def entered(run: Run) -> list[str]:
    """The ids of those who run."""
    return [group.request.request_id for group in run.scheduler._roster.running]


def test_interactive_requests_go_first() -> None:
    run = new_run(max_num_seqs=2, class_share=LeastShares(batch=0.0))
    run.add(request("first", 8, 30), batch("b1"), batch("b2"), request("i1", 8, 3), request("i2", 8, 3))
    run.to_end()
    ends = run.finish_step
    assert max(ends["i1"], ends["i2"]) < min(ends["b1"], ends["b2"])


def test_an_interactive_request_takes_the_seat_of_a_batch_one() -> None:
    run = new_run(max_num_seqs=2)
    run.add(request("elder", 8, 60), wanted := batch("b", 8, 40))
    for _ in range(10):
        run.one_step()
    run.add(short := request("i", 8, 4))
    run.one_step()
    assert entered(run) == ["elder", "i"]
    run.to_end()
    assert produced_alone(run, wanted, short)
    assert run.scheduler.stats().total_preemptions == 1


def test_memory_is_taken_from_batch_work_only_where_that_helps() -> None:
    run = new_run(num_blocks=10, block_size=16, max_num_seqs=4)
    run.add(request("elder", 64, 16), batch("b", 60, 4))
    run.one_step()
    run.add(request("large", 100, 4))  # seven blocks: with the batch request's four it would have six
    run.one_step()
    assert entered(run) == ["elder", "b"], "nobody is preempted in vain"
    run.to_end()


def test_batch_requests_are_preempted_for_their_class_a_bounded_number_of_times() -> None:
    run = new_run(max_num_seqs=2, class_share=LeastShares(batch=0.0), elder_age_steps=10_000)
    run.add(request("elder", 8, 400), batch("b", 8, 200))
    for number in range(3 * MAX_CLASS_PREEMPTIONS):
        for _ in range(6):
            run.one_step()
        run.add(request(f"i{number}", 8, 2))
    group = run.scheduler._roster.live["b"]
    for _ in range(30):
        run.one_step()
    assert group.num_class_preemptions == MAX_CLASS_PREEMPTIONS
    assert group.state == "running"


def overload(share: float) -> History:
    """Interactive requests for more than the machine computes, and batch work beside them."""
    chats = [Arrival(at=number * 0.05, tenant="chat", prompt=100, output=30) for number in range(600)]
    work = [Arrival(at=0.5, tenant="work", prompt=300, output=60, service_class="batch") for _ in range(60)]
    config: SchedulerConfig = scheduler_config(
        num_blocks=400,
        max_num_seqs=12,
        max_num_batched_tokens=256,
        prefill_chunk=256,
        class_share=LeastShares(batch=share),
    )
    return simulate(config, [*chats, *work], until=30, machine=Machine(0.02, 0.0008, 0.001))


@pytest.mark.parametrize("share", few([0.2, 0.4], 0.4))
def test_batch_work_gets_its_share_under_overload(share: float) -> None:
    history = overload(share)
    computed = {tenant: history.total(tenant, 10) for tenant in ("chat", "work")}
    assert computed["work"] / sum(computed.values()) == pytest.approx(share, abs=0.04)


def test_without_a_share_batch_work_gets_what_the_elder_rule_gives() -> None:
    history = overload(0.0)
    assert 0 < history.total("work", 10) < 0.15 * history.total("chat", 10)


def interactive_part(shares: LeastShares, chat: int, work: int, *, one_at_a_time: bool = False) -> float:
    """The part of the computed tokens that interactive requests get, where both classes have more than enough.

    `chat`, `work`: tokens of an interactive and of a batch prompt; their answers have two tokens.
    """
    quota = 1 if one_at_a_time else 0
    arrivals = [Arrival(at=0.0, tenant="chat", prompt=chat, output=2, max_running=quota)] * (12_000 // chat)
    arrivals += [Arrival(at=0.0, tenant="work", prompt=work, output=2, service_class="batch")] * (12_000 // work)
    config = scheduler_config(
        num_blocks=2000,
        max_model_len=4096,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        prefill_chunk=128,
        itl_target=0.0,
        scheduling_policy="wfq",
        class_share=shares,
        enable_prefix_caching=False,
    )
    history = simulate(config, arrivals, until=9, machine=Machine(0.02, 0.0008, 0.001))
    computed = {tenant: history.total(tenant, 1) for tenant in ("chat", "work")}
    return computed["chat"] / sum(computed.values())


@pytest.mark.parametrize(("chat", "work"), [(40, 1500), (1500, 40), (600, 600)])
@pytest.mark.parametrize("shares", [LeastShares(batch=0.3), LeastShares(interactive=0.9, batch=0.05)])
def test_each_class_gets_its_share_whatever_the_sizes_of_its_prompts(shares: LeastShares, chat: int, work: int) -> None:
    assert shares.interactive - 0.03 <= interactive_part(shares, chat, work) <= 1 - shares.batch + 0.03


def test_a_long_interactive_prompt_gets_its_share_beside_many_batch_requests() -> None:
    """By priority alone, half of each step is left to short prompts behind a long one, batch ones too."""
    by_share = interactive_part(LeastShares(interactive=0.9, batch=0.05), 3000, 40, one_at_a_time=True)
    by_priority = interactive_part(LeastShares(batch=0.05), 3000, 40, one_at_a_time=True)
    assert by_share > 0.85
    assert by_priority < 0.6


def test_what_a_class_does_not_use_is_lent() -> None:
    """Batch work alone takes no more steps with shares than without."""
    steps = []
    for shares in (LeastShares(batch=0.0), LeastShares(interactive=0.9, batch=0.1)):
        run = new_run(max_num_seqs=4, max_num_batched_tokens=64, prefill_chunk=64, class_share=shares)
        run.add(*(batch(f"b{number}", 100, 6) for number in range(6)), request("i", 8, 3))
        run.to_end()
        steps.append(run.step)
    assert steps[1] <= steps[0]


def test_streams_of_batch_work_do_not_slow_down_interactive_prompts_that_are_due() -> None:
    """Of a slow machine's steps, which could hold 64 prompt tokens beside streams within the target."""
    sizes = []
    for shares in (LeastShares(), LeastShares(interactive=0.9, batch=0.1)):
        run = new_run(max_num_seqs=8, class_share=shares, itl_target=0.1)
        run.add(batch("b", 100, 60))
        for _ in range(3):
            run.one_step()
        run.add(request("i", 400, 2))
        sizes.append(run.one_step().num_tokens)
    assert sizes[0] < 100
    assert sizes[1] > 400


def late(config_value: int) -> float:
    """Seconds to the first token of short prompts that come while two long ones are computed in small steps."""
    long = [Arrival(at=0.0, tenant="long", prompt=3000, output=4) for _ in range(3)]
    short = [Arrival(at=1.0 + 0.7 * number, tenant="short", prompt=60, output=4) for number in range(8)]
    config = scheduler_config(
        num_blocks=2000,
        max_model_len=4096,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        prefill_chunk=64,
        itl_target=0.0,
        max_consecutive_chunks=config_value,
    )
    return simulate(config, [*long, *short], machine=Machine(0.02, 0.001, 0.001)).p95("short")


def test_a_long_prompt_gives_way_after_some_chunks_in_a_row() -> None:
    assert late(2) < 0.6 * late(0)


def test_who_gives_way_gets_what_nobody_takes() -> None:
    """Alone, or beside others that cannot enter, a cap on chunks costs no step."""
    steps = []
    for cap in (0, 1):
        run = new_run(max_num_seqs=2, max_num_batched_tokens=64, prefill_chunk=64, max_consecutive_chunks=cap)
        run.add(request("a", 640, 2), request("b", 640, 2), request("c", 640, 2))
        run.to_end()
        steps.append(run.step)
    assert steps[1] <= steps[0] + 1
