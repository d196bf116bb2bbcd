"""`quire doctor`: each cause injected into what a server would tell, and named; where nothing is wrong nothing is."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from quire_engine.cost_model import CostModel
from quire_lab.commands import doctor
from quire_lab.commands.diagnosis import causes
from quire_lab.commands.diagnosis.causes import Cause, Diagnosis, diagnose
from quire_lab.commands.diagnosis.scrapes import Scrape, Window, read_scrape
from quire_lab.simulation.slo import parse_slo
from quire_server.metrics.metrics import Metrics
from support.exposition import PLAN
from support.plans import changed

SLO = parse_slo("ttft_p95=1s,itl_p95=100ms")
BOUNDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
GOOD: dict[str, Any] = {
    "quire_time_to_first_token_seconds": [0.2] * 100,
    "quire_inter_token_latency_seconds": [0.02] * 1000,
    "quire_request_queue_time_seconds": [0.01] * 100,
    "quire_request_prefill_time_seconds": [0.15] * 100,
    "quire_request_kv_wait_seconds": [0.0] * 100,
    "quire_request_prefill_kv_computed_tokens": [200] * 100,
    "quire_engine_step_seconds": [0.02] * 1000,
    "quire_engine_step_host_seconds": [0.001] * 1000,
    "quire_event_loop_stall_seconds": [0.001] * 100,
    "quire_engine_steps_total": 1000,
    'quire_engine_computed_tokens_total{kind="prefill"}': 2000,
    'quire_engine_computed_tokens_total{kind="decode"}': 2000,
    "quire_requests_running": 2,
    'quire_requests_waiting{reason="kv"}': 0,
    'quire_requests_waiting{reason="slots"}': 0,
    'quire_requests_waiting{reason="budget"}': 0,
    "quire_kv_cache_usage_ratio": 0.3,
    'quire_requests_total{outcome="stop"}': 100,
    'quire_rejected_total{reason="max_num_queued_reqs"}': 0,
    "quire_preemptions_total": 0,
    "quire_engine_restarts_total": 0,
    "quire_prefix_cache_query_tokens_total": 20000,
    "quire_prefix_cache_hit_tokens_total": 10000,
    "quire_kv_evictions_total": 0,
    'quire_model_info{kernels="cpu"}': 1,
}
SLOW_FIRST = {"quire_time_to_first_token_seconds": [3.0] * 100, "quire_request_prefill_time_seconds": [0.15] * 100}
SLOW_NEXT = {"quire_inter_token_latency_seconds": [0.2] * 1000}
QUEUED = {**SLOW_FIRST, "quire_request_queue_time_seconds": [2.8] * 100}
LONG_PREFILL = {**SLOW_FIRST, "quire_request_prefill_time_seconds": [2.8] * 100}


def text(**values: Any) -> str:
    lines = []
    for name, value in values.items():
        if not isinstance(value, list):
            lines.append(f"{name} {value}")
            continue
        for bound in (*BOUNDS, float("inf")):
            shown = "+Inf" if bound == float("inf") else f"{bound}"
            lines.append(f'{name}_bucket{{model_name="m",le="{shown}"}} {sum(each <= bound for each in value)}')
        lines += [f"{name}_sum {sum(value)}", f"{name}_count {len(value)}"]
    return "\n".join(lines) + "\n"


def window(**changes: Any) -> Window:
    """Ten seconds in which all this came, after a while of which nothing shows."""
    values = {**GOOD, **changes}
    before = {name: ([] if isinstance(value, list) else value) for name, value in values.items()}
    before |= {name: 0 for name in values if name.split("{")[0].endswith("_total")}
    return Window([read_scrape(text(**before), 0.0), read_scrape(text(**values), 10.0)])


def found(**changes: Any) -> Diagnosis:
    return diagnose(window(**changes), SLO)


INJECTED = {
    "admission": {'quire_rejected_total{reason="max_num_queued_reqs"}': 40},
    "restarted": {**SLOW_NEXT, "quire_engine_restarts_total": 1},
    "KV pressure": {**QUEUED, "quire_preemptions_total": 30, "quire_request_kv_wait_seconds": [2.5] * 100},
    "all seats": {**QUEUED, 'quire_requests_waiting{reason="slots"}': 12, "quire_requests_running": 64},
    "prefill starvation": {**QUEUED, 'quire_requests_waiting{reason="budget"}': 9},
    "cold prefix cache": {**LONG_PREFILL, "quire_prefix_cache_hit_tokens_total": 100, "quire_kv_evictions_total": 900},
    "long prompts": LONG_PREFILL,
    "prompts beside streams": {
        **SLOW_NEXT,
        'quire_engine_computed_tokens_total{kind="prefill"}': 200_000,
        "quire_engine_step_seconds": [0.02] * 800 + [0.3] * 200,
    },
    "batch too large": {
        **SLOW_NEXT,
        'quire_engine_computed_tokens_total{kind="decode"}': 60_000,
        "quire_engine_step_seconds": [0.2] * 1000,
        "quire_requests_running": 60,
    },
    "the host": {**SLOW_NEXT, "quire_engine_step_host_seconds": [0.015] * 1000},
    "event loop": {**SLOW_NEXT, "quire_event_loop_stall_seconds": [0.001] * 90 + [0.4] * 10},
    "network": {
        **SLOW_NEXT,
        "quire_http_connections_stalled": 2,
        "quire_requests_held": 2,
        "quire_reply_bytes_waiting": 300_000,
    },
    "quantisation: slower": {
        **SLOW_NEXT,
        'quire_model_info{kernels="cpu"}': 0,
        'quire_model_info{quantization="int4",kv_cache_dtype="int8",kernels="cpu",cpu_variant="portable"}': 1,
    },
    "quantisation: answers": {
        'quire_model_info{kernels="cpu"}': 0,
        'quire_model_info{quantization="int4",kv_cache_dtype="auto",kernels="cpu",cpu_variant="avx2"}': 1,
        "quire_quantization_mean_kl_nats": 0.4,
    },
    "slow kernels": {**SLOW_NEXT, 'quire_model_info{kernels="cpu"}': 0, "quire_kernels_replaced": 2},
}


@pytest.mark.parametrize("name", INJECTED)
def test_each_cause_is_named_first(name: str) -> None:
    diagnosis = found(**INJECTED[name])
    assert diagnosis.causes, "nothing was named"
    assert name in diagnosis.causes[0].name
    assert diagnosis.causes[0].numbers
    assert diagnosis.causes[0].remedy


def test_a_client_that_does_not_read_is_named_where_objectives_are_met_too() -> None:
    """The engine's own step is told beside it: it is fast."""
    diagnosis = found(quire_http_connections_stalled=1, quire_requests_held=0)
    assert diagnosis.ok
    (cause,) = diagnosis.causes
    assert "network" in cause.name
    assert "1.0 connections" in cause.numbers
    assert "the engine's own step takes 20 ms" in cause.numbers
    assert found(quire_http_connections_stalled=1, quire_requests_running=64).causes == (), "one client of many"


