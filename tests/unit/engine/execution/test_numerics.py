"""The name of an engine's numerics: equal where the bits are, whatever the sizes."""

from __future__ import annotations

from dataclasses import replace

from quire_engine.build import resolve_plan
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.demo import demo_model_path

ASKED = EngineConfig(model=str(demo_model_path()), device="cpu", kernels="reference", dtype="float32")


def named(**fields: object) -> str:
    return resolve_plan(replace(ASKED, **fields)).identity.numerics  # type: ignore[arg-type]


def test_sizes_threads_and_limits_are_not_in_the_name() -> None:
    plain = named()
    assert len(plain) == 64
    others = (
        {"kv_memory": 8 << 20},
        {"num_threads": 1},
        {"max_model_len": 64},
        {"replicas": 2, "alive_seconds": 0.5},
        {"limits": SchedulerLimits(max_num_seqs=3, block_size=32)},
        {"speculation": "suffix"},
    )
    for fields in others:
        assert named(**fields) == plain, fields


def test_what_bits_depend_on_is() -> None:
    names = [named(), named(dtype="bfloat16"), named(deterministic=True)]
    assert len(set(names)) == len(names)
