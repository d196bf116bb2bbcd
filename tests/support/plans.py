"""Plans of engines: a small one, and copies that differ in some fields of their parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_engine.contract.limits import SchedulerConfig
from quire_engine.contract.plan import EnginePlan, MachinePart, ModelPart, PoolPart


def small_plan(scheduler: SchedulerConfig, **parts: Mapping[str, Any]) -> EnginePlan:
    """The plan of a small model on one thread of a CPU. `parts`: the fields of each in which it differs."""
    plan = EnginePlan(
        model=ModelPart(
            path="/m",
            architecture="FakeForCausalLM",
            num_parameters=1,
            vocab_size=100,
            dtype="float32",
            weights_bytes=4,
        ),
        machine=MachinePart(device="cpu", kernels="reference", num_threads=1),
        pool=PoolPart(num_bytes=scheduler.num_blocks * 1024, bytes_per_block=1024),
        scheduler=scheduler,
    )
    return changed(plan, **parts)


def changed(plan: EnginePlan, **parts: Mapping[str, Any]) -> EnginePlan:
    """The plan with other fields in its parts: `changed(plan, machine={"device": "cuda"})`."""
    return replace(plan, **{name: replace(getattr(plan, name), **fields) for name, fields in parts.items()})
