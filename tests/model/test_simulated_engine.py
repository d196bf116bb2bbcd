"""The whole engine over the GPU's runner on a simulated device: what is made, and that clients see the same bits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import quire_engine.execution.executor
import quire_engine.execution.memory
from quire_engine.build import BuiltEngine, build
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import BeamParams, GenerationRequest, SamplingParams, StopParams, ThinkingParams
from quire_engine.execution.executor import make_executor, runs_by_itself, spare_blocks, staging_blocks_for
from quire_engine.execution.gpu.graphs import GRAPH_BYTES, MOST_GRAPHS
from quire_engine.execution.gpu.runner import GpuRunner
from quire_engine.execution.kv.kv_storage import KVStorage
from quire_engine.execution.memory import measure_workspace
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.models.decoder import Decoder
from quire_engine.execution.models.weights import load_decoder
from quire_engine.execution.runner import Runner
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.scheduling.speculation import Speculate
from quire_kernels.reference import REFERENCE
from quire_kernels.reference.linear import SHARE, TILE, Linear, project
from support.checkpoints import shared_checkpoint
from support.covering import few
from support.limits import PLAIN_POLICIES
from support.model_steps import CPU, random_ids
from support.offline import Generated, generate
from support.simulated_device import SimulatedDevice
from support.simulated_kernels import SIMULATED

CUDA = torch.device("cuda")
LIMITS = SchedulerLimits(
    max_num_seqs=6, max_num_batched_tokens=40, prefill_chunk=24, max_num_partial_prefills=2, **PLAIN_POLICIES
)


def asked() -> EngineConfig:
    block_bytes = 2 * 2 * 2 * 16 * 32 * 4
    return EngineConfig(
        model=str(shared_checkpoint()),
        device="cpu",
        kernels="reference",
        max_model_len=128,
        kv_memory=11 * block_bytes,  # too little for six: some are preempted
        limits=LIMITS,
        async_scheduling="off",
    )


def on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    built: BuiltEngine,
    *,
    ahead: bool,
    num_host_blocks: int = 0,
    speculate: Speculate | None = None,
) -> tuple[BuiltEngine, SimulatedDevice]:
    """The same engine with the runner that a GPU would have, and decodes in columns from the first on."""
    device = SimulatedDevice()
    monkeypatch.setattr(quire_engine.execution.executor, "CudaDevice", lambda _: device)
    config = built.plan.scheduler
    path = shared_checkpoint()
    model = load_model_config(path)
    decoder = load_decoder(
        path, model, kernels=SIMULATED, dtype=torch.float32, device=CPU, max_model_len=config.max_model_len
    )
    num_blocks = config.num_blocks + spare_blocks(SIMULATED, CUDA)
    num_blocks += staging_blocks_for(SIMULATED, CUDA, built.plan.pool.bytes_per_block, num_host_blocks)
    executor = make_executor(
        decoder,
        SIMULATED,
        KVStorage(SIMULATED, model, num_blocks, 16, torch.float32, CPU),
        LIMITS,
        max_model_len=config.max_model_len,
        num_blocks=config.num_blocks,
        device=CUDA,
        ahead=ahead,
        grammars=built.grammars,
        num_host_blocks=num_host_blocks,
        drafts=speculate is not None,
    )
    assert isinstance(executor._runner, GpuRunner)
    config = replace(config, plans_ahead=ahead, num_host_blocks=num_host_blocks)
    scheduler = Scheduler(config, speculate=speculate, columns_from=0)
    return BuiltEngine(plan=built.plan, executor=executor, scheduler=scheduler, grammars=built.grammars), device


OPENING = 'start: (<[1]> "fox " <[2]>)? ("the dog" | "quick")'


def requests() -> list[GenerationRequest]:
    shared = random_ids(20, 99)
    sampling = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 1, "num_logprobs": 2},
        {"temperature": 1.2, "top_k": 9, "seed": 2},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.0, "num_prompt_logprobs": 1},
        {"temperature": 0.7, "top_p": 0.8, "min_tokens": 4, "seed": 3},
        {"temperature": 1.0, "seed": 4, "logit_bias": ((5, 2.0),)},
        {"temperature": 1.1, "seed": 5, "grammar": 'start: "quick " /[a-z ]{8}/ " fox jumps"'},
        {"temperature": 0.9, "seed": 6, "thinking": ThinkingParams(end_ids=(7, 8), is_open=True, max_tokens=5)},
        {"temperature": 0.0, "grammar": "start: <[7]>"},  # one token, and a vocabulary's end behind it
        *(
            {"temperature": heat, "seed": 9, "grammar": OPENING, "thinking_opener": 1, "logit_bias": ((1, bias),)}
            for heat, bias in ((0.0, 0.0), (0.0, 40.0), (0.9, 0.0), (0.9, 3.0))
        ),
    ]
    return [
        GenerationRequest(
            request_id=f"r{i}",
            prompt_token_ids=(*shared[: 5 * i], *random_ids(7 + 3 * i, i)),
            sampling=SamplingParams(**options),
            stop=StopParams(max_new_tokens=10 + 2 * i, stop_token_ids=tuple(range(0, 512, 40))),
            n=3 if i == 2 else 1,
        )
        for i, options in enumerate(sampling)
    ] + [
        GenerationRequest(
            request_id="beams",
            prompt_token_ids=tuple(shared[:12]),
            sampling=SamplingParams(num_logprobs=2),
            stop=StopParams(max_new_tokens=16, stop_token_ids=tuple(range(0, 512, 40))),
            n=2,
            beam=BeamParams(width=3),
        )
    ]


@cache
def host() -> tuple[BuiltEngine, dict[tuple[str, int], Generated]]:
    """An engine without a device, and what it gives these requests."""
    built = build(asked())
    return built, generate(built, requests())


@pytest.mark.matrix  # the same requests, beside others and in columns: below
@pytest.mark.parametrize("ahead", [True, False])
def test_clients_see_the_same(monkeypatch, ahead):
    built, right = host()
    gpu, device = on_a_gpu(monkeypatch, built, ahead=ahead)
    assert generate(gpu, requests()) == right
    assert {len(r.token_ids) for r in right.values()} > {10}, "some stop early"
    assert any(r.num_preemptions for r in right.values())
    assert not any(r.error for r in right.values())
    assert device.replays > 10


@pytest.mark.parametrize(("ahead", "eager"), few([(True, True), (True, False)], (True, False)))
def test_clients_see_the_same_when_requests_are_swapped(monkeypatch, ahead, eager):
    """Their blocks leave and come back in a lane of the device, which runs as late as it may or as early as it can."""
    built, right = host()
    gpu, device = on_a_gpu(monkeypatch, built, ahead=ahead, num_host_blocks=30)
    device.eager_lanes = eager
    for key, result in generate(gpu, requests()).items():
        assert replace(result, num_preemptions=0) == replace(right[key], num_preemptions=0)
    stats = gpu.scheduler.stats()
    assert stats.total_preemptions_by_mode["swap"] > 0
    assert stats.total_swapped_in_blocks > 0


def plain_requests() -> list[GenerationRequest]:
    """Requests that decode in columns: greedy and drawn, some with a common beginning, of many lengths."""
    shared = random_ids(20, 99)
    return [
        GenerationRequest(
            request_id=f"plain{i}",
            prompt_token_ids=(*shared[: 4 * i], *random_ids(5 + 2 * i, i)),
            sampling=SamplingParams(temperature=(0.0, 0.9, 0.0, 1.2)[i % 4], top_k=9 * (i % 2), seed=i),
            stop=StopParams(max_new_tokens=12 + 3 * i, stop_token_ids=tuple(range(0, 512, 64))),
        )
        for i in range(9)
    ]


@pytest.mark.parametrize("ahead", few([True, False, None], True))
def test_clients_see_the_same_with_decodes_in_columns(monkeypatch, ahead):
    """On a GPU, one step ahead or not, and on a CPU, beside requests that no column takes."""
    wanted = [each for pair in zip(plain_requests(), requests(), strict=False) for each in pair]
    plain = build(asked())
    right = generate(plain, wanted)
    in_columns: list[int] = []
    if ahead is None:
        built = replace(plain, scheduler=Scheduler(plain.plan.scheduler, columns_from=0))
    else:
        built, _ = on_a_gpu(monkeypatch, plain, ahead=ahead)
    found = generate(built, wanted, on_batch=lambda batch: in_columns.append(len(batch.items) - len(batch.others)))
    assert found == right
    assert max(in_columns) > 2
    assert sum(in_columns) > 50


def test_which_runner_is_made():
    path = shared_checkpoint()
    model = load_model_config(path)
    decoder = load_decoder(path, model, kernels=REFERENCE, dtype=torch.float32, device=CPU, max_model_len=64)
    kv = KVStorage(REFERENCE, model, 2, 16, torch.float32, CPU)
    executor = make_executor(decoder, REFERENCE, kv, LIMITS, max_model_len=64, num_blocks=2, device=CPU, ahead=True)
    assert isinstance(executor._runner, Runner)
    assert not runs_by_itself(REFERENCE, CUDA), "its tokens are chosen where the host waits for them"
    assert not runs_by_itself(replace(SIMULATED, attention=REFERENCE.attention), CUDA), "it follows the host's lengths"
    assert not runs_by_itself(SIMULATED, CPU)
    assert (spare_blocks(SIMULATED, CUDA), spare_blocks(SIMULATED, CPU), spare_blocks(REFERENCE, CUDA)) == (1, 0, 0)


class Books:
    """torch.cuda's books of memory, which the simulated device has none of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: SimulatedDevice) -> None:
        self.device = device
        monkeypatch.setattr(quire_engine.execution.executor, "CudaDevice", lambda _: device)
        for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1000)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 1000 + 70 * (device.sent > 0))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (9000 - 500 * device.captures, 10_000))


