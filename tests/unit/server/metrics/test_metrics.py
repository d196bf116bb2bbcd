"""Metrics of requests: every request and token counted once, times measured from the right moment."""

from __future__ import annotations

import time

import pytest

from quire_engine.contract.types import EngineStats
from quire_server.metrics import metrics as module
from quire_server.metrics.metric_catalog import OUTCOMES
from quire_server.metrics.metrics import Metrics
from support.exposition import Scrape, busy, timing

REQUEST_HISTOGRAMS = (
    "time_to_first_token_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_prefill_kv_computed_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_num_preemptions",
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(module.time, "monotonic", lambda: Clock.now)
    return Clock


def test_counts_add_up(clock):
    """R requests of P prompt and T generated tokens, alone: the counting rules that dashboards rely on."""
    requests, prompt, generated = 7, 5, 9
    metrics = Metrics("tiny", max_model_len=256)
    for _ in range(requests):
        record = metrics.start(prompt_tokens=prompt, max_tokens=generated, n=1)
        for step in range(generated):
            clock.now += 0.25
            metrics.observe_step(
                busy(prefill_tokens=prompt if step == 0 else 0, decode_tokens=int(step > 0)), generated_tokens=1
            )
            record.tokens(0, 1, clock.now)
        record.timing(timing())
        record.finish("length")
    metrics.observe_step(EngineStats(blocks_total=64, blocks_free=64))
    scrape = Scrape(metrics)
    for prefix in ("quire_", "vllm:"):
        for name in REQUEST_HISTOGRAMS:
            assert scrape(f"{prefix}{name}_count") == requests, name
        assert scrape(f"{prefix}inter_token_latency_seconds_count") == requests * (generated - 1)
        assert scrape(f"{prefix}prompt_tokens_total") == requests * prompt
        assert scrape(f"{prefix}generation_tokens_total") == requests * generated
    assert scrape("vllm:iteration_tokens_total_sum") == requests * (prompt + generated)
    assert scrape("vllm:iteration_tokens_total_count") == requests * generated
    assert scrape("quire_engine_steps_total") == requests * generated
    assert scrape("quire_requests_total", outcome="length") == requests
    assert scrape("vllm:request_success_total", finished_reason="length") == requests
    assert scrape("quire_time_to_first_token_seconds_sum") == pytest.approx(requests * 0.25)
    assert scrape("quire_inter_token_latency_seconds_sum") == pytest.approx(requests * (generated - 1) * 0.25)
    assert scrape("quire_request_time_per_output_token_seconds_sum") == pytest.approx(requests * 0.25)
    assert scrape("quire_e2e_request_latency_seconds_sum") == pytest.approx(requests * generated * 0.25)
    assert scrape("quire_request_decode_time_seconds_sum") == pytest.approx(requests * (generated - 1) * 0.25)
    assert scrape("quire_request_inference_time_seconds_sum") == pytest.approx(
        requests * (0.2 + (generated - 1) * 0.25)
    )


def test_choices_share_one_prompt_and_have_their_own_gaps(clock):
    metrics = Metrics("tiny")
    record = metrics.start(prompt_tokens=10, max_tokens=None, n=2)
    record.cached(8)
    clock.now += 1
    record.tokens(0, 1, clock.now)
    clock.now += 1
    record.tokens(1, 1, clock.now)
    record.tokens(0, 1, clock.now)
    clock.now += 1
    record.tokens(1, 4, clock.now)  # arrived together: the gap is shared out
    record.finish("stop")
    scrape = Scrape(metrics)
    assert scrape("quire_prompt_tokens_total") == 10
    assert scrape("quire_prompt_tokens_cached_total") == 8
    assert scrape("quire_request_prefill_kv_computed_tokens_sum") == 2
    assert scrape("quire_generation_tokens_total") == 7
    assert scrape("quire_time_to_first_token_seconds_count") == 1
    assert scrape("quire_inter_token_latency_seconds_count") == 5  # 1 of the first choice, 4 of the second
    assert scrape("quire_inter_token_latency_seconds_sum") == pytest.approx(2.0)
    assert scrape("quire_inter_token_latency_seconds_bucket", le="0.3") == 4
    assert scrape("quire_request_time_per_output_token_seconds_sum") == pytest.approx(2.0 / 5)
    assert scrape("quire_request_max_num_generation_tokens_sum") == 5
    assert scrape("quire_request_params_n_sum") == 2
    assert scrape("quire_request_params_max_tokens_count") == 0


def test_the_longest_gap_is_kept_with_its_beginning_and_a_silence_counts_while_it_lasts(clock):
    metrics = Metrics("tiny")
    record = metrics.start(prompt_tokens=1, max_tokens=9, n=2, request_id="r")
    rows = []
    for choice, seconds in ((0, 1), (1, 1), (0, 2), (1, 4), (0, 3.5)):
        clock.now += seconds
        record.tokens(choice, 1, clock.now)
        rows.append(metrics.load.board.find("r"))
    assert [row.gap for row in rows] == [0, 0, 3, 6, 7.5]
    assert [row.gap_at and round(row.gap_at - row.at) for row in rows] == [None, None, 1, 2, 4]
    clock.now += 8
    assert metrics.load.board.find("r").gap == 8, "it lasts"
    record.finish("abort")
    ended = metrics.load.board.find("r")
    assert (ended.gap, round(ended.gap_at - ended.at)) == (7.5, 4)
    assert metrics.load.board.find("s") is None


def test_a_first_burst_counts_one_first_token_and_the_rest_as_gaps(clock):
    metrics = Metrics("tiny")
    record = metrics.start(prompt_tokens=1, max_tokens=3, n=1)
    clock.now += 1
    record.tokens(0, 3, clock.now)
    record.finish("length")
    scrape = Scrape(metrics)
    assert scrape("quire_time_to_first_token_seconds_count") == 1
    assert scrape("quire_inter_token_latency_seconds_count") == 2


def test_a_request_ends_once_and_only_whole_ones_have_latencies():
    metrics = Metrics("tiny")
    never_started = metrics.start(prompt_tokens=10, max_tokens=4, n=1)
    never_started.finish("abort")
    never_started.finish("stop")
    cut = metrics.start(prompt_tokens=10, max_tokens=4, n=1)
    cut.tokens(0, 2, time.monotonic())
    cut.finish("abort")
    failed = metrics.start(prompt_tokens=10, max_tokens=4, n=1)
    failed.finish("error")
    scoring = metrics.start(prompt_tokens=10, max_tokens=0, n=1)
    scoring.finish("length")
    scrape = Scrape(metrics)
    counts = {outcome: scrape("quire_requests_total", outcome=outcome) for outcome in OUTCOMES}
    assert counts == {"stop": 0, "length": 1, "abort": 2, "error": 1}
    assert scrape("quire_prompt_tokens_total") == 20, "the cut one and the scoring one were computed"
    assert scrape("quire_generation_tokens_total") == 2
    assert scrape("quire_e2e_request_latency_seconds_count") == 1
    assert scrape("quire_time_to_first_token_seconds_count") == 1
    assert scrape("quire_request_time_per_output_token_seconds_count") == 0


def test_the_longest_time_of_each_kind_counts(clock):
    metrics = Metrics("tiny")
    record = metrics.start(prompt_tokens=1, max_tokens=1, n=2)
    record.timing(timing(queue_seconds=3.0, num_preemptions=0))
    record.timing(timing(queue_seconds=1.0, kv_wait_seconds=2.0, num_preemptions=4))
    record.finish("stop")
    scrape = Scrape(metrics)
    assert scrape("quire_request_queue_time_seconds_sum") == 3.0
    assert scrape("quire_request_kv_wait_seconds_sum") == 2.0
    assert scrape("quire_request_num_preemptions_sum") == 4


def test_rejects_stalls_and_replies():
    metrics = Metrics("tiny")
    assert Scrape(metrics)("quire_rejected_total", reason="max_num_queued_reqs") == 0, "shown before the first"
    for _ in range(3):
        metrics.reject("max_num_queued_reqs")
    metrics.reject("draining")
    metrics.loop_stall(0.3)
    metrics.http_request("/v1/models/{model}", "GET", 200, 0.01)
    scrape = Scrape(metrics)
    assert scrape("quire_rejected_total", reason="max_num_queued_reqs") == 3
    assert scrape("vllm:admission_rejections_total", reason="max_num_queued_reqs") == 3
    assert scrape("quire_rejected_total", reason="draining") == 1
    assert scrape("quire_event_loop_stall_seconds_count") == 1
    assert scrape("quire_event_loop_stall_seconds_bucket", le="0.25") == 0
    assert scrape("quire_http_requests_total", handler="/v1/models/{model}", method="GET", status="200") == 1
    assert scrape("quire_http_request_duration_seconds_count", handler="/v1/models/{model}") == 1


def test_updates_are_cheap():
    """A token costs about a microsecond of a core, a step a few: far below a step of any model."""
    metrics = Metrics("tiny")
    record = metrics.start(prompt_tokens=1, max_tokens=None, n=1)
    stats = busy()
    started = time.thread_time()
    for step in range(2000):
        record.tokens(0, 1, float(step))
        metrics.observe_step(stats)
    assert (time.thread_time() - started) / 2000 < 2e-3
