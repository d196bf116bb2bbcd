"""`make gpu-bench` on the CPU with tiny sizes: its arithmetic, its whole flow, what it says where something fails."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from gpu import __main__ as gpu_bench
from gpu import compiled, kernels, parts, timing
from gpu.chips import CHIPS, chip_of, doubts
from gpu.kernels import KernelBench, KernelSizes, KernelTime
from gpu.report import GpuResults, lines
from gpu.shapes import TINY, write_checkpoint
from gpu.steps import StepBench, StepSizes, eager, engine_config, prompt_operations
from quire_engine.build import build
from quire_engine.tools import gpu_limits
from quire_engine.tools.gpu_limits import Limits
from quire_kernels.reference import REFERENCE
from support.model_steps import random_ids

CPU = torch.device("cpu")
CPU_ONLY = ("--device", "cpu")
QUICK = "decode,nano,compiled,contiguous,gaps,chains,kv-types,swap,kernels,demo,model"
SIZES = StepSizes(batches=(1, 3), context=20, steps=12, prefills=(16, 40), requests=4, lengths=(4, 12), repeat=1)
LIMITS = Limits(
    variant="NVIDIA H100 80GB HBM3",
    threads=132,
    fp32_per_second=50e12,
    bf16_per_second=700e12,
    fp16_per_second=700e12,
    int8_per_second=0.0,
    read_bytes_per_second=3e12,
    cache_bytes=50 << 20,
)


@pytest.mark.matrix  # a quarter of a minute; a part that fails is tried beside it
def test_the_whole_flow(tmp_path, capsys):
    out = tmp_path / "folder" / "results.json"
    assert gpu_bench.main(["--device", "cpu", "--out", str(out), "--parts", QUICK]) == 0
    found = json.loads(out.read_text())
    assert set(found["parts"]) == set(QUICK.split(",")[:4])
    assert [row["run"] for row in found["parts"]["nano"]] == ["first", "second"]
    assert all(row["tokens/s"] > 0 for row in found["parts"]["nano"] + found["parts"]["decode"])
    assert [row["streams"] for row in found["parts"]["compiled"]] == [1, 2]
    assert found["not_measured"] == {
        "gaps": "the gap between launches needs a GPU",
        "chains": "a chain of launches needs a GPU",
        "kv-types": "an FP8 KV cache needs a GPU",
        "swap": "swapping to the host needs a GPU",
    }
    assert [model["model"] for model in found["models"]] == ["quire-demo", "tiny shape"]
    for model in found["models"]:
        served = [(one["executor"], one["batch"]) for one in model["decodes"]]
        assert served == [("serving", 1), ("serving", 3), ("eager", 1), ("eager", 3)]
        assert [one["tokens"] for one in model["prefills"]] == [16, 40]
        assert all(one["seconds"] > 0 for one in model["decodes"] + model["prefills"])
        assert 16 <= model["throughput"]["output_tokens"] <= 48
    assert {one["name"] for one in found["kernels"]} >= {"norm + QKV", "decode attention", "prefill attention"}
    printed = capsys.readouterr().out
    assert "NOT MEASURED: chains: a chain of launches needs a GPU" in printed
    assert "these numbers mean nothing" in printed
    assert f"written to {out}" in printed


def test_the_most_wanted_part_comes_first_and_unknown_ones_are_named(capsys):
    assert gpu_bench.NAMES[:3] == ("decode", "gaps", "chains")
    assert gpu_bench.NAMES[-3:] == ("kernels", "model", "demo")
    with pytest.raises(SystemExit):
        gpu_bench.main(["--device", "cpu", "--parts", "decode,decod"])
    assert "no part is called decod: they are decode, gaps" in capsys.readouterr().err


def test_the_load_of_nano_vllm_is_its_own():
    """Its README counts 133,966 tokens."""
    asked = []

    def noted(engine, requests):
        asked.extend(requests)
        return 1.0, 0.0

    sizes = replace(parts.ON_CPU, nano=parts.ON_GPU.nano)
    bench = SimpleNamespace(sizes=sizes, checkpoint=lambda _: None, device="cpu", kernels="auto", tell=lambda _: None)
    built = SimpleNamespace(
        plan=SimpleNamespace(model=SimpleNamespace(vocab_size=10**6), scheduler=None), executor=None
    )
    with (
        patch.object(parts, "_to_the_end", noted),
        patch.object(parts, "build", lambda _: built),
        patch.object(parts, "Scheduler", lambda _: None),
        patch.object(parts, "Engine", lambda *_: None),
    ):
        first, second = parts.nano(bench)
    assert first["tokens out"] == second["tokens out"] == 133_966
    assert len(asked) == 512
    assert sum(len(request.prompt_token_ids) for request in asked[:256]) == 142_827
    assert {request.sampling.temperature for request in asked} == {0.6}


def test_the_static_decode_computes_the_same_tokens(tiny):
    """With the engine's own weights: otherwise it would be no peer."""
    built, told = build(tiny), []
    bench = StepBench(built.plan, built.executor, SIZES, lambda _: None)
    prompt = random_ids(9)
    request = replace(bench._request(0, 9, 8), prompt_token_ids=tuple(prompt))
    bench._run([request], lambda step: told.extend(t for output in step.outputs for t in output.token_ids))
    decoder = compiled.StaticDecoder(Path(tiny.model), 2, 24, CPU)
    with torch.inference_mode():
        found, seconds = compiled.decode(decoder, torch.tensor([prompt, prompt]), 8, compile_step=False)
    assert found.tolist() == [told, told]
    assert seconds > 0


