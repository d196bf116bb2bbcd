"""Measures step durations on this machine and fits a cost model: `python -m quire_lab.tools.calibrate`.

Questions and replies are lines of JSON. Promises: the steps run on the engine with the server's configuration and
scheduler; a step's duration counts from the end of the step before; a reply is a file for `quire simulate`.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from quire_engine.build import build
from quire_engine.contract.batch import Batch, StepResult
from quire_engine.contract.config import EngineConfig, engine_config
from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_engine.cost_model import step_sizes
from quire_engine.engine import Engine, StepExecutor
from quire_engine.tools.json_child import converse
from quire_engine.tools.verify.machine_facts import machine_facts
from quire_lab.simulation.fitting import Sample, fit

_DECODES = 12  # decode steps of each load
_CONTEXTS = (32, 128, 512, 2048, 8192, 32768)
_SPECIAL_IDS = 100  # most vocabularies begin with control tokens


class TimedExecutor:
    """Wraps an executor and measures each step from the end of the step before, host time included."""

    def __init__(self, inner: StepExecutor) -> None:
        self.samples: list[Sample] = []
        self._inner = inner
        self._launched: deque[Batch] = deque()
        self._since = 0.0

    @property
    def max_in_flight(self) -> int:
        return self._inner.max_in_flight

    def begin(self) -> None:
        """Start the clock; no step may be in flight."""
        self._since = time.perf_counter()

    def launch(self, batch: Batch) -> None:
        self._launched.append(batch)
        self._inner.launch(batch)

    def collect(self) -> StepResult:
        result = self._inner.collect()
        now = time.perf_counter()
        self.samples.append(Sample(sizes=step_sizes(self._launched.popleft()), seconds=now - self._since))
        self._since = now
        return result

    def forget_host_blocks(self, blocks: Sequence[int]) -> None:
        self._inner.forget_host_blocks(blocks)

    def prepare(self) -> int:
        return self._inner.prepare()


class Grid:
    """Runs loads of known sizes through an engine, cheap loads first, within a time limit."""

    def __init__(self, engine: Engine, executor: TimedExecutor, plan: EnginePlan) -> None:
        self._engine = engine
        self._executor = executor
        self._plan = plan
        self._rng = random.Random(0)
        self._number = 0
        self._seconds_per_token = 0.0  # of the slowest load so far

    def measure(self, seconds: float) -> list[Sample]:
        """Run rounds over the grid. A load that would take more than half of the remaining time is skipped."""
        deadline = time.perf_counter() + seconds
        self._load(1, 16, 4)  # a warm-up for caches and allocators
        self._executor.samples.clear()
        rounds = 0
        while rounds == 0 or time.perf_counter() < deadline:
            for width, length in self._points():
                left = deadline - time.perf_counter()
                if rounds and left <= 0:
                    break
                if width * length * self._seconds_per_token <= max(left, 0.0) / 2:
                    self._load(width, length, _DECODES)
            rounds += 1
        return self._executor.samples

    def _points(self) -> list[tuple[int, int]]:
        """(concurrent requests, prompt tokens of each) that fit into the pool and the context length."""
        config, limits = self._plan.scheduler, self._plan.scheduler.limits
        most = config.max_model_len - _DECODES - 1
        lengths = [length for length in _sizes(limits.max_num_batched_tokens) if length < most]
        points = {(1, length) for length in (*lengths, *_CONTEXTS) if length <= most}
        for width in _sizes(limits.max_num_seqs):
            for length in _CONTEXTS:
                if length <= most and width * config.num_blocks_for(length + _DECODES) <= config.num_blocks:
                    points.add((width, length))
        return sorted(points, key=lambda point: (point[0] * point[1], point))

    def _load(self, width: int, length: int, outputs: int) -> None:
        """Run `width` concurrent requests to completion. Random prompts have no hits in the prefix cache."""
        for _ in range(width):
            self._number += 1
            vocabulary = range(min(_SPECIAL_IDS, self._plan.model.vocab_size // 2), self._plan.model.vocab_size)
            self._engine.submit(
                GenerationRequest(
                    request_id=str(self._number),
                    prompt_token_ids=tuple(self._rng.choices(vocabulary, k=length)),
                    sampling=SamplingParams(temperature=0.0),
                    stop=StopParams(max_new_tokens=outputs),
                    arrival_time=time.monotonic(),
                )
            )
        self._executor.begin()
        began = time.perf_counter()
        while self._engine.has_work:
            self._engine.step()
        rate = (time.perf_counter() - began) / (width * (length + outputs))
        self._seconds_per_token = max(self._seconds_per_token / 2, rate) if width * length >= 64 else 0.0


def calibrate(config: EngineConfig, seconds: float) -> dict[str, Any]:
    """Load the model, measure, fit. Raises ConfigError, ModelLoadError."""
    built = build(config)
    executor = TimedExecutor(built.executor)
    samples = Grid(Engine(built.scheduler, executor), executor, built.plan).measure(seconds)
    cost, error = fit(samples)
    plan = built.plan
    facts = machine(plan)
    scheduler = plan.scheduler
    pool = {name: getattr(scheduler, name) for name in ("num_blocks", "max_model_len", "plans_ahead", "windows")}
    return {
        "cost": {**cost.as_plain(), "origin": facts},
        "fit_error": error.as_plain(),
        "num_samples": len(samples),
        "settings": {**asdict(scheduler.limits), **pool},
        "bytes_per_block": plan.pool.bytes_per_block,
    }


def machine(plan: EnginePlan) -> dict[str, Any]:
    """Facts about the machine, the model and the build; `hash` tells whether a cost model fits another machine."""
    facts, model, computing = machine_facts(), plan.model, plan.machine
    what = {
        "model": plan.identity.checkpoint,
        "architecture": model.architecture,
        "build": version("quire"),
        "kernels": computing.kernels,
        "cpu_variant": computing.cpu_variant or "none",
        "dtype": model.dtype,
        "quantization": model.quantization or "none",
        "kv_cache_dtype": plan.pool.dtype,
        "threads": computing.num_threads,
        "device": computing.device,
        "processor": facts["processor"],
        "gpus": [gpu["name"] for gpu in facts["gpus"]],
    }
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    return {**what, "hash": digest, "measured": time.strftime("%Y-%m-%d")}


def _sizes(most: int) -> list[int]:
    """Powers of two up to `most`, and `most` itself."""
    return sorted({*(1 << i for i in range(most.bit_length())), most} - {0})


def answers(questions: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A calibration for each configuration. Raises ConfigError, ModelLoadError."""
    for asked in questions:
        yield calibrate(engine_config(asked["config"]), asked["seconds"])


if __name__ == "__main__":
    sys.exit(converse(answers))
