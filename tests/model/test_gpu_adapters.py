"""Adapters over the GPU's runner on a simulated device: what clients see, copies to places, graphs, the plan."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import quire_engine.execution.executor
from quire_engine.build import BuiltEngine, build
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import Adapter, AdaptersInUse, GenerationRequest, SamplingParams, StopParams
from quire_engine.execution.adapters import AdapterCache, adapter_bytes, adapter_scratch
from quire_engine.execution.executor import make_executor
from quire_engine.execution.gpu.adapters import PlacedAdapters
from quire_engine.execution.gpu.device import HostBuffer
from quire_engine.execution.gpu.graphs import Bucket
from quire_engine.execution.gpu.runner import GpuRunner
from quire_engine.execution.gpu.tables import ADAPTED
from quire_engine.execution.kv.kv_storage import KVStorage
from quire_engine.execution.models.adapter import adapted_products, read_adapter
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.models.weights import load_decoder
from quire_engine.execution.step_tensors import StepTensors
from quire_engine.scheduling.scheduler import Scheduler
from quire_kernels.adapter_places import AdapterPlaces
from quire_kernels.reference import REFERENCE
from support.adapters import write_adapter
from support.checkpoints import shared_checkpoint
from support.covering import few
from support.limits import PLAIN_POLICIES
from support.model_steps import CPU, random_ids
from support.offline import generate
from support.simulated_device import SimulatedDevice
from support.simulated_kernels import SIMULATED

CUDA = torch.device("cuda")
RANK = 16  # that places have, so that their bits are the reference's
MODEL = {"family": "qwen3", "tie_word_embeddings": False}


def limits(max_loras: int) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=6,
        max_num_batched_tokens=64,
        prefill_chunk=24,
        max_num_partial_prefills=2,
        max_loras=max_loras,
        elder_age_steps=4,
        **PLAIN_POLICIES,
    )


def asked(max_loras: int = 3) -> EngineConfig:
    return EngineConfig(
        model=str(shared_checkpoint(**MODEL)),
        device="cpu",
        kernels="reference",
        max_model_len=128,
        kv_memory=4 << 20,
        limits=limits(max_loras),
        async_scheduling="off",
        enable_lora=True,
        max_cpu_loras=4,
        max_lora_rank=RANK,
    )


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    folder, model = tmp_path_factory.mktemp("adapters"), shared_checkpoint(**MODEL)
    forms = ({}, {"layers": (1,)}, {"alpha": 3.0, "dtype": torch.bfloat16}, {"targets": ("q_proj", "k_proj", "v_proj")})
    found = []
    for i, form in enumerate(forms):
        path = write_adapter(folder / f"a{i}", model, seed=i, rank=RANK, **form)
        digest = read_adapter(path, load_model_config(model), max_rank=RANK).digest
        found.append(Adapter(name=f"a{i}", path=str(path), digest=digest))
    return found


def requests(bound: list[Adapter], count: int = 12) -> list[GenerationRequest]:
    """Of every adapter and of none; the first have one prompt."""
    choices = [None, *bound]
    kinds = ({"temperature": 0.0}, {"temperature": 0.9, "num_logprobs": 2}, {"temperature": 1.1, "top_k": 9})
    return [
        GenerationRequest(
            request_id=f"r{i}",
            prompt_token_ids=tuple(random_ids(30, i // 5)),
            sampling=SamplingParams(seed=i, **kinds[i % 3]),
            stop=StopParams(max_new_tokens=8 + i),
            n=2 if i == 4 else 1,
        ).bound_to(choices[i % len(choices)])
        for i in range(count)
    ]


def buffers_of(device: SimulatedDevice) -> Callable[[int], HostBuffer]:
    """Of any thread: the device's own are its user's thread's alone."""

    def made(num_bytes: int) -> HostBuffer:
        buffer = HostBuffer(torch.full((num_bytes,), 0xA5, dtype=torch.uint8))
        device._host[buffer.tensor.untyped_storage().data_ptr()] = buffer
        return buffer

    return made


def on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, host: BuiltEngine, *, ahead: bool
) -> tuple[BuiltEngine, SimulatedDevice, PlacedAdapters]:
    device = SimulatedDevice()
    monkeypatch.setattr(quire_engine.execution.executor, "CudaDevice", lambda _: device)
    planned, path = host.plan.scheduler, Path(config.model)
    model = load_model_config(path)
    decoder = load_decoder(
        path, model, kernels=SIMULATED, dtype=torch.float32, device=CPU, max_model_len=planned.max_model_len
    )
    places = AdapterPlaces(adapted_products(model), config.limits.max_loras, RANK, torch.float32, CPU)
    placed = PlacedAdapters(places, buffers_of(device))
    assert SIMULATED.adapted is not None
    adapters = AdapterCache(model, SIMULATED.adapted, max_rank=RANK, most=config.max_cpu_loras or 1, placed=placed)
    executor = make_executor(
        decoder,
        SIMULATED,
        KVStorage(SIMULATED, model, planned.num_blocks + 1, 16, torch.float32, CPU),
        config.limits,
        max_model_len=planned.max_model_len,
        num_blocks=planned.num_blocks,
        device=CUDA,
        ahead=ahead,
        adapters=adapters,
    )
    scheduler = Scheduler(replace(planned, plans_ahead=ahead), columns_from=0)
    return (
        BuiltEngine(plan=host.plan, executor=executor, scheduler=scheduler, grammars=host.grammars, adapters=adapters),
        device,
        placed,
    )


