"""What a model is known to need, what the machine could do, and the share of it that was used."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from unittest.mock import patch

import msgspec
import pytest
import torch

from quire_bench import benchmark
from quire_bench.limits import PROBES, Limits, probe_limits, request_flop, shares, token_bytes, why_not_measurable
from quire_bench.results import Collected
from quire_bench.servers import ModelFacts, ServerInfo, read_facts
from quire_bench.workload import LoadPoint
from quire_engine.contract.plan import TokenCost
from quire_engine.tools import gpu_limits
from quire_server.metrics.metrics import Metrics
from support.bench_runs import ALONE, FACTS, LIMITS, WORKLOAD, run_with
from support.fakes import make_plan
from support.plans import changed

# -- limits


def test_facts_are_read_from_a_servers_metrics():
    metrics = Metrics("tiny")
    plan = make_plan()
    parts = {"layer_parameters": 700, "sampled_parameters": 300, "layer_attention": 64, "sampled_attention": 16}
    metrics.observe_plan(replace(plan, cost=TokenCost(**parts, weights_read_bytes=900)))
    assert read_facts(metrics.render().decode()) == ModelFacts(
        architecture=plan.model.architecture,
        parameters=plan.model.num_parameters,
        **parts,
        read_bytes=900,
        weight_type="float32",
        kv_bytes_per_token=plan.pool.bytes_per_block / 16,
        device="cpu",
        kernels="reference",
        num_threads=1,
    )
    metrics.observe_plan(changed(plan, model={"quantization": "int8"}, machine={"cpu_variant": "amx"}))
    quantized = read_facts(metrics.render().decode())
    assert quantized is not None
    assert (quantized.weight_type, quantized.cpu_variant, quantized.machine) == ("int8", "amx", "cpu amx")
    assert read_facts("") is None
    assert read_facts('vllm:cache_config_info{block_size="16"} 1.0\nup 1\n') is None


def test_operations_are_those_of_every_token():
    """Counted one by one: a token's products, what it looks at; the end for each that is sampled from."""
    for inputs, outputs in ((4, 3), (1, 1), (7, 1)):
        total = 0
        for position in range(inputs + outputs - 1):
            total += 2 * FACTS.layer_parameters + 4 * FACTS.layer_attention * (position + 1)
            if position >= inputs - 1:
                total += 2 * FACTS.sampled_parameters + 4 * FACTS.sampled_attention * (position + 1)
        assert request_flop(FACTS, inputs, outputs) == total


def test_bytes_of_a_token():
    assert token_bytes(FACTS, 10) == 2400 + 160


def test_shares_of_one_stream():
    run = run_with(ttft=0.5, tpot=0.01)
    found = shares(ALONE, WORKLOAD, run, FACTS, LIMITS)
    assert found.prefill == pytest.approx(request_flop(FACTS, 4, 1) / 0.5 / 2e6)
    assert found.decode_read == pytest.approx(token_bytes(FACTS, 5.5) / 0.01 / 1e6)
    assert found.arithmetic == pytest.approx(request_flop(FACTS, 4, 3) / 0.52 / 2e6)


def test_what_is_not_known_is_not_told():
    run = run_with(ttft=0.5, tpot=0.01)
    many = shares(LoadPoint(mode="concurrency", value=4), WORKLOAD, run, FACTS, LIMITS)
    assert many.prefill is many.decode_read is None
    assert many.arithmetic is not None
    cached = shares(ALONE, replace(WORKLOAD, prefix=9), run, FACTS, LIMITS)
    assert cached.arithmetic is cached.prefill is cached.decode_read is None


def test_what_a_cache_holds_is_not_read_from_memory():
    big = msgspec.structs.replace(LIMITS, cache_bytes=2000)
    found = shares(ALONE, WORKLOAD, run_with(ttft=0.5, tpot=0.01), FACTS, big)
    assert found.decode_read is None
    assert found.prefill is not None


def test_the_peak_is_that_of_the_weights_type():
    types = ("float32", "bfloat16", "int8", "int4")
    assert [LIMITS.arithmetic(name, "cpu") for name in types] == [1e6, 2e6, 4e6, 4e6]
    old = msgspec.structs.replace(LIMITS, bf16_per_second=0.0, int8_per_second=0.0)
    assert {old.arithmetic(name, "cpu") for name in ("float32", "float16", "bfloat16", "int8")} == {1e6}


def test_a_gpus_peak_of_another_type_is_unknown_and_so_is_the_share():
    gpu = msgspec.structs.replace(LIMITS, int8_per_second=0.0, fp16_per_second=3e6)
    assert [gpu.arithmetic(name, "cuda") for name in ("float32", "bfloat16", "float16", "int8")] == [1e6, 2e6, 3e6, 0.0]
    facts = msgspec.structs.replace(FACTS, device="cuda", weight_type="int8")
    found = shares(ALONE, WORKLOAD, run_with(ttft=0.5, tpot=0.01), facts, gpu)
    assert found.arithmetic is found.prefill is None
    assert found.decode_read is not None


def test_the_best_of_each_limit_counts():
    other = msgspec.structs.replace(LIMITS, bf16_per_second=3e6, read_bytes_per_second=5e5)
    best = LIMITS.best(other)
    assert (best.bf16_per_second, best.read_bytes_per_second, best.fp32_per_second) == (3e6, 1e6, 1e6)


