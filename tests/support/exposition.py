"""What a scrape shows, and what is told to the metrics: a plan, timings, a busy engine.

Promises: a sample that is exposed twice fails the test that scrapes it.
Must not know: which metrics there are.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from quire_engine.contract.limits import SchedulerConfig
from quire_engine.contract.types import EngineStats, RequestTiming
from quire_server.metrics.metrics import Metrics
from support.plans import small_plan

PLAN = replace(
    small_plan(
        SchedulerConfig(num_blocks=64, max_model_len=256),
        model={"architecture": "Qwen3ForCausalLM", "num_parameters": 1000, "weights_bytes": 4000},
    ),
    load_seconds=0.5,
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


def without_aliases(exposition: bytes) -> bytes:
    """The metrics under our own names alone."""
    return b"".join(line for line in exposition.splitlines(keepends=True) if b"vllm:" not in line)


NAMES_OF_OTHERS = {
    'vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix',
    "vllm:avg_prompt_throughput_toks_per_s metric names should not contain abbreviated units",
    "vllm:avg_generation_throughput_toks_per_s metric names should not contain abbreviated units",
}


def check_with_promtool(exposition: bytes) -> None:
    """Fail the test where `promtool check metrics` finds more than names that vLLM chose."""
    own = _promtool(without_aliases(exposition))
    assert (own.returncode, own.stdout, own.stderr) == (0, "", "")
    both = _promtool(exposition)
    complaints = (both.stdout + both.stderr).splitlines()
    assert all(line.startswith("vllm:") for line in complaints)
    assert {line for line in complaints if "':'" not in line} == NAMES_OF_OTHERS


def _promtool(exposition: bytes) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", "check", "metrics"], input=exposition.decode(), capture_output=True, text=True, check=False
    )


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
        "total_preemptions_by_mode": {"recompute": changes.get("total_preemptions", 0), "swap": 0},
    }
    return EngineStats(**(values | changes))
