"""The facts' own arithmetic, which is not read off any server, and how they are told."""

from __future__ import annotations

import doctest
import re
from collections.abc import Sequence
from itertools import combinations_with_replacement

import pytest

from quire_bench.traces import TraceRow
from quire_engine.cost_model import CostModel
from quire_lab.facts import batching, memory
from quire_lab.facts.__main__ import checks
from quire_lab.facts.fact import Try, at_most, equal, near, not_shown, tried
from quire_lab.facts.live import Live
from quire_lab.facts.sharing import Saving, seconds_saved
from quire_lab.facts.timing import (
    PoolLoad,
    beyond_queue_and_prompt,
    both_sides_of_littles_law,
    full_cache,
    pool_load,
)
from quire_lab.simulation.setup import Setup
from quire_lab.simulation.simulator import simulate
from quire_server.metrics.alert_rules import RULES
from support.documents import text

COST = CostModel(step=0.01, row=0.0001, prompt=((1, 0.01), (513, 0.1)))


def test_the_memory_of_keys_and_values() -> None:
    assert doctest.testmod(memory).failed == 0
    assert doctest.testmod(memory).attempted == 2


def test_a_fact_says_both_numbers_and_whether_they_agree() -> None:
    assert equal("F1", 480, 480).ok
    wrong = equal("F1 slots", 1024, 1023)
    assert (wrong.ok, wrong.expected, wrong.got) == (False, "1,024", "1,023")
    assert near("F14", 0.2, 0.17, within=0.2).ok
    assert not near("F14", 0.2, 0.15, within=0.2).ok
    assert near("F2", 0.53125, 0.53125, within=0.0).ok
    assert not near("F2", 0.53125, 0.5313, within=0.0).ok
    assert at_most("F18", 5, 5).ok
    assert not at_most("F18", 5, 5.1).ok
    assert [at_most("F18", 5, got).verdict for got in (5, 6)] == ["ok", "NOT SO"]
    skipped = not_shown("F17 alerts", "too few seats")
    assert (skipped.verdict, skipped.got, skipped.ok) == ("not shown here", "too few seats", True)


