"""Checkpoints that others quantised: the same bits as the numbers that they stand for, and damage named in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire_engine.build import build, resolve_plan
from quire_engine.errors import ModelLoadError
from quire_engine.execution.models.checkpoint import open_checkpoint
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.models.weights import take_text
from support.limits import engine_config
from support.model_steps import Model, random_ids
from support.quantised import FORMS, make_quantised
from support.served_answers import served_answers

Q = "model.layers.0.self_attn.q_proj"
Parts = dict[str, Tensor]


@pytest.mark.parametrize("name", FORMS)
def test_every_number_is_the_one_that_the_form_says(name: str, tmp_path: Path) -> None:
    quantised, dense = make_quantised(tmp_path, FORMS[name])
    wanted = load_file(str(dense / "model.safetensors"))
    with open_checkpoint(quantised) as checkpoint:
        take_text(checkpoint, load_model_config(quantised))
        for tensor in checkpoint.names:
            assert torch.equal(checkpoint.tensor(tensor), wanted[tensor]), tensor
        assert checkpoint.names == wanted.keys()
        stored = load_file(str(quantised / "model.safetensors")).values()
        unused = sum(each.numel() * each.element_size() for each in stored) - checkpoint.num_bytes
        assert 0 <= unused < 100  # scales of activations, which are not used


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "mixtral"])
def test_logits_are_those_of_the_numbers_in_the_clear(family: str, tmp_path: Path) -> None:
    quantised, dense = make_quantised(tmp_path, FORMS["gptq in activation order"], family)
    ids = random_ids(40, vocab_size=200)
    assert torch.equal(Model(quantised).logits(ids, 40), Model(dense).logits(ids, 40))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_server_answers_as_with_the_numbers_in_the_clear(quantization: str | None, tmp_path: Path) -> None:
    asked = [("/v1/completions", {"prompt": "Once upon", "max_tokens": 12, "temperature": 0, "logprobs": 3, "seed": 1})]
    replies = []
    for path in make_quantised(tmp_path, FORMS["awq"]):
        (reply,) = served_answers(
            asked,
            model=str(path),
            kernels="cpu",
            dtype="bfloat16",
            quantization=quantization,
            kv_memory=4 << 20,
            num_threads=1,
            packed_cache_dir=tmp_path / "packed",
        )
        replies.append((reply["choices"][0]["text"], reply["choices"][0]["logprobs"]))
    assert replies[0] == replies[1]


def test_the_plan_counts_the_numbers_and_not_the_words(tmp_path: Path) -> None:
    paths = make_quantised(tmp_path, FORMS["gptq"])
    plans = [resolve_plan(engine_config(model=str(path), device="cpu")) for path in paths]
    assert plans[0].num_parameters == plans[1].num_parameters
    assert plans[0].weights_bytes == plans[1].weights_bytes
    assert [plan.stored_as for plan in plans] == ["GPTQ, 4 bits", ""]


def changed(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Parts], None]:
    def damage(parts: Parts) -> None:
        value = change(parts.pop(f"{Q}.{name}"))
        if value is not None:
            parts[f"{Q}.{name}"] = value.contiguous()

    return damage


DAMAGES = {
    "no scales": ("gptq", changed("scales", lambda _: None), "is quantised, but there is no"),
    "scales of another group": ("gptq", changed("scales", lambda x: x[:1]), "the quantisation implies F16 or BF16"),
    "scales that are no numbers": ("gptq", changed("scales", lambda x: x * torch.inf), "scales that are not finite"),
    "zero points cut": ("awq", changed("qzeros", lambda x: x[:, :1]), "the quantisation implies I32"),
    "words of another type": ("awq", changed("qweight", lambda x: x.short()), "not a matrix of I32"),
    "words cut": ("gptq", changed("qweight", lambda x: x[:4]), "the quantisation implies"),
    "a group beyond": ("gptq", changed("g_idx", lambda x: x + 1), "groups beyond the 2 that there are"),
    "a group below": ("gptq", changed("g_idx", lambda x: x - 1), "groups beyond the 2 that there are"),
    "groups of another matrix": ("gptq", changed("g_idx", lambda x: x[:8]), "the quantisation implies I32 [64]"),
    "blocks of another size": (
        "fp8 by block",
        changed("weight_scale_inv", lambda x: x[:1]),
        "the quantisation implies",
    ),
    "rows without a scale": (
        "fp8 by row",
        changed("weight_scale", lambda x: x[:3]),
        "neither one scale nor one",
    ),
    "values that are no numbers": ("fp8 by block", changed("weight_scale_inv", lambda x: x * torch.nan), "not finite"),
    "a matrix of numbers": ("fp8 by row", changed("weight", lambda x: x.float()), "not a matrix of F8_E4M3"),
    "another shape in words": ("W4A16", changed("weight_shape", lambda x: x + 1), "its weight_shape says [129, 65]"),
    "no shape": ("W4A16", changed("weight_shape", lambda _: None), "is quantised, but there is no"),
    "scales of other rows": ("W8A16", changed("weight_scale", lambda x: x[1:]), "the quantisation implies"),
    "a matrix of another shape": ("awq", changed("qweight", lambda x: x[:, :4]), "the quantisation implies"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_line_that_names_file_and_tensor(damage: str, tmp_path: Path) -> None:
    form, change, reason = DAMAGES[damage]
    path, _ = make_quantised(tmp_path, FORMS[form])
    file = path / "model.safetensors"
    parts = load_file(str(file))
    change(parts)
    save_file(parts, str(file))
    with pytest.raises(ModelLoadError) as raised:
        build(engine_config(model=str(path), device="cpu", kernels="reference", kv_memory=1 << 22))
    message = str(raised.value)
    assert str(file) in message
    assert Q in message
    assert reason in message
    assert "\n" not in message
