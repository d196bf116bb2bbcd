"""The catalog of metrics: names, texts, buckets and aliases, and how engine state becomes values.

Promises: gauges are set from the engine's state only; totals survive a restart of the engine. Must not know: the event
loop, HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import zip_longest
from typing import Literal, get_args

from quire_engine.contract.drafts import MOST_DRAFTS
from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import (
    FREE_RUN_BOUNDS,
    NO_DRAFT_CAUSES,
    PREEMPTION_CAUSES,
    TRANSFER_EVENTS,
    UNUSED_SLOT_BOUNDS,
    WAIT_REASONS,
    EngineStats,
    PinEvent,
)
from quire_server.metrics.metric_values import Histogram, Total, Values
from quire_server.metrics.samples import Window
from quire_server.metrics.step_metrics import PrefillCost, StepMetrics
from quire_server.showing.version import VERSION

Outcome = Literal["stop", "length", "abort", "error"]
OUTCOMES: tuple[Outcome, ...] = ("stop", "length", "abort", "error")
REJECT_REASONS = (
    *("max_num_queued_reqs", "max_num_queued_tokens", "draining", "tenant", "slo_ttft"),
    *("max_text_bytes_queued", "max_reply_bytes_waiting"),
)

ModelState = Literal["unloaded", "loading", "loaded", "unloading", "sleeping", "restarting", "failed"]
ModelEnd = Literal["idle", "memory", "order"]  # why its engine ends

# The usual buckets of LLM servers, so that dashboards carry over, with a finer low end for small models.
TTFT_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STALL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


def token_bounds(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, ... up to the first that reaches `largest`."""
    bounds = [1]
    while bounds[-1] < largest:
        bounds.append(bounds[-1] * 5 // 2 if str(bounds[-1])[0] == "2" else bounds[-1] * 2)
    return tuple(bounds)


KEPT_EVENTS = ("written", "read", "dropped", "refused")
PIN_EVENTS: tuple[PinEvent, ...] = ("pinned", "refused", "expired", "evicted")
DIRECTIONS: tuple[Literal["sent", "received"], ...] = ("sent", "received")


class RequestMetrics:
    """Counted once per prompt: a request with several prompts counts several, one with n choices counts one."""

    def __init__(self, values: Values, max_model_len: int) -> None:
        tokens = token_bounds(max_model_len)
        self.finished = values.counter(
            "quire_requests",
            "Finished requests by outcome: stop, length, abort or error.",
            ("outcome",),
            children=[(outcome,) for outcome in OUTCOMES],
            alias="vllm:request_success",
            alias_label="finished_reason",
        )
        self.prompted = values.counter(
            "quire_prompt_tokens", "Prompt tokens of requests that produced output.", alias="vllm:prompt_tokens"
        )
        self.cached = values.counter(
            "quire_prompt_tokens_cached",
            "Prompt tokens taken from the prefix cache, of requests that produced output.",
            alias="vllm:prompt_tokens_cached",
        )
        self.generated = values.counter(
            "quire_generation_tokens", "Tokens generated and received from the engine.", alias="vllm:generation_tokens"
        )
        self.ttft = values.histogram(
            "quire_time_to_first_token_seconds",
            "From acceptance to the request's first token, seconds.",
            TTFT_SECONDS,
            alias="vllm:time_to_first_token_seconds",
        )
        self.itl = values.histogram(
            "quire_inter_token_latency_seconds",
            "Between two tokens of a choice, seconds.",
            TOKEN_SECONDS,
            alias="vllm:inter_token_latency_seconds",
            old="vllm:time_per_output_token_seconds",
        )
        self.tpot = values.histogram(
            "quire_request_time_per_output_token_seconds",
            "Mean time between a request's tokens, seconds; requests with one token have none.",
            TOKEN_SECONDS,
            alias="vllm:request_time_per_output_token_seconds",
        )
        self.e2e = values.histogram(
            "quire_e2e_request_latency_seconds",
            "From acceptance to the end, seconds.",
            REQUEST_SECONDS,
            alias="vllm:e2e_request_latency_seconds",
        )
        self.queue = values.histogram(
            "quire_request_queue_time_seconds",
            "From arrival in the engine to the first step, seconds.",
            REQUEST_SECONDS,
            alias="vllm:request_queue_time_seconds",
            old="vllm:time_in_queue_requests",
        )
        self.kv_wait = values.histogram(
            "quire_request_kv_wait_seconds",
            "Time at the head of the queue waiting for KV blocks, seconds.",
            REQUEST_SECONDS,
        )
        self.prefill = values.histogram(
            "quire_request_prefill_time_seconds",
            "From the first step to the first token, seconds.",
            REQUEST_SECONDS,
            alias="vllm:request_prefill_time_seconds",
        )
        self.decode = values.histogram(
            "quire_request_decode_time_seconds",
            "From the first token to the last, seconds.",
            REQUEST_SECONDS,
            alias="vllm:request_decode_time_seconds",
        )
        self.inference = values.histogram(
            "quire_request_inference_time_seconds",
            "From the first step to the last token, seconds.",
            REQUEST_SECONDS,
            alias="vllm:request_inference_time_seconds",
        )
        self.prompt_tokens = values.histogram(
            "quire_request_prompt_tokens", "Prompt tokens of a request.", tokens, alias="vllm:request_prompt_tokens"
        )
        self.generation_tokens = values.histogram(
            "quire_request_generation_tokens",
            "Tokens generated for a request, all choices together.",
            tokens,
            alias="vllm:request_generation_tokens",
        )
        self.max_generation_tokens = values.histogram(
            "quire_request_max_num_generation_tokens",
            "Tokens generated for a request's longest choice.",
            tokens,
            alias="vllm:request_max_num_generation_tokens",
        )
        self.computed_tokens = values.histogram(
            "quire_request_prefill_kv_computed_tokens",
            "Prompt tokens that the prefix cache did not have.",
            tokens,
            alias="vllm:request_prefill_kv_computed_tokens",
        )
        self.params_n = values.histogram(
            "quire_request_params_n", "Choices requested (n).", (1, 2, 5, 10, 20), alias="vllm:request_params_n"
        )
        self.params_max_tokens = values.histogram(
            "quire_request_params_max_tokens", "Requested max_tokens.", tokens, alias="vllm:request_params_max_tokens"
        )
        self.static_slots = values.counter(
            "quire_static_batching_slots",
            "Token slots that static batching would have reserved for the finished requests: those that held a token,"
            " and the padding up to the longest of each batch.",
            ("use",),
            children=[("useful",), ("padding",)],
        )
        self.preemptions = values.histogram(
            "quire_request_num_preemptions",
            "Preemptions of a request: times it lost its KV blocks.",
            (0, 1, 2, 3, 4, 5, 10, 20),
            alias="vllm:request_num_preemptions",
        )


class EngineMetrics:
    """The engine's state as of its last message; `show` sets the gauges from it."""

    def __init__(self, values: Values) -> None:
        self._state = EngineStats()
        self._bytes_per_block = 0
        self._num_blocks = 0
        self.pool = values.gauge("quire_kv_pool_blocks", "KV blocks in the pool.")
        self.running = values.gauge(
            "quire_requests_running", "Sequences in the batch.", alias="vllm:num_requests_running", field="running"
        )
        self.waiting = values.gauge(
            "quire_requests_waiting",
            "Sequences not in the batch, by what they wait for: kv blocks, a slot, the step's token budget or a"
            " prefix that another request is computing.",
            ("reason",),
            children=[(reason,) for reason in WAIT_REASONS],
        )
        values.gauge(
            "quire_requests_held",
            "Sequences that are set aside, as long as their clients do not read or other adapters have their turn.",
            field="held",
        )
        self._alias_waiting = values.gauge(None, "Sequences not in the batch.", alias="vllm:num_requests_waiting")
        self._alias_waiting_by_reason = values.gauge(
            None,
            "Sequences not in the batch, for want of capacity.",
            ("reason",),
            children=[("capacity",)],
            alias="vllm:num_requests_waiting_by_reason",
        )
        self.usage = values.gauge(
            "quire_kv_cache_usage_ratio",
            "KV blocks held by sequences over all blocks, 0 to 1; cached blocks that no sequence holds do not count.",
            alias="vllm:kv_cache_usage_perc",
            old="vllm:gpu_cache_usage_perc",
        )
        self.blocks = values.gauge(
            "quire_kv_blocks",
            "KV blocks by state: used by a sequence, cached for reuse, or free. They add up to the pool.",
            ("state",),
            children=[("used",), ("cached",), ("free",)],
        )
        self.blocks_held = values.gauge(
            "quire_kv_blocks_held",
            "Used KV blocks by holder: shared by several sequences, or one sequence's own.",
            ("by",),
            children=[("several",), ("one",)],
        )
        values.gauge(
            "quire_kv_blocks_saved", "KV blocks saved by sharing among the running sequences.", field="blocks_saved"
        )
        self.kv_bytes = values.gauge(
            "quire_kv_bytes",
            "Bytes of the KV pool by state: used by a sequence, cached for reuse, or free.",
            ("state",),
            children=[("used",), ("cached",), ("free",)],
        )
        values.gauge("quire_kv_slots_allocated", "Token slots in used KV blocks.", field="slots_allocated")
        values.gauge(
            "quire_kv_slots_unused",
            "Token slots in used KV blocks that hold no token: internal fragmentation.",
            field="slots_unused",
        )
        self.efficiency = values.gauge(
            "quire_kv_slot_efficiency_ratio",
            "Slots that hold a token over slots in used blocks; 1 when nothing is used.",
        )
        self.steps = StepMetrics(values)
        self.preempted = values.counter(
            "quire_preemptions",
            "Requests that lost their KV blocks to another one, by what became of what they held.",
            ("mode",),
            children=[("recompute",), ("swap",)],
            field="total_preemptions_by_mode",
        )
        values.counter(
            "quire_preemptions_by_cause",
            "Preemptions by the beneficiary: a running request that grew (blocks), the elder, an interactive request"
            " (class), or a tenant within its share (share); device: the device had no memory for the step.",
            ("cause",),
            children=[(cause,) for cause in PREEMPTION_CAUSES],
            field="total_preemptions_by_cause",
        )
        values.counter(None, "Requests that were preempted.", alias="vllm:num_preemptions", field="total_preemptions")
        swapped_bytes = values.counter(
            "quire_swapped_bytes",
            "Bytes of KV blocks that were copied to the host's memory and from it.",
            ("direction",),
            children=[("out",), ("in",)],
        )
        self.host_blocks = values.gauge(
            "quire_host_kv_blocks",
            "KV blocks in the host's memory by state: used by a swapped sequence, cached for reuse, or free.",
            ("state",),
            children=[("used",), ("cached",), ("free",)],
        )
        self.kept = KeptMetrics(values)
        _declare_transfers(values)
        self.ranks = RankMetrics(values)
        _declare_pins(values)
        self.fragments = FragmentMetrics(values)
        self.query_tokens = values.counter(
            "quire_prefix_cache_query_tokens",
            "Prompt tokens looked up in the prefix cache.",
            alias="vllm:prefix_cache_queries",
            old="vllm:gpu_prefix_cache_queries",
            field="total_prefix_query_tokens",
        )
        self.hit_tokens = values.counter(
            "quire_prefix_cache_hit_tokens",
            "Prompt tokens found in the prefix cache.",
            alias="vllm:prefix_cache_hits",
            old="vllm:gpu_prefix_cache_hits",
            field="total_prefix_hit_tokens",
        )
        self._old_hit_rate = values.gauge(
            None,
            "Prompt tokens found in the prefix cache over those looked up, since the start; 0 before the first.",
            old="vllm:gpu_prefix_cache_hit_rate",
        )
        self._old_host_usage = values.gauge(
            None,
            "KV blocks in the host's memory that swapped sequences use, over all of them; 0 without swap space.",
            old="vllm:cpu_cache_usage_perc",
        )
        values.counter(
            "quire_kv_evictions", "Cached KV blocks whose content was dropped for reuse.", field="total_kv_evictions"
        )
        values.counter(
            "quire_kv_blocks_taken",
            "KV blocks taken for sequences; one that is found in the prefix cache is not.",
            field="total_blocks_taken",
        )
        self.kv_waiting = values.gauge(
            "quire_kv_waiting_seconds",
            "How long the request at the queue's head has been waiting for KV blocks by now; 0 when none is, seconds.",
        )
        self.kv_wait_seconds = values.counter(
            "quire_kv_waiting_time_seconds",
            "Time in which a request at the queue's head waited for KV blocks, as of the last step, seconds.",
            field="total_kv_wait_seconds",
        )
        self.padded = values.counter(
            "quire_engine_padding_rows",
            "Rows without a token that pad steps to one of few sizes; 0 on a CPU.",
            field="total_padding_rows",
        )
        values.counter(
            "quire_recomputed_tokens", "Tokens recomputed after a preemption.", field="total_recomputed_tokens"
        )
        values.counter(
            "quire_spec_decode_drafts",
            "Decodes with guessed tokens behind them.",
            alias="vllm:spec_decode_num_drafts",
            field="total_drafts",
        )
        self.draft_tokens = values.counter(
            "quire_spec_decode_draft_tokens",
            "Tokens guessed and computed behind a decode.",
            alias="vllm:spec_decode_num_draft_tokens",
            field="total_draft_tokens",
        )
        self.accepted_tokens = values.counter(
            "quire_spec_decode_accepted_tokens",
            "Guessed tokens that were right.",
            alias="vllm:spec_decode_num_accepted_tokens",
            field="total_accepted_tokens",
        )
        values.counter(
            "quire_spec_decode_accepted_tokens_by_position",
            "Accepted tokens by position among the guesses of their decode, from 0.",
            ("position",),
            children=[(str(position),) for position in range(MOST_DRAFTS)],
            alias="vllm:spec_decode_num_accepted_tokens_per_pos",
            field="total_accepted_by_position",
        )
        self.undrafted = values.counter(
            "quire_spec_decode_undrafted",
            "Slices of steps without guesses: too many rows in the step (batch), not a decode or of a request that"
            " takes none (request), others were looked at (turn), nothing found (nothing), not worth its rows (cost),"
            " no free block (blocks).",
            ("cause",),
            children=[(cause,) for cause in NO_DRAFT_CAUSES],
            field="total_undrafted",
        )
        self.saved_tokens = values.counter(
            "quire_prefill_tokens_saved",
            "Prompt tokens found in the cache instead of computed, after a preemption too.",
            field="total_prefill_tokens_saved",
        )
        self.saved_seconds = values.counter(
            "quire_prefill_seconds_saved",
            "The time of those at what a prompt token more costs in a step, as measured while serving, seconds.",
        )
        self._prefill_cost = PrefillCost()
        self.restarts = values.counter("quire_engine_restarts", "Times the engine process was replaced.")
        self._totals, self._shown = values.totals, values.shown
        for way in ("out", "in"):
            self._totals[f"total_swapped_{way}_blocks"] = Total(swapped_bytes, way, in_bytes=True)
        for event in KEPT_EVENTS:
            self._totals[f"total_kept_{event}"] = Total(self.kept.events, event)

    def begin(self, plan: EnginePlan) -> None:
        """An engine with this plan has started and is empty."""
        self._bytes_per_block = plan.pool.bytes_per_block
        self._num_blocks = plan.scheduler.num_blocks
        self.pool.set(self._num_blocks)
        self.ranks.begin(plan)
        self._reset()

    def resize(self, num_blocks: int) -> None:
        """Engines have joined or left: their pools have so many blocks together."""
        self._num_blocks = num_blocks
        self.pool.set(num_blocks)

    def observe(
        self, stats: EngineStats, generated_tokens: int | None = None, prompt_tokens: int | None = None
    ) -> None:
        """The engine's state changed.

        `generated_tokens`: tokens that the step sent; None takes its decode tokens. `prompt_tokens`: of the prompts
        whose first token it sent; None takes those that it computed.
        """
        if stats.blocks_total == 0:  # sent on behalf of an engine that has ended
            return
        self._state = stats
        num_saved = self.saved_tokens.get()
        for name, total in self._totals.items():
            if (value := getattr(stats, name)) != total.last:
                total.advance(value, self._bytes_per_block)
        self.fragments.observe(stats)
        num_saved = self.saved_tokens.get() - num_saved
        self.saved_seconds.inc(num_saved * self._prefill_cost.seconds_per_token)
        if stats.step_seconds > stats.host_seconds:  # otherwise the model did not run: the message reports an abort
            generated = stats.decode_tokens if generated_tokens is None else generated_tokens
            self.steps.observe(stats, generated, stats.prefill_tokens if prompt_tokens is None else prompt_tokens)
            self._prefill_cost.learn(
                prompt_tokens=stats.prefill_tokens,
                num_decodes=stats.decode_tokens,
                seconds=stats.step_seconds - stats.host_seconds,
            )

    @property
    def state(self) -> EngineStats:
        """The engine's last statistics."""
        return self._state

    def show(self, now: float) -> None:
        """Set the gauges from the last state; called at each scrape, not at each step."""
        stats = self._state
        for field, gauge in self._shown.items():
            gauge.set(getattr(stats, field))
        waiting = 0
        for reason in WAIT_REASONS:
            count = stats.waiting.get(reason, 0)
            self.waiting.set(count, reason)
            waiting += count
        self._alias_waiting.set(waiting)
        self._alias_waiting_by_reason.set(waiting, "capacity")
        self.usage.set(stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0)
        for state, blocks in (
            ("used", stats.blocks_used),
            ("cached", stats.blocks_cached),
            ("free", stats.blocks_free),
        ):
            self.blocks.set(blocks, state)
            self.kv_bytes.set(blocks * self._bytes_per_block, state)
        self.blocks_held.set(stats.blocks_shared, "several")
        self.blocks_held.set(stats.blocks_unshared, "one")
        held = stats.host_blocks_used + stats.host_blocks_cached
        for state, blocks in (
            ("used", stats.host_blocks_used),
            ("cached", stats.host_blocks_cached),
            ("free", stats.host_blocks_total - held),
        ):
            self.host_blocks.set(blocks, state)
        self.kept.show(stats, self._bytes_per_block)
        self._old_host_usage.set(stats.host_blocks_used / stats.host_blocks_total if stats.host_blocks_total else 0.0)
        looked_up = self.query_tokens.get()
        self._old_hit_rate.set(self.hit_tokens.get() / looked_up if looked_up else 0.0)
        self.ranks.show(stats, self._num_blocks * self._bytes_per_block, self._bytes_per_block)
        self.efficiency.set(1.0 - stats.slots_unused / stats.slots_allocated if stats.slots_allocated else 1.0)
        since = stats.kv_waiting_since
        self.kv_waiting.set(0.0 if since is None else max(0.0, now - since))

    def restarted(self) -> None:
        """The engine process was replaced: its totals begin at 0 again, and nothing runs for now."""
        self.restarts.inc()
        for total in self._totals.values():
            total.last = 0
        self.fragments.restarted()
        self._reset()

    def _reset(self) -> None:
        if self._num_blocks:
            self.observe(EngineStats(blocks_total=self._num_blocks, blocks_free=self._num_blocks))


class KeptMetrics:
    """Prefixes in files that outlive the server."""

    def __init__(self, values: Values) -> None:
        values.gauge(
            "quire_kept_kv_blocks",
            "KV blocks of prefixes in files that outlive the server, on a CPU.",
            field="kept_blocks",
        )
        self.bytes = values.gauge(
            "quire_kept_kv_bytes", "Bytes of KV blocks of prefixes in files that outlive the server."
        )
        self.events = values.counter(
            "quire_kept_kv_block_events",
            "KV blocks that were written to these files, read from them, left out because the disk was slower than"
            " they came (dropped), or computed because their file was damaged or foreign (refused).",
            ("event",),
            children=[(event,) for event in KEPT_EVENTS],
        )

    def show(self, stats: EngineStats, bytes_per_block: int) -> None:
        self.bytes.set(stats.kept_blocks * bytes_per_block)


def _declare_pins(values: Values) -> None:
    """Declare the metrics of prefixes that requests keep for a time."""
    values.gauge(
        "quire_pinned_kv_blocks",
        "KV blocks, used and cached, of prefixes that requests keep for a time.",
        field="blocks_pinned",
    )
    values.counter(
        "quire_pinned_kv_block_events",
        "KV blocks that were pinned for a time, or not, as their share of the pool was used up (refused), whose"
        " time is over (expired), or that had to be evicted before that.",
        ("event",),
        children=[(event,) for event in PIN_EVENTS],
        field="total_pins",
    )


def _declare_transfers(values: Values) -> None:
    """Declare the metrics of KV blocks of prompts that nodes pass on to each other."""
    values.gauge(
        "quire_kv_transfer_leased_blocks",
        "KV blocks that nodes have asked each other for and that are not sent yet.",
        field="leased_blocks",
    )
    values.counter(
        "quire_kv_transfer_blocks",
        "KV blocks that a node has sent to another, that came (received), that did not come while their request"
        " waited (missed), or that were damaged on their way (refused); the last two are computed.",
        ("event",),
        children=[(event,) for event in TRANSFER_EVENTS],
        field="total_transfers",
    )
    values.counter(
        "quire_kv_transfer_bytes",
        "Bytes of the blocks that were sent and received.",
        ("direction",),
        children=[(direction,) for direction in DIRECTIONS],
        field="total_transfer_bytes",
    )
    values.counter(
        "quire_kv_transfer_wait_seconds",
        "Time that requests have waited for blocks of other nodes, seconds.",
        field="total_transfer_wait_seconds",
    )


class RankMetrics:
    """Processes that compute a model together."""

    def __init__(self, values: Values) -> None:
        values.counter(
            "quire_rank_gather_seconds",
            "Time that a rank has waited for columns that others had not computed yet, seconds: the one that waits"
            " least is the slowest. None without --tensor-parallel-size; of several engines those of equal number"
            " together.",
            ("rank",),
            children=(),
            field="total_rank_seconds",
        )
        self._bytes = values.gauge(
            "quire_kv_rank_bytes",
            "Bytes of the KV pool by rank and its device: allocated at the start (reserved), in blocks that a sequence"
            " holds (used), and in slots of those that hold a token (live). A rank has its part of every block; of"
            " several engines the ranks of equal number together, divided as in the first one.",
            ("rank", "device", "state"),
        )
        self._devices: list[str] = []  # by rank
        self._block_size = 1

    def begin(self, plan: EnginePlan) -> None:
        """An engine with this plan has started."""
        device, size = plan.machine.device, plan.machine.tensor_parallel_size
        self._devices = ["cpu" if device == "cpu" else f"{device}:{rank}" for rank in range(size)]
        self._block_size = plan.scheduler.limits.block_size
        self._bytes.values.clear()

    def show(self, stats: EngineStats, reserved: int, bytes_per_block: int) -> None:
        """Set the gauges of memory. `reserved`: bytes of the pool; `bytes_per_block`: of all ranks together."""
        live = (stats.slots_allocated - stats.slots_unused) * bytes_per_block / self._block_size
        for rank, device in enumerate(self._devices):
            for state, total in (("reserved", reserved), ("used", stats.blocks_used * bytes_per_block), ("live", live)):
                self._bytes.set(total / len(self._devices), str(rank), device, state)


class FragmentMetrics:
    """Samples of the pool's fragmentation, which the engine takes."""

    def __init__(self, values: Values) -> None:
        self._runs = _Samples(
            values.histogram(
                "quire_kv_free_run_blocks",
                "Lengths of the runs of neighbouring KV blocks that no sequence holds, in samples that the engine takes"
                " while it computes, once a second. Any free block serves, so short runs cost nothing.",
                FREE_RUN_BOUNDS,
            )
        )
        self._unused = _Samples(
            values.histogram(
                "quire_kv_sequence_unused_slots",
                "Token slots that hold no token in the blocks of a running sequence, in the same samples: internal"
                " fragmentation, usually below the size of a block.",
                UNUSED_SLOT_BOUNDS,
            )
        )

    def observe(self, stats: EngineStats) -> None:
        """Take in the engine's totals."""
        self._runs.advance(stats.total_free_runs, stats.total_free_run_blocks)
        self._unused.advance(stats.total_unused_slots, stats.total_unused_slots_sum)

    def restarted(self) -> None:
        """The engine was replaced: its totals begin at 0 again."""
        self._runs.last, self._unused.last = ((), 0), ((), 0)


class _Samples:
    """Follows the counts and the sum of a histogram that the engine fills, which fall back to 0 when it is replaced."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self.last: tuple[tuple[int, ...], int] = (), 0

    def advance(self, counts: tuple[int, ...], total: int) -> None:
        """Take in the counts and the sum of the sizes."""
        if not counts or (counts, total) == self.last:
            return
        before, before_total = self.last if sum(counts) >= sum(self.last[0]) else ((), 0)
        for place, (count, old) in enumerate(zip_longest(counts, before, fillvalue=0)):
            self._histogram.counts[place] += count - old
        self._histogram.sum += total - before_total
        self.last = counts, total


class MinuteMetrics:
    """Gauges over the last minute, or less where their text says so, updated each second."""

    def __init__(self, values: Values) -> None:
        self.busy = values.gauge(
            "quire_engine_busy_ratio",
            "Share of the last ten seconds that the engine spent in steps, on a CPU or a GPU, 0 to 1: at 1 each step"
            " follows the one before it at once; of several engines the mean.",
        )
        self.efficiency = values.gauge(
            "quire_batching_efficiency_ratio",
            "Of the token slots that batches reserved in the last minute, the share that held a token: those computed"
            " here, and those that static batching would have made of the same requests; 1 of none.",
            ("batching",),
            children=[("continuous",), ("static",)],
        )
        self.padding = values.gauge(
            "quire_batching_padding_ratio",
            "Share of the reserved token slots that held no token, last minute.",
            ("batching",),
            children=[("continuous",), ("static",)],
        )
        self.in_system = values.gauge(
            "quire_sequences_in_system",
            "L of Little's law: accepted and unfinished sequences, mean of the last minute.",
        )
        self.arrivals = values.gauge(
            "quire_sequence_arrivals_per_second", "Lambda of Little's law: sequences accepted a second, last minute."
        )
        self.seconds = values.gauge(
            "quire_sequence_seconds_in_system",
            "W of Little's law: from acceptance to the end, mean of sequences that ended in the last minute, seconds.",
        )
        self.residual = values.gauge(
            "quire_littles_law_residual_ratio",
            "L - lambda W, as a share of the larger of the two: near 0 in a steady state; else the load changes, or a"
            " metric is wrong.",
        )
        self.peak = values.gauge("quire_kv_blocks_peak", "Most KV blocks used at once in the last minute.")
        self.static_blocks = values.gauge(
            "quire_kv_static_blocks",
            "KV blocks that static slots would hold for the same requests now: for each sequence the longest of its"
            " batch, or the longest context.",
            ("slots",),
            children=[("longest",), ("max_model_len",)],
        )

        self._old_prompt_rate = values.gauge(
            None,
            "Prompt tokens computed a second, over the last ten seconds.",
            old="vllm:avg_prompt_throughput_toks_per_s",
        )
        self._old_generation_rate = values.gauge(
            None,
            "Tokens generated a second, over the last ten seconds.",
            old="vllm:avg_generation_throughput_toks_per_s",
        )

    def show(self, window: Window, lately: Window, *, peak: int, static_longest: int, static_full: int) -> None:
        """Set the gauges from the last minute, and those of the last ten seconds from `lately`."""
        self.busy.set(lately.busy)
        self._old_prompt_rate.set(lately.rate("prefilled"))
        self._old_generation_rate.set(lately.rate("generated"))
        self.peak.set(peak)
        self.static_blocks.set(static_longest, "longest")
        self.static_blocks.set(static_full, "max_model_len")
        for batching, ratio in (("continuous", window.efficiency), ("static", window.static_efficiency)):
            self.efficiency.set(ratio, batching)
            self.padding.set(1.0 - ratio, batching)
        little = window.little
        self.in_system.set(little.in_system)
        self.arrivals.set(little.arrivals)
        self.seconds.set(little.seconds)
        self.residual.set(little.residual)


class PlanMetrics:
    """Values that do not change while an engine runs, as labels of gauges with the value 1."""

    def __init__(self, values: Values) -> None:
        self.build = values.gauge("quire_build_info", "The running version.", ("version",))
        self.build.set(1, VERSION)
        self.model = values.gauge(
            "quire_model_info",
            "The loaded model and how it is computed.",
            (
                "architecture",
                "parameters",
                "device",
                "dtype",
                "quantization",
                "kv_cache_dtype",
                "kernels",
                "cpu_variant",
                "num_threads",
                "tensor_parallel_size",
                "max_model_len",
            ),
        )
        self.parameters = values.gauge(
            "quire_model_parameters",
            "Parameters that every token is multiplied with; the others, for tokens whose logits are needed.",
            ("part",),
            children=[("layers",), ("sampled",)],
        )
        self.attention_width = values.gauge(
            "quire_model_attention_width",
            "Query heads x head width x layers, by the same parts; attention takes 4 of these FLOP per pair of tokens.",
            ("part",),
            children=[("layers",), ("sampled",)],
        )
        self.weights_read = values.gauge(
            "quire_model_read_bytes", "Bytes of weights that a token alone in its step reads from memory."
        )
        self.cache = values.gauge(
            "quire_cache_config_info",
            "The KV pool's layout.",
            ("block_size", "num_blocks", "bytes_per_block", "kv_tokens", "enable_prefix_caching"),
        )
        self._alias_cache = values.gauge(
            None,
            "The KV pool's layout.",
            (
                "block_size",
                "num_gpu_blocks",
                "kv_cache_size_tokens",
                "kv_cache_max_concurrency",
                "cache_dtype",
                "enable_prefix_caching",
            ),
            alias="vllm:cache_config_info",
        )
        self.memory = values.gauge(
            "quire_memory_bytes", "Memory reserved at start, by use.", ("kind",), children=[("weights",), ("kv",)]
        )
        self.kernels_replaced = values.gauge(
            "quire_kernels_replaced",
            "1 for each op that failed its check at the start and is replaced by a slower one.",
            ("op",),
        )
        self.gpu_path_left_out = values.gauge(
            "quire_gpu_path_left_out",
            "1 for each optional path of a GPU's kernels that it has not shown: a plain one serves.",
            ("path",),
        )
        self.quantization_kl = values.gauge(
            "quire_quantization_mean_kl_nats",
            "Loss by quantisation as `quire eval-quant` measured it: mean KL of the next token from bf16's; absent"
            " where it was not measured, nats.",
            children=(),
        )
        self.load_seconds = values.gauge("quire_model_load_seconds", "Time the last start of the engine took, seconds.")

    def observe(self, plan: EnginePlan, mean_kl: float | None) -> None:
        """Set all from a plan. `mean_kl`: of its quantisation, in nats, where it was measured."""
        model, cost, machine, pool, scheduler = plan.model, plan.cost, plan.machine, plan.pool, plan.scheduler
        self.quantization_kl.values.clear()
        if mean_kl is not None:
            self.quantization_kl.set(mean_kl)
        self.model.values.clear()
        self.model.set(
            1,
            model.architecture,
            str(model.num_parameters),
            machine.device,
            model.dtype,
            model.quantization or model.stored_as or "none",
            pool.dtype,
            machine.kernels,
            machine.cpu_variant or "none",
            str(machine.num_threads),
            str(machine.tensor_parallel_size),
            str(scheduler.max_model_len),
        )
        caching = str(scheduler.limits.enable_prefix_caching).lower()
        size, blocks, tokens = str(scheduler.limits.block_size), str(scheduler.num_blocks), str(scheduler.num_slots)
        self.parameters.set(cost.layer_parameters, "layers")
        self.parameters.set(cost.sampled_parameters, "sampled")
        self.attention_width.set(cost.layer_attention, "layers")
        self.attention_width.set(cost.sampled_attention, "sampled")
        self.weights_read.set(cost.weights_read_bytes)
        self.cache.values.clear()
        self.cache.set(1, size, blocks, str(pool.bytes_per_block), tokens, caching)
        concurrency = f"{scheduler.num_slots / scheduler.max_model_len:.2f}"
        self._alias_cache.values.clear()
        self._alias_cache.set(1, size, blocks, tokens, concurrency, model.dtype, caching)
        self.memory.set(model.weights_bytes, "weights")
        self.memory.set(pool.num_bytes, "kv")
        self.kernels_replaced.values.clear()
        for op in machine.replaced_ops:
            self.kernels_replaced.set(1, op)
        self.gpu_path_left_out.values.clear()
        for path in machine.left_out_paths:
            self.gpu_path_left_out.set(1, path)
        self.load_seconds.set(plan.load_seconds)


class BatchMetrics:
    """The lines of batches, which are requests too and counted among these as well."""

    def __init__(self, values: Values) -> None:
        self._lines = values.counter(
            "quire_batch_lines",
            "Finished lines of batches: completed, or failed with an error.",
            ("outcome",),
            children=[("completed",), ("failed",)],
        )
        self.backlog = values.gauge("quire_batch_lines_open", "Lines of unfinished batches without a result.").set

    def line(self, ok: bool) -> None:
        """A line has got its result."""
        self._lines.inc(1, "completed" if ok else "failed")


class ModelMetrics:
    """The metrics of the state of each of several models; nothing is exported for a single model."""

    def __init__(self, values: Values) -> None:
        # Called at each scrape: the state, and the bytes that it takes; None: there are no others.
        self.now: Callable[[], tuple[ModelState, int]] | None = None
        self._state = values.gauge(
            "quire_model_state",
            "1 for the state that a model is in, of several: unloaded, loading, loaded, unloading, sleeping,"
            " restarting or failed.",
            ("state",),
            children=(),
        )
        self._memory = values.gauge(
            "quire_model_memory_bytes", "Bytes of --model-memory that a model takes, of several.", children=()
        )
        self._loads = values.counter(
            "quire_model_loads", "Starts of a model's engine from memory or disk, of several.", children=()
        )
        self._ends = values.counter(
            "quire_model_ends",
            "Ends of a model's engine, of several, by cause: idle, memory for another model, or an operator's order.",
            ("cause",),
        )

    def show(self) -> None:
        """Set what is read when it is asked for."""
        if self.now is None:
            return
        state, num_bytes = self.now()
        for name in get_args(ModelState):
            self._state.set(float(name == state), name)
        self._memory.set(num_bytes)
        self._loads.inc(0)
        for cause in get_args(ModelEnd):
            self._ends.inc(0, cause)

    def loaded(self) -> None:
        """The engine has started."""
        self._loads.inc()

    def ended(self, cause: ModelEnd) -> None:
        """The engine has ended."""
        self._ends.inc(1, cause)


class AdapterMetrics:
    """One sample whose labels are lists of names and whose value is the time; none where adapters are not enabled."""

    def __init__(self, values: Values, clock: Callable[[], float] = time.time) -> None:
        self._max_lora = 0  # 0: adapters are not enabled
        self._clock = clock
        self._info = values.gauge(
            "quire_lora_requests_info",
            "The adapters of requests that run and of requests that wait, names with commas between them, and how many"
            " may run at once; the value is the time of this state, seconds since 1970.",
            ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
            alias="vllm:lora_requests_info",
        )

    def begin(self, plan: EnginePlan) -> None:
        """An engine with this plan has started."""
        self._max_lora = plan.scheduler.limits.max_loras if plan.adapters.max_kept else 0

    def show(self, stats: EngineStats) -> None:
        """Take the place of the state before; called at each scrape."""
        self._info.values.clear()
        if self._max_lora:
            names = [",".join(sorted(names)) for names in (stats.waiting_adapters, stats.running_adapters)]
            self._info.set(self._clock(), str(self._max_lora), *names)
