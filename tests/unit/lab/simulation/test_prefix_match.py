"""What each way of finding a cached prefix finds: whole contents, whole blocks, or tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire_bench.traces import TraceRow
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.limits import SchedulerConfig, SchedulerLimits
from quire_engine.scheduling.scheduler import Scheduler
from quire_lab.simulation.prefix_match import matching
from quire_lab.simulation.setup import MATCH_NAMES, MatchName, Setup
from quire_lab.simulation.simulator import simulate
from support.fake_executor import FakeExecutor, Run, own_tokens, request
from support.limits import scheduler_config

SIZE = 8
FIRST = own_tokens("first", 28)  # three blocks and a half


def run_with(name: MatchName) -> Run:
    config = scheduler_config(num_blocks=64, block_size=SIZE, max_num_batched_tokens=128, max_num_seqs=4)
    scheduler = Scheduler(config, allocate=matching(name, config))
    return Run(scheduler=scheduler, executor=FakeExecutor(SIZE))


def cached(run: Run, name: str, prompt: tuple[int, ...]) -> int:
    """The cached tokens that a request gets, once it has ended."""
    run.add(request(name, prompt, 4))
    run.to_end()
    return next(each for each in run.outputs if each.request_id == name).num_cached_tokens


CASES = {
    # What the second request begins with, and what each way finds of it.
    "the whole prompt and more": ((*FIRST, 5, 6, 7), (28, 24, 28)),
    "the first three blocks": ((*FIRST[:24], 900, 901, 902), (0, 24, 24)),
    "six tokens into the fourth block": ((*FIRST[:26], 900, 901, 902), (0, 24, 26)),
    "six tokens into the second block": ((*FIRST[:14], 900, 901, 902), (0, 8, 14)),
    "another prompt": (own_tokens("other", 28), (0, 0, 0)),
    "the very same prompt": (FIRST, (27, 24, 27)),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_found(case: str):
    second, expected = CASES[case]
    found = []
    for name in MATCH_NAMES:
        run = run_with(name)
        assert cached(run, "first", FIRST) == 0
        found.append(cached(run, "second", second))
        run.scheduler.check_invariants()
    assert tuple(found) == expected


def test_a_conversation_is_found_as_a_whole():
    run = run_with("whole")
    run.add(request("first", FIRST, 4))
    run.to_end()
    said = tuple(run.tokens["first", 0])
    assert cached(run, "next", (*FIRST, *said, 1, 2, 3)) >= 28
    assert cached(run, "last", (*FIRST[:16], 1, 2, 3)) == 0


def test_nothing_is_waited_for_that_is_not_found():
    run = run_with("whole")
    run.add(request("first", FIRST, 4), request("second", (*FIRST[:24], 1, 2, 3), 4))
    run.one_step()
    assert run.scheduler.stats().running == 2
    radix = run_with("radix")
    radix.add(request("first", FIRST, 4), request("second", (*FIRST[:24], 1, 2, 3), 4))
    radix.one_step()
    assert radix.scheduler.stats().running == 1


def test_a_simulation_is_worth_no_less_with_a_finer_match():
    setup = Setup(scheduler=SchedulerConfig(num_blocks=512, max_model_len=4096, limits=SchedulerLimits(block_size=16)))
    rows = [
        TraceRow(
            at=float(40 * i),
            input_tokens=100 + 40 * (i % 3),
            output_tokens=8,
            blocks=(1, 2 + i % 3, 9),
            block_tokens=40,
        )
        for i in range(12)
    ]
    found = []
    for name in MATCH_NAMES:
        outcome = simulate(replace(setup, prefix_match=name), rows)
        found.append(sum(one.cached_tokens for one in outcome.requests))
        assert all(one.num_tokens == 8 for one in outcome.requests)
    assert found[0] < found[1] < found[2]


@pytest.mark.parametrize("name", ["whole", "blocks"])
def test_what_it_cannot_do_is_refused(name: MatchName):
    for wrong in ({"num_host_blocks": 4}, {"limits": SchedulerLimits(enable_prefix_caching=False)}):
        with pytest.raises(ConfigError, match=f"match by {name}"):
            matching(name, SchedulerConfig(num_blocks=8, **wrong))
    assert matching("radix", SchedulerConfig(num_blocks=8, num_host_blocks=4)) is None
