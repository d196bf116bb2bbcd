"""How a checkpoint's pairs are scored, by its files, its name and the operator's word; and the head's own file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_server.text.matrices import Projection
from quire_server.text.scoring_method import COSINE, scoring_method
from quire_server.text.tokenizer import TextTokenizer
from support import sample_tokenizers
from support.fake_tokenizer import load_tokenizer

CLASSIFIER = {"architectures": ["Qwen3ForSequenceClassification"]}
GENERATOR = {"architectures": ["Qwen3ForCausalLM"]}


def checkpoint(path: Path, config: object, **tensors: torch.Tensor) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if tensors:
        save_file({f"score.{name}": tensor for name, tensor in tensors.items()}, str(path / "model.safetensors"))
    return path


@pytest.mark.parametrize(
    ("config", "labels", "values"),
    [
        ({}, ("LABEL_0", "LABEL_1"), [0.5, 0.5]),
        ({"id2label": {"0": "no", "1": "yes"}}, ("no", "yes"), [0.5, 0.5]),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), [0.9525741268, 0.9525741268]),
        ({"problem_type": "regression"}, ("LABEL_0", "LABEL_1"), [3.0, 3.0]),
    ],
)
def test_a_classifier_is_what_its_config_says(tmp_path, config, labels, values):
    path = checkpoint(tmp_path, CLASSIFIER | config, weight=torch.ones(2, 4))
    classifier = scoring_method("auto", path, load_tokenizer()).classifier
    assert classifier is not None
    assert classifier.labels == labels
    assert classifier.values([1, 1, 1, 0]) == pytest.approx(values)
    assert classifier.values([1, 1, 1, 0], activates=False) == [3.0, 3.0]


def test_one_label_is_a_probability_of_its_own(tmp_path):
    path = checkpoint(tmp_path, CLASSIFIER, weight=torch.ones(1, 4), bias=torch.ones(1))
    classifier = scoring_method("auto", path, load_tokenizer()).classifier
    assert classifier is not None
    assert classifier.values([-1, 0, 0, 0]) == [0.5]
    assert classifier.values([-1e4, 0, 0, 0]) == pytest.approx([0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_tensor_of_any_type_in_any_shard(tmp_path, dtype):
    weight, other = torch.randn(3, 5).to(dtype), torch.randn(7, 2)
    save_file({"a": other, "score.weight": weight}, str(tmp_path / "two.safetensors"))
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"score.weight": "two.safetensors"}})
    )
    assert Projection.read(tmp_path, "score").weight.tolist() == weight.to(torch.float64).tolist()


@pytest.mark.parametrize("written", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x09" + b"\0" * 7 + b'{"a": 1}x'])
def test_a_file_that_cannot_be_read_is_a_load_error(tmp_path, written):
    path = checkpoint(tmp_path, CLASSIFIER)
    (path / "model.safetensors").write_bytes(written)
    with pytest.raises(ModelLoadError):
        scoring_method("auto", path, load_tokenizer())


def test_the_answers_by_name_by_modules_and_by_the_operator(tmp_path):
    tokenizer = sample_tokenizers.byte_level()
    tokenizer.add_tokens(["yes", "no"])
    known = TextTokenizer(tokenizer, config={}, special_tokens={})
    ids = (known.token_id("no"), known.token_id("yes"))
    named = checkpoint(tmp_path / "Qwen3-Reranker-0.6B", GENERATOR)
    plain = checkpoint(tmp_path / "other", GENERATOR)
    assert scoring_method("auto", named, known).answers == ids
    assert scoring_method("last", named, known) is COSINE
    assert scoring_method("yes-no", plain, known).answers == ids
    assert scoring_method("auto", plain, known) is COSINE
    (plain / "modules.json").write_text(json.dumps([{"type": "x.logit_score.LogitScore", "path": "1_LogitScore"}]))
    checkpoint(plain / "1_LogitScore", {"true_token_id": 7, "false_token_id": 8})
    assert scoring_method("auto", plain, known).answers == (8, 7)
    with pytest.raises(ConfigError, match="no tokens 'yes' and 'no'"):
        scoring_method("yes-no", named, load_tokenizer())