def quantised(seconds: float, cost: CostModel | None, form: str = "int8") -> tuple[Cause, ...]:
    """The causes named for a quantised model with fast kernels, whose steps of two decodes take so long."""
    info = f'quire_model_info{{quantization="{form}",kv_cache_dtype="auto",kernels="cpu",cpu_variant="avx512"}}'
    values = {**SLOW_NEXT, 'quire_model_info{kernels="cpu"}': 0, info: 1}
    values |= {'quire_engine_computed_tokens_total{kind="prefill"}': 0, "quire_kv_slots_allocated": 1000}
    values |= {"quire_engine_step_seconds": [seconds] * 1000, "quire_kv_slots_unused": 0}
    read = window(**values)
    return diagnose(Window(read._scrapes, cost=cost), SLO).causes


def test_a_quantised_model_is_held_against_its_calibration() -> None:
    """Two decodes that look at 1,000 tokens should take 10 + 2 x 4 + 1000 x 0.002 = 20 ms."""
    cost = CostModel(step=0.01, row=0.004, context=2e-6)
    (cause,) = quantised(0.06, cost)
    assert "quantisation: slower" in cause.name
    assert "int8 weights: a step takes 3.0 times what its calibration says" in cause.numbers
    assert quantised(0.025, cost) == ()
    assert quantised(0.06, None) == ()
    assert quantised(0.06, cost, form="none") == ()


def test_a_quantised_model_of_a_server_on_slow_kernels_is_named_by_its_own_metrics() -> None:
    """Not by made-up lines: what a server with such a plan shows."""
    scrapes = []
    for at, count in ((0.0, 0), (10.0, 200)):
        metrics = Metrics("m")
        plan = changed(
            PLAN,
            model={"quantization": "int8"},
            machine={"kernels": "cpu", "cpu_variant": "portable"},
            pool={"dtype": "int8"},
        )
        metrics.observe_plan(plan, 0.3)
        for _ in range(count):
            record = metrics.start(prompt_tokens=4, max_tokens=2, n=1)
            record.tokens(0, 1, time.monotonic() + 9.0)
            record.tokens(0, 1, time.monotonic() + 18.0)
            record.finish("stop")
        scrapes.append(read_scrape(metrics.render().decode(), at))
    slow, lossy = diagnose(Window(scrapes), SLO).causes
    assert "quantisation: slower" in slow.name
    assert "int8 weights, a KV cache in int8: the portable kernels" in slow.numbers
    assert "a mean KL of 0.3 nats" in lossy.numbers


def test_preemptions_are_told_by_cause_and_with_the_requests_they_were_for() -> None:
    by_cause = {f'quire_preemptions_by_cause_total{{cause="{name}"}}': n for name, n in (("blocks", 28), ("elder", 2))}
    read = window(**INJECTED["KV pressure"], **by_cause)
    cause = diagnose(Window(read._scrapes, takers={"r1": 2, "r2": 9}), SLO).causes[0]
    assert "30 preemptions (28 for running requests that grew, 2 for the elder) on" in cause.numbers
    assert cause.numbers.endswith("gave their blocks to r2 (9), r1 (2)")