@pytest.mark.parametrize("ahead", few([True, False], True))
@pytest.mark.parametrize("max_loras", few([4, 2], 2))
def test_clients_see_the_same(monkeypatch, ahead: bool, max_loras: int, bound) -> None:
    """With places for all adapters, and with two that change hands while steps are in flight."""
    config = asked(max_loras)
    host = build(config)
    right = generate(host, requests(bound))
    gpu, device, placed = on_a_gpu(monkeypatch, config, host, ahead=ahead)
    before = device.sent
    assert generate(gpu, requests(bound)) == right
    assert not any(result.error for result in right.values())
    assert len({tuple(result.token_ids) for result in right.values()}) > 8
    runner = gpu.executor._runner
    assert isinstance(runner, GpuRunner)
    flags = {bucket.flags & ADAPTED for bucket in runner._graphs._captured if isinstance(bucket, Bucket)}
    assert ADAPTED in flags
    assert device.replays > 10
    assert device.sent > before
    assert set(placed._place_of) <= {adapter.digest for adapter in bound}
    assert len(placed._place_of) == max_loras


def test_steps_without_adapters_take_the_graphs_that_they_took(monkeypatch, bound) -> None:
    config = asked()
    host = build(config)
    plain = requests(bound[:0], 5)
    gpu, _, placed = on_a_gpu(monkeypatch, config, host, ahead=True)
    assert generate(gpu, plain) == generate(host, plain)
    runner = gpu.executor._runner
    assert isinstance(runner, GpuRunner)
    assert {bucket.flags & ADAPTED for bucket in runner._graphs._captured if isinstance(bucket, Bucket)} == {0}
    assert not placed._place_of
    assert runner._graphs.largest.flags & ADAPTED


def test_the_largest_graphs_are_those_of_steps_with_adapters(monkeypatch, bound) -> None:
    config = asked()
    gpu, device, _ = on_a_gpu(monkeypatch, config, build(config), ahead=True)
    runner = gpu.executor._runner
    assert isinstance(runner, GpuRunner)
    runner.capture_largest()
    assert device.captures == 2
    assert set(runner._graphs._captured) == {runner._graphs.largest, runner._graphs.largest_mixed}
    assert runner._graphs.largest_mixed is not None
    assert runner._graphs.largest_mixed.adapted


def step_of(*digests: str) -> StepTensors:
    step = StepTensors()
    step.adapters = list(digests)
    step.adapter_slots = array("i", [-1, *range(len(digests))])
    return step


def test_the_place_that_was_used_least_recently_is_taken(bound) -> None:
    model = load_model_config(shared_checkpoint(**MODEL))
    places = AdapterPlaces(adapted_products(model), 2, RANK, torch.float32, CPU)
    device = SimulatedDevice()
    placed = PlacedAdapters(places, buffers_of(device))
    matrices = {each.digest: read_adapter(Path(each.path), model, max_rank=RANK).matrices for each in bound}
    packed = {digest: placed.packed(each) for digest, each in matrices.items()}
    placed.packed_of = packed.__getitem__
    a, b, c, _ = (each.digest for each in bound)

    def rows(*digests: str) -> list[int]:
        return placed.place_rows(step_of(*digests), device).tolist()

    assert rows(a, b) == [-1, 0, 1]
    assert rows(a) == [-1, 0]
    assert rows(c) == [-1, 1]
    assert rows(b, c) == [-1, 0, 1]
    assert device.sent == 4
    with pytest.raises(ValueError, match="a step has 3 adapters, and there are 2 places"):
        rows(a, b, c)
    device.finish()
    assert torch.equal(places.place(1), packed[c].tensor)


def test_experts_are_refused_on_a_gpu(bound, tmp_path: Path) -> None:
    path = shared_checkpoint("qwen3_moe")
    model = load_model_config(path)
    places = AdapterPlaces(adapted_products(model), 1, RANK, torch.float32, CPU)
    assert SIMULATED.adapted is not None
    placed = PlacedAdapters(places, buffers_of(SimulatedDevice()))
    cache = AdapterCache(model, SIMULATED.adapted, max_rank=RANK, most=1, placed=placed)
    written = write_adapter(tmp_path / "all", path)
    with pytest.raises(ModelLoadError, match=r"all: it adds to experts that rows choose, which is computed on a CPU"):
        cache._load(str(written))
    attention = write_adapter(tmp_path / "attention", path, targets=("q_proj", "o_proj"))
    assert cache._load(str(attention)).num_bytes == len(places.place(0))
    assert cache.prepare(Adapter(name="x", path=str(attention), digest="x"), AdaptersInUse((), ())) is None


def test_the_plan_counts_places_and_scratch() -> None:
    config = asked(2)
    model = load_model_config(Path(config.model))
    assert SIMULATED.adapted is not None
    places = AdapterPlaces(adapted_products(model), 2, RANK, torch.float32, CPU)
    assert adapter_bytes(config, model, SIMULATED, CUDA) == 2 * len(places.place(0))
    assert adapter_scratch(config, model, SIMULATED) == 64 * RANK
    assert adapter_scratch(replace(config, enable_lora=False), model, SIMULATED) == 0
    assert adapter_scratch(config, model, REFERENCE) == 0
    with pytest.raises(ConfigError, match="enable_lora: the reference kernels compute adapters on a CPU only"):
        adapter_bytes(config, model, REFERENCE, CUDA)