@pytest.mark.matrix  # tests/api/test_bench.py has the benchmark
def test_streams_over_http_are_measured_by_our_own_benchmark(tmp_path):
    sizes = replace(parts.ON_CPU, streams=(1, 2), api_servers=(1,))
    bench = parts.Bench(device="cpu", kernels="auto", sizes=sizes, limits=LIMITS, folder=tmp_path, tell=lambda _: None)
    rows = parts.http(bench)
    assert [(row["API servers"], row["streams"], row["failed"]) for row in rows] == [(1, 1, 0), (1, 2, 0)]
    assert all(row["tokens/s"] > 0 for row in rows)


def test_without_a_gpu_it_is_one_line(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_bench.main([]) == 2
    assert capsys.readouterr().err == "gpu-bench: torch finds no usable GPU\n"


def test_a_part_that_fails_is_named_and_the_others_are_measured(tmp_path, capsys):
    def fail(*_: object) -> None:
        raise RuntimeError("no such\nkernel")

    with patch.object(KernelBench, "run", fail):
        assert gpu_bench.main([*CPU_ONLY, "--out", str(tmp_path / "r.json"), "--parts", "kernels,model"]) == 1
    printed = capsys.readouterr().out
    assert "NOT MEASURED: kernels: RuntimeError: no such kernel" in printed
    assert "tiny shape: " in printed
    assert gpu_bench.main([*CPU_ONLY, "--out", str(tmp_path / "r.json"), "--seconds", "-1"]) == 1
    assert "NOT MEASURED: demo: the time was up" in capsys.readouterr().out


def test_what_an_op_moves_and_computes():
    sizes = KernelSizes(rows=(2, 5), decodes=((3, 40),), prefills=(24,), operand_bytes=1 << 18, repeat=1)
    cases = {(case.name, case.size): case for case in KernelBench(REFERENCE, TINY, sizes, CPU)._cases()}
    qkv = cases["norm + QKV", "2 rows"]
    assert (qkv.num_bytes, qkv.operations) == (2 * (64 * 256 + 2 * 64 + 2 * 256), 2 * 2 * 64 * 256)
    assert qkv.calls == (1 << 18) // (2 * 64 * 256)
    gate = cases["norm + gate, up + SiLU", "2 rows"]
    assert gate.num_bytes == 2 * (64 * 192 + 2 * 64 + 2 * 96)
    head = cases["norm + head", "2 rows"]
    assert head.num_bytes == 2 * 64 * 512 + 2 * (2 * 64 + 4 * 512)
    decode = cases["decode attention", "3 x 40 tokens"]
    assert decode.num_bytes == 3 * 40 * 2 * 2 * 2 * 32 + 2 * 2 * 3 * 4 * 32
    assert decode.operations == 4 * 3 * 40 * 4 * 32
    prefill = cases["prefill attention", "24 tokens"]
    assert prefill.operations == sum(4 * (position + 1) * 4 * 32 for position in range(24))
    assert max(case.calls for case in cases.values()) <= kernels._MOST_CALLS


def test_a_call_is_its_share_of_the_run():
    called: list[int] = []
    with patch.object(timing, "seconds_of", lambda run, *_, **__: run() or 6.0):
        found = timing.time_calls(called.append, CPU, calls=3, repeat=2)
    assert (found.seconds, found.replayed) == (2.0, False)
    assert called == [0, 1, 2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return engine_config(write_checkpoint(TINY, tmp_path_factory.mktemp("tiny")), "cpu", SIZES)


def test_a_decode_step_reads_the_weights_once_and_every_context(tiny):
    """By a clock that ticks once a look: a step of the batch is as long as the engine looks at the time."""
    built = build(tiny)
    bench = StepBench(built.plan, built.executor, SIZES, lambda _: None)
    ticks = count()
    with patch("gpu.steps.time.perf_counter", lambda: float(next(ticks))):
        alone, three = bench.decodes("serving")
    assert alone.seconds == three.seconds == 1.0
    plan = built.plan
    per_token = plan.pool.bytes_per_block // 16
    # The context, and half of an answer: 8 to settle, 12 steps, and what comes while prompts are still computed.
    assert alone.num_bytes == plan.cost.weights_read_bytes + (20 + 26 // 2) * per_token
    assert three.num_bytes == plan.cost.weights_read_bytes + 3 * (20 + 26 // 2) * per_token


def test_operations_of_a_prompt_are_those_of_every_token(tiny):
    plan = build(tiny).plan
    total = 2 * plan.cost.sampled_parameters
    for position in range(9):
        total += 2 * plan.cost.layer_parameters + 4 * plan.cost.layer_attention * (position + 1)
    assert prompt_operations(plan.cost, 9) == total + 4 * 9 * plan.cost.sampled_attention


def test_the_eager_executor_computes_the_same_tokens(tiny):
    built = build(tiny)
    answers = []
    for executor in (built.executor, eager(tiny, built.plan)):
        told: list[tuple[int, ...]] = []
        bench = StepBench(built.plan, executor, SIZES, lambda _: None)
        request = replace(bench._request(0, 30, 9), prompt_token_ids=tuple(random_ids(30)))
        bench._run([request], lambda step, told=told: told.extend(output.token_ids for output in step.outputs))
        answers.append(told)
    assert answers[0] == answers[1]
    assert sum(map(len, answers[0])) == 9


def test_a_request_that_fails_stops_the_benchmark(tiny):
    built = build(tiny)
    bench = StepBench(built.plan, built.executor, SIZES, lambda _: None)
    with pytest.raises(RuntimeError, match="1 requests failed, the first with: "):
        bench._run([replace(bench._request(0, 4, 4), prompt_token_ids=(10**6,))], lambda _: None)


def test_a_pool_too_small_for_a_batch_is_told(tiny):
    built = build(tiny)
    small = replace(built.plan, scheduler=replace(built.plan.scheduler, num_blocks=4, max_model_len=64))
    bench = StepBench(small, built.executor, SIZES, lambda _: None)
    with pytest.raises(RuntimeError, match="3 sequences never decoded together"):
        bench._decode("serving", 3)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 80GB HBM3"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A10G", None),
    ],
)
def test_published_limits_are_those_of_the_chip(name, known):
    chip = chip_of(name)
    assert (chip and chip.name) == known
    assert len({chip.name for chip in CHIPS}) == len(CHIPS)


def test_measured_limits_that_cannot_be_are_doubted():
    name = "NVIDIA H200"
    assert doubts(name, bytes_per_second=4.3e12, bf16_per_second=750e12) == []
    low, high = doubts(name, bytes_per_second=2.4e12, bf16_per_second=1100e12)
    assert low.startswith("the memory's bandwidth was measured at 50% of the published one")
    assert high.startswith("the bf16 peak was measured at 111% of the published one")
    assert "not checked" in doubts("Voodoo 2", bytes_per_second=1.0, bf16_per_second=1.0)[0]


def test_shares_in_the_table_are_of_what_was_measured():
    time = KernelTime(name="op", size="1 rows", num_bytes=3 * 10**6, operations=7 * 10**8, seconds=2e-6, replayed=False)
    results = GpuResults(
        started="now", device="a GPU", versions={"torch": "2"}, limits=LIMITS, doubts=["a doubt"], kernel_set="triton",
        kernels=[time, replace(time, name="graph", replayed=True)],
    )  # fmt: skip
    text = list(lines(results))
    (row,) = [line for line in text if line.startswith("  op *")]
    assert row.split()[2:] == ["1", "rows", "2.0", "1,500", "50%", "350.0", "50%"]
    assert "  * launch by launch: gaps between launches count" in text
    assert "a doubt" in text
    assert "limits, measured: memory 3,000 GB/s (a copy), bf16 700.0 TFLOP/s" in text[1]


def test_the_probe_leaves_room_for_what_is_there():
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "mem_get_info", lambda: (2 << 30, 80 << 30)),
        patch.object(gpu_limits, "measure", lambda device, **sizes: sizes),
    ):
        sizes = gpu_limits.measure_gpu()
    assert sizes["copied"] == 512 << 20
    assert sizes["sides"] == {torch.bfloat16: 2048, torch.float16: 2048, torch.float32: 4096}
