"""GGUF files of every family that is read from them: the same bits as the numbers that they stand for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import make_gguf as make_gguf_file
from quire_engine.build import build, resolve_plan
from quire_engine.contract.errors import ModelLoadError
from quire_engine.execution.models.checkpoint import fingerprint, open_checkpoint
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.models.weights import take_text
from quire_engine.gguf import read_gguf
from quire_engine.memory_plan import plan_text
from quire_kernels.cpu.ops import cpu_kernel_set
from quire_kernels.cpu.stored import STACKED
from quire_kernels.kernel_set import KernelSet, LinearAdd, MixExperts, NormGateUp, NormLinear, Quantization
from quire_server.checkpoint.gguf_folder import unfolded
from support.covering import few
from support.gguf_blocks import QUANTISED
from support.gguf_models import ARCHITECTURES, all_of, make_gguf
from support.limits import engine_config
from support.model_steps import Model, random_ids

WIDE = {"hidden_size": 256, "intermediate_size": 512}  # rows of whole blocks
WIDE_HEADS = WIDE | {"num_attention_heads": 8}
# What files do not say, as llama.cpp has it: each fourth layer without a rotation, queries scaled by heads.
NO_CHOICE: dict[str, dict[str, Any]] = {
    "smollm3": {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_moe": {"mlp_only_layers": []},
    # Windows are not said either, and the MLP beside experts is as wide as the converter's quotient.
    "dots1": {"sliding_window": None, "attention_bias": True},
    "ernie4_5_moe": {"intermediate_size": 160},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.01 * place for place in range(8)],
    "long_factor": [1.0 + place for place in range(8)],
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
OF_GEMMA3 = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 131072, "hidden_size": 256}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"head_dim": 24}),
    ("mistral", {"sliding_window": 21}),
    ("qwen2", {"rope_parameters": YARN}),
    ("qwen3", {"attention_bias": True}),
    ("gemma3", {"rope_parameters": OF_GEMMA3}),
    ("gemma3", {"tie_word_embeddings": False}),
    ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}),
    ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 21}),
]


def same_numbers(path: Path, dense: Path) -> Path:
    folder = unfolded(path)
    wanted = load_file(str(dense / "model.safetensors"))
    with open_checkpoint(folder) as checkpoint, open_checkpoint(dense) as exact:
        take_text(checkpoint, load_model_config(folder))
        take_text(exact, load_model_config(dense))  # which gives experts the names that all families have
        for name in checkpoint.names:
            found, number = checkpoint.tensor(name), wanted[name] if name in wanted else exact.tensor(name)
            assert torch.equal(found.float(), number.float()), name
        assert exact.names - checkpoint.names <= {"lm_head.weight"}
    return folder


def same_logits(path: Path, dense: Path, dtype: torch.dtype = torch.float32) -> None:
    ids = random_ids(60, vocab_size=200)
    found, wanted = Model(path, dtype=dtype).logits(ids, 60), Model(dense, dtype=dtype).logits(ids, 60)
    assert torch.equal(found, wanted)


# Rows of queries permuted, norms shifted, experts, experts behind others: further families in the long run.
@pytest.mark.parametrize("family", few(ARCHITECTURES, "llama", "gemma3", "phi3", "qwen3_moe", "gpt_oss", "glm4_moe"))
def test_a_family_has_the_bits_of_its_safetensors(family: str, tmp_path: Path) -> None:
    path, dense = make_gguf(tmp_path, family, **NO_CHOICE.get(family, {}))
    folder = same_numbers(path, dense)
    assert load_model_config(folder).dtype == "float32"
    same_logits(folder, dense)


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    path, dense = make_gguf(tmp_path, "glm4_moe", num_hidden_layers=3, change={"glm4moe.nextn_predict_layers": 1})
    config = json.loads((dense / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (dense / "config.json").write_text(json.dumps(config))
    folder = unfolded(path)
    found = load_model_config(folder)
    assert (found.num_layers, found.more_layers) == (2, 1)
    same_logits(folder, dense)


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("glm4_moe", {"glm4moe.nextn_predict_layers": 2}, "nextn_predict_layers=2 are all the layers that there are"),
        ("dots1", {"dots1.expert_gating_func": 1}, "dots1.expert_gating_func=1 is not supported"),
        ("dots1", {"dots1.expert_used_count": None}, "dots1.expert_used_count is missing"),
        (
            "ernie4_5_moe",
            {"ernie4_5-moe.expert_shared_feed_forward_length": 40},
            "expert_shared_feed_forward_length=40 is not that of 2 experts of 40",
        ),
    ],
)
def test_experts_that_are_not_known_are_refused_by_their_key(
    family: str, change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path, _ = make_gguf(tmp_path, family, change=change, **NO_CHOICE.get(family, {}))
    with pytest.raises(ModelLoadError, match=reason):
        unfolded(path)


@pytest.mark.parametrize("family", few(["qwen3_moe", "gpt_oss"], "gpt_oss"))
def test_experts_of_quantised_types_have_the_bits_of_their_numbers(family: str, tmp_path: Path) -> None:
    overrides = {"hidden_size": 256, "intermediate_size": 256, **NO_CHOICE.get(family, {})}
    if family == "qwen3_moe":
        overrides["moe_intermediate_size"] = 256
    kind = "MXFP4" if family == "gpt_oss" else "Q4_K"
    path, dense = make_gguf(tmp_path, family, kinds=lambda name, _: kind if "exps" in name else "F32", **overrides)
    folder = unfolded(path)
    assert str(load_model_config(folder).quantisation) == f"GGUF, F32, {kind}"
    same_logits(folder, dense)
    same_logits(folder, dense, torch.bfloat16)
    kernels = cpu_kernel_set(2)
    model = Model(folder, dtype=torch.bfloat16, kernels=kernels)
    blocks = [op.experts for op in model.decoder._weights.program if isinstance(op, MixExperts)]
    assert all(matrix.args.kind == 3 for block in blocks for matrix in (block.gate_up, block.down))
    ids = random_ids(40, vocab_size=200)
    got, truth = model.logits(ids, 40), Model(dense).logits(ids, 40)
    rounded = Model(dense, dtype=torch.bfloat16, kernels=kernels).logits(ids, 40)  # the numbers too
    assert (got - truth).norm() < 1.3 * (rounded - truth).norm()
    assert torch.equal(model.logits(ids, 1), got)


@pytest.mark.parametrize(("family", "overrides"), OPTIONS)
def test_options_of_a_family_are_read_from_the_metadata(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    path, dense = make_gguf(tmp_path, family, **NO_CHOICE.get(family, {}), **overrides)
    folder = same_numbers(path, dense)
    found, wanted = load_model_config(folder), load_model_config(dense)
    for name in (
        "ropes",
        "windows",
        "tie_word_embeddings",
        "qkv_bias",
        "mlp_bias",
        "head_dim",
        "rotary_share",
        "norm_eps",
    ):
        assert getattr(found, name) == getattr(wanted, name), name
    same_logits(folder, dense)


# The numbers of each type: test_gguf_blocks.py.
@pytest.mark.parametrize("kind", few([*QUANTISED, "F16", "BF16"], "Q4_0", "F16"))
def test_every_type_of_matrix_has_the_bits_of_its_numbers(kind: str, tmp_path: Path) -> None:
    path, dense = make_gguf(tmp_path, "llama", kinds=all_of(kind), **WIDE)
    folder = same_numbers(path, dense)
    config = load_model_config(folder)
    assert config.dtype == ("float16" if kind == "F16" else "bfloat16")
    assert str(config.quantisation) == f"GGUF, {kind}"
    same_logits(folder, dense)
    same_logits(folder, dense, torch.bfloat16)


def mixed(name: str, shape: tuple[int, ...]) -> str:
    """As in files that are called Q4_K_M."""
    if len(shape) == 1:
        return "F32"
    return "Q6_K" if "ffn_down" in name or "attn_v" in name or "token_embd" in name else "Q4_K"


@pytest.mark.parametrize("family", few(["qwen3", "gemma3", "phi3"], "gemma3"))
def test_a_mixture_of_types_in_several_files(family: str, tmp_path: Path) -> None:
    path, dense = make_gguf(tmp_path, family, kinds=mixed, shards=3, **NO_CHOICE.get(family, {}), **WIDE_HEADS)
    assert path.name == f"{family}-00001-of-00003.gguf"
    folder = same_numbers(path, dense)
    same_logits(folder, dense)
    config = engine_config(model="", device="cpu", dtype="bfloat16", kernels="reference")
    plans = [resolve_plan(replace(config, model=str(each))) for each in (folder, dense)]
    assert plans[0].model.num_parameters == plans[1].model.num_parameters
    assert plans[0].model.weights_bytes == plans[1].model.weights_bytes
    assert [plan.model.stored_as for plan in plans] == ["GGUF, Q4_K, Q6_K", ""]


def weights_of(model: Model) -> dict[str, Any]:
    """The packed matrices of the last layer, by their ops, and the head."""
    weights = model.decoder._weights
    found = {type(op).__name__: op.weight for op in weights.program if isinstance(op, NormLinear | NormGateUp)}
    adds = [op.weight for op in weights.program if isinstance(op, LinearAdd)]
    return found | {"o": adds[-2], "down": adds[-1], "head": weights.head}


def columns(kernels: KernelSet, weight: Any) -> torch.Tensor:
    """The numbers of a packed matrix: a row of one 1 gives one of its columns."""
    assert kernels.linear is not None
    return kernels.linear(torch.eye(weight.num_inputs).bfloat16(), weight, True).T


@pytest.mark.parametrize(
    ("family", "kind"),
    few(
        [*(("llama", kind) for kind in QUANTISED), ("qwen3", "mixed")],
        ("llama", "Q8_0"),
        ("llama", "MXFP4"),
        ("qwen3", "mixed"),
    ),
)
def test_matrices_stay_as_they_are_stored(family: str, kind: str, tmp_path: Path) -> None:
    """Each number is the file's, with queries, keys and values of two types too, and so is the head's."""
    kinds = mixed if kind == "mixed" else all_of(kind)
    path, dense = make_gguf(tmp_path, family, kinds=kinds, tie_word_embeddings=kind == "mixed", **WIDE_HEADS)
    kernels, exact = cpu_kernel_set(2), load_file(str(dense / "model.safetensors"))
    model = Model(unfolded(path), dtype=torch.bfloat16, kernels=kernels)
    packed, layer = weights_of(model), f"model.layers.{model.decoder.config.num_layers - 1}."
    wanted = {
        "NormLinear": torch.cat([exact[f"{layer}self_attn.{each}_proj.weight"] for each in "qkv"]),
        "o": exact[layer + "self_attn.o_proj.weight"],
        "down": exact[layer + "mlp.down_proj.weight"],
        "head": exact.get("lm_head.weight", exact["model.embed_tokens.weight"]),
    }
    assert torch.equal(model.decoder.embed(torch.arange(9)), exact["model.embed_tokens.weight"][:9].bfloat16())
    assert (model.decoder._weights.stored_embedding is packed["head"]) == (kind == "mixed")
    for name, numbers in wanted.items():
        assert torch.equal(columns(kernels, packed[name]), numbers), name
    ids = random_ids(40, vocab_size=200)
    got, truth = model.logits(ids, 40), Model(dense).logits(ids, 40)
    rounded = Model(dense, dtype=torch.bfloat16, kernels=kernels).logits(ids, 40)  # the numbers too
    assert (got - truth).norm() < 1.3 * (rounded - truth).norm()
    assert torch.equal(model.logits(ids, 1), got)


@pytest.mark.parametrize(
    ("family", "kind"),
    few(
        [*(("qwen3", kind) for kind in ("Q4_0", "Q4_K", "mixed", "Q8_0")), ("qwen3_moe", "Q4_K")],
        ("qwen3", "mixed"),
    ),
)
def test_the_plan_counts_what_matrices_take(family: str, kind: str, tmp_path: Path) -> None:
    kinds = mixed if kind == "mixed" else all_of(kind)
    more = {"moe_intermediate_size": 256, **NO_CHOICE["qwen3_moe"]} if family == "qwen3_moe" else {}
    path, _ = make_gguf(tmp_path, family, kinds=kinds, vocab_size=2048, **WIDE_HEADS, **more)
    config = engine_config(model=str(unfolded(path)), device="cpu", dtype="bfloat16", kernels="cpu", kv_memory=4 << 20)
    plan = resolve_plan(config)
    assert "kept as GGUF, Q" in plan_text(plan)
    assert 0.97 < plan.model.weights_bytes / build(config).plan.model.weights_bytes < 1.03


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_is_quantised_here_is_decoded_first(quantization: Quantization, tmp_path: Path) -> None:
    ids = random_ids(20, vocab_size=200)
    kernels = cpu_kernel_set(1, quantization)
    path, dense = make_gguf(tmp_path, "llama", kinds=mixed, **WIDE_HEADS)
    logits = [Model(each, dtype=torch.bfloat16, kernels=kernels).logits(ids, 20) for each in (unfolded(path), dense)]
    assert torch.equal(*logits)


def test_rows_beside_plain_ones_are_decoded_and_the_plan_says_so(tmp_path: Path) -> None:
    kinds = lambda name, shape: "BF16" if "blk.1.attn_v" in name else mixed(name, shape)  # noqa: E731
    path, _ = make_gguf(tmp_path, "llama", kinds=kinds, **WIDE_HEADS)
    config = engine_config(model=str(unfolded(path)), device="cpu", dtype="bfloat16", kernels="cpu", kv_memory=4 << 20)
    text = plan_text(resolve_plan(config))
    assert "kept as GGUF, BF16, Q4_K, Q6_K (but for 2 matrices beside plain ones, which are decoded)" in text
    model = Model(unfolded(path), dtype=torch.bfloat16, kernels=cpu_kernel_set(1))
    kept = [op.weight.args.kind for op in model.decoder._weights.program if isinstance(op, NormLinear)]
    assert kept == [STACKED, 0]


@pytest.mark.parametrize("shape", few(["qwen3-0.6b", "llama3-8b", "qwen3-30b-a3b"], "qwen3-30b-a3b"))
def test_random_files_for_measuring_are_served(shape: str, tmp_path: Path) -> None:
    small = make_gguf_file.SHAPES[shape]._replace(layers=2, hidden=256, inner=512, heads=4, kv_heads=2, head_dim=64)
    if small.experts:
        small = small._replace(experts=6, chosen=2)
    path = make_gguf_file.make(tmp_path, small._replace(vocabulary=2600))
    config = engine_config(model=str(unfolded(path)), device="cpu", dtype="bfloat16", kernels="cpu", kv_memory=4 << 20)
    routers = "F32, " if small.experts else ""
    assert build(config).plan.model.stored_as == f"GGUF, {routers}Q4_K, Q6_K"
    model = Model(unfolded(path), dtype=torch.bfloat16, kernels=cpu_kernel_set(1))
    assert 0.2 < model.logits(random_ids(20), 20).std() < 20


def test_packed_files_have_what_is_stored(tmp_path: Path) -> None:
    path, _ = make_gguf(tmp_path, "llama", kinds=mixed, **WIDE_HEADS)
    config = engine_config(model=str(unfolded(path)), device="cpu", dtype="bfloat16", kernels="cpu", kv_memory=4 << 20)
    config = replace(config, packed_cache_dir=str(tmp_path / "packed"))
    sizes = [build(config).plan.model.weights_bytes for _ in range(2)]
    assert sizes[0] == sizes[1]
    assert sum(file.stat().st_size for file in (tmp_path / "packed").rglob("*") if file.is_file()) < sizes[0] * 1.1


def test_rotations_that_are_stretched_otherwise_than_llama_3s_are_taken_as_they_are(tmp_path: Path) -> None:
    unusual = LLAMA3 | {"original_max_position_embeddings": 4096}
    path, dense = make_gguf(tmp_path, "llama", rope_parameters=unusual, max_position_embeddings=8192, hidden_size=256)
    folder = same_numbers(path, dense)
    (rope,) = set(load_model_config(folder).ropes)
    assert rope is not None
    assert rope.rope_type == "longrope"
    ids = random_ids(60, vocab_size=200)
    found, wanted = Model(folder).logits(ids, 60), Model(dense).logits(ids, 60)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def test_a_file_is_the_same_checkpoint_each_time_it_is_unfolded(tmp_path: Path) -> None:
    path, _ = make_gguf(tmp_path, "qwen3")
    first, second = unfolded(path), unfolded(path)
    assert first != second
    assert fingerprint(first) == fingerprint(second)
    before = fingerprint(first)
    data = path.read_bytes()
    path.write_bytes(data)
    assert fingerprint(first) != before  # written to, be it with the same content


@pytest.mark.parametrize("damage", ["another name", "no matrix", "another shape", "infinite scales"])
def test_tensors_that_do_not_fit_the_configuration_are_one_line(damage: str, tmp_path: Path) -> None:
    change = {"qwen3.block_count": 3} if damage == "no matrix" else {}
    if damage == "another shape":
        change = {"qwen3.feed_forward_length": 64}
    path, _ = make_gguf(tmp_path, "qwen3", kinds=all_of("Q4_0"), change=change)
    scales = read_gguf(path).tensors["blk.1.ffn_up.weight"].offset
    data = path.read_bytes()
    if damage == "another name":
        path.write_bytes(data.replace(b"blk.1.ffn_gate.weight", b"blk.1.ffn_gaze.weight"))
    if damage == "infinite scales":
        path.write_bytes(data[:scales] + b"\x00\x7c" + data[scales + 2 :])
    with pytest.raises(ModelLoadError) as caught:
        Model(unfolded(path))
    line = str(caught.value)
    assert "\n" not in line
    expected = {
        "another name": "missing tensors: model.layers.1.mlp.gate_proj.weight",
        "no matrix": "missing tensors: model.layers.2.",
        "another shape": "has shape [64, 96], the configuration implies [64, 64]",
        "infinite scales": "holds values that are not finite numbers",
    }
    assert expected[damage] in line
