"""The decoder against transformers, on random checkpoints of every family and option."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers

from quire_engine.execution.models.config import load_model_config
from support.checkpoints import ALL_FAMILIES, FAMILIES, make_checkpoint, make_model, shared_checkpoint
from support.covering import few
from support.model_steps import DEVICES, Model, random_ids

# What a checkpoint may vary, as (family, options).
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WINDOWED = {"use_sliding_window": True, "sliding_window": 37}
VARIANTS = {
    **{family: (family, {}) for family in ALL_FAMILIES},
    "gemma3 capped": ("gemma3", {"final_logit_softcapping": 30.0}),
    "gemma3 global rope": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "gemma4 values of their own": ("gemma4", {"attention_k_eq_v": False}),
    "gemma4 of one width": ("gemma4", {"global_head_dim": 16, "num_global_key_value_heads": 2}),
    "phi3 window": ("phi3", {"sliding_window": 37}),
    "phi3 partial": ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.75, "rope_theta": 1e4}}),
    "phi3 longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [2.0 + i for i in range(8)],
            },
            "original_max_position_embeddings": 64,
        },
    ),
    "smollm3 window": ("smollm3", {"use_sliding_window": True, "sliding_window": 37, "layer_types": None}),
    "glm4 biases": ("glm4", {"attention_bias": True}),
    "ernie4_5 biases": ("ernie4_5", {"use_bias": True}),
    "granite biases": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "exaone4 rotated everywhere": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "qwen3_moe not normalised": (
        "qwen3_moe",
        {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []},
    ),
    "mixtral window": ("mixtral", {"sliding_window": 37}),
    "olmoe normalised": ("olmoe", {"norm_topk_prob": True, "attention_bias": True}),
    "qwen2_moe normalised, window": ("qwen2_moe", {"norm_topk_prob": True, **WINDOWED, "num_hidden_layers": 3}),
    "glm4_moe plain": (
        "glm4_moe",
        {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "use_qk_norm": False, "attention_bias": True},
    ),
    "dots1 normalised": ("dots1", {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "attention_bias": True}),
    "ernie4_5_moe by steps": (
        "ernie4_5_moe",
        {"num_hidden_layers": 5, "moe_layer_interval": 2, "moe_layer_end_index": 3},
    ),
    "ernie4_5_moe alone": ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_norm_min": 0.9}),
    "flex_olmo normalised": ("flex_olmo", {"norm_topk_prob": True}),
    "gpt_oss without biases": ("gpt_oss", {"attention_bias": False}),
    "cohere biases": ("cohere", {"attention_bias": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama head_dim": ("llama", {"head_dim": 40}),
    "llama multi-head": ("llama", {"num_key_value_heads": 4}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "odd sizes": ("llama", {"hidden_size": 60, "intermediate_size": 93, "vocab_size": 509, "num_attention_heads": 6}),
    "norm eps": ("qwen3", {"rms_norm_eps": 0.1}),
    "mistral window": ("mistral", {"sliding_window": 37}),
    "qwen2 window on upper layers": ("qwen2", {**WINDOWED, "max_window_layers": 1}),
    "qwen3 window by layer": ("qwen3", {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3 window off": ("qwen3", {"use_sliding_window": False, "sliding_window": 37}),
    "rope theta": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "rope linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e3}}),
    "rope dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "rope llama3": (
        "llama",
        {"rope_parameters": {**LLAMA3, "rope_theta": 1e4, "original_max_position_embeddings": 64}},
    ),
    "rope yarn": ("qwen3", {"rope_parameters": {**YARN, "rope_theta": 1e4}, "max_position_embeddings": 256}),
    "rope yarn, every parameter": (
        "llama",
        {
            "rope_parameters": {
                **YARN,
                "rope_theta": 1e4,
                "beta_fast": 20.0,
                "beta_slow": 2.0,
                "mscale": 0.8,
                "mscale_all_dim": 0.5,
                "truncate": False,
            },
            "max_position_embeddings": 256,
        },
    ),
    "rope yarn, attention factor": (
        "mistral",
        {"rope_parameters": {**YARN, "rope_theta": 1e4, "attention_factor": 1.3}, "max_position_embeddings": 256},
    ),
}
# Options that other families have in the rows beside them.
FURTHER = (
    *("glm4 biases", "ernie4_5 biases", "granite biases", "cohere biases", "qwen3 biases", "qwen2 tied"),
    *("olmoe normalised", "dots1 normalised", "flex_olmo normalised", "qwen2_moe normalised, window"),
    *("phi3 window", "smollm3 window", "mixtral window"),
)


def _options(options: dict) -> dict:
    """A copy: transformers fills in the dictionaries it is given."""
    return json.loads(json.dumps(options))


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _reference(path, dtype=torch.float32):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def _expected(model, token_ids) -> torch.Tensor:
    return model(torch.tensor([token_ids])).logits[0].float()


def _compare(path, device: str, num_tokens: int = 150) -> None:
    token_ids = random_ids(num_tokens, vocab_size=500)
    expected = _expected(_reference(path), token_ids)
    result = Model(path, device=device).logits(token_ids, chunk=64)
    assert (result - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", few(VARIANTS, *(set(VARIANTS) - set(FURTHER))))
def test_logits_equal_the_reference(variant, device, tmp_path):
    family, options = VARIANTS[variant]
    _compare(make_checkpoint(tmp_path, family, **_options(options)), device)


def test_windows_and_scalings_do_change_the_logits(tmp_path):
    """So that the comparisons above compare what they say."""
    token_ids = random_ids(150)
    plain = {family: Model(shared_checkpoint(family)).logits(token_ids) for family in FAMILIES}
    for variant, (family, options) in VARIANTS.items():
        if family in FAMILIES and ("window" in variant or "rope" in variant):
            path = make_checkpoint(tmp_path / variant, family, **_options(options))
            difference = (Model(path).logits(token_ids) - plain[family]).abs().max()
            assert (difference > 0.01) != (variant in ("qwen3 window off", "rope dynamic")), variant


@pytest.mark.parametrize("family", FAMILIES)
def test_16_bit_logits_are_as_near_the_truth_as_the_reference(family, tmp_path):
    path = make_checkpoint(tmp_path, family, dtype="bfloat16")
    token_ids = random_ids(150)
    truth = _expected(_reference(path, torch.float32), token_ids)
    theirs = (_expected(_reference(path, torch.bfloat16), token_ids) - truth).square().mean().sqrt()
    ours = (Model(path, dtype=torch.bfloat16).logits(token_ids) - truth).square().mean().sqrt()
    assert ours <= 2 * theirs
    half = (Model(path, dtype=torch.float16).logits(token_ids) - truth).square().mean().sqrt()
    assert half <= ours


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", few(FAMILIES, "qwen3"))
def test_greedy_tokens_equal_the_reference(family, device):
    """64 tokens on each of 20 prompts of different lengths, ours in one batch."""
    path = shared_checkpoint(family)
    prompts = [random_ids(3 + 4 * i, seed=i) for i in range(20)]
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model = _reference(path)
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        expected = model.generate(padded, attention_mask=mask, max_new_tokens=64, do_sample=False, pad_token_id=0)
    assert Model(path, device=device).greedy(prompts, 64) == expected[:, longest:].tolist()


@torch.inference_mode()
def test_dynamic_rope_beyond_its_length_equals_the_reference_decoding_with_a_cache(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    path = make_checkpoint(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=40)
    token_ids = random_ids(100)
    model, cache, rows = _reference(path), None, []
    for start, end in [(0, 30), *((i, i + 1) for i in range(30, 100))]:
        output = model(torch.tensor([token_ids[start:end]]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        rows.append(output.logits[0])
    expected = torch.cat(rows)
    assert (Model(path).logits(token_ids) - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("variant", ["rope llama3", "rope yarn", "rope linear", "rope theta", "qwen2 tied"])
def test_the_older_spelling_of_a_configuration_means_the_same(variant, tmp_path):
    family, options = VARIANTS[variant]
    path = make_checkpoint(tmp_path, family, **_options(options))
    config = load_model_config(path)
    values = json.loads((path / "config.json").read_text())
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if rope["rope_type"] == "linear":
        rope["type"] = rope.pop("rope_type")
    values["torch_dtype"] = values.pop("dtype")
    values.pop("layer_types", None)
    (path / "config.json").write_text(json.dumps(values))
    assert load_model_config(path) == config
    _compare(path, "cpu", num_tokens=80)


def test_sharded_weights_are_the_same_weights(tmp_path):
    model = make_model("qwen3")
    model.save_pretrained(tmp_path / "shards", max_shard_size="200KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    token_ids = random_ids(20)
    assert torch.equal(Model(tmp_path / "shards").logits(token_ids), Model(shared_checkpoint()).logits(token_ids))


def test_code_that_a_checkpoint_brings_is_not_run(tmp_path):
    path = tmp_path / "with_code"
    shutil.copytree(shared_checkpoint(), path)
    values = json.loads((path / "config.json").read_text())
    values["auto_map"] = {"AutoConfig": "trap.Config", "AutoModelForCausalLM": "trap.Model"}
    (path / "config.json").write_text(json.dumps(values))
    (path / "trap.py").write_text(f"open({str(path / 'ran')!r}, 'w')\n")
    Model(path)
    assert not (path / "ran").exists()


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_once(tied, tmp_path):
    path = make_checkpoint(tmp_path, "qwen2", tie_word_embeddings=tied)
    decoder = Model(path, dtype=torch.bfloat16).decoder
    assert decoder.num_parameters == sum(p.numel() for p in make_model("qwen2", tie_word_embeddings=tied).parameters())
