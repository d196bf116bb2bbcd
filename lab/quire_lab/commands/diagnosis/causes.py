"""Finds the causes of bad latencies in a server's metrics over a while, with numbers and a remedy for each.

Promises: a cause is named only with the numbers that show it; the strongest first. Must not know: HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from quire_engine.contract.config import Quantization
from quire_engine.contract.types import PREEMPTION_CAUSES
from quire_lab.commands.diagnosis.scrapes import Window
from quire_lab.simulation.slo import Objective, Slo
from quire_server.showing.terminal import duration

_HISTOGRAMS = {
    "ttft": "quire_time_to_first_token_seconds",
    "itl": "quire_inter_token_latency_seconds",
    "tpot": "quire_request_time_per_output_token_seconds",
    "e2e": "quire_e2e_request_latency_seconds",
    "queue": "quire_request_queue_time_seconds",
}
_SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
_FEWEST = 5  # fewest observations for a statement
_FEWEST_STALLED = 0.5  # fewest connections or sequences, mean over the scrapes, that a client holds up
_MOST_TAKERS = 3  # requests named as those that took blocks
_SLOWER = 1.5  # a step's time over the calibration's
_CHUNK = 512  # tokens of a large chunk
LARGEST_KL = 0.1  # nats; int8 is below 0.01, a good int4 below this
_BENEFICIARIES = {
    "blocks": "for running requests that grew",
    "elder": "for the elder",
    "class": "for a higher class",
    "share": "for tenants within their shares",
}
_STEP, _HOST = "quire_engine_step_seconds", "quire_engine_step_host_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One objective with its measured value."""

    objective: Objective
    seconds: float | None  # None without observations

    @property
    def ok(self) -> bool:
        return self.seconds is None or self.seconds <= self.objective.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One cause."""

    name: str
    weight: float  # 0 to 1: the share of the problem that it explains
    numbers: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The objectives, the causes, and the number of observed requests."""

    measured: tuple[Measured, ...]
    causes: tuple[Cause, ...]
    observed: float  # requests that got their first token

    @property
    def ok(self) -> bool:
        return all(one.ok for one in self.measured)


def diagnose(window: Window, slo: Slo) -> Diagnosis:
    """The diagnosis; causes are searched where an objective is missed, or requests were refused."""
    measured = tuple(
        Measured(objective=one, seconds=_statistic(window, _HISTOGRAMS[one.quantity], one.statistic))
        for one in slo.objectives
    )
    missed = {one.objective.quantity for one in measured if not one.ok}
    found = [cause for look in _ALWAYS if (cause := look(window)) is not None]
    if missed & {"ttft", "queue", "e2e"}:
        found += [cause for look in _FIRST_TOKEN if (cause := look(window)) is not None]
    if missed & {"itl", "tpot", "e2e"}:
        found += [cause for look in _NEXT_TOKENS if (cause := look(window)) is not None]
    if missed:
        found += [cause for look in _BOTH if (cause := look(window)) is not None]
    found.sort(key=lambda cause: -cause.weight)
    return Diagnosis(measured=measured, causes=tuple(found), observed=window.count(_HISTOGRAMS["ttft"]))


def _statistic(window: Window, name: str, statistic: str) -> float | None:
    if window.count(name) < _FEWEST:
        return None
    return window.mean(name) if statistic == "mean" else window.quantile(name, _SHARES[statistic])


def _part_of_ttft(window: Window, name: str) -> float:
    """The share of the mean time to the first token that passes in one part of it."""
    whole, part = window.mean(_HISTOGRAMS["ttft"]), window.mean(name)
    return min(1.0, part / whole) if whole and part is not None else 0.0


def _refusals(window: Window) -> Cause | None:
    refused, done = window.delta("quire_rejected_total"), window.delta("quire_requests_total")
    if not refused:
        return None
    share = refused / (refused + done)
    return Cause(
        name="admission: requests are refused",
        weight=share,
        numbers=f"{refused:,.0f} of {refused + done:,.0f} requests ({share:.1%}) got 429 or 503",
        remedy="more replicas; --max-num-queued-reqs lets more wait, which makes TTFT longer",
    )


def _restarts(window: Window) -> Cause | None:
    restarts = window.delta("quire_engine_restarts_total")
    if not restarts:
        return None
    return Cause(
        name="the engine was restarted",
        weight=1.0,
        numbers=f"{restarts:,.0f} times in {window.seconds:.0f} s: every stream paused meanwhile",
        remedy="the log says what ended it; a memory limit is the usual reason",
    )


