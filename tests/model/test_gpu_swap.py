"""Swaps on a GPU: bytes come back as they were while steps run beside the copies, and requests keep their own bits.

The engine's tests run on a CPU too, where swapping is forced, so that they can be seen to pass; so does the benchmark.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from gpu.shapes import TINY
from gpu.steps import StepSizes
from gpu.swaps import measured
from quire_engine.build import BuiltEngine, build
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_engine.demo import demo_model_path
from quire_engine.execution.gpu import swaps
from quire_engine.execution.gpu.device import CudaDevice
from quire_engine.execution.gpu.swaps import StreamedKV, staging_blocks
from quire_engine.execution.kv.pool_rows import block_rows
from quire_engine.scheduling.scheduler import Scheduler
from quire_kernels.kernel_set import KVFormat
from quire_kernels.select import select
from support.limits import PLAIN_POLICIES
from support.model_steps import DEVICES, random_ids
from support.offline import generate

# On a CPU test_swapped.py holds the same, with more models.
LONG_ON_CPU = (pytest.param("cpu", marks=pytest.mark.matrix), *DEVICES[1:])
NUM_BLOCKS, NUM_HOST = 40, 24
SIZES = StepSizes(batches=(1, 2), context=20, steps=12, prefills=(16, 40), requests=0, lengths=(1, 1), repeat=1)


class Pool:
    """A pool of the GPU's kernels; blocks of a quarter to a half MiB, whose copies take their time."""

    def __init__(self, num_blocks: int, kv_type: str) -> None:
        device = torch.device("cuda")
        format_ = KVFormat(head_dim=128, block_size=16, kv_type=kv_type)
        kernels = select(device, torch.bfloat16, "triton", kv=format_)
        self._copy = kernels.copy_blocks
        self.tensor = kernels.new_kv(num_blocks, 8, 8, 16, 128, torch.bfloat16, device)

    def copy_blocks(self, pairs) -> None:
        if pairs:
            self._copy(self.tensor, pairs)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_type", ["auto", "fp8"])
@pytest.mark.parametrize("staged", [1, 3, 16])
def test_the_pool_is_as_if_swaps_were_done_in_their_places(kv_type, staged, monkeypatch):
    """Work that holds the stream up comes before some swaps, so that the lane could run ahead of it, and behind others,
    so that it could fall behind."""
    num_bytes = 8 * 2 * 8 * 16 * (128 * 2 if kv_type == "auto" else 128 + 4)
    monkeypatch.setattr(swaps, "STAGING_BYTES", staged * num_bytes)
    pool = Pool(NUM_BLOCKS + 1 + staging_blocks(num_bytes, NUM_HOST), kv_type)
    rows = block_rows(pool.tensor)
    assert rows.shape[1] == num_bytes
    dice, device = random.Random(staged), CudaDevice(torch.device("cuda"))
    with device.work(), torch.inference_mode():
        streamed = StreamedKV(pool, device, first_staging=NUM_BLOCKS + 1, num_blocks=NUM_HOST)
    right = [0] * NUM_BLOCKS
    held = [0] * NUM_HOST
    for step in range(60):
        count = dice.choice([0, 1, 2, 7, 20])
        out = list(zip(dice.choices(range(NUM_BLOCKS), k=count), dice.sample(range(NUM_HOST), count), strict=True))
        count = dice.choice([0, 1, 2, 7, 20])
        into = list(zip(dice.choices(range(NUM_HOST), k=count), dice.sample(range(NUM_BLOCKS), count), strict=True))
        if step == 0:  # what the host's blocks hold before is anything
            out, into = [(i, i) for i in range(NUM_HOST)], []
        for source, target in out:
            held[target] = right[source]
        for source, target in into:
            right[target] = held[source]
        with device.work(), torch.inference_mode():
            if dice.random() < 0.4:
                torch.cuda._sleep(dice.choice([10**5, 10**7]))
            streamed.swap(out, into)
            if dice.random() < 0.4:
                torch.cuda._sleep(10**6)
            for block in dice.sample(range(NUM_BLOCKS), 12):
                right[block] = dice.randrange(256)
                rows[block].fill_(right[block])
    torch.cuda.synchronize()
    expected = torch.tensor(right, dtype=torch.uint8, device="cuda").unsqueeze(1)
    wrong = (rows[:NUM_BLOCKS] != expected).any(dim=1).nonzero().flatten().tolist()
    assert wrong == [], f"blocks {wrong} are not what they should be"


