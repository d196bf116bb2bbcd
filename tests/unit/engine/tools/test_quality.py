"""The numbers of quality against hand computations, and the store that keeps them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from quire_engine.contract.errors import ConfigError
from quire_engine.execution.models.config import load_model_config
from quire_engine.quality_store import Quality, planned_quality, quality_text, store_quality, stored_quality
from quire_engine.tools.logit_comparison import Comparison, equal_share, kl
from quire_engine.tools.quality import CONTINUATION_TOKENS, MAX_PROMPT_TOKENS, bounded, random_prompts
from support.checkpoints import shared_checkpoint
from support.exposition import PLAN
from support.plans import changed

QUALITY = Quality(
    checkpoint="0123456789abcdef",
    quantization="int8",
    kv_cache_dtype="auto",
    prompts="text",
    num_positions=1234,
    mean_kl=0.00212,
    max_kl=0.1,
    greedy_agreement=0.9876,
    continuation_agreement=0.5,
    bf16_perplexity=10.0,
    perplexity=10.5,
    measured="2031-02-03",
)


def logits_of(*rows: tuple[float, ...]) -> torch.Tensor:
    """Rows whose softmax is these probabilities; the shift must not matter."""
    return torch.tensor(rows, dtype=torch.float64).log().float() + 3.0


def test_kl_by_hand():
    ours = logits_of((0.5, 0.5), (0.9, 0.1), (0.25, 0.75))
    theirs = logits_of((0.25, 0.75), (0.9, 0.1), (0.5, 0.5))
    expected = [
        0.5 * math.log(2) + 0.5 * math.log(2 / 3),
        0.0,
        0.25 * math.log(0.5) + 0.75 * math.log(1.5),
    ]
    assert kl(ours, theirs).tolist() == pytest.approx(expected, abs=1e-6)


def test_kl_is_the_same_for_any_number_of_rows():
    generator = torch.Generator().manual_seed(0)
    ours, theirs = torch.randn(2, 200, 50, generator=generator)
    alone = torch.cat([kl(ours[i : i + 1], theirs[i : i + 1]) for i in range(200)])
    assert kl(ours, theirs).tolist() == pytest.approx(alone.tolist(), rel=1e-12)
    assert (alone > 0).all()


def test_a_comparison_by_hand():
    comparison = Comparison(
        [[0, 1, 1], [1, 0]],
        [
            logits_of((0.2, 0.8), (0.5 + 1e-3, 0.5 - 1e-3), (0.6, 0.4)),
            logits_of((0.1, 0.9), (0.3, 0.7)),
        ],
    )
    comparison.add(logits_of((0.4, 0.6), (0.25, 0.75), (0.6, 0.4)))
    comparison.add(logits_of((0.1, 0.9), (0.3, 0.7)))
    first = 0.2 * math.log(0.2 / 0.4) + 0.8 * math.log(0.8 / 0.6)
    second = 0.501 * math.log(0.501 / 0.25) + 0.499 * math.log(0.499 / 0.75)
    assert comparison.num_positions == 5
    assert comparison.mean_kl == pytest.approx((first + second) / 5, rel=1e-5)
    assert comparison.max_kl == pytest.approx(second, rel=1e-5)
    assert comparison.greedy_agreement == pytest.approx(4 / 5)
    # The tokens that were there: 1 and 1 after the first prompt's rows, 0 after the second's.
    assert comparison.reference_perplexity == pytest.approx((0.8 * 0.499 * 0.1) ** (-1 / 3), rel=1e-5)
    assert comparison.perplexity == pytest.approx((0.6 * 0.75 * 0.1) ** (-1 / 3), rel=1e-5)


@pytest.mark.parametrize(
    ("ours", "theirs", "share"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 1.0),
        ([1, 2, 3, 4], [1, 2, 9, 4], 0.5),
        ([1, 2, 3, 4], [9, 2, 3, 4], 0.0),
        ([1, 2], [1, 2, 3, 4], 1.0),  # went on where the reference ended by length
        ([1, 2, 3, 4], [1], 0.25),
    ],
)
def test_the_share_before_the_first_difference(ours, theirs, share):
    assert equal_share(ours, theirs) == share


def test_random_prompts_are_fixed():
    prompts = random_prompts(512)
    assert prompts == random_prompts(512)
    assert prompts != random_prompts(511)
    assert {token for prompt in prompts for token in prompt} <= set(range(512))


def test_prompts_are_bounded():
    config = load_model_config(shared_checkpoint())
    assert bounded([[1, 2], [3] * 1000], config) == [[1, 2], [3] * MAX_PROMPT_TOKENS]
    short = replace(config, max_position_embeddings=CONTINUATION_TOKENS + 10)
    assert [len(prompt) for prompt in bounded([[3] * 1000], short)] == [10]
    wide = replace(config, vocab_size=1 << 20)  # 4 MiB of logits a token
    assert [len(prompt) for prompt in bounded([[3] * 1000] * 4, wide)] == [64] * 4
    for prompts in ([], [[1]], [[1, 2], []]):
        with pytest.raises(ConfigError, match="two tokens"):
            bounded(prompts, config)
    for outside in (512, -1):
        with pytest.raises(ConfigError, match=f"token {outside} is not among its 512"):
            bounded([[1, 2, outside]], config)


def test_what_is_stored_is_found(tmp_path):
    folder = tmp_path / "deep" / "quality"
    assert stored_quality(QUALITY.checkpoint, "int8", directory=folder) is None
    store_quality(QUALITY, directory=folder)
    newer = replace(QUALITY, mean_kl=0.5)
    path = store_quality(newer, directory=folder)
    store_quality(replace(QUALITY, quantization=None, kv_cache_dtype="int8"), directory=folder)
    assert stored_quality(QUALITY.checkpoint, "int8", directory=folder) == newer
    assert stored_quality(QUALITY.checkpoint, None, "int8", directory=folder) is not None
    assert stored_quality(QUALITY.checkpoint, "int8", device="cuda", directory=folder) is None
    on_gpu = replace(QUALITY, device="cuda", mean_kl=0.5)
    store_quality(on_gpu, directory=folder)
    assert stored_quality(QUALITY.checkpoint, "int8", device="cuda", directory=folder) == on_gpu
    assert stored_quality(QUALITY.checkpoint, "int8", directory=folder) == newer
    for others in (("fedcba9876543210", "int8"), (QUALITY.checkpoint, "int4"), (QUALITY.checkpoint, "int8", "int8")):
        assert stored_quality(*others, directory=folder) is None
    assert len(list(folder.iterdir())) == 3
    assert path.stat().st_size < 1000


@pytest.mark.parametrize(
    "damage",
    [
        lambda stored: "",
        lambda stored: "[]",
        lambda stored: json.dumps(stored)[:40],
        lambda stored: json.dumps({**stored, "format": 0}),
        lambda stored: json.dumps({**stored, "mean_kl": "small"}),
        lambda stored: json.dumps({name: value for name, value in stored.items() if name != "max_kl"}),
        lambda stored: json.dumps({**stored, "extra": 1}),
    ],
)
def test_a_damaged_file_is_none(tmp_path, damage):
    path = store_quality(QUALITY, directory=tmp_path)
    path.write_text(damage(json.loads(path.read_text())))
    assert stored_quality(QUALITY.checkpoint, "int8", directory=tmp_path) is None


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        store_quality(replace(QUALITY, max_kl=object()), directory=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_line_for_the_operator(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    stored = changed(PLAN, identity={"checkpoint": QUALITY.checkpoint})
    served = changed(stored, model={"quantization": "int8"})
    assert quality_text(served) == "not measured: run quire eval-quant"
    store_quality(QUALITY)
    assert quality_text(served) == "mean KL 0.0021 nats, greedy agreement 98.8% (measured 2031-02-03)"
    assert quality_text(changed(served, pool={"dtype": "int8"})) == "not measured: run quire eval-quant"
    assert (quality_text(stored), planned_quality(stored)) == ("", None)
    assert planned_quality(served) == QUALITY
