"""Classifiers, rerankers and models of embeddings through a whole server: the numbers are those of transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer

from quire_engine.build import resolve_plan
from quire_engine.contract.errors import InfeasibleRequest
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_engine.scheduling.gate import check_request
from quire_server.text.scoring_method import question
from support.checkpoints import FAMILIES, make_checkpoint, make_model
from support.covering import few
from support.limits import engine_config
from support.served_answers import served_answers

SETTINGS: dict[str, Any] = {"kv_memory": 8 << 20, "num_threads": 1, "max_model_len": 256, "device": "cpu"}
TEXTS = ["Once upon a time", "The capital of France is Paris.", "x" * 100, "é"]
PAIR = {"query": "capital of France", "documents": TEXTS}


def ids_of(path: Path, *texts: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    return [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False).ids]


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("family", few(FAMILIES, "qwen3"))
def test_the_classes_of_texts_are_transformers_own(family: str, tmp_path: Path) -> None:
    shape = {"num_labels": 3, "id2label": {0: "bad", 1: "fair", 2: "good"}}
    path = make_checkpoint(tmp_path, family, kind="ForSequenceClassification", **shape)
    model = make_model(family, kind="ForSequenceClassification", **shape)
    asked = [
        ("/classify", {"input": TEXTS}),
        ("/classify", {"input": TEXTS, "use_activation": False}),
        ("/v1/classify", {"input": ids_of(path, TEXTS[1])}),
    ]
    probs, logits, alone = served_answers(asked, model=str(path), **SETTINGS)
    for i, text in enumerate(TEXTS):
        expected = logits_of(model, ids_of(path, text))
        assert logits["data"][i]["probs"] == pytest.approx(expected.tolist(), abs=1e-4)
        assert probs["data"][i]["probs"] == pytest.approx(expected.softmax(0).tolist(), abs=1e-5)
        assert probs["data"][i]["label"] == ("bad", "fair", "good")[int(expected.argmax())]
        assert (probs["data"][i]["index"], probs["data"][i]["num_classes"]) == (i, 3)
    assert alone["data"][0]["probs"] == probs["data"][1]["probs"]  # the same bits alone and in company
    assert probs["usage"]["prompt_tokens"] == sum(len(ids_of(path, text)) for text in TEXTS)


@pytest.mark.parametrize("dtype", few(["float32", "bfloat16"], "float32"))
def test_a_classifier_of_one_class_ranks_documents(dtype: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, kind="ForSequenceClassification", dtype=dtype, num_labels=1)
    model = make_model("qwen3", kind="ForSequenceClassification", num_labels=1)
    pairs = {"text_1": PAIR["query"], "text_2": TEXTS}
    asked = [("/v1/rerank", {**PAIR, "top_n": 2}), ("/v2/rerank", PAIR), ("/v1/score", pairs)]
    top, ranks, scores = served_answers(asked, model=str(path), **SETTINGS)
    expected = [float(logits_of(model, ids_of(path, PAIR["query"], text)).sigmoid()[0]) for text in TEXTS]
    found = [entry["score"] for entry in scores["data"]]
    assert found == pytest.approx(expected, abs=1e-5 if dtype == "float32" else 0.1)
    order = sorted(range(len(TEXTS)), key=lambda i: -found[i])
    assert [(each["index"], each["relevance_score"]) for each in ranks["results"]] == [(i, found[i]) for i in order]
    assert [each["document"]["text"] for each in top["results"]] == [TEXTS[i] for i in order[:2]]
    assert all("document" not in each for each in ranks["results"])


def test_the_answer_yes_or_no_scores_a_pair(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, vocab_size=520)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("yes", normalized=False), AddedToken("no", normalized=False)])
    tokenizer.save(str(path / "tokenizer.json"))
    yes, no = tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")
    model = make_model("qwen3", vocab_size=520)
    asked = [
        ("/rerank", PAIR),
        ("/score", {"text_1": [PAIR["query"]], "text_2": TEXTS, "instruction": "Find it.", "use_activation": False}),
        ("/v1/rerank", {**PAIR, "documents": ["long " * 500], "truncate_prompt_tokens": 450}),
    ]
    settings = {**SETTINGS, "max_model_len": 512, "pooling": "yes-no", "model": str(path)}
    ranks, logits, cut = served_answers(asked, **settings)
    for each in ranks["results"]:
        last = logits_of(model, ids_of(path, question(PAIR["query"], TEXTS[each["index"]], None)))[-1]
        assert each["relevance_score"] == pytest.approx(float((last[yes] - last[no]).sigmoid()), abs=1e-5)
    for each, text in zip(logits["data"], TEXTS, strict=True):
        last = logits_of(model, ids_of(path, question(PAIR["query"], text, "Find it.")))[-1]
        assert each["score"] == pytest.approx(float(last[yes] - last[no]), abs=1e-4)
    assert cut["usage"]["prompt_tokens"] <= 450


@pytest.mark.parametrize("kind", few(["ForCausalLM", "Model"], "ForCausalLM"))
def test_vectors_pass_through_the_modules_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, kind="Model")  # its tensors have no prefix, and there is no head
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": [f"Qwen3{kind}"]}))
    kinds = {
        "": "Transformer",
        "1_Pooling": "Pooling",
        "2_Dense": "Dense",
        "3_Dense": "Dense",
        "4_Normalize": "Normalize",
    }
    modules = [{"path": where, "type": f"sentence_transformers.models.{name}"} for where, name in kinds.items()]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    weights = {"2_Dense": torch.randn(96, 64), "3_Dense": torch.randn(32, 96)}
    for (where, weight), activation in zip(weights.items(), ("linear.Identity", "activation.Tanh"), strict=True):
        (path / where).mkdir()
        (path / where / "config.json").write_text(json.dumps({"activation_function": f"torch.nn.modules.{activation}"}))
        save_file({"linear.weight": weight / 8}, str(path / where / "model.safetensors"))
    prompts = {"prompts": {"query": "Find: ", "document": "Text: "}, "default_prompt_name": "document"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    asked = [("/v1/embeddings", {"input": TEXTS}), ("/v1/embeddings", {"input": TEXTS, "prompt_name": "query"})]
    replies = served_answers(asked, model=str(path), **SETTINGS)
    model = make_model("qwen3", kind="Model")
    for reply, prompt in zip(replies, ("Text: ", "Find: "), strict=True):
        for entry, text in zip(reply["data"], TEXTS, strict=True):
            with torch.inference_mode():
                rows = model(torch.tensor([ids_of(path, prompt + text)])).last_hidden_state[0]
            row = torch.tanh(weights["3_Dense"] / 8 @ (weights["2_Dense"] / 8 @ rows.mean(0)))
            assert entry["embedding"] == pytest.approx((row / row.norm()).tolist(), abs=1e-5)


@pytest.mark.parametrize("kind", ["Model", "ForSequenceClassification"])
def test_a_model_without_a_head_for_tokens_writes_no_text(kind: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, kind=kind)
    scheduler = resolve_plan(engine_config(model=str(model), **SETTINGS)).scheduler
    asked = GenerationRequest(
        request_id="a", prompt_token_ids=(5, 6), sampling=SamplingParams(), stop=StopParams(max_new_tokens=1)
    )
    with pytest.raises(InfeasibleRequest, match="a model without a head for tokens"):
        check_request(scheduler, asked)
    check_request(scheduler, replace(asked, stop=StopParams(max_new_tokens=0), pooling="last"))
