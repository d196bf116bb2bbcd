"""Metrics: every request and token counted once, both names equal, exposition that Prometheus' own tools accept."""

from __future__ import annotations

import shutil
import subprocess
import time
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire_engine.config import EnginePlan
from quire_engine.limits import SchedulerConfig
from quire_engine.types import EngineStats, RequestTiming
from quire_server.metrics import metrics as module
from quire_server.metrics.metric_catalog import token_bounds
from quire_server.metrics.metrics import Metrics

PLAN = EnginePlan(
    model="/m",
    architecture="Qwen3ForCausalLM",
    num_parameters=1000,
    device="cpu",
    dtype="float32",
    kernels="reference",
    num_threads=1,
    vocab_size=100,
    weights_bytes=4000,
    kv_bytes=64 * 1024,
    bytes_per_block=1024,
    load_seconds=0.5,
    scheduler=SchedulerConfig(num_blocks=64, max_model_len=256),
)

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


class Scrape:
    """The samples of one exposition, by name and labels other than the constant ones."""

    def __init__(self, metrics: Metrics) -> None:
        self.text = metrics.render().decode()
        self.families = list(text_string_to_metric_families(self.text))
        self.samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for family in self.families:
            for sample in family.samples:
                labels = tuple(
                    sorted((key, value) for key, value in sample.labels.items() if key not in {"model_name", "engine"})
                )
                assert (sample.name, labels) not in self.samples, "a sample is exposed twice"
                self.samples[sample.name, labels] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[name, tuple(sorted(labels.items()))]


def timing(**changes: float) -> RequestTiming:
    values = {"queue_seconds": 0.1, "kv_wait_seconds": 0.0, "prefill_seconds": 0.2, "num_preemptions": 0}
    return RequestTiming(**(values | changes))


def busy(**changes: object) -> EngineStats:
    values: dict[str, object] = {
        "running": 3,
        "waiting": {"kv": 2, "budget": 1},
        "blocks_total": 64,
        "blocks_used": 16,
        "blocks_cached": 8,
        "blocks_free": 40,
        "slots_allocated": 256,
        "slots_unused": 64,
        "prefill_tokens": 10,
        "decode_tokens": 3,
        "step_seconds": 0.02,
        "host_seconds": 0.001,
    }
    return EngineStats(**(values | changes))


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
    counts = {outcome: scrape("quire_requests_total", outcome=outcome) for outcome in module.Outcome.__args__}
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


def test_gauges_are_the_engines_state_and_return_to_zero():
    metrics = Metrics("tiny")
    metrics.observe_plan(PLAN)
    metrics.observe_step(busy())
    scrape = Scrape(metrics)
    assert scrape("quire_requests_running") == 3
    assert scrape("quire_requests_waiting", reason="kv") == 2
    assert scrape("quire_requests_waiting", reason="slots") == 0
    assert scrape("vllm:num_requests_waiting") == 3
    assert scrape("vllm:num_requests_waiting_by_reason", reason="capacity") == 3
    assert "deferred" not in metrics.render().decode()  # nothing here is
    assert scrape("quire_kv_cache_usage_ratio") == scrape("vllm:kv_cache_usage_perc") == 0.25
    assert sum(scrape("quire_kv_blocks", state=state) for state in ("used", "cached", "free")) == 64
    assert sum(scrape("quire_kv_bytes", state=state) for state in ("used", "cached", "free")) == PLAN.kv_bytes
    assert scrape("quire_kv_slot_efficiency_ratio") == 0.75
    metrics.observe_step(EngineStats(blocks_total=64, blocks_cached=24, blocks_free=40))  # after an abort
    scrape = Scrape(metrics)
    for name in ("quire_requests_running", "vllm:num_requests_running", "vllm:num_requests_waiting"):
        assert scrape(name) == 0
    assert scrape("quire_requests_waiting", reason="kv") == 0
    assert scrape("quire_kv_cache_usage_ratio") == 0
    assert scrape("quire_kv_slots_allocated") == scrape("quire_kv_slots_unused") == 0
    assert scrape("quire_kv_slot_efficiency_ratio") == 1


def test_an_engine_that_has_just_started_holds_nothing():
    metrics = Metrics("tiny")
    metrics.observe_plan(PLAN)
    scrape = Scrape(metrics)
    assert scrape("quire_kv_pool_blocks") == scrape("quire_kv_blocks", state="free") == 64
    metrics.observe_step(busy(total_preemptions=3))
    metrics.observe_step(EngineStats())  # the supervisor ends requests of an engine that is gone
    scrape = Scrape(metrics)
    assert scrape("quire_requests_running") == 3
    metrics.engine_restarted()
    metrics.observe_step(busy(total_preemptions=1, running=0))
    scrape = Scrape(metrics)
    assert scrape("quire_requests_running") == 0
    assert scrape("quire_preemptions_total") == 4
    metrics.engine_restarted()
    scrape = Scrape(metrics)
    assert scrape("quire_kv_blocks", state="free") == 64
    assert scrape("quire_kv_blocks", state="used") == scrape("quire_requests_waiting", reason="kv") == 0


