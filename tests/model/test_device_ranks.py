"""Ranks that have a GPU each: what is refused by name, their memory, how they are told, and a start that fails."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from quire_engine.build import plan_text, resolve_plan
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.models.found import find_model
from quire_engine.execution.parallel.checks import check_kept, check_ranks
from quire_engine.execution.parallel.devices import Children
from quire_engine.process.device_rank import receive
from quire_kernels.kernel_set import KernelSet
from quire_kernels.ranks import RankLost
from quire_kernels.reference import REFERENCE
from support.checkpoints import shared_checkpoint
from support.plans import changed

CUDA = torch.device("cuda")
DIVIDED = replace(REFERENCE, name="triton", part_of=lambda w, _: w)


def asked(**changes: object) -> EngineConfig:
    return EngineConfig(model=str(shared_checkpoint()), **{"tensor_parallel_size": 2, **changes})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


def refusal(config: EngineConfig, *, family: str = "", kernels: KernelSet = DIVIDED, implementation: str = "") -> str:
    path = shared_checkpoint(family) if family else Path(config.model)
    with pytest.raises(ConfigError) as refused:
        check_ranks(config, load_model_config(path), kernels, CUDA, implementation)
    return str(refused.value)


def test_what_ranks_on_gpus_serve(gpus):
    for family in ("qwen3", "gemma2", "granite"):
        check_ranks(asked(), load_model_config(shared_checkpoint(family)), DIVIDED, CUDA, "")
    check_ranks(asked(tensor_parallel_size=4, quantization="int8"), find_model(asked()).facts, DIVIDED, CUDA, "")


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({"tensor_parallel_size": 8}, {}, "torch finds 4 GPUs here; set it to at most 4"),
        (
            {"tensor_parallel_size": 3},
            {},
            "4 heads, and 2 of keys, are not divided among so many ranks; set it to 1",
        ),
        (
            {},
            {"kernels": REFERENCE},
            "the reference kernels are not divided among ranks on GPUs; set kernels to",
        ),
        ({}, {"implementation": "transformers"}, "the model is computed by transformers' code"),
        ({}, {"family": "qwen3_moe"}, "the experts of these kernels are not divided among ranks on GPUs"),
        ({}, {"family": "olmo2"}, "norms of all heads together are divided among ranks on a CPU only"),
        ({"enable_lora": True}, {}, "adapters are computed by ranks on a CPU only; set enable_lora to false"),
        ({"swap_space": 1 << 30}, {}, "ranks on GPUs have no swap space; set swap_space to 0"),
    ],
)
def test_what_they_do_not_serve_is_refused_by_name(gpus, changes, given, message):
    found = refusal(asked(**changes), **given)
    assert message in found
    assert found.startswith(f"tensor_parallel_size={changes.get('tensor_parallel_size', 2)}: ")


def test_a_torch_without_nccl_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert "GPUs exchange columns by NCCL, which this torch was built without" in refusal(asked())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "torch finds 1 GPU here; set it to at most 1" in refusal(asked())


def test_kernels_that_failed_a_check_serve_no_ranks():
    check_kept(2, ())
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: .* need the kernels, of which rope_write failed"):
        check_kept(2, ("rope_write",))


def test_weights_of_a_rank_are_its_part_of_the_matrices_and_all_else():
    parameters = find_model(asked()).parameters(shared_checkpoint())
    alone, half = (parameters.memory(2, REFERENCE, memories=count) for count in (1, 2))
    embedding, small = (2 * number for number in (parameters.embedding, parameters.small))
    matrices = alone.read - small
    assert (half.read, half.total) == (matrices // 2 + small, matrices // 2 + small + embedding)
    assert parameters.memory(2, REFERENCE, 1000, memories=2).read == 1000 + small


def test_the_plan_tells_what_each_rank_holds():
    plan = resolve_plan(asked(tensor_parallel_size=1, device="cpu", kernels="reference", kv_memory=4 << 20))
    assert "each rank" not in plan_text(plan)
    two = changed(
        plan,
        model={"weights_bytes": 6 << 30},
        machine={"device": "cuda", "tensor_parallel_size": 2},
        pool={"num_bytes": 3 << 30},
    )
    assert "each rank        a GPU with 3.00 GiB of weights and 1.50 GiB of the KV cache" in plan_text(two)


def test_messages_come_whole_or_not_at_all():
    written = BytesIO()
    for message in (b"first", b"second" * 20_000):
        written.write(len(message).to_bytes(8, "little") + message)
    written.seek(0)
    assert receive(written) == b"first"
    assert receive(written) == b"second" * 20_000
    with pytest.raises(EOFError):
        receive(written)
    with pytest.raises(EOFError):
        receive(BytesIO((10).to_bytes(8, "little") + b"cut"))


def test_a_child_that_ends_at_its_start_is_named():
    children = Children([[sys.executable, "-c", "print(input())"], [sys.executable, "-c", "pass"]], [])
    children.tell_all({"a": 1})
    with pytest.raises(ModelLoadError, match="rank 2 of 3 has ended at its start"):
        children.replies()
    os.waitid(os.P_PID, children.pids[1], os.WEXITED | os.WNOWAIT)  # its end of the pipe is closed
    with pytest.raises(RankLost, match="of the model has ended"):
        children.send(b"more")
    children.end()