def _memory(window: Window) -> Cause | None:
    preemptions = window.delta("quire_preemptions_total")
    requests = max(window.count(_HISTOGRAMS["ttft"]), 1.0)
    waiting = _part_of_ttft(window, "quire_request_kv_wait_seconds")
    queued = window.gauge("quire_requests_waiting", reason="kv")
    usage = window.gauge("quire_kv_cache_usage_ratio")
    if waiting < 0.2 and preemptions / requests < 0.05 and not (queued >= 1 and usage > 0.9):
        return None
    by_cause = {cause: window.delta("quire_preemptions_by_cause_total", cause=cause) for cause in PREEMPTION_CAUSES}
    causes = ", ".join(f"{count:,.0f} {_BENEFICIARIES.get(cause, cause)}" for cause, count in by_cause.items() if count)
    takers = sorted(window.takers.items(), key=lambda one: (-one[1], one[0]))[:_MOST_TAKERS]
    taken = ", ".join(f"{request_id} ({count})" for request_id, count in takers)
    return Cause(
        name="KV pressure: requests wait for blocks or lose them",
        weight=min(1.0, max(waiting, preemptions / requests, 0.6 if queued >= 1 and usage > 0.9 else 0.0)),
        numbers=f"pool {usage:.0%} used, {queued:.1f} sequences wait for blocks, {preemptions:,.0f} preemptions"
        f"{f' ({causes})' if causes else ''} on {requests:,.0f} requests; waiting for blocks is {waiting:.0%} of TTFT"
        f"{f'; the preempted gave their blocks to {taken}' if taken else ''}",
        remedy="a larger pool (--kv-memory, --gpu-memory-utilization, --kv-cache-dtype), or fewer sequences at once"
        " (--max-num-seqs)",
    )


def _slots(window: Window) -> Cause | None:
    share, queued = _part_of_ttft(window, _HISTOGRAMS["queue"]), window.gauge("quire_requests_waiting", reason="slots")
    blocked = _part_of_ttft(window, "quire_request_kv_wait_seconds")
    if share - blocked < 0.3 or queued < 1:
        return None
    running = window.gauge("quire_requests_running")
    return Cause(
        name="queue: all seats are taken",
        weight=share - blocked,
        numbers=f"{running:.1f} sequences run, {queued:.1f} wait for a seat; the queue is {share:.0%} of TTFT",
        remedy="raise --max-num-seqs while the gap between tokens allows it, or add a replica: `quire plan` says which",
    )


def _budget(window: Window) -> Cause | None:
    queued = window.gauge("quire_requests_waiting", reason="budget")
    share = _part_of_ttft(window, _HISTOGRAMS["queue"])
    prefill = _part_of_ttft(window, "quire_request_prefill_time_seconds")
    if max(share, prefill) < 0.3 or queued < 1:
        return None
    steps = max(window.delta("quire_engine_steps_total"), 1.0)
    tokens = window.delta("quire_engine_computed_tokens_total", kind="prefill") / steps
    return Cause(
        name="prefill starvation: prompts wait for a share of the steps",
        weight=max(share, prefill),
        numbers=f"{queued:.1f} sequences wait for the step's token budget; a step computes {tokens:,.0f} prompt tokens;"
        f" the queue is {share:.0%} of TTFT, prefill {prefill:.0%}",
        remedy="a larger --itl-target, --max-num-batched-tokens or --set max_num_partial_prefills=N: prompts sooner,"
        " streams slower",
    )


def _cold_cache(window: Window) -> Cause | None:
    asked = window.delta("quire_prefix_cache_query_tokens_total")
    share = _part_of_ttft(window, "quire_request_prefill_time_seconds")
    hits = window.delta("quire_prefix_cache_hit_tokens_total") / asked if asked else 1.0
    evicted = window.delta("quire_kv_evictions_total")
    if share < 0.4 or hits > 0.1:
        return None
    thrown_out = f"; {evicted:,.0f} cached blocks were dropped for others" if evicted else ""
    return Cause(
        name="cold prefix cache: prompts are computed whole",
        weight=0.7 * share,
        numbers=f"{hits:.1%} of {asked:,.0f} prompt tokens were cached; prefill is {share:.0%} of TTFT{thrown_out}",
        remedy="put what prompts share first and keep it equal to the byte; with drops a larger pool keeps it longer",
    )


