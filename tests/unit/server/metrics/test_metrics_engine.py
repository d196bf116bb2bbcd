"""Metrics of the engine: gauges are its state, totals go on over its restarts, its plan becomes labels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire_engine.contract.plan import TokenCost
from quire_engine.contract.types import (
    FREE_RUN_BOUNDS,
    NO_DRAFT_CAUSES,
    PREEMPTION_CAUSES,
    UNUSED_SLOT_BOUNDS,
    EngineStats,
)
from quire_server.metrics.metrics import Metrics
from support.exposition import PLAN, Scrape, busy
from support.plans import changed


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
    assert sum(scrape("quire_kv_bytes", state=state) for state in ("used", "cached", "free")) == PLAN.pool.num_bytes
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
    assert scrape("quire_preemptions_total", mode="recompute") == 4
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


def test_predictions_of_steps_are_told_by_kind_where_there_were_some():
    metrics = Metrics("tiny")
    for prefill, seen, predicted in ((0, 0.03, 0.02), (0, 0.02, 0.0), (10, 0.03, 0.04)):
        metrics.observe_step(
            busy(prefill_tokens=prefill, step_rows=prefill + 5, seen_seconds=seen, predicted_seconds=predicted)
        )
    scrape = Scrape(metrics)
    assert scrape("quire_engine_step_predicted_seconds_count") == 2
    assert scrape("quire_engine_step_predicted_seconds_sum") == pytest.approx(0.06)
    for kind, ratio in (("decode", 1.5), ("prompt", 0.75)):
        assert scrape("quire_engine_step_prediction_ratio_count", kind=kind) == 1
        assert scrape("quire_engine_step_prediction_ratio_sum", kind=kind) == pytest.approx(ratio)
    assert (scrape("quire_engine_step_rows_count"), scrape("quire_engine_step_rows_sum")) == (3, 25)


@pytest.mark.parametrize(
    ("device", "ranks", "names"),
    [("cpu", 1, ["cpu"]), ("cpu", 2, ["cpu", "cpu"]), ("cuda", 2, ["cuda:0", "cuda:1"])],
    ids=["one process", "two on a CPU", "two GPUs"],
)
def test_the_pools_bytes_are_told_by_rank(device: str, ranks: int, names: list[str]):
    metrics = Metrics("tiny")
    metrics.observe_plan(changed(PLAN, machine={"device": device, "tensor_parallel_size": ranks}))
    metrics.observe_step(busy())  # 16 of 64 blocks of 1 KiB, and a quarter of their slots is unused
    scrape = Scrape(metrics)
    shown = [labels for name, labels in scrape.samples if name == "quire_kv_rank_bytes"]
    assert len(shown) == 3 * ranks
    for rank, name in enumerate(names):
        sizes = {
            state: scrape("quire_kv_rank_bytes", rank=str(rank), device=name, state=state)
            for state in ("reserved", "used", "live")
        }
        assert sizes == {"reserved": 65536 / ranks, "used": 16384 / ranks, "live": 12288 / ranks}


@pytest.mark.parametrize("told", [True, False], ids=["told", "noticed"])
def test_samples_of_fragmentation_go_on_over_an_engine_restart(told: bool):
    metrics = Metrics("tiny")
    runs, slots = len(FREE_RUN_BOUNDS) + 1, len(UNUSED_SLOT_BOUNDS) + 1

    def observe(ones: int, fours: int, full: int) -> None:
        metrics.observe_step(
            busy(
                total_free_runs=(ones, 0, fours, *(0,) * (runs - 3)),
                total_free_run_blocks=ones + 4 * fours,
                total_unused_slots=(full, *(0,) * (slots - 1)),
            )
        )

    observe(2, 1, 5)
    observe(5, 1, 5)
    metrics.observe_step(busy())  # tells nothing of it
    if told:
        metrics.engine_restarted()
    observe(1, 1, 2)
    scrape = Scrape(metrics)
    assert [scrape("quire_kv_free_run_blocks_bucket", le=le) for le in ("1.0", "2.0", "4.0", "+Inf")] == [6, 6, 8, 8]
    assert scrape("quire_kv_free_run_blocks_sum") == 14
    assert scrape("quire_kv_sequence_unused_slots_bucket", le="0.0") == 7


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
    assert scrape("quire_preemptions_total", mode="recompute") == scrape("vllm:num_preemptions_total") == 7
    assert scrape("quire_prefix_cache_query_tokens_total") == scrape("vllm:prefix_cache_queries_total") == 190
    assert scrape("quire_prefix_cache_hit_tokens_total") == scrape("vllm:prefix_cache_hits_total") == 41
    assert scrape("quire_kv_evictions_total") == 7
    assert scrape("quire_engine_restarts_total") == int(told)


def test_a_restart_that_overtakes_the_old_totals_is_counted_whole():
    metrics = Metrics("tiny")
    metrics.observe_step(busy(total_preemptions=5))
    metrics.engine_restarted()
    metrics.observe_step(busy(total_preemptions=8))
    assert Scrape(metrics)("quire_preemptions_total", mode="recompute") == 13


def test_swaps_by_mode_and_direction_and_where_the_host_keeps_blocks():
    metrics = Metrics("tiny")
    metrics.observe_plan(PLAN)
    told = {
        "host_blocks_total": 9,
        "host_blocks_used": 2,
        "host_blocks_cached": 3,
        "total_swapped_out_blocks": 7,
        "total_swapped_in_blocks": 5,
        "total_preemptions": 6,
        "total_preemptions_by_mode": {"recompute": 4, "swap": 2},
        "total_preemptions_by_cause": {"blocks": 3, "elder": 2, "class": 1},
    }
    metrics.observe_step(busy(**told))
    metrics.engine_restarted()
    metrics.observe_step(busy(**told))
    scrape = Scrape(metrics)
    assert [scrape("quire_preemptions_total", mode=mode) for mode in ("recompute", "swap")] == [8, 4]
    assert scrape("vllm:num_preemptions_total") == 12
    counted = {cause: scrape("quire_preemptions_by_cause_total", cause=cause) for cause in PREEMPTION_CAUSES}
    assert {cause: count for cause, count in counted.items() if count} == {"blocks": 6, "elder": 4, "class": 2}
    assert [scrape("quire_swapped_bytes_total", direction=way) for way in ("out", "in")] == [14 * 1024, 10 * 1024]
    assert [scrape("quire_host_kv_blocks", state=state) for state in ("used", "cached", "free")] == [2, 3, 4]


def test_blocks_kept_in_files_and_what_became_of_others():
    metrics = Metrics("tiny")
    metrics.observe_plan(PLAN)
    events = {"written": 7, "read": 5, "dropped": 3, "refused": 2}
    told = {"kept_blocks": 9, **{f"total_kept_{event}": count for event, count in events.items()}}
    metrics.observe_step(busy(**told))
    metrics.engine_restarted()
    metrics.observe_step(busy(**told))
    scrape = Scrape(metrics)
    assert {event: scrape("quire_kept_kv_block_events_total", event=event) for event in events} == {
        event: 2 * count for event, count in events.items()
    }
    assert (scrape("quire_kept_kv_blocks"), scrape("quire_kept_kv_bytes")) == (9, 9 * 1024)


def test_blocks_of_prefixes_that_are_kept_for_a_time():
    metrics = Metrics("tiny")
    metrics.observe_plan(PLAN)
    events = {"pinned": 7, "refused": 5, "expired": 3, "evicted": 2}
    metrics.observe_step(busy(blocks_pinned=2, total_pins=events))
    metrics.engine_restarted()
    metrics.observe_step(busy(blocks_pinned=1, total_pins=events))
    scrape = Scrape(metrics)
    assert {event: scrape("quire_pinned_kv_block_events_total", event=event) for event in events} == {
        event: 2 * count for event, count in events.items()
    }
    assert scrape("quire_pinned_kv_blocks") == 1


def test_guesses_by_place_and_slices_without_them_by_cause():
    metrics = Metrics("tiny")
    told = {
        "total_accepted_by_position": (5, 3, 1, 0, 0),
        "total_undrafted": dict.fromkeys(NO_DRAFT_CAUSES, 0) | {"batch": 9, "nothing": 4},
    }
    metrics.observe_step(busy(**told))
    metrics.engine_restarted()
    metrics.observe_step(busy(**told))
    scrape = Scrape(metrics)
    for name in ("quire_spec_decode_accepted_tokens_by_position", "vllm:spec_decode_num_accepted_tokens_per_pos"):
        assert [scrape(f"{name}_total", position=str(position)) for position in range(5)] == [10, 6, 2, 0, 0]
    counted = {cause: scrape("quire_spec_decode_undrafted_total", cause=cause) for cause in NO_DRAFT_CAUSES}
    assert {cause: count for cause, count in counted.items() if count} == {"batch": 18, "nothing": 8}


def test_waits_of_each_rank_go_on_over_a_restart():
    metrics = Metrics("tiny")
    metrics.observe_step(busy())
    assert "\nquire_rank_gather_seconds_total{" not in Scrape(metrics).text
    for seconds in ((0.5, 2.0), (0.5, 2.0), (1.0, 2.5)):
        metrics.observe_step(busy(total_rank_seconds=seconds))
    metrics.engine_restarted()
    metrics.observe_step(busy(total_rank_seconds=(0.25, 0.5)))
    scrape = Scrape(metrics)
    assert [scrape("quire_rank_gather_seconds_total", rank=rank) for rank in ("0", "1")] == [1.25, 3.0]


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


def test_the_model_is_quantised_as_asked_or_as_it_is_stored():
    for quantization, stored_as, label in (
        (None, "", "none"),
        (None, "GGUF, Q4_1, Q8_0", "GGUF, Q4_1, Q8_0"),
        ("int8", "GGUF, Q4_1", "int8"),
    ):
        metrics = Metrics("tiny")
        metrics.observe_plan(changed(PLAN, model={"quantization": quantization, "stored_as": stored_as}))
        assert f'quantization="{label}"' in Scrape(metrics).text


def test_what_a_token_costs():
    metrics = Metrics("tiny")
    metrics.observe_plan(
        replace(
            PLAN,
            cost=TokenCost(
                layer_parameters=700,
                sampled_parameters=300,
                layer_attention=64,
                sampled_attention=16,
                weights_read_bytes=2000,
            ),
        )
    )
    scrape = Scrape(metrics)
    assert scrape("quire_model_parameters", part="layers") == 700
    assert scrape("quire_model_parameters", part="sampled") == 300
    assert scrape("quire_model_read_bytes") == 2000
    assert scrape("quire_model_attention_width", part="layers") == 64
    assert scrape("quire_model_attention_width", part="sampled") == 16
