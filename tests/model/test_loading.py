"""Checkpoints that cannot be served: each is refused with the file and the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire_engine.build import resolve_plan
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ModelLoadError, NotNative
from quire_engine.execution.models.config import load_model_config
from support.checkpoints import make_model, shared_checkpoint
from support.fallback_steps import FallbackSteps
from support.model_steps import Model
from support.quantised import FORMS

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared_checkpoint(), tmp_path / "checkpoint"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_model("qwen3").save_pretrained(tmp_path / "sharded", max_shard_size="200KB")
    return tmp_path / "sharded"


def _refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        Model(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def _edit(file: Path, **changes) -> None:
    values = json.loads(file.read_text())
    for key, value in changes.items():
        values[key] = value
    file.write_text(json.dumps(values))


def _rewrite(path: Path, change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


# Weights


def test_missing_tensors_are_named(path):
    _rewrite(path, lambda tensors: tensors.pop(Q_PROJ))
    assert f"missing tensors: {Q_PROJ}" in _refusal(path)


def test_left_over_tensors_are_named(path):
    _rewrite(path, lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": torch.zeros(4)}))
    assert "does not use: model.layers.0.self_attn.sinks" in _refusal(path)


def test_a_long_list_of_tensors_is_cut(path):
    _edit(path / "config.json", num_hidden_layers=20, layer_types=["full_attention"] * 20)
    message = _refusal(path)
    assert "and 190 more" in message
    assert len(message) < 1000


def test_a_wrong_shape_is_named(path):
    _rewrite(path, lambda tensors: tensors.update({Q_PROJ: torch.zeros(128, 63)}))
    assert f"{Q_PROJ} has shape [128, 63], the configuration implies [128, 64]" in _refusal(path)


def test_a_quantised_tensor_is_named(path):
    _rewrite(path, lambda tensors: tensors.update({Q_PROJ: torch.zeros(128, 64, dtype=torch.int8)}))
    assert f"{Q_PROJ} is stored as I8" in _refusal(path)


def test_biases_that_the_configuration_denies_are_left_over(path):
    name = "model.layers.1.self_attn.q_proj.bias"
    _rewrite(path, lambda tensors: tensors.update({name: torch.zeros(128)}))
    assert name in _refusal(path)


def test_derived_frequencies_of_old_exporters_are_accepted(path):
    _rewrite(path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    Model(path)


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# What the files of a model with tied embeddings hold beside them, or instead.
TIED = {
    "a copy": lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}),
    "a head of its own": lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].flip(0).contiguous()}),
    "the head alone": lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}),
}


@pytest.mark.parametrize("stored", TIED)
@pytest.mark.parametrize("steps", [Model, None], ids=["native", "transformers"])
def test_a_head_beside_tied_embeddings_is_used_as_transformers_uses_it(stored, steps, tmp_path):
    path = Path(shutil.copytree(shared_checkpoint("qwen2", tie_word_embeddings=True), tmp_path / "tied"))
    _rewrite(path, TIED[stored])
    ids = [3, 50, 7, 120, 9]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0]
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight) is (stored != "a head of its own")
    if steps is None:
        found = FallbackSteps(path, dtype="float32").run({0: ids}, [[(0, len(ids))]])[0]
    else:
        found = steps(path).logits(ids)
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_a_head_beside_tied_embeddings_counts_in_the_plan(tmp_path):
    path = Path(shutil.copytree(shared_checkpoint("qwen2", tie_word_embeddings=True), tmp_path / "tied"))
    config = EngineConfig(model=str(path), device="cpu", kv_memory=1 << 20)
    before = resolve_plan(config)
    _rewrite(path, TIED["a head of its own"])
    table = load_file(path / "model.safetensors")[HEAD].numel()
    assert resolve_plan(config).model.num_parameters == before.model.num_parameters + table


@pytest.mark.parametrize("keep", [0, 7, 100, 5000, -1])
def test_a_truncated_file_is_refused(keep, path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model.safetensors: not a complete safetensors file" in _refusal(path)


@pytest.mark.parametrize("length", [2**63, 2**40, 150_000_000])
def test_a_huge_header_length_is_refused(length, path):
    file = path / "model.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    assert "not a complete safetensors file" in _refusal(path)


def test_bytes_that_are_no_safetensors_are_refused(path):
    (path / "model.safetensors").write_bytes(b"\x80\x04\x95" * 1000)
    assert "not a complete safetensors file" in _refusal(path)


def test_a_missing_shard_is_named(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"{shard.name}: missing" in _refusal(sharded)


def test_a_shard_that_lacks_a_promised_tensor_is_named(sharded):
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    first, second = sorted(set(weight_map.values()))[:2]
    moved = next(name for name, shard in weight_map.items() if shard == first)
    _edit(index, weight_map={**weight_map, moved: second})
    assert f"{second}: lacks tensors that model.safetensors.index.json places there: {moved}" in _refusal(sharded)


def test_a_tensor_in_two_shards_is_named(sharded):
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    tensors, others = load_file(first), load_file(second)
    name = next(iter(tensors))
    save_file({**others, name: tensors[name]}, second, metadata={"format": "pt"})
    assert f"tensor {name} is also in" in _refusal(sharded)


@pytest.mark.parametrize(
    "shard",
    ["../model.safetensors", "/etc/model.safetensors", "a\\b.safetensors", "x\0.safetensors", "", 3, "model.bin"],
)
def test_a_shard_name_that_leaves_the_directory_is_refused(shard, sharded):
    shutil.copy(next(iter(sharded.glob("*.safetensors"))), sharded.parent / "model.safetensors")
    _edit(sharded / "model.safetensors.index.json", weight_map={Q_PROJ: shard})
    assert f"{shard!r} is not the name of a safetensors file in this directory" in _refusal(sharded)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_an_index_without_a_map_is_refused(weight_map, sharded):
    _edit(sharded / "model.safetensors.index.json", weight_map=weight_map)
    assert "weight_map must be a non-empty object" in _refusal(sharded)


def test_pickled_weights_are_refused_unread(path):
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert "pytorch_model.bin: pickled weights are never loaded" in _refusal(path)


def test_a_directory_without_weights_is_refused(path):
    (path / "model.safetensors").unlink()
    assert "holds neither model.safetensors nor" in _refusal(path)


def test_a_failed_load_closes_its_files(path):
    """On the way out as well: the file can be replaced and loaded at once."""
    good = (path / "model.safetensors").read_bytes()
    _rewrite(path, lambda tensors: tensors.pop(Q_PROJ))
    _refusal(path)
    (path / "model.safetensors").write_bytes(good)
    Model(path)


def test_weights_do_not_follow_the_file_after_loading(path):
    model = Model(path)
    before = model.logits([1, 2, 3])
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(10_000)
        file.write(b"\xff" * 100_000)
    assert torch.equal(model.logits([1, 2, 3]), before)


# Configuration


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'"text"'])
def test_a_config_that_is_no_json_object_is_refused(content, path):
    (path / "config.json").write_bytes(content)
    assert "config.json" in _refusal(path)


def test_a_missing_config_is_named(path):
    (path / "config.json").unlink()
    assert "config.json: no such file" in _refusal(path)


def compressed(**changes: object) -> dict[str, object]:
    return FORMS["W4A16"].config | changes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; supported are"),
        ({"architectures": None}, "must name exactly one architecture"),
        ({"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]}, "must name exactly one architecture"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: bits is missing"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "bits=3 is not supported; supported: 2, 4, 8"),
        ({"quantization_config": {"quant_method": "awq", "version": "gemv"}}, "version='gemv' is not supported"),
        ({"quantization_config": {"quant_method": "awq", "group_size": 0}}, "group_size=0 must be -1"),
        ({"quantization_config": {"quant_method": "fp8", "twist": 2}}, "twist: not known of fp8"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "two positive integers"),
        ({"quantization_config": compressed(format="nvfp4-pack-quantized")}, "use a version with W4A16, W8A16, W8A8"),
        ({"quantization_config": compressed(kv_cache_scheme={"num_bits": 8})}, "kv_cache_scheme: it changes the num"),
        ({"quantization_config": compressed(twist=2)}, "twist: not known of compressed-tensors"),
        ({"quantization_config": compressed(config_groups={})}, "must have one form of weights, not 0"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method='hqq' is not read; use a GPTQ or AWQ version"),
        ({"quantization_config": {"quant_method": "new"}}, "'new' is not read; use a GPTQ, AWQ or FP8 version"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 must be at most 1"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.3}}, "they come in pairs"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
        ({"attention_sinks": True}, "attention_sinks=True is not supported"),
        ({"num_experts": 8}, "num_experts=8 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"dtype": "float64"}, "dtype='float64' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "long_factor must be a list of numbers"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
            "short_factor and long_factor must have 16 numbers",
        ),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "rope type 'mrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor must be greater than 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "alpha": 3}}, "rope parameters alpha are not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope parameters full_attention"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor must be greater than low_freq_factor",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types must list 2 layers"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention' is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window or sliding_window is off"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"head_dim": 31}, "head_dim=31 must be even"),
        ({"head_dim": 2}, "head_dim=2 must be even and at least 4"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer from 1 to 4096"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to 4096"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_theta=1.0 must be greater than 1"),
        ({"vocab_size": True}, "vocab_size must be an integer"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"hidden_act": 3}, "hidden_act must be a string"),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 64}, "sliding_window=64"),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 2},
            "layer_types=['full_attention', 'full_attention']",
        ),
    ],
)
def test_an_option_that_would_change_the_output_is_refused(changes, reason, path):
    _edit(path / "config.json", **changes)
    with pytest.raises(ModelLoadError) as caught:
        load_model_config(path)
    assert reason in str(caught.value)
    assert str(path / "config.json") in str(caught.value)


def test_a_key_that_no_family_knows_is_refused_by_name_and_may_be_ignored(path):
    before = load_model_config(path)
    _edit(path / "config.json", attention_temperature=0.7, mixes={"a": list(range(100))}, hidden_dropout=0.1, note=None)
    with pytest.raises(NotNative) as caught:
        load_model_config(path)
    assert "attention_temperature=0.7, mixes={'a': [0, 1," in str(caught.value)
    assert str(caught.value).endswith("are not supported for Qwen3ForCausalLM")
    assert load_model_config(path, ("attention_temperature", "mixes")) == before


# As they are published, without what every configuration has; each is served by an entry of ours.
PUBLISHED = {
    "Qwen3ForCausalLM": {"max_window_layers": 28, "rope_scaling": None, "sliding_window": None, "use_mrope": False},
    "LlamaForCausalLM": {"pretraining_tp": 1, "mlp_bias": False, "is_llama_config": None, "max_sequence_length": 2048},
    "Gemma3ForCausalLM": {
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "Phi3ForCausalLM": {
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "embd_pdrop": 0.0,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "sliding_window": 262144,
    },
    "SmolLM3ForCausalLM": {
        "max_window_layers": 28,
        "no_rope_layer_interval": 4,
        "pretraining_tp": 2,
        "use_sliding_window": False,
    },
}


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_published_configurations_are_read(architecture, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    plain = {"architectures": [architecture], "vocab_size": 512, "num_key_value_heads": 2, "head_dim": 64, **sizes}
    if architecture == "Phi3ForCausalLM":
        del plain["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(plain | PUBLISHED[architecture]))
    assert load_model_config(tmp_path).architecture == architecture


def test_the_smallest_text_part_that_is_published_is_read(tmp_path):
    """Gemma 3 4B's leaves out heads and vocabulary."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 256, "vision_config": {"a": 1}}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "text_config": text, "boi_token_index": 255999}))
    config = load_model_config(tmp_path)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.windows[:6] == (1024,) * 5 + (None,)
    assert (config.ropes[0].factor, config.ropes[5].factor, config.ropes[5].theta) == (1.0, 8.0, 1e6)
    assert config.tie_word_embeddings


def test_family_defaults_stand_in_for_absent_options(tmp_path):
    required = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
    }
    expected = {
        "LlamaForCausalLM": (32, 8, 2048, (None, None)),
        "MistralForCausalLM": (8, 8, 131072, (4096, 4096)),
        "Qwen2ForCausalLM": (32, 8, 32768, (None, None)),
        "Qwen3ForCausalLM": (32, 128, 32768, (None, None)),
    }
    for architecture, values in expected.items():
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **required}))
        config = load_model_config(tmp_path)
        assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings, config.windows) == values
        assert config.ropes[0].theta == 10000.0
        assert config.dtype == "float32"
        assert not config.tie_word_embeddings


def test_a_null_window_is_no_window(tmp_path):
    shutil.copytree(shared_checkpoint("mistral"), tmp_path, dirs_exist_ok=True)
    assert load_model_config(tmp_path).windows == (None, None)
