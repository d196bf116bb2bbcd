"""Engines whose windowed layers give blocks back: the tokens of one whose layers share all blocks, to the bit.

Whatever a table does not hold is poison: every free block of the pool and the block that passed entries name are NaN
before each step, so a walk that reads one spoils a row.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from quire_engine import build as building
from quire_engine.build import BuiltEngine, build
from quire_engine.contract.batch import Batch
from quire_engine.contract.config import DType, EngineConfig
from quire_engine.contract.kv_groups import one_group
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_engine.execution.kv import kv_storage
from quire_engine.execution.kv.pool_rows import block_rows
from quire_engine.scheduling import blocks as scheduling_blocks
from quire_engine.scheduling import prefix_cache
from support.checkpoints import ALL_FAMILIES, make_checkpoint
from support.covering import few
from support.model_steps import random_ids
from support.offline import generate
from sweep.__main__ import save_random, tiny

SIZES = {"num_hidden_layers": 4, "max_position_embeddings": 2048}
MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
# (family, options, windows of the groups)
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int | None, ...]]] = {
    "one full layer of four": ("gemma3", {"sliding_window": 40, "layer_types": MIXED}, (None, 40, 40, 40)),
    "heads of two widths": ("gemma4", {"sliding_window": 40, "layer_types": [*MIXED[1:], *MIXED[2:3]]}, (None, 40)),
    "every layer": ("mistral", {"sliding_window": 37}, (37,)),
    "every other layer, with sinks and experts": (
        "gpt_oss",
        {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"] * 2},
        (None, 40),
    ),
    "every other layer, by transformers": ("vaultgemma", {"sliding_window": 40}, (None, 40)),
    "in a plain pool": ("vaultgemma", {"sliding_window": 40, "head_dim": 24}, (None, 40)),
}


@cache
def checkpoint(name: str) -> Path:
    family, options, _ = MODELS[name]
    path = Path(mkdtemp(prefix="quire-windows-"))
    atexit.register(rmtree, path, ignore_errors=True)
    if family in ALL_FAMILIES:
        return make_checkpoint(path, family, dtype="bfloat16", **SIZES, **options)
    save_random(tiny(family, **SIZES, **options), path, torch.bfloat16)
    return path


Watch = Callable[[Batch], None]


def engine(path: Path, num_blocks: int, *, step: int = 48, dtype: DType = "auto") -> BuiltEngine:
    asked = EngineConfig(
        model=str(path),
        device="cpu",
        dtype=dtype,
        num_threads=1,
        limits=SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=step, prefill_chunk=step, admission="prompt"),
        max_model_len=600,
    )
    resolved = building.resolve(asked)
    return build(replace(asked, kv_memory=num_blocks * resolved.bytes_per_block))


def requests() -> list[GenerationRequest]:
    """Prompts of up to several windows; the last ones begin as the first."""
    prompts = [random_ids(length, seed, 120) for seed, length in enumerate((300, 170, 90, 20, 7))]
    prompts += [[*prompts[0][:240], 5, 6, 7, 8], [*prompts[1][:96], 9]]
    return [
        GenerationRequest(
            request_id=f"r{number}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.0 if number % 2 else 1.0, seed=number, num_logprobs=2),
            stop=StopParams(max_new_tokens=50),
            n=2 if number == 2 else 1,
        )
        for number, prompt in enumerate(prompts)
    ]


def poisoned(
    path: Path, num_blocks: int, patch: pytest.MonkeyPatch, dtype: DType = "auto"
) -> tuple[BuiltEngine, Watch]:
    """An engine whose passed entries name a block behind the pool, and what spoils all free blocks before a step."""
    with patch.context() as during:
        during.setattr(building, "spare_blocks", lambda kernels, device: 1)
        built = engine(path, num_blocks, dtype=dtype)
    pool = block_rows(built.executor._kv.tensor)  # type: ignore[attr-defined]
    last = len(pool) - 1
    assert last == built.plan.scheduler.num_blocks
    for module in (scheduling_blocks, prefix_cache):
        patch.setattr(module, "PASSED", last)

    def spoil(_: Batch) -> None:
        pool[[last, *built.scheduler._kv._pool._free]] = 0xFF

    return built, spoil


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *few(((name, "auto") for name in MODELS), ("one full layer of four", "auto")),
        pytest.param("every layer", "float32", marks=pytest.mark.matrix),
    ],
)
def test_the_tokens_are_those_of_one_group_of_layers(name: str, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(name)
    grouped, spoil = poisoned(path, 400, monkeypatch, dtype)
    assert grouped.plan.scheduler.windows == MODELS[name][2]
    passed = 0

    def watch(batch: Batch) -> None:
        nonlocal passed
        spoil(batch)
        tables = [table for s in grouped.scheduler._roster.sequences.values() for table in s.kv.tables]
        passed += sum(table.num_passed for table in tables)

    got = generate(grouped, requests(), on_batch=watch)
    assert passed > 100
    assert any(each.num_cached_tokens > 200 for each in got.values())
    monkeypatch.undo()
    monkeypatch.setattr(kv_storage, "_layout", lambda config, model, device, head_ranks: one_group(model.kv_heads))
    whole = engine(path, 200, dtype=dtype)
    assert whole.plan.scheduler.windows == (None,)
    assert got == generate(whole, requests())


@pytest.mark.parametrize(
    "name", few(["one full layer of four", "heads of two widths", "every layer"], "heads of two widths")
)
def test_a_small_pool_preempts_and_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(name)
    wanted = generate(engine(path, 400, step=160), requests())
    small, spoil = poisoned(path, 14 if name == "every layer" else 60, monkeypatch)
    got = generate(small, requests(), on_batch=spoil)
    assert got == wanted
    assert sum(each.num_preemptions for each in got.values()) > 0


def test_a_gemma_of_32k_holds_four_times_the_sequences(tmp_path: Path) -> None:
    """By the plan, whose counts the scheduler keeps to."""
    layers = ["full_attention" if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(26)]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 32768}
    make_checkpoint(tmp_path, "gemma3", num_hidden_layers=26, layer_types=layers, sliding_window=512, **sizes)
    resolved = building.resolve(EngineConfig(model=str(tmp_path), device="cpu", max_model_len=32768))
    pool = resolved.pool(1 << 30)
    plan = resolved.plan(pool, resolved.scheduler(pool))
    bytes_per_layer = resolved.bytes_per_block // resolved.layout.layers_per_block
    shared = (1 << 30) // (32768 // 16 * 26 * bytes_per_layer)  # with all layers in every block
    assert plan.scheduler.num_blocks // plan.scheduler.num_blocks_for(32768) >= 4 * shared > 0