def _long_prompts(window: Window) -> Cause | None:
    share, tokens = (
        _part_of_ttft(window, "quire_request_prefill_time_seconds"),
        window.mean("quire_request_prefill_kv_computed_tokens"),
    )
    if share < 0.5 or tokens is None:
        return None
    rate = tokens / (window.mean("quire_request_prefill_time_seconds") or 1.0)
    return Cause(
        name="long prompts for this machine",
        weight=0.5 * share,
        numbers=f"{tokens:,.0f} tokens a prompt at {rate:,.0f} tokens/s; prefill is {share:.0%} of TTFT",
        remedy="shorter prompts, --quantization int8 on a CPU, a faster machine; `quire bench` shows its limit",
    )


def _mixed_steps(window: Window) -> Cause | None:
    steps = window.delta("quire_engine_steps_total")
    if not steps:
        return None
    prefill = window.delta("quire_engine_computed_tokens_total", kind="prefill") / steps
    decode = window.delta("quire_engine_computed_tokens_total", kind="decode") / steps
    slow, usual = window.quantile(_STEP, 0.95), window.quantile(_STEP, 0.5)
    if prefill < 2 * decode or slow is None or not usual or slow < 2 * usual:
        return None
    return Cause(
        name="prompts beside streams: steps with chunks are long",
        weight=min(1.0, prefill / (prefill + decode)),
        numbers=f"{prefill:,.0f} prompt tokens and {decode:,.1f} decodes a step; steps take {duration(usual)} at p50,"
        f" {duration(slow)} at p95",
        remedy="a lower --itl-target or --prefill-chunk: shorter gaps, later first tokens",
    )


def _large_batch(window: Window) -> Cause | None:
    steps, running = window.delta("quire_engine_steps_total"), window.gauge("quire_requests_running")
    if not steps:
        return None
    prefill = window.delta("quire_engine_computed_tokens_total", kind="prefill") / steps
    decode = window.delta("quire_engine_computed_tokens_total", kind="decode") / steps
    usual = window.quantile(_STEP, 0.5)
    if decode < 4 or prefill >= 2 * decode or usual is None:
        return None
    return Cause(
        name="batch too large: every step is long",
        weight=0.8,
        numbers=f"{decode:,.1f} decodes a step, {running:.1f} sequences run; steps take {duration(usual)} at p50",
        remedy=f"--max-num-seqs {max(1, int(decode / 2))} or so, and a replica for the rest",
    )


def _host(window: Window) -> Cause | None:
    host, step = window.mean(_HOST), window.mean(_STEP)
    if not host or not step or host / step < 0.3:
        return None
    return Cause(
        name="the host holds up the model",
        weight=host / step,
        numbers=f"{duration(host)} of a step's {duration(step)} pass outside of the model",
        remedy="fewer requests with grammars or penalties, a free core for the engine",
    )


def _stalls(window: Window) -> Cause | None:
    late, worst = (
        window.delta("quire_event_loop_stall_seconds_sum"),
        window.quantile("quire_event_loop_stall_seconds", 0.99),
    )
    share = late / window.seconds if window.seconds else 0.0
    if share < 0.02 and (worst or 0.0) < 0.1:
        return None
    return Cause(
        name="event loop stalls: the API process is late",
        weight=min(1.0, 5 * share + (worst or 0.0)),
        numbers=f"{share:.1%} of the time late, p99 {duration(worst)}",
        remedy="a core that compute threads do not take (--num-threads), --api-server-count 2, shorter prompts as text",
    )


def _slow_kernels(window: Window) -> Cause | None:
    replaced = window.gauge("quire_kernels_replaced")
    kernels = window.last.label("quire_model_info", "kernels")
    if not replaced and kernels != "reference":
        return None
    what = f"{replaced:.0f} ops failed their check and were replaced" if replaced else "the reference kernels serve"
    return Cause(
        name="slow kernels",
        weight=0.9,
        numbers=what,
        remedy="`quire verify` says what is wrong; on a CPU install a C++ compiler, on a GPU a newer driver and Triton",
    )


