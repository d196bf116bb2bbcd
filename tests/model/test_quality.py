"""What quantisation costs real models: the embedded one, which is trained, and random ones."""

from __future__ import annotations

from functools import cache

import pytest

from make_demo.corpus import documents
from quire_engine.contract.errors import ConfigError
from quire_engine.demo import demo_model_path
from quire_engine.execution.models.checkpoint import fingerprint
from quire_engine.quality_store import Quality
from quire_engine.tools.quality import CONTINUATION_TOKENS, Variant, measure
from quire_server.text.quality_prompts import CHATS, TEXTS, prompt_ids
from quire_server.text.tokenizer import TextTokenizer
from support.checkpoints import shared_checkpoint
from support.covering import few

INT8, INT4, KV_INT8 = Variant(quantization="int8"), Variant(quantization="int4"), Variant(kv_cache_dtype="int8")


def tokenizer() -> TextTokenizer:
    return TextTokenizer.load(demo_model_path())


@cache
def demo_quality(source: str) -> tuple[Quality, ...]:
    """int8, int4 and an int8 KV cache, on the shipped prompts or on unseen texts like those of the training."""
    if source == "shipped prompts":
        prompts = prompt_ids(tokenizer())
    else:  # a seed that the training has not seen
        texts = ("\n".join([doc.text, *(message.content for message in doc.messages)]) for doc in documents(21, 80))
        ids = tokenizer().encode("\n\n".join(texts), add_special_tokens=False)
        prompts = [ids[start : start + 200] for start in range(0, 2000, 200)]
    return tuple(
        measure(
            demo_model_path(),
            [INT8, INT4, KV_INT8],
            prompts,
            end_token_ids=tokenizer().eos_token_ids,
            num_threads=1,
        )
    )


@pytest.mark.parametrize("source", few(["shipped prompts", "its own kind of text"], "shipped prompts"))
def test_the_embedded_model(source, record_property):
    int8, int4, kv_int8 = demo_quality(source)
    for name, quality in (("int8", int8), ("int4", int4), ("kv int8", kv_int8)):
        record_property(name, str(quality))
        assert quality.checkpoint == fingerprint(demo_model_path())
        assert quality.num_positions > 1000
        assert 0 < quality.mean_kl < quality.max_kl
    assert int8.mean_kl <= 0.01
    assert kv_int8.mean_kl <= 0.01
    assert int8.greedy_agreement >= 0.95
    assert int4.mean_kl > int8.mean_kl
    assert int4.greedy_agreement < int8.greedy_agreement
    assert int8.perplexity == pytest.approx(int8.bf16_perplexity, rel=0.01)


def test_the_prompts_are_of_the_size_that_is_meant():
    prompts = prompt_ids(tokenizer())
    assert len(prompts) == len(TEXTS) + len(CHATS)
    assert prompts == prompt_ids(tokenizer())
    assert tokenizer().decode(prompts[-1], skip_special_tokens=False).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])  # the second one's windowed layers have blocks of their own
def test_a_model_equals_itself(family):
    (quality,) = measure(shared_checkpoint(family), [Variant()], None, num_threads=1)
    assert quality.mean_kl == quality.max_kl == 0
    assert quality.greedy_agreement == quality.continuation_agreement == 1
    assert quality.perplexity == quality.bf16_perplexity
    assert quality.prompts == "random ids"


def test_random_weights():
    both = Variant(quantization="int4", kv_cache_dtype="int8")
    int8, int4, kv_int8, most = measure(shared_checkpoint(), [INT8, INT4, KV_INT8, both], None, num_threads=1)
    assert (most.quantization, most.kv_cache_dtype) == ("int4", "int8")
    assert 0 < int8.mean_kl < int4.mean_kl
    assert 0 < kv_int8.mean_kl < int4.mean_kl
    assert int8.greedy_agreement > int4.greedy_agreement
    assert 0 <= int4.continuation_agreement <= 1


def test_continuations_end_where_the_text_ends(monkeypatch):
    lengths = []
    monkeypatch.setattr(
        "quire_engine.tools.quality.equal_share", lambda ours, theirs: lengths.append((len(ours), len(theirs))) or 1.0
    )
    path, prompts = shared_checkpoint(), [[5, 6, 7], [8, 9]]
    list(measure(path, [Variant()], prompts, num_threads=1))
    assert lengths == [(CONTINUATION_TOKENS, CONTINUATION_TOKENS)] * 2
    lengths.clear()
    list(measure(path, [Variant()], prompts, end_token_ids=range(512), num_threads=1))
    assert lengths == [(1, 1)] * 2


def test_heads_that_the_kernels_cannot_serve():
    path = shared_checkpoint("qwen3", head_dim=24)
    with pytest.raises(ConfigError, match="head_dim 24"):
        list(measure(path, [INT8], None, num_threads=1))
