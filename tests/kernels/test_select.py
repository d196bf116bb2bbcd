"""The choice of a kernel set: which is taken, what is refused, and what a further one needs to take part."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from typing import get_args

import pytest
import torch

from quire_engine.contract.config import KernelChoice
from quire_kernels.kernel_set import KVFormat
from quire_kernels.provider import Requirements, Unavailable
from quire_kernels.reference import REFERENCE
from quire_kernels.select import AUTO, PROVIDERS, select

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KV = KVFormat(head_dim=64, block_size=16)
KV_INT8, KV_FP8 = replace(KV, kv_type="int8"), replace(KV, kv_type="fp8")


class Abacus:
    """Serves float32 on a CPU, up to four beads."""

    name = "abacus"
    devices = ("cpu",)

    def __init__(self) -> None:
        self.made = []
        self.lacks = None

    def why_not(self, required):
        if required.dtype is not torch.float32:
            return f"slide float32 only, not {required.dtype} (set dtype to float32)"
        return None if required.kv.head_dim <= 64 else f"have 64 beads, not {required.kv.head_dim}"

    def make(self, required):
        if self.lacks:
            raise Unavailable(f"lack {self.lacks}")
        self.made.append(required)
        return replace(REFERENCE, name="abacus", own_threads=True)


def refusal(*arguments, **options) -> str:
    with pytest.raises(ValueError) as caught:
        select(*arguments, **options)
    return str(caught.value)


def test_the_reference_set_serves_every_device():
    for device in (CPU, CUDA):
        assert select(device, torch.bfloat16, "reference", kv=KV) is REFERENCE


def test_the_cpu_kernels_are_the_default_for_bf16_on_a_cpu_only():
    assert select(CPU, torch.bfloat16, kv=KV, threads=1).name == "cpu"
    assert select(CPU, torch.bfloat16, "cpu", kv=KV, threads=1).own_threads
    assert select(CPU, torch.bfloat16, kv=KV, threads=1, quantization="int4").name == "cpu"
    assert select(CPU, torch.bfloat16, kv=KV_INT8, threads=1).name == "cpu"
    assert select(CPU, torch.float32, kv=KV) is REFERENCE
    assert select(CUDA, torch.float32, kv=KV) is REFERENCE


def test_an_unknown_name_or_dtype_is_refused():
    assert refusal(CPU, torch.float32, "fast", kv=KV) == (
        "there are no fast kernels; set kernels to one of auto, cpu, triton, reference"
    )
    assert "not in float64" in refusal(CPU, torch.float64, kv=KV)


@pytest.mark.parametrize(
    ("device", "dtype", "choice", "options", "said"),
    [
        (CPU, torch.float16, "cpu", {}, "bfloat16, not in float16 (set dtype to bfloat16); set kernels to auto"),
        (
            CUDA,
            torch.bfloat16,
            "cpu",
            {},
            "the cpu kernels compute on cpu, not on cuda (set device to cpu); set kernels",
        ),
        (
            CPU,
            torch.bfloat16,
            "cpu",
            {"kv": replace(KV, head_dim=24)},
            "up to 512, not head_dim 24; set kernels to auto",
        ),
        (CPU, torch.bfloat16, "cpu", {"kv": replace(KV, head_dim=528)}, "not head_dim 528"),
        (CPU, torch.bfloat16, "cpu", {"kv": replace(KV, block_size=8)}, "not block_size 8 (set block_size to 16)"),
        (CPU, torch.bfloat16, "reference", {"quantization": "int8"}, "(leave quantization out); set kernels to auto"),
        (CPU, torch.bfloat16, "reference", {"kv": KV_INT8}, "(set kv_cache_dtype to auto); set kernels to auto"),
        (CPU, torch.bfloat16, "cpu", {"kv": KV_FP8}, "not in fp8 (set kv_cache_dtype to int8)"),
        (CPU, torch.bfloat16, "triton", {}, "the triton kernels compute on cuda, not on cpu (set device to cuda); set"),
    ],
)
def test_what_the_named_kernels_cannot_serve_is_refused(device, dtype, choice, options, said):
    assert said in refusal(device, dtype, choice, **{"kv": KV, **options})


@pytest.mark.parametrize(
    ("device", "dtype", "options"),
    [
        (CPU, torch.float32, {"quantization": "int8"}),
        (CUDA, torch.bfloat16, {"quantization": "int4"}),
        (CUDA, torch.bfloat16, {"kv": KV_INT8}),
        (CPU, torch.bfloat16, {"quantization": "int4", "kv": replace(KV, head_dim=24)}),
        (CPU, torch.bfloat16, {"kv": replace(KV_INT8, block_size=8)}),
        (CPU, torch.bfloat16, {"kv": KV_FP8}),
        (CUDA, torch.float32, {"kv": KV_FP8}),
    ],
)
def test_what_no_kernels_can_serve_is_refused_with_the_reason_of_each(device, dtype, options):
    message = refusal(device, dtype, **{"kv": KV, **options})
    assert message.startswith("the cpu kernels ")
    assert "; the reference kernels hold " in message
    assert "kernels to auto" not in message


@pytest.mark.parametrize("kv", [replace(KV, head_dim=24), replace(KV, block_size=24)])
def test_auto_leaves_faster_kernels_out_with_a_warning_that_says_why(kv, caplog):
    with caplog.at_level(logging.WARNING):
        assert select(CPU, torch.bfloat16, kv=kv) is REFERENCE
        select(CPU, torch.bfloat16, "reference", kv=kv)
    (record,) = caplog.records
    assert record.getMessage().startswith("serving with the slower reference kernels: the cpu kernels take ")


def test_on_a_cpu_all_are_deterministic_and_on_a_gpu_the_reference_is_not():
    for choice in ("cpu", "reference"):
        assert select(CPU, torch.bfloat16, choice, kv=KV, threads=1, deterministic=True).name == choice
    assert "order that depends on the others (leave deterministic out)" in refusal(
        CUDA, torch.float32, "reference", kv=KV, deterministic=True
    )


def test_a_further_provider_is_one_entry(caplog):
    abacus = Abacus()
    providers = (abacus, *PROVIDERS)
    for choice in (AUTO, "abacus"):
        kernels = select(CPU, torch.float32, choice, kv=KV, threads=3, providers=providers)
        asked = Requirements(device=CPU, dtype=torch.float32, kv=KV, threads=3)
        assert (kernels.name, abacus.made.pop()) == ("abacus", asked)
    assert not caplog.records
    assert select(CPU, torch.float32, "reference", kv=KV, providers=providers) is REFERENCE
    assert select(CUDA, torch.float32, kv=KV, providers=providers) is REFERENCE
    assert not abacus.made


def test_a_further_provider_is_refused_and_passed_over_with_its_reason(caplog):
    abacus = Abacus()
    providers = (abacus, *PROVIDERS)
    message = refusal(CPU, torch.float16, "abacus", kv=KV, providers=providers)
    assert message.startswith("the abacus kernels slide float32 only, not torch.float16 (set dtype to float32); set ")
    assert "not on cuda (set device to cpu)" in refusal(CUDA, torch.float32, "abacus", kv=KV, providers=providers)
    abacus.lacks = "a frame"
    assert refusal(CPU, torch.float32, "abacus", kv=KV, providers=providers).startswith(
        "the abacus kernels lack a frame;"
    )
    assert not caplog.records
    assert select(CPU, torch.float32, kv=KV, providers=providers) is REFERENCE
    assert "the abacus kernels lack a frame; the cpu kernels compute in bfloat16" in caplog.text
    assert not abacus.made


def test_the_engine_offers_the_names_of_all_providers():
    assert set(get_args(KernelChoice)) == {AUTO, *(each.name for each in PROVIDERS)}
    assert len({each.name for each in PROVIDERS}) == len(PROVIDERS)


def test_a_set_is_loaded_only_when_it_is_made():
    code = (
        "import sys, torch; from quire_kernels.kernel_set import KVFormat; from quire_kernels.select import select\n"
        "cpu, kv = torch.device('cpu'), KVFormat(head_dim=64, block_size=16)\n"
        "select(cpu, torch.float32, kv=kv)\n"
        "try:\n    select(cpu, torch.float32, 'cpu', kv=kv)\nexcept ValueError:\n    pass\n"
        "print('quire_kernels.cpu.ops' in sys.modules, 'quire_kernels.cpu.library' in sys.modules)\n"
        "try:\n    select(torch.device('cuda'), torch.float32, 'triton', kv=kv)\nexcept ValueError:\n    pass\n"
        "print('triton' in sys.modules)\n"
        "select(cpu, torch.bfloat16, 'cpu', kv=kv, threads=1)\n"
        "print('quire_kernels.cpu.ops' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["False", "False", "False", "True"]
