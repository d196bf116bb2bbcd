"""The one sample that tells which adapters run and which are waited for, of one engine and of several."""

from __future__ import annotations

import time
from dataclasses import replace

from quire_engine.contract.plan import AdapterPart
from quire_server.engine.stats_sum import StatsSum
from quire_server.metrics.metrics import Metrics
from support.exposition import PLAN, Scrape, busy

LIMITS = replace(PLAN.scheduler.limits, max_loras=2)
WITH_ADAPTERS = replace(PLAN, adapters=AdapterPart(max_kept=3), scheduler=replace(PLAN.scheduler, limits=LIMITS))
NAMES = ("quire_lora_requests_info", "vllm:lora_requests_info")


def test_the_adapters_of_this_moment_are_labels_and_the_time_is_the_value():
    metrics = Metrics("tiny")
    metrics.observe_plan(WITH_ADAPTERS)
    for running, waiting in (({"b", "a"}, {"c"}), (set(), set()), ({"c"}, {"c", "a"})):
        metrics.observe_step(busy(running_adapters=frozenset(running), waiting_adapters=frozenset(waiting)))
        before, scrape = time.time(), Scrape(metrics)
        for name in NAMES:
            value = scrape(
                name,
                max_lora="2",
                running_lora_adapters=",".join(sorted(running)),
                waiting_lora_adapters=",".join(sorted(waiting)),
            )
            assert before <= value <= time.time()
            (family,) = [each for each in scrape.families if each.name == name]
            assert len(family.samples) == 1, "what was before is gone"


def test_a_server_without_adapters_has_no_sample():
    metrics = Metrics("tiny")
    metrics.observe_plan(PLAN)
    metrics.observe_step(busy())
    assert [each.samples for each in Scrape(metrics).families if each.name in NAMES] == [[], []]


def test_the_adapters_of_all_engines_are_told_and_an_engine_that_ends_has_none():
    sums = StatsSum()
    sums.take("0", busy(running_adapters=frozenset("a"), waiting_adapters=frozenset("b")))
    both = sums.take("1", busy(running_adapters=frozenset("ac")))
    assert (both.running_adapters, both.waiting_adapters) == (frozenset("ac"), frozenset("b"))
    left = sums.lost("1")
    assert (left.running_adapters, left.waiting_adapters) == (frozenset("a"), frozenset("b"))