def measured(decoder: Decoder) -> int:
    config = replace(asked(), max_model_len=64)
    return measure_workspace(decoder, SIMULATED, config, dtype=torch.float32, device=torch.device("cuda"))


def simulated_decoder() -> Decoder:
    path = shared_checkpoint()
    config = load_model_config(path)
    return load_decoder(path, config, kernels=SIMULATED, dtype=torch.float32, device=CPU, max_model_len=64)


def test_the_memory_of_a_step_is_that_of_the_runner_that_serves(monkeypatch):
    monkeypatch.setattr(quire_engine.execution.memory, "KVStorage", on_the_cpu)
    books = Books(monkeypatch, SimulatedDevice())
    block = 2 * 2 * 2 * 16 * 32 * 4
    assert measured(simulated_decoder()) == 70 + 2 * 500 + MOST_GRAPHS * GRAPH_BYTES + block
    assert books.device.captures == 2, "the largest graph of decodes, and of a step with prompts"
    assert books.device.sent >= 4, "both of the largest batches, and the largest graphs'"


def test_a_step_that_does_not_fit_is_no_measure(monkeypatch):
    monkeypatch.setattr(quire_engine.execution.memory, "KVStorage", on_the_cpu)
    Books(monkeypatch, SimulatedDevice())
    decoder = simulated_decoder()

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(decoder, "forward", full)
    with pytest.raises(RuntimeError, match="no memory for one sequence alone"):
        measured(decoder)


def on_the_cpu(*what, layout):
    return KVStorage(*what[:-1], CPU, layout=layout)


def test_wide_products_of_the_reference_are_captured_like_all_others():
    """On a CPU with several threads the reference computes these in threads of its own, which a capture cannot see."""
    rows, device = torch.ones(TILE, 8), SimulatedDevice()
    weight = torch.arange(float(2 * SHARE * 8)).reshape(2 * SHARE, 8)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with device.work():
            kept: list[torch.Tensor] = []
            graph = device.capture(lambda: kept.append(project(rows, Linear(weight, None))))
            graph.replay()
            device.finish()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert kept[0].equal(rows @ weight.T)