def test_a_message_without_a_step_counts_no_step():
    metrics = Metrics("tiny")
    metrics.observe_step(busy())
    metrics.observe_step(busy(step_seconds=0.001, host_seconds=0.001))  # tells of an abort; token counts are stale
    scrape = Scrape(metrics)
    assert scrape("quire_engine_steps_total") == 1
    assert scrape("quire_engine_step_tokens_sum") == 13
    assert scrape("quire_engine_computed_tokens_total", kind="prefill") == 10
    assert scrape("quire_engine_computed_tokens_total", kind="decode") == 3


@pytest.mark.parametrize("told", [True, False], ids=["told", "noticed"])
def test_totals_go_on_over_an_engine_restart(told: bool):
    metrics = Metrics("tiny")
    before = busy(total_preemptions=5, total_prefix_query_tokens=100, total_prefix_hit_tokens=40, total_kv_evictions=7)
    metrics.observe_step(before)
    metrics.observe_step(before)
    if told:
        metrics.engine_restarted()
    metrics.observe_step(
        busy(total_preemptions=2, total_prefix_query_tokens=90, total_prefix_hit_tokens=1, total_kv_evictions=0)
    )
    scrape = Scrape(metrics)
    assert scrape("quire_preemptions_total") == scrape("vllm:num_preemptions_total") == 7
    assert scrape("quire_prefix_cache_query_tokens_total") == scrape("vllm:prefix_cache_queries_total") == 190
    assert scrape("quire_prefix_cache_hit_tokens_total") == scrape("vllm:prefix_cache_hits_total") == 41
    assert scrape("quire_kv_evictions_total") == 7
    assert scrape("quire_engine_restarts_total") == int(told)


def test_a_restart_that_overtakes_the_old_totals_is_counted_whole():
    metrics = Metrics("tiny")
    metrics.observe_step(busy(total_preemptions=5))
    metrics.engine_restarted()
    metrics.observe_step(busy(total_preemptions=8))
    assert Scrape(metrics)("quire_preemptions_total") == 13


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


def test_aliases_can_be_switched_off():
    on, off = Scrape(Metrics("tiny")), Scrape(Metrics("tiny", vllm_aliases=False))
    assert "vllm:" in on.text
    assert "vllm:" not in off.text
    ours = {family.name for family in on.families if not family.name.startswith("vllm:")}
    assert ours == {family.name for family in off.families}


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


def test_plan_becomes_labels():
    metrics = Metrics("tiny")
    metrics.observe_plan(PLAN)
    metrics.observe_plan(PLAN)
    text = Scrape(metrics).text
    assert "vllm:cache_config_info{" in text
    line = next(line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
    for label in ('block_size="16"', 'num_gpu_blocks="64"', 'kv_cache_size_tokens="1024"', 'model_name="tiny"'):
        assert label in line
    assert 'kv_cache_max_concurrency="4.00"' in line
    assert text.count("\nquire_model_info{") == 1


def test_what_a_token_costs():
    metrics = Metrics("tiny")
    metrics.observe_plan(
        replace(
            PLAN,
            layer_parameters=700,
            sampled_parameters=300,
            layer_attention=64,
            sampled_attention=16,
            weights_read_bytes=2000,
        )
    )
    scrape = Scrape(metrics)
    assert scrape("quire_model_parameters", part="layers") == 700
    assert scrape("quire_model_parameters", part="sampled") == 300
    assert scrape("quire_model_read_bytes") == 2000
    assert scrape("quire_model_attention_width", part="layers") == 64
    assert scrape("quire_model_attention_width", part="sampled") == 16


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
    own = subprocess.run(
        ["promtool", "check", "metrics"],
        input=Metrics("tiny", vllm_aliases=False).render(),
        capture_output=True,
        check=False,
    )
    assert (own.returncode, own.stdout, own.stderr) == (0, b"", b"")
    both = subprocess.run(["promtool", "check", "metrics"], input=metrics.render(), capture_output=True, check=False)
    complaints = (both.stdout + both.stderr).decode().splitlines()
    assert all(line.startswith("vllm:") for line in complaints)
    assert [line for line in complaints if "':'" not in line] == [
        'vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix'
    ]


def test_updates_are_cheap():
    """A token costs about a microsecond, a step a few: far below a step of any model. Generous for slow machines."""
    metrics = Metrics("tiny")
    record = metrics.start(prompt_tokens=1, max_tokens=None, n=1)
    stats = busy()
    started = time.perf_counter()
    for step in range(2000):
        record.tokens(0, 1, float(step))
        metrics.observe_step(stats)
    assert (time.perf_counter() - started) / 2000 < 200e-6