def built_on(device: str, **changes: object) -> BuiltEngine:
    """One in which a choice's bits do not depend on its batch."""
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=128, prefill_chunk=64, **PLAIN_POLICIES)
    asked = EngineConfig(
        model=str(demo_model_path()),
        device=device,
        kernels="triton" if device == "cuda" else "cpu",
        dtype="bfloat16",
        deterministic=True,
        max_model_len=256,
        limits=limits,
        kv_memory=64 << 20,
    )
    return build(replace(asked, **changes))


def requests() -> list[GenerationRequest]:
    kinds = (
        SamplingParams(temperature=0.0, num_logprobs=2),
        SamplingParams(temperature=0.9, seed=5, num_logprobs=3),
        SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.2),
    )
    return [
        GenerationRequest(
            request_id=f"request {i}",
            prompt_token_ids=tuple(random_ids(20 + 23 * i % 90, i)),
            sampling=replace(kinds[i % 3], seed=i),
            stop=StopParams(max_new_tokens=40),
            n=2 if i % 4 == 3 else 1,
        )
        for i in range(9)
    ]


@pytest.mark.parametrize("device", LONG_ON_CPU)
def test_swapped_requests_and_restored_prefixes_have_their_own_bits(device):
    alone = {}
    solo = built_on(device)
    for request in requests():
        alone |= generate(solo, [replace(request, cache_salt=request.request_id)])
    memory = 26 * solo.plan.pool.bytes_per_block
    tight = built_on(device, kv_memory=memory, swap_space=100 * solo.plan.pool.bytes_per_block, swap_on_cpu=True)
    assert tight.plan.scheduler.swap_seconds > 0
    swapping = replace(tight, scheduler=Scheduler(replace(tight.plan.scheduler, swap_seconds=0.0)))
    for _ in range(2):  # the second time prompts are found, in the pool or on the host
        for key, result in generate(swapping, requests()).items():
            assert (result.token_ids, result.logprobs) == (alone[key].token_ids, alone[key].logprobs), key
    stats = swapping.scheduler.stats()
    assert stats.total_preemptions_by_mode["swap"] > 2
    assert stats.total_swapped_in_blocks > 10


@pytest.mark.parametrize("device", LONG_ON_CPU)
def test_prefixes_from_an_earlier_start_have_their_own_bits(device, tmp_path):
    wanted = [replace(request, n=1) for request in requests()]
    alone = generate(solo := built_on(device), wanted)
    block = solo.plan.pool.bytes_per_block
    again: dict[str, object] = {"kv_memory": 26 * block, "swap_space": 100 * block, "swap_on_cpu": True}
    found, hits = {}, 0
    for _ in range(2):
        built = built_on(device, kv_offload_dir=str(tmp_path / "kv"), **again)
        hits = built.scheduler.stats().host_blocks_cached
        for request in wanted:
            found |= generate(built, [request])
        assert {key: result.token_ids for key, result in found.items()} == {
            key: result.token_ids for key, result in alone.items()
        }
        built.executor._host._files.close()
    assert hits > 5
    assert built.scheduler.stats().total_swapped_in_blocks > 5


def test_the_benchmark_on_a_cpu(capsys):
    facts = list(measured(TINY, "cpu", SIZES, host_bytes=4 << 20))
    assert facts[0]["bytes_per_second"] > 0
    swaps_told = [fact for fact in facts if "blocks" in fact]
    assert {fact["blocks"] for fact in swaps_told} == {0, 1}  # so small is its pool
    assert all(fact["seconds"] > 0 for fact in swaps_told)
    assert [fact["prompt_tokens"] for fact in facts[-2:]] == [16, 40]
    assert "blocks each way" in capsys.readouterr().err
