"""The setting `attention` on its way to the kernels: who may be asked for it, and what is said where it cannot be."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from types import ModuleType
from typing import get_args

import pytest
import torch

from quire_engine.contract import config
from quire_kernels import provider
from quire_kernels.flash import trial
from quire_kernels.kernel_set import KVFormat
from quire_kernels.select import select
from quire_kernels.triton import provider as triton_provider
from support import flash_libraries as libraries

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KV = KVFormat(head_dim=64, block_size=256)

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton for this system")


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    """A GPU on which a kernel runs, and flash-attn 2 beside it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(triton_provider, "_run_a_kernel", lambda _: None)
    monkeypatch.setattr(trial, "why_it_fails", lambda *_, **__: None)
    module = ModuleType("flash_attn")
    vars(module).update({each.__name__: each for each in (libraries.varlen_of_2(), libraries.with_kvcache_of_2())})
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)


def refusal(*arguments, **options) -> str:
    with pytest.raises(ValueError) as caught:
        select(*arguments, **options)
    return str(caught.value)


def test_the_engine_offers_what_the_kernels_know():
    assert get_args(config.AttentionChoice) == get_args(provider.AttentionChoice)


@needs_triton
def test_the_triton_set_is_given_the_librarys_attention():
    ours = select(CUDA, torch.bfloat16, kv=KV)
    assert ours.name == "triton"
    assert select(CUDA, torch.bfloat16, kv=KV, attention="triton").name == "triton"
    for kernels in ("auto", "triton"):
        assert select(CUDA, torch.bfloat16, kernels, kv=KV, attention="flash-attn").name == "triton+flash-attn 2"


@needs_triton
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"deterministic": True},
            "the triton kernels cannot take attention from flash-attn: its results depend on what",
        ),
        ({"kv": replace(KV, kv_type="fp8")}, "not in fp8 (set kv_cache_dtype to auto)"),
        ({"kv": replace(KV, block_size=64)}, "not 64 (set block_size to 256)"),
    ],
)
def test_what_was_asked_for_is_not_replaced_by_something_else(changes, said):
    for kernels in ("auto", "triton"):
        message = refusal(CUDA, torch.bfloat16, kernels, **{"kv": KV, "attention": "flash-attn", **changes})
        assert said in message
        assert "set kernels to auto" not in message
    assert "the reference kernels " in refusal(CUDA, torch.bfloat16, **{"kv": KV, "attention": "flash-attn", **changes})


@pytest.mark.parametrize("attention", ["triton", "flash-attn"])
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_sets_with_an_attention_of_their_own_take_no_other(kernels, attention):
    message = refusal(CPU, torch.bfloat16, kernels, kv=KV, attention=attention)
    assert message == (
        f"the {kernels} kernels compute attention by themselves, not by {attention} (set attention to auto)"
    )