@pytest.mark.parametrize(
    ("seats", "max_model_len", "pool"),
    [(8, 512, 4096), (8, 512, 4222), (8, 2048, 4096), (64, 512, 8192), (1, 4096, 2048), (128, 256, 16384)],
)
def test_the_load_of_the_full_cache_keeps_the_pool_above_the_alert(seats: int, max_model_len: int, pool: int) -> None:
    """By the scheduler that serves, without a server: the mean over the middle of a closed loop's steps."""
    load = pool_load(pool=pool, seats=seats, max_model_len=max_model_len, block_size=16, step_tokens=512)
    assert isinstance(load, PoolLoad)
    assert load.prompt + load.answer <= min(max_model_len, pool)
    limits = {"max_num_seqs": seats, "max_num_batched_tokens": 512, "prefill_chunk": 512}
    server = {"num_blocks": pool // 16, "max_model_len": max_model_len, "max_num_queued_reqs": 1000}
    setup = Setup(cost=COST).with_settings([*(limits | server).items(), ("enable_prefix_caching", False)])
    row = TraceRow(at=0.0, input_tokens=load.prompt, output_tokens=load.answer)
    moments = simulate(setup, [row] * (4 * load.streams)).moments
    middle = moments[len(moments) // 4 : len(moments) * 3 // 4]
    used = sum(moment.blocks_used for moment in middle) / len(middle) / (pool // 16)
    (full,) = [rule.threshold for rule in RULES if rule.name == "QuireKVCacheFull"]
    assert used > full


def test_seats_that_cannot_fill_the_pool_are_the_reason_that_it_is_not_shown() -> None:
    """Eight sequences of the longest context hold half of the pool."""
    reason = pool_load(pool=8192, seats=8, max_model_len=512, block_size=16, step_tokens=512)
    assert reason == "8 sequences of 512 tokens fill at most 50% of the pool's 8,192"


def test_what_needs_circumstances_counts_only_where_they_were_there() -> None:
    good, bad = equal("F1", 1, 1), equal("F1", 1, 2)
    tries: list[Try] = []

    def run(*found: Try) -> list[str]:
        tries[:] = reversed(found)
        return [fact.verdict for fact in tried(tries.pop)]

    apart = "they came apart"
    assert run(Try(certain=(good,), others=(bad,))) == ["ok", "NOT SO"]
    assert run(Try(others=(bad,), missing=apart), Try(others=(good,))) == ["ok"]
    assert run(Try(others=(bad,), missing=apart), Try(others=(bad,))) == ["NOT SO"]
    assert run(*[Try(certain=(good,), others=(bad,), missing=apart)] * 3) == ["ok", "not shown here"]
    assert run(Try(certain=(bad,), others=(bad,), missing=apart)) == ["NOT SO", "not shown here"]
    assert run(Try(others=(good,), missing=apart)) == ["ok"], "as expected, whatever was missing"


def test_the_peak_of_blocks_is_the_same_for_all_who_arrive_near_each_other_in_order() -> None:
    lengths, size, prompt = batching.LENGTHS, 16, 8

    def peak(arrivals: Sequence[int]) -> int:
        return max(
            sum(
                -(-(prompt + step - arrival) // size)
                for length, arrival in zip(lengths, arrivals, strict=True)
                if 0 <= step - arrival < length - prompt
            )
            for step in range(300)
        )

    near_each_other = [(0, *rest) for rest in combinations_with_replacement(range(batching.NEAR + 1), 3)]
    assert {peak(arrivals) for arrivals in near_each_other} == {16}
    assert peak((0, 60, 120, 180)) != 16


def test_the_first_token_is_judged_by_the_loops_own_lateness() -> None:
    def verdict(*rests: float, stall: float) -> str:
        return beyond_queue_and_prompt(rests, stall).verdict

    assert verdict(0.4, 0.6, 9.0, stall=0.1) == "ok"
    assert verdict(0.9, 3.0, 9.0, stall=0.1) == "not shown here", "the quickest is as quick as on a quiet machine"
    assert verdict(3.0, 4.0, 9.0, stall=1.2) == "not shown here", "the loop itself is late"
    assert verdict(3.0, 4.0, 9.0, stall=0.1) == "NOT SO", "no stall explains even the quickest"
    assert verdict(-3.0, -4.0, -9.0, stall=0.1) == "NOT SO", "its parts are longer than the whole"


def test_littles_law_is_judged_beyond_the_ends_of_its_window() -> None:
    assert both_sides_of_littles_law(4.9, streams=4, ended=6000).ok
    assert both_sides_of_littles_law(6.0, streams=4, ended=6000).verdict == "NOT SO"
    assert both_sides_of_littles_law(6.0, streams=4, ended=400).verdict == "not shown here"
    assert both_sides_of_littles_law(60.0, streams=4, ended=400).verdict == "NOT SO"


def test_an_alert_that_does_not_fire_speaks_against_a_pool_that_stayed_full() -> None:
    full = "QuireKVCacheFull"
    assert full_cache("F17", [0.95] * 10, {full}).ok
    assert full_cache("F17", [0.95] * 80, set()).verdict == "NOT SO"
    assert full_cache("F17", [*[0.95] * 50, 0.8, *[0.95] * 50], {"other"}).verdict == "not shown here"
    assert full_cache("F17", [], set()).verdict == "not shown here"
    (rule,) = [rule for rule in RULES if rule.name == full]
    assert rule.for_seconds == 30


def test_seconds_saved_speak_against_a_cache_in_every_round_or_not_at_all() -> None:
    def round_of(got: float, expected: float = 0.75) -> Saving:
        return Saving(cold_short=0.25, cold_long=1.0, warm_long=1.0 - got, hits=expected * 1000, more=750)

    def verdict(*rounds: Saving) -> str:
        return seconds_saved(rounds).verdict

    assert verdict(*[round_of(0.7)] * 9) == "ok"
    assert verdict(*[round_of(0.0)] * 9) == "NOT SO", "nothing is saved"
    assert verdict(*[round_of(0.99)] * 9) == "NOT SO"
    assert verdict(*[round_of(0.3)] * 8, round_of(0.8)) == "not shown here"
    assert verdict(*[round_of(0.7)] * 5, *[round_of(-4.0)] * 4) == "ok", "a few rounds were disturbed"


def test_every_fact_of_the_documents_is_there() -> None:
    rows = re.findall(r"^\| (F[\d, F]+) \|", text("docs/measuring.md"), re.MULTILINE)
    assert {name for row in rows for name in row.split(", ")} == {name for names in checks(None) for name in names}


def test_no_two_prompts_begin_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Live, "label", lambda *_: "16")
    live = Live("http://127.0.0.1:1")
    begins = [live.prompt(1)[0] for _ in range(448)]
    assert len(set(begins)) == len(begins)
    assert len(live.prompt(20)) == 20