def test_nothing_is_named_where_nothing_is_wrong() -> None:
    diagnosis = found()
    assert diagnosis.ok
    assert diagnosis.causes == ()
    assert [round(one.seconds or 0, 3) for one in diagnosis.measured] == [0.242, 0.048]


def test_too_little_traffic_misses_nothing() -> None:
    diagnosis = found(quire_time_to_first_token_seconds=[9.0] * 3, quire_inter_token_latency_seconds=[])
    assert [one.seconds for one in diagnosis.measured] == [None, None]
    assert diagnosis.ok


def test_counters_that_began_anew() -> None:
    one, other = read_scrape("a_total 90\nh_count 5\n", 0.0), read_scrape("a_total 20\nh_count 7\n", 1.0)
    assert Window([one, other]).delta("a_total") == 20
    assert Window([one, other]).delta("h_count") == 2
    assert Window([one, other]).delta("absent_total") == 0
    assert Window([one, other]).quantile("absent", 0.5) is None


def test_labels_with_quotes_and_lines_that_are_none() -> None:
    scrape = read_scrape('# HELP x y\nx{a="q\\"}{",b="c"} 3 1700000000\nx{a="d"} 4\nnonsense\ny NaN2\n', 0.0)
    assert scrape.total("x") == 7
    assert scrape.total("x", b="c") == 3
    assert set(scrape.samples) == {"x"}


def test_the_names_are_those_of_the_server() -> None:
    """What the diagnosis reads is there: a metric that was renamed would read as nothing."""
    rendered = Metrics("m").render().decode()
    source = Path(causes.__file__).read_text()
    names = set(re.findall(r'"(quire_\w+)"', source))
    assert len(names) > 15
    declared = set(re.findall(r"^# TYPE (quire_\w+)", rendered, re.MULTILINE))
    declared |= {f"{name}_total" for name in declared} | {f"{name}_sum" for name in declared}
    assert names - declared == set()


def test_the_command_says_all_of_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {name: [] if isinstance(value, list) else 0 for name, value in GOOD.items()}
    answers = iter([text(**nothing), text(**{**GOOD, **LONG_PREFILL})])
    steps = '{"steps": [{"decisions": [{"kind": "preempted", "by": "r9"}, {"kind": "waits", "by": ""}]}]}'
    monkeypatch.setattr(doctor, "fetch", lambda url, headers: steps if "/debug/" in url else next(answers))
    assert doctor.takers("http://x", "") == {"r9": 1}
    assert doctor.run(["--url", "http://x", "--slo", "ttft_p95=1s", "--seconds", "0.01"]) == 1
    out = capsys.readouterr().out
    assert "MISSED" in out
    assert "long prompts for this machine" in out
    assert "remedy" in out
    monkeypatch.setattr(doctor, "fetch", lambda url, headers: text(**GOOD))
    assert doctor.run(["--url", "http://x", "--seconds", "0.01", "--since-start"]) == 0
    assert "meets its objectives" in capsys.readouterr().out
    assert doctor.takers("http://x", "") == {}, "what answers is no step log"


def test_keys_may_be_in_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sent = []

    def fetch(url: str, headers: dict[str, str]) -> str:
        if url.endswith("/metrics"):
            sent.append(headers.get("Authorization"))
        return text(**GOOD)

    monkeypatch.setattr(doctor, "fetch", fetch)
    file = tmp_path / "keys"
    file.write_text("# of the clients\nalice=the-key-of-alice\n")
    assert doctor.run(["--url", "http://x", "--seconds", "0.01", "--since-start", "--api-key", f"@{file}"]) == 0
    assert set(sent) == {"Bearer the-key-of-alice"}
    assert doctor.run(["--url", "http://x", "--api-key", f"@{tmp_path / 'none'}"]) == 2


def test_what_cannot_be_read(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.run(["--url", "ftp://x"]) == 2
    assert doctor.run(["--url", "http://127.0.0.1:9", "--seconds", "0.01"]) == 2
    assert doctor.run(["--slo", "fast"]) == 2
    monkeypatch.setattr(doctor, "listening", set)
    assert doctor.run([]) == 2
    monkeypatch.setattr(doctor, "fetch", lambda url, headers: "other_metric 1\n")
    assert doctor.run(["--url", "http://x"]) == 2
    errors = capsys.readouterr().err
    for said in ("http:// or https://", "cannot be read", "QUANTITY_STATISTIC", "no server listens", "is not Quire"):
        assert said in errors


def test_gauges_are_means_over_the_window() -> None:
    def scrape(at: float, value: int) -> Scrape:
        return read_scrape(f'g{{reason="kv"}} {value}\n', at)

    read = iter([f"quire_requests_running {n}\n" for n in (1, 2, 6)])
    times = iter([0.0, 0.0, 1.0, 1.0, 2.0, 2.0])
    scrapes = doctor.watch(lambda: next(read), seconds=2.0, clock=lambda: next(times), sleep=lambda _: None)
    assert Window(scrapes).gauge("quire_requests_running") == 3
    assert Window([scrape(0, 1), scrape(1, 3)]).gauge("g", reason="kv") == 2
