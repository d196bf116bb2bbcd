"""What the pool may take on each kind of device: what is asked of the device, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import quire_engine.execution.memory
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.execution.memory import estimate_workspace, pool_memory
from quire_engine.execution.models.config import load_model_config
from quire_engine.memory_plan import PoolSize
from quire_kernels.reference import REFERENCE
from support.checkpoints import shared_checkpoint

GIB = 1 << 30
PLANNED = PoolSize(num_blocks=3, max_model_len=48)


def memory_of(device: str, **changes):
    asked = EngineConfig(model=str(shared_checkpoint()), **changes)
    model = load_model_config(shared_checkpoint())
    return pool_memory(asked, model, REFERENCE, dtype=torch.float32, device=torch.device(device)), asked, model


def test_host_memory_is_decided_before_the_load(monkeypatch):
    monkeypatch.setattr(quire_engine.execution.memory, "available_memory", lambda: 5 * GIB)
    memory, *_ = memory_of("cpu", limits=SchedulerLimits(max_num_seqs=7))
    assert memory.before_load(GIB) == GIB  # a quarter of the rest
    assert memory.max_useful_seqs == 7
    assert memory.positions(PLANNED) == 48
    assert memory.after_load(None) is None
    asked, *_ = memory_of("cpu", kv_memory=3 * GIB)
    assert (asked.before_load(GIB), asked.max_useful_seqs) == (3 * GIB, None)
    with pytest.raises(ConfigError, match=r"need 5\.00 GiB of memory and 5\.00 GiB are available"):
        memory.before_load(5 * GIB)


def test_the_estimate_knows_what_attention_keeps_of_every_sequence():
    _, asked, model = memory_of("cuda", limits=SchedulerLimits(max_num_seqs=7))
    given = []

    def scratch(*sizes):
        given.append(sizes)
        return GIB

    kernels = replace(REFERENCE, attention_scratch=scratch)
    assert estimate_workspace(model, kernels, asked) == estimate_workspace(model, REFERENCE, asked) + GIB
    estimate_workspace(model, kernels, replace(asked, max_model_len=100))
    assert given == [(7, length, model.num_heads, model.head_dim) for length in (model.max_position_embeddings, 100)]


def test_gpu_memory_is_estimated_and_then_measured(monkeypatch):
    free = [60 * GIB]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 80 * GIB))
    memory, asked, model = memory_of("cuda", gpu_memory_utilization=0.5)
    estimate = estimate_workspace(model, REFERENCE, asked)
    assert 0 < estimate < GIB
    assert memory.before_load(10 * GIB) == 40 * GIB - 20 * GIB - 10 * GIB - estimate
    assert memory.max_useful_seqs is None
    assert memory.positions(PLANNED) == model.max_position_embeddings
    measured = []

    def measure(decoder, kernels, config, **where):
        measured.append((decoder, kernels, config.max_model_len, where))
        return 3 * GIB

    monkeypatch.setattr(quire_engine.execution.memory, "measure_workspace", measure)
    free[0] = 49 * GIB
    assert memory.after_load("decoder") == 40 * GIB - 31 * GIB - 3 * GIB
    where = {"dtype": torch.float32, "device": torch.device("cuda"), "layout": None, "adapters": None}
    assert measured == [("decoder", REFERENCE, model.max_position_embeddings, where)]
    short, *_ = memory_of("cuda", max_model_len=100)
    assert short.positions(PLANNED) == 100


def test_ranks_on_gpus_have_pools_in_all_their_memories(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(quire_engine.execution.memory, "measure_workspace", lambda *_, **__: 3 * GIB)
    alone, *_ = memory_of("cuda", gpu_memory_utilization=0.5)
    four, *_ = memory_of("cuda", gpu_memory_utilization=0.5, tensor_parallel_size=4)
    assert four.before_load(10 * GIB) == 4 * alone.before_load(10 * GIB)
    assert four.after_load("decoder") == 4 * alone.after_load("decoder") == 4 * 17 * GIB
    asked, *_ = memory_of("cuda", tensor_parallel_size=4, kv_memory=200 * GIB)
    assert asked.after_load("decoder") == 200 * GIB
    asked, *_ = memory_of("cuda", tensor_parallel_size=4, kv_memory=240 * GIB)
    with pytest.raises(ConfigError, match=r"more than the 228 GiB left"):
        asked.after_load("decoder")