def _network(window: Window) -> Cause | None:
    """Clients that read slowly, against the time that the engine takes."""
    stalled, held = window.gauge("quire_http_connections_stalled"), window.gauge("quire_requests_held")
    running = window.gauge("quire_requests_running")
    share = max(stalled, held) / max(running + held, stalled, 1.0)
    if max(stalled, held) < _FEWEST_STALLED or share < 0.1:
        return None
    step, kilobytes = window.mean(_STEP), window.gauge("quire_reply_bytes_waiting") / 1024
    return Cause(
        name="network: clients read slower than the engine generates",
        weight=min(1.0, share),
        numbers=f"{stalled:.1f} connections wait for their clients to read, with {kilobytes:,.0f} KiB, and {held:.1f}"
        f" sequences are set aside for it; the engine's own step takes {duration(step)} with {running:.1f} sequences",
        remedy="look at the client, the proxy and the way between: a stream must be read as it comes;"
        " a client that has stopped is cut off after a minute",
    )


def _quantization(window: Window) -> str:
    """The quantised form that serves, in an operator's words; empty where weights and KV cache are the model's own."""
    weights, kv = (window.last.label("quire_model_info", name) for name in ("quantization", "kv_cache_dtype"))
    parts = [f"{weights} weights"] if weights in get_args(Quantization) else []  # other forms are the checkpoint's own
    return ", ".join([*parts, f"a KV cache in {kv}"] if kv not in ("", "auto") else parts)


def _lossy_quantisation(window: Window) -> Cause | None:
    form, kl = _quantization(window), window.last.total("quire_quantization_mean_kl_nats")
    if not form or kl is None or kl <= LARGEST_KL:
        return None
    return Cause(
        name="quantisation: answers are not the model's",
        weight=min(1.0, kl),
        numbers=f"{form}: a mean KL of {kl:.2g} nats from bf16, where {LARGEST_KL:g} is much",
        remedy="--quantization int8 instead of int4, or none; `quire eval-quant` compares them",
    )


def _slow_quantisation(window: Window) -> Cause | None:
    """Quantised numbers without kernels for them, or with steps that take longer than the calibration says."""
    form = _quantization(window)
    if not form:
        return None
    is_portable = window.last.label("quire_model_info", "cpu_variant") == "portable"
    replaced, beyond = window.gauge("quire_kernels_replaced"), _beyond_calibration(window)
    reasons = [
        *(["the portable kernels have no instructions for it"] if is_portable else []),
        *([f"{replaced:.0f} ops failed their check and were replaced"] if replaced else []),
    ]
    if reasons:
        weight = 0.95
    elif beyond is not None and beyond > _SLOWER:
        weight = 1.0 - 1.0 / beyond
    else:
        return None
    measured = [f"a step takes {beyond:.1f} times what its calibration says"] if beyond is not None else []
    return Cause(
        name="quantisation: slower than it should be",
        weight=weight,
        numbers=f"{form}: {'; '.join([*reasons, *measured])}",
        remedy="`quire verify` says which kernels serve and why; without fast ones for it --quantization none may be"
        " faster, which `quire bench` shows",
    )


def _beyond_calibration(window: Window) -> float | None:
    """The mean step over the calibration's prediction for its mean sizes; None without a calibration or steps.

    A prompt token counts as one of a large chunk, which is at least what it costs beside decodes.
    """
    steps, measured = window.delta("quire_engine_steps_total"), window.mean(_STEP)
    if window.cost is None or not steps or measured is None:
        return None
    prefill, decode = (
        window.delta("quire_engine_computed_tokens_total", kind=kind) / steps for kind in ("prefill", "decode")
    )
    context = window.gauge("quire_kv_slots_allocated") - window.gauge("quire_kv_slots_unused")
    cost = window.cost
    predicted = cost.step + cost.row * decode + cost.context * context + prefill * cost.prompt_seconds(_CHUNK) / _CHUNK
    return measured / predicted if predicted > 0 else None


Look = Callable[[Window], Cause | None]
_ALWAYS: tuple[Look, ...] = (_refusals, _restarts, _network, _lossy_quantisation)
_FIRST_TOKEN: tuple[Look, ...] = (_slots, _budget, _cold_cache, _long_prompts)
_NEXT_TOKENS: tuple[Look, ...] = (_mixed_steps, _large_batch)
_BOTH: tuple[Look, ...] = (_memory, _host, _stalls, _slow_kernels, _slow_quantisation)
