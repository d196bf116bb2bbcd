"""Checkpoints that others quantised: the same bits as the numbers that they stand for, and damage named in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire_engine.build import build, resolve, resolve_plan
from quire_engine.contract.errors import ModelLoadError
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_engine.execution.models.checkpoint import open_checkpoint
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.models.fallback.interface import is_experts
from quire_engine.execution.models.weights import take_text
from quire_engine.memory_plan import plan_text
from quire_kernels.cpu.ops import cpu_kernel_set
from quire_kernels.kernel_set import KernelSet, LinearAdd, MixExperts, NormGateUp, NormLinear, Quantization
from support.covering import few
from support.fallback_steps import FallbackSteps
from support.limits import engine_config
from support.model_steps import Model, random_ids
from support.offline import generate
from support.quantised import FORMS, make_quantised

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


# Groups of 40 columns have no form, and those of columns in the order of their activations lie apart.
KEPT = (
    *("gptq", "gptq in 8 bits", "awq", "W4A16", "W8A16", "W8A8", "FP8 of compressed-tensors", "fp8 by row"),
    *("NVFP4", "MXFP4"),
)
DECODED = ("gptq in activation order", "fp8 by block", "W4A16 with zero points, in activation order")


def on_cpu_kernels(path: Path, quantization: str | None = None) -> tuple[Model, KernelSet]:
    kernels = cpu_kernel_set(1, quantization)
    return Model(path, dtype=torch.bfloat16, kernels=kernels), kernels


@pytest.mark.parametrize("name", KEPT)
def test_matrices_stay_as_they_are_stored(name: str, tmp_path: Path) -> None:
    quantised, dense = make_quantised(tmp_path, FORMS[name])
    exact = load_file(str(dense / "model.safetensors"))
    model, kernels = on_cpu_kernels(quantised)
    assert kernels.linear is not None
    program = model.decoder._weights.program
    packed = {type(op).__name__: op.weight for op in program if isinstance(op, NormLinear | LinearAdd | NormGateUp)}
    assert all(weight.args.kind >= 3 for weight in packed.values())
    layer = "model.layers.1."
    wanted = torch.cat([exact[f"{layer}self_attn.{each}_proj.weight"] for each in "qkv"])
    for weight, numbers in (
        (packed["NormLinear"], wanted),
        (packed["LinearAdd"], exact[f"{layer}mlp.down_proj.weight"]),
    ):  # a row of one 1 gives a column of the matrix
        assert torch.equal(kernels.linear(torch.eye(numbers.shape[1]).bfloat16(), weight, True).T, numbers)
    few = Model(dense, dtype=torch.bfloat16, kernels=kernels).decoder.packed_bytes
    assert (model.decoder.packed_bytes or 0) < (few or 0)

    ids = random_ids(40, vocab_size=200)
    truth, got = Model(dense).logits(ids, 40), model.logits(ids, 40)
    assert (got - truth).norm() < 0.02 * truth.norm()
    assert torch.equal(model.logits(ids, 1), got)


@pytest.mark.parametrize("name", DECODED)
def test_what_has_no_form_is_decoded(name: str, tmp_path: Path) -> None:
    ids = random_ids(20, vocab_size=200)
    logits = [on_cpu_kernels(path)[0].logits(ids, 20) for path in make_quantised(tmp_path, FORMS[name])]
    assert torch.equal(*logits)


def test_fused_matrices_stay_too(tmp_path: Path) -> None:
    quantised, dense = make_quantised(tmp_path, FORMS["gptq"], "phi3")
    model, _ = on_cpu_kernels(quantised)
    assert all(op.weight.args.kind == 3 for op in model.decoder._weights.program if isinstance(op, NormGateUp))
    ids = random_ids(40, vocab_size=200)
    truth, got = Model(dense).logits(ids, 40), model.logits(ids, 40)
    assert (got - truth).norm() < 0.02 * truth.norm()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_an_engine_answers_as_with_the_numbers_in_the_clear(quantization: Quantization, tmp_path: Path) -> None:
    asked = GenerationRequest(
        request_id="a",
        prompt_token_ids=tuple(random_ids(9, vocab_size=200)),
        sampling=SamplingParams(temperature=0, num_logprobs=3, seed=1),
        stop=StopParams(max_new_tokens=12),
    )
    replies = []
    for path in make_quantised(tmp_path, FORMS["awq"]):
        config = engine_config(
            model=str(path),
            device="cpu",
            kernels="cpu",
            dtype="bfloat16",
            quantization=quantization,
            kv_memory=4 << 20,
            num_threads=1,
            packed_cache_dir=str(tmp_path / "packed"),
        )
        replies.append(generate(build(config), [asked]))
    assert len(replies[0]["a", 0].logprobs) == 12
    assert replies[0] == replies[1]


@pytest.mark.parametrize(
    ("name", "family"),
    few(
        [("gptq in activation order", "llama"), ("awq", "llama"), ("awq", "qwen3_moe")],
        ("gptq in activation order", "llama"),
        ("awq", "llama"),
    ),
)
def test_transformers_code_computes_the_numbers_in_the_clear(name: str, family: str, tmp_path: Path) -> None:
    """Experts too; in bfloat16 what can stay as it is stored does."""
    ids, schedule = {0: random_ids(20, vocab_size=200)}, [[(0, 13)], [(0, 7)]]
    paths = make_quantised(tmp_path, FORMS[name], family)
    plain = [FallbackSteps(path, kernels="reference").run(ids, schedule)[0] for path in paths]
    assert torch.equal(*plain)
    steps = [FallbackSteps(path, dtype="bfloat16", kernels="cpu") for path in paths]
    kept = name == "awq"
    assert (steps[0].model.packed_bytes or 0) < (steps[1].model.packed_bytes or 0) * (1 if kept else 1.01)
    assert torch.equal(*[each.run(ids, schedule)[0] for each in steps]) != kept
    found = steps[0].run(ids, schedule)[0]
    assert torch.equal(found, steps[0].run(ids, [[(0, 1)]] * 20)[0])
    assert (found - plain[0]).norm() < 0.05 * plain[0].norm()
    plan = resolve_plan(engine_config(model=str(paths[0]), device="cpu", dtype="bfloat16", model_impl="transformers"))
    assert f"kept as {'AWQ' if kept else 'GPTQ'}, 4 bits" in plan_text(plan)


@pytest.mark.parametrize("family", few(["qwen3_moe", "mixtral"], "mixtral"))
def test_experts_of_transformers_code_stay_as_they_are_stored(family: str, tmp_path: Path) -> None:
    """By the bits of our own layers over the same files; the plan counts them as kept."""
    quantised, dense = make_quantised(tmp_path, FORMS["awq"], family)
    native, kernels = on_cpu_kernels(quantised)
    assert kernels.given_experts is not None
    ours = [op.experts for op in native.decoder._weights.program if isinstance(op, MixExperts)]
    steps = FallbackSteps(quantised, dtype="bfloat16", kernels="cpu")
    modules = [each.__dict__["quire_experts"] for each in steps.model._model.modules() if is_experts(each)]
    assert len(modules) == len(ours) > 0
    x = torch.randn(5, steps.resolved.model.hidden_size, generator=torch.Generator().manual_seed(3)).bfloat16()
    index = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3], [0, 3]])
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(4))
    for module, theirs in zip(modules, ours, strict=True):
        kept = module._experts
        assert kept.gate_up.args.kind >= 3
        assert kept.down.args.kind >= 3
        assert torch.equal(module.compute(None, x, index, weights), kernels.given_experts(x, index, weights, theirs))
    exact, counted = load_file(str(dense / "model.safetensors")), steps.resolved.parameters
    numbers = sum(value.numel() for name, value in exact.items() if ".experts." in name)
    assert numbers == counted.experts == sum(each.rows * each.columns for each in counted.stored_experts)
    by_us = resolve(engine_config(model=str(quantised), device="cpu", model_impl="native")).parameters
    assert (counted.experts, counted.num_experts, counted.top_k) == (by_us.experts, by_us.num_experts, by_us.top_k)


def test_the_plan_counts_the_numbers_and_not_the_words(tmp_path: Path) -> None:
    paths = make_quantised(tmp_path, FORMS["gptq"])
    for kernels in ("reference", "cpu"):
        configs = [engine_config(model=str(path), device="cpu", dtype="bfloat16", kernels=kernels) for path in paths]
        plans = [resolve_plan(config) for config in configs]
        assert plans[0].model.num_parameters == plans[1].model.num_parameters
        assert [plan.model.stored_as for plan in plans] == ["GPTQ, 4 bits", ""]
        if kernels == "reference":
            assert plans[0].model.weights_bytes == plans[1].model.weights_bytes
            assert "decoded from GPTQ, 4 bits" in plan_text(plans[0])
        else:
            assert "kept as GPTQ, 4 bits" in plan_text(plans[0])
            loaded = [build(config).plan.model.weights_bytes for config in configs]
            assert 0.9 < (plans[0].model.weights_bytes - plans[1].model.weights_bytes) / (loaded[0] - loaded[1]) < 1.3


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
