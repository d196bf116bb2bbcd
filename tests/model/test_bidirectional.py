"""A model whose attention sees both ways, as EmbeddingGemma: transformers' vectors, and prompts that are never cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_engine.build import resolve_plan
from quire_engine.contract.errors import ConfigError, InfeasibleRequest, NotNative
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_engine.execution.models.config import load_model_config
from quire_engine.scheduling.gate import check_request
from support.covering import few
from support.embedding_gemma import PROMPTS, WINDOW, EmbeddingGemma
from support.limits import engine_config
from support.model_steps import Model, random_ids
from support.served_answers import served_answers

LONGEST = 400
# A step's budget of so few tokens would cut most of the texts.
SETTINGS: dict[str, Any] = {
    "kv_memory": 8 << 20,
    "num_threads": 2,
    "max_model_len": LONGEST,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 16,
    "device": "cpu",
}
TEXTS = [
    "Paris",
    "The capital of France is Paris.",
    "A quire is four sheets of paper folded into eight leaves; a ream is twenty quires. " * 3,
    "é" * 60,
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 10,
]


def embedding(reply: dict[str, Any], index: int = 0) -> list[float]:
    found: list[float] = reply["data"][index]["embedding"]
    return found


def test_vectors_are_transformers_own_and_the_same_alone_and_in_company(tmp_path: Path) -> None:
    gemma = EmbeddingGemma(tmp_path)
    assert len(gemma.ids(TEXTS[-1])) > 3 * WINDOW
    asked = [
        {"input": TEXTS * 4},
        {"input": TEXTS, "dimensions": 16},
        *({"input": TEXTS, "prompt_name": name} for name in PROMPTS),
        *({"input": text} for text in TEXTS),
    ]
    whole, cut, *prompted = served_answers(
        [("/v1/embeddings", body) for body in asked], model=str(tmp_path), **SETTINGS
    )
    prompted, alone = prompted[: len(PROMPTS)], prompted[len(PROMPTS) :]
    for i, text in enumerate(TEXTS):
        assert embedding(whole, i) == pytest.approx(gemma.vector(text).tolist(), abs=1e-4)
        assert all(embedding(whole, i + len(TEXTS) * n) == embedding(whole, i) == embedding(alone[i]) for n in range(4))
        assert embedding(cut, i) == pytest.approx(gemma.vector(text, 16).tolist(), abs=1e-4)
        for reply, prompt in zip(prompted, PROMPTS.values(), strict=True):
            assert embedding(reply, i) == pytest.approx(gemma.vector(prompt + text).tolist(), abs=1e-4)


@pytest.mark.parametrize("settings", few([{}, {"kv_cache_dtype": "int8"}, {"quantization": "int8"}], {}), ids=str)
def test_the_c_kernels_compute_it_in_bfloat16(settings: dict[str, Any], tmp_path: Path) -> None:
    gemma = EmbeddingGemma(tmp_path, "bfloat16")
    asked: list[tuple[str, dict[str, Any]]] = [("/v1/embeddings", {"input": TEXTS})]
    asked += [("/v1/embeddings", {"input": text}) for text in TEXTS]
    whole, *alone = served_answers(
        asked, model=str(tmp_path), packed_cache=False, **{**SETTINGS, **settings, "kernels": "cpu"}
    )
    for i, text in enumerate(TEXTS):
        assert embedding(whole, i) == embedding(alone[i])
        assert torch.tensor(embedding(whole, i)) @ gemma.vector(text) > 0.99


def test_the_scheduler_gives_a_prompt_one_step(tmp_path: Path) -> None:
    EmbeddingGemma(tmp_path)
    scheduler = resolve_plan(engine_config(model=str(tmp_path), **SETTINGS)).scheduler
    limits = scheduler.limits
    assert scheduler.bidirectional
    assert scheduler.windows == (None,)
    assert (limits.enable_prefix_caching, limits.max_num_batched_tokens) == (False, LONGEST + 16)
    assert (limits.min_chunk, limits.prefill_chunk) == (LONGEST, LONGEST)
    wide = engine_config(model=str(tmp_path), **{**SETTINGS, "max_num_batched_tokens": 4096})
    assert resolve_plan(wide).scheduler.limits.max_num_batched_tokens == 4096
    request = GenerationRequest(
        request_id="a", prompt_token_ids=(5, 6), sampling=SamplingParams(), stop=StopParams(max_new_tokens=1)
    )
    with pytest.raises(InfeasibleRequest, match="its attention is bidirectional"):
        check_request(scheduler, request)


def test_a_part_of_a_prompt_is_not_computed(tmp_path: Path) -> None:
    EmbeddingGemma(tmp_path)
    with pytest.raises(ValueError, match="computed whole"):
        Model(tmp_path).logits(random_ids(60, vocab_size=500), 30)


def test_without_the_option_attention_is_causal_and_others_refuse_it(tmp_path: Path) -> None:
    EmbeddingGemma(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    found = load_model_config(tmp_path)
    assert (found.bidirectional, found.headless, found.windows) == (True, True, (WINDOW // 2 + 1, None))
    (tmp_path / "config.json").write_text(json.dumps(config | {"use_bidirectional_attention": False}))
    causal = load_model_config(tmp_path)
    assert (causal.bidirectional, causal.headless, causal.windows) == (False, True, (WINDOW, None))
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Gemma3ForCausalLM"]}))
    with pytest.raises(NotNative, match="use_bidirectional_attention=True is not supported"):
        load_model_config(tmp_path)


def test_on_a_gpu_it_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    EmbeddingGemma(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="bidirectional attention of Gemma3TextModel is computed on a CPU only"):
        resolve_plan(engine_config(model=str(tmp_path), **{**SETTINGS, "device": "auto"}))
