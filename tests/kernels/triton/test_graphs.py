"""The Triton kernels in captured graphs: what a launch takes from the host at the capture serves every replay.

In the interpreter launches join the simulated device's queue; on a GPU the device is the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from quire_engine.contract.batch import Batch, StepResult
from quire_engine.demo import demo_model_path
from quire_engine.execution.executor import Executor
from quire_engine.execution.gpu import graphs
from quire_engine.execution.gpu.device import CudaDevice
from quire_engine.execution.gpu.rank_commands import DeviceLeader, decode
from quire_engine.execution.gpu.runner import GpuRunner, RunnerLimits
from quire_engine.execution.runner import Runner
from quire_kernels.divided import divided
from quire_kernels.kernel_set import KernelSet
from quire_kernels.ranks import DeviceCollective, TorchDistributed
from quire_kernels.triton.set import make_triton_set
from support.checkpoints import shared_checkpoint
from support.device_ranks import Launched
from support.guarded import DEVICE
from support.model_steps import Model
from support.simulated_device import SimulatedDevice
from support.step_stories import Story, ahead

pytestmark = pytest.mark.skipif("ttsem" in sys.modules, reason="the sanitizer launches in its own way")

NUM_BLOCKS = 40
LIMITS = RunnerLimits(
    max_num_seqs=4, max_num_batched_tokens=512, max_model_len=512, block_size=16, spare_block=NUM_BLOCKS
)


@pytest.fixture
def device() -> Iterator[Any]:
    if DEVICE.type == "cuda":
        yield CudaDevice(DEVICE)
        return
    from triton.runtime import interpreter

    simulated = SimulatedDevice()
    launch = interpreter.GridExecutor.__call__

    def queued(self: Any, *args: Any, **kwargs: Any) -> None:
        if simulated.executing:
            launch(self, *args, **kwargs)
        else:
            simulated.keep(lambda *a, **k: launch(self, *a, **k), args, kwargs, None)

    with patch.object(interpreter.GridExecutor, "__call__", queued):
        yield simulated


@pytest.fixture
def exchange(tmp_path: Path) -> Iterator[DeviceCollective]:
    """Of one rank with itself: by NCCL on a GPU; in the interpreter by Gloo, as an operation that a graph may hold."""
    name, index = ("nccl", torch.device("cuda", 0)) if DEVICE.type == "cuda" else ("gloo", None)
    dist.init_process_group(name, init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1, device_id=index)
    try:
        assert dist.group.WORLD is not None
        found = TorchDistributed(dist.group.WORLD, DEVICE)
        yield found if index else Launched(found)
    finally:
        dist.destroy_process_group()


def _model(path: Path, kernels: KernelSet | None = None) -> Model:
    return Model(
        path,
        dtype=torch.bfloat16,
        device=str(DEVICE),
        num_blocks=NUM_BLOCKS + 1,
        max_model_len=512,
        kernels=kernels or make_triton_set(deterministic=True),
    )


def _results(runner: GpuRunner, model: Model, story: Story) -> list[StepResult]:
    """The story's steps, each launched while the one before it is computed."""
    executor = Executor(runner, model.kv)
    results = []
    for number, (batch, _) in enumerate(ahead(story.steps)):
        executor.launch(batch)
        if number:
            results.append(executor.collect())
    results.append(executor.collect())
    return results


def _tell(device: Any, path: Path, length: int) -> Story:
    """Two sequences, one of `length` tokens, as the runner computes them that waits for every step."""
    model = _model(path)
    executor = Executor(Runner(model.decoder, model.kv.tensor, 16, DEVICE), model.kv)

    def execute(batch: Batch) -> StepResult:
        if not isinstance(device, SimulatedDevice):
            return executor.execute(batch)
        with patch.object(device, "executing", True):  # at once, not queued
            return executor.execute(batch)

    story = Story(execute, num_blocks=NUM_BLOCKS, chunk=512)
    story.add(0, range(20, 20 + length), 5, num_logprobs=1)
    story.add(1, (9, 8, 7, 6, 5), 3, temperature=0.8, top_k=20, top_p=0.9, seed=3)
    story.run()
    return story


@pytest.mark.parametrize(
    ("family", "shortest", "length", "mixed_rows"),
    [
        ("qwen3", 512, 3, 512),
        ("qwen3_moe", 512, 3, 512),
        pytest.param("", 512, 3, 512, marks=pytest.mark.matrix),  # the embedded model: minutes
        *(pytest.param("", 256, length, rows, marks=pytest.mark.sim) for length in (3, 253) for rows in (0, 512)),
    ],
)
def test_replays_compute_what_steps_compute_that_are_waited_for(  # noqa: PLR0917 - parameters
    device, monkeypatch, family, shortest, length, mixed_rows
):
    """One part of keys; two parts planned of which one is there; and a context that grows into its second part.

    With `mixed_rows` the prompts' step is one of a graph's size too: with rows of no sequence, sequences without rows.
    A graph of experts serves whatever its rows choose.
    """
    monkeypatch.setattr(graphs, "_SHORTEST", shortest)
    path = shared_checkpoint(family) if family else demo_model_path()
    story, model = _tell(device, path, length), _model(path)
    runner = GpuRunner(model.decoder, model.kv.tensor, device, replace(LIMITS, mixed_rows=mixed_rows))
    assert _results(runner, model, story) == [told.result for told in story.steps]
    if isinstance(device, SimulatedDevice):
        assert device.replays
        assert (device.pageable, set(device.waits)) == (0, {"event"}), "nothing waits but who collects"


def test_a_rank_that_gathers_from_itself_replays_its_exchanges(device, monkeypatch, exchange):
    """The path of many ranks: products of own columns, exchanges in graphs, what the others are told."""
    monkeypatch.setattr(graphs, "_SHORTEST", 512)
    path, told = shared_checkpoint("qwen3"), list[bytes]()
    story = _tell(device, path, 3)
    model = _model(path, divided(make_triton_set(deterministic=True), exchange))
    limits, leader = replace(LIMITS, mixed_rows=512), DeviceLeader(exchange, told.append)
    runner = GpuRunner(model.decoder, model.kv.tensor, device, limits, others=leader)
    assert _results(runner, model, story) == [each.result for each in story.steps]
    assert {decode(message)[0] for message in told} == {"sent", "mixed", "decodes", "logits", "tokens"}
    assert len(runner._graphs) > 1
