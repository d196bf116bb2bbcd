"""The exposition: both names equal, every family described once, and Prometheus' own tools accept it."""

from __future__ import annotations

import shutil
import time

import pytest

from quire_server.metrics.metric_catalog import token_bounds
from quire_server.metrics.metrics import Metrics
from support.exposition import PLAN, Scrape, busy, check_with_promtool, timing


def test_every_alias_equals_its_original():
    metrics = Metrics("tiny")
    record = metrics.start(prompt_tokens=3, max_tokens=2, n=1)
    record.tokens(0, 1, time.monotonic())
    record.tokens(0, 1, time.monotonic() + 0.1)
    record.timing(timing())
    record.finish("stop")
    metrics.observe_step(busy())
    scrape = Scrape(metrics)
    compared = 0
    for (name, labels), value in scrape.samples.items():
        if name.startswith("vllm:") and ("quire_" + name.removeprefix("vllm:"), labels) in scrape.samples:
            assert scrape.samples["quire_" + name.removeprefix("vllm:"), labels] == value, name
            compared += 1
    assert compared > 200


OLD_NAMES = {
    "vllm:gpu_cache_usage_perc": "quire_kv_cache_usage_ratio",
    "vllm:gpu_prefix_cache_queries_total": "quire_prefix_cache_query_tokens_total",
    "vllm:gpu_prefix_cache_hits_total": "quire_prefix_cache_hit_tokens_total",
    "vllm:time_per_output_token_seconds_sum": "quire_inter_token_latency_seconds_sum",
    "vllm:time_per_output_token_seconds_count": "quire_inter_token_latency_seconds_count",
    "vllm:time_in_queue_requests_sum": "quire_request_queue_time_seconds_sum",
}


def loaded(metrics: Metrics) -> Scrape:
    """Two ticks around one request, which found 4 of 10 prompt tokens in the cache."""
    metrics.tick()
    record = metrics.start(prompt_tokens=10, max_tokens=2, n=1)
    record.tokens(0, 1, time.monotonic())
    record.tokens(0, 1, time.monotonic() + 0.1)
    record.timing(timing())
    record.finish("stop")
    metrics.observe_step(
        busy(
            total_prefix_query_tokens=10,
            total_prefix_hit_tokens=4,
            host_blocks_total=8,
            host_blocks_used=2,
            prefill_tokens=6,
        ),
        generated_tokens=2,
    )
    metrics.tick()
    return Scrape(metrics)


def test_older_names_have_the_values_of_the_newer_ones():
    scrape = loaded(Metrics("tiny"))
    for old, name in OLD_NAMES.items():
        assert scrape(old) == scrape(name) > 0, old
    assert scrape("vllm:gpu_prefix_cache_hit_rate") == 0.4
    assert scrape("vllm:cpu_cache_usage_perc") == 0.25
    ratio = scrape("vllm:avg_prompt_throughput_toks_per_s") / scrape("vllm:avg_generation_throughput_toks_per_s")
    assert ratio == pytest.approx(6 / 2)


def test_histogram_buckets_are_cumulative_and_end_in_infinity():
    metrics = Metrics("tiny")
    record = metrics.start(prompt_tokens=3, max_tokens=2, n=1)
    record.tokens(0, 1, time.monotonic())
    for family in Scrape(metrics).families:
        if family.type != "histogram":
            continue
        buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
        counts = [sample.value for sample in buckets if sample.labels.get("handler") is None]
        assert counts == sorted(counts)
        assert not buckets or buckets[-1].labels["le"] == "+Inf"


@pytest.mark.parametrize(("largest", "last"), [(1, 1), (2, 2), (3, 5), (2048, 5000), (5000, 5000), (131072, 200000)])
def test_token_bounds(largest: int, last: int):
    bounds = token_bounds(largest)
    assert bounds[-1] == last
    assert list(bounds) == sorted(set(bounds))
    assert {str(bound).rstrip("0") for bound in bounds} <= {"1", "2", "5"}


def test_every_family_is_described_once_and_in_one_piece():
    text = Scrape(Metrics("tiny")).text
    helps = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert helps == types
    assert len(helps) == len(set(helps))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_finds_nothing_but_the_names_others_chose():
    metrics = Metrics("tiny")
    metrics.observe_plan(PLAN)
    metrics.http_request("/health", "GET", 200, 0.01)
    check_with_promtool(metrics.render())
