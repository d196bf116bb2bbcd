"""The text part of models that see too: their own classes' checkpoints, under both names that the tensors have had."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire_engine.contract.errors import ModelLoadError, NotNative
from quire_engine.execution.models.config import load_model_config
from support.model_steps import Model, random_ids

TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
}
MRoPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
WRAPPERS = {
    "Gemma3": {"text": {"query_pre_attn_scalar": 24, "sliding_window": 37, "layer_types": ["sliding_attention"] * 2}},
    "Mistral3": {"text": {"model_type": "mistral", "sliding_window": None}, "vision": {"model_type": "pixtral"}},
    "Qwen3VL": {
        "text": {"rope_parameters": MRoPE},
        "vision": {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": []},
    },
    "Qwen3VLMoe": {
        "text": {
            "rope_parameters": MRoPE,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "num_hidden_layers": 3,
            "decoder_sparse_step": 2,
        },
        "vision": {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": []},
    },
}


@pytest.fixture
def made(request, tmp_path):
    """The model of a wrapper's own class with random weights, and its checkpoint."""
    parts = WRAPPERS[request.param]
    config_class = getattr(transformers, f"{request.param}Config")
    config = config_class(text_config=TEXT | parts["text"], vision_config=VISION | parts.get("vision", {}))
    torch.manual_seed(0)
    model = getattr(transformers, f"{request.param}ForConditionalGeneration")(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape) * (0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path)
    return model, tmp_path


@pytest.mark.parametrize("made", WRAPPERS, indirect=True)
def test_texts_equal_the_whole_models(made):
    model, path = made
    token_ids = random_ids(100, vocab_size=500)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([token_ids])).logits[0]
    stored = load_file(path / "model.safetensors")
    newer = any(name.startswith("model.language_model.") for name in stored)
    for renamed in (False, True):
        if renamed:
            old, new = ("model.language_model.", "language_model.model.")[:: 1 if newer else -1]
            save_file({name.replace(old, new): value for name, value in stored.items()}, path / "model.safetensors")
        found = Model(path).logits(token_ids, 30)
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("made", ["Qwen3VLMoe"], indirect=True)
def test_stacks_of_experts_may_lie_either_way(made):
    """As transformers has them in memory and saves them, and as they are published."""
    _, path = made
    token_ids, file = random_ids(20, vocab_size=500), path / "model.safetensors"
    saved = Model(path).logits(token_ids)
    stored = load_file(file)
    stacks = [name for name, value in stored.items() if value.dim() == 3 and ".experts." in name]
    assert {stored[name].shape for name in stacks} == {(6, 80, 64), (6, 64, 40)}
    save_file(stored | {name: stored[name].transpose(1, 2).contiguous() for name in stacks}, file)
    assert torch.equal(Model(path).logits(token_ids), saved)


@pytest.mark.parametrize("made", ["Gemma3"], indirect=True)
def test_what_is_neither_text_nor_known_is_refused(made):
    _, path = made
    config = json.loads((path / "config.json").read_text())
    for changes, reason in (
        ({"text_config": {**config["text_config"], "model_type": "gemma4_text"}}, "'gemma4_text' is not supported"),
        ({"text_config": {**config["text_config"], "attn_temperature": 2}}, "attn_temperature=2 is not supported"),
        ({"cross_layers": 3}, "cross_layers=3 is not supported"),
    ):
        (path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(NotNative, match=reason):
            load_model_config(path)
    (path / "config.json").write_text(json.dumps(config))
    stored = load_file(path / "model.safetensors")
    save_file(stored | {"model.memory.weight": torch.zeros(2)}, path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"does not use: model\.memory\.weight"):
        Model(path)
