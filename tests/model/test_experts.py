"""Checkpoints with experts: every way in which they are stored, what is refused, and how they are computed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quire_engine.contract.errors import ModelLoadError, NotNative
from quire_engine.execution.models.config import load_model_config
from quire_kernels.cpu.ops import cpu_kernel_set
from quire_kernels.kernel_set import MixExperts
from quire_kernels.reference import REFERENCE
from support.checkpoints import make_model, shared_checkpoint, write_tokenizer
from support.model_steps import Model, random_ids


def _names(path: Path) -> set[str]:
    with safe_open(path / "model.safetensors", "pt") as file:
        return set(file.keys())


def _changed(path: Path, tmp_path: Path, **options: object) -> Path:
    copy = tmp_path / "changed"
    shutil.copytree(path, copy)
    values = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**values, **options}))
    return copy


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "glm4_moe", "ernie4_5_moe"])
def test_experts_in_one_tensor_and_in_their_own_are_the_same(family, tmp_path):
    """As transformers keeps them in memory, and as checkpoints are published."""
    make_model(family).save_pretrained(tmp_path, save_original_format=False)
    write_tokenizer(tmp_path)
    first = 1 if family in {"glm4_moe", "ernie4_5_moe"} else 0
    assert f"model.layers.{first}.mlp.experts.gate_up_proj" in _names(tmp_path)
    apart = "block_sparse_moe.experts.3.w1.weight" if family == "mixtral" else "mlp.experts.3.gate_proj.weight"
    assert f"model.layers.{first}.{apart}" in _names(shared_checkpoint(family))
    token_ids = random_ids(40)
    stacked, single = Model(tmp_path).logits(token_ids), Model(shared_checkpoint(family)).logits(token_ids)
    assert torch.equal(stacked, single)


@pytest.mark.parametrize(("family", "name"), [("qwen3_moe", "down_proj"), ("gpt_oss", "gate_up_proj_bias")])
def test_a_stack_of_another_shape_is_refused(family, name, tmp_path):
    make_model(family).save_pretrained(tmp_path, save_original_format=False)
    tensors = load_file(tmp_path / "model.safetensors")
    whole = f"model.layers.0.mlp.experts.{name}"
    save_file({**tensors, whole: tensors[whole][:-1].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=rf"{name} has shape \[\d, .*the configuration implies"):
        Model(tmp_path)


def test_a_missing_expert_is_named(tmp_path):
    path = _changed(shared_checkpoint("olmoe"), tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"missing tensors: model.layers.1.mlp.experts.5.up_proj.weight"):
        Model(path)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("olmoe", {"num_experts_per_tok": 7}, "num_experts_per_tok=7 cannot be more than the 6 experts"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported for OlmoeForCausalLM"),
        ("qwen3_moe", {"mlp_only_layers": "1"}, "mlp_only_layers must be a list of layers"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size=8 is not supported"),
        ("glm4_moe", {"n_group": 3}, "n_group=3 does not divide 8 experts into groups of two or more"),
        ("glm4_moe", {"n_group": 8}, "n_group=8 does not divide 8 experts into groups of two or more"),
        ("glm4_moe", {"topk_group": 5}, "topk_group=5 cannot be more than the 4 groups"),
        ("glm4_moe", {"topk_group": 1}, "topk_group=1 groups have fewer experts than the 3 of a token"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported for Glm4MoeForCausalLM"),
        ("dots1", {"n_routed_experts": None}, "n_routed_experts is missing"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=True is not supported for Ernie4_5_MoeForCausalLM"),
        ("ernie4_5_moe", {"moe_layer_end_index": -2}, "moe_layer_end_index must be an integer from -1"),
        ("gemma4_moe", {"num_experts": None}, "num_experts is missing"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0 is not supported for GptOssForCausalLM"),
        ("gpt_oss", {"experts_per_token": 2}, "experts_per_token=2 is not supported"),
        ("mixtral", {"num_local_experts": 5000}, "num_local_experts must be an integer from 1 to 4096"),
    ],
)
def test_options_that_no_entry_computes_are_refused_by_name(family, options, message, tmp_path):
    with pytest.raises((ModelLoadError, NotNative), match=message):
        load_model_config(_changed(shared_checkpoint(family), tmp_path, **options))


def test_what_is_added_for_the_choice_stays_as_wide_as_it_is(tmp_path):
    """In a model of 16 bits too, where a rounding could decide between two experts."""
    path = _changed(shared_checkpoint("glm4_moe"), tmp_path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    values = tensors[name] + 2.0**-20
    assert not torch.equal(values.bfloat16().float(), values)
    save_file({**tensors, name: values}, path / "model.safetensors")
    for kernels in (REFERENCE, cpu_kernel_set(1)):
        model = Model(path, dtype=torch.bfloat16, kernels=kernels)
        found = next(op for op in model.decoder._weights.program if isinstance(op, MixExperts))
        assert torch.equal(found.routing.selection_bias, values)


def test_a_router_of_float32_is_not_rounded():
    path, name = shared_checkpoint("ernie4_5_moe"), "model.layers.1.mlp.gate.weight"
    stored, kernels = load_file(path / "model.safetensors")[name], cpu_kernel_set(1)
    for ops in (REFERENCE, kernels):
        model = Model(path, dtype=torch.bfloat16, kernels=ops)
        weight = next(op for op in model.decoder._weights.program if isinstance(op, MixExperts)).routing.weight
        if ops is REFERENCE:
            assert torch.equal(weight.weight, stored)
        else:  # the sum of three matrices of bfloat16
            parts = kernels.linear(torch.eye(64).bfloat16(), weight, True).T.view(3, 6, 64)
            assert torch.equal(parts[2] + parts[1] + parts[0], stored)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("glm4_moe", ("model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.0.up_proj.weight")),
        ("ernie4_5_moe", ("model.mtp_linear_proj.0.weight", "model.mtp_block.0.mlp.up_proj.weight")),
    ],
)
def test_layers_that_guess_further_tokens_are_left_out(family, more, tmp_path):
    path = _changed(shared_checkpoint(family), tmp_path, num_nextn_predict_layers=1)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {name: torch.ones(2, 2) for name in more}, path / "model.safetensors")
    token_ids = random_ids(20)
    assert torch.equal(Model(path).logits(token_ids), Model(shared_checkpoint(family)).logits(token_ids))
    shutil.rmtree(path)
    path = _changed(shared_checkpoint(family), tmp_path, num_nextn_predict_layers=0)
    save_file(tensors | {more[0]: torch.ones(2, 2)}, path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"does not use: {more[0]}"):
        Model(path)


def test_a_head_that_is_stored_by_itself_has_its_experts(tmp_path):
    """A model without its head was saved from below it, by names without their first part."""
    path = _changed(shared_checkpoint("olmoe", tie_word_embeddings=True), tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file({name.removeprefix("model."): value for name, value in tensors.items()}, path / "model.safetensors")
    token_ids = random_ids(20)
    whole = Model(shared_checkpoint("olmoe", tie_word_embeddings=True)).logits(token_ids)
    assert torch.equal(Model(path).logits(token_ids), whole)


def test_kernels_without_experts_refuse_the_model():
    with pytest.raises(ModelLoadError, match="MixtralForCausalLM: the reference kernels compute no experts"):
        Model(shared_checkpoint("mixtral"), kernels=replace(REFERENCE, pack_router=None))
    with pytest.raises(ModelLoadError, match="Qwen2MoeForCausalLM: the reference kernels gate no rows"):
        Model(shared_checkpoint("qwen2_moe"), kernels=replace(REFERENCE, gate_rows=None))


def _in_mxfp4(path: Path, target: Path) -> tuple[Path, Path]:
    """gpt-oss's experts as random bytes of MXFP4, and the same numbers by transformers' own decoder."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, random = load_file(path / "model.safetensors"), torch.Generator().manual_seed(4)
    stored, plain = dict(tensors), dict(tensors)
    for name, values in tensors.items():
        if values.dim() != 3:
            continue
        count, columns, rows = values.shape
        blocks = torch.randint(256, (count, rows, columns // 32, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(120, 126, (count, rows, columns // 32), generator=random, dtype=torch.uint8)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    folders = target / "stored", target / "plain"
    for folder, content in zip(folders, (stored, plain), strict=True):
        shutil.copytree(path, folder)
        save_file(content, folder / "model.safetensors")
    values = json.loads((folders[0] / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folders[0] / "config.json").write_text(json.dumps(values))
    return folders


def test_experts_in_mxfp4_are_the_numbers_that_they_stand_for(tmp_path):
    stored, plain = _in_mxfp4(shared_checkpoint("gpt_oss"), tmp_path)
    token_ids = random_ids(40)
    model = Model(stored)
    assert torch.equal(model.logits(token_ids), Model(plain).logits(token_ids))
    assert str(model.decoder.config.quantisation) == "MXFP4"


@pytest.mark.parametrize("broken", ["scales", "blocks"])
def test_mxfp4_of_another_shape_is_refused(broken, tmp_path):
    stored, _ = _in_mxfp4(shared_checkpoint("gpt_oss"), tmp_path)
    tensors = load_file(stored / "model.safetensors")
    name = f"model.layers.0.mlp.experts.gate_up_proj_{broken}"
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, stored / "model.safetensors")
    with pytest.raises(ModelLoadError, match=rf"gate_up_proj_{broken} is not stored as U8 \[4, 192, 2"):
        Model(stored)
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(ModelLoadError, match="down_proj_blocks has no exponents"):
        Model(stored)