def test_only_this_machines_devices_are_compared_with_its_limits():
    here = ServerInfo(name="a", address="http://127.0.0.1:8", model="m", facts=FACTS)
    assert why_not_measurable(here) is None
    assert (
        why_not_measurable(msgspec.structs.replace(here, address="http://10.0.0.3:8")) == "it runs on another machine"
    )
    assert why_not_measurable(msgspec.structs.replace(here, facts=None)) == "it does not tell its model's sizes"
    gpu = msgspec.structs.replace(FACTS, device="cuda")
    assert why_not_measurable(msgspec.structs.replace(here, facts=gpu)) is None
    other = msgspec.structs.replace(here, facts=msgspec.structs.replace(FACTS, device="tpu"))
    assert why_not_measurable(other) == "nothing here measures a device called tpu"


def test_each_machine_is_probed_once_and_who_has_no_limits_is_told_why():
    gpu = msgspec.structs.replace(FACTS, device="cuda")
    here = ServerInfo(name="cpu", address="http://127.0.0.1:8", model="m", facts=FACTS)
    infos = [
        here,
        msgspec.structs.replace(here, name="cpu too"),
        msgspec.structs.replace(here, name="cpu otherwise", facts=msgspec.structs.replace(FACTS, cpu_variant="avx2")),
        msgspec.structs.replace(here, name="gpu", facts=gpu),
        msgspec.structs.replace(here, name="far", address="http://10.0.0.3:8"),
        ServerInfo(name="static", address="", model="m"),
    ]
    assert benchmark._machines(infos) == ["cpu", "cpu avx2", "cuda"]
    missing = benchmark._missing(infos, {"cpu": LIMITS, "cpu avx2": "no compiler", "cuda": "no GPU"})
    assert missing == {"cpu otherwise": "no compiler", "gpu": "no GPU", "far": "it runs on another machine"}


def test_shares_are_of_the_servers_own_instructions():
    """Two servers of one machine, computing with different instruction sets: each against its own peak."""
    tiles = msgspec.structs.replace(LIMITS, bf16_per_second=40e6)
    run, point = run_with(ttft=0.5, tpot=0.01), ALONE
    infos = [
        ServerInfo(
            name=name, address="http://127.0.0.1:8", model="m", facts=msgspec.structs.replace(FACTS, cpu_variant=name)
        )
        for name in ("amx", "avx512_bf16")
    ]
    collected = Collected(points=(point,), servers=infos)
    for info in infos:
        collected.add(point, info.name, run)
    benchmark._add_shares(collected, WORKLOAD, {"cpu amx": tiles, "cpu avx512_bf16": LIMITS})
    (by_tiles,), (by_lanes,) = (collected.shares[point, info.name] for info in infos)
    assert by_lanes.prefill == pytest.approx(20 * by_tiles.prefill)


def test_the_instruction_of_the_peak_is_told():
    named = msgspec.structs.replace(LIMITS, fp32_instruction="VFMADD231PS", int8_instruction="VPDPBUSD")
    types = ("float32", "bfloat16", "int8", "int4")
    assert [named.instruction(name) for name in types] == ["VFMADD231PS"] * 2 + ["VPDPBUSD"] * 2
    assert msgspec.structs.replace(named, bf16_instruction="TDPBF16PS").instruction("bfloat16") == "TDPBF16PS"
    assert LIMITS.instruction("bfloat16") == ""


def test_the_probe_measures_the_instruction_set_that_a_server_has(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(PROBES, "cpu", "quire_kernels.cpu.build")  # says what it was asked for, and computes nothing
    said = asyncio.run(probe_limits("cpu sse9"))
    assert isinstance(said, str)
    assert said.startswith("quire build-kernels: the kernels are not made for sse9")


def test_a_probe_that_finds_no_gpu_says_so():
    found = asyncio.run(probe_limits("cuda"))
    assert found == "gpu limits: torch finds no usable GPU" or isinstance(found, Limits)


@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
def test_the_gpus_probe_measures_what_it_is_told(weights):
    """On the CPU, with sizes for its speed: rates of a machine, not numbers out of nowhere."""
    sides = {torch.bfloat16: 64, torch.float32: 128}
    found = gpu_limits.measure(torch.device("cpu"), copied=1 << 20, sides=sides, repeat=2)
    limits = msgspec.json.decode(json.dumps(asdict(found)), type=Limits)
    assert 1e6 < limits.arithmetic(weights, "cuda") < 1e14
    assert limits.arithmetic("float16", "cuda") == 0
    assert 1e7 < limits.read_bytes_per_second < 1e13


def test_rates_are_operations_and_bytes_over_the_shortest_run():
    with patch.object(gpu_limits, "seconds_of", return_value=0.5):
        assert gpu_limits.product_rate(torch.device("cpu"), torch.float32, 10) == 2 * 1000 / 0.5
        assert gpu_limits.copy_rate(torch.device("cpu"), 400) == 2 * 400 / 0.5
    runs = []
    assert gpu_limits.seconds_of(lambda: runs.append(1), torch.device("cpu"), repeat=4, warm_up=2) < 10
    assert len(runs) == 6


def test_a_gpu_without_memory_left_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 << 20, 80 << 30))
    with pytest.raises(gpu_limits.NotMeasurable, match="only 100 MiB of the GPU's memory are free"):
        gpu_limits.measure_gpu()
