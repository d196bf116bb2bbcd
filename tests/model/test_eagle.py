"""EAGLE-3 heads: the published layout against a head in plain torch, the same answers, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire_engine.build import BuiltEngine, build, resolve
from quire_engine.config import EngineConfig
from quire_engine.drafts import Wish
from quire_engine.errors import ConfigError
from quire_engine.execution.drafting.eagle import EagleDrafter
from quire_engine.limits import SchedulerLimits
from quire_engine.memory_plan import plan_text
from quire_engine.scheduling.speculation import DraftingCosts, RowCosts, Speculation
from quire_engine.types import GenerationRequest, SamplingParams, StopParams
from support.checkpoints import make_checkpoint, make_model
from support.offline import generate

HIDDEN, INNER, HEADS, KV_HEADS, WIDTH, VOCAB, DRAFTED = 64, 96, 4, 2, 16, 512, 96
ENTERING = (2, 3, 3)  # of six layers, as published heads have it: the third, the middle one, the third from the end
SHAPE = {"num_hidden_layers": 6, "tie_word_embeddings": False, "seed": 5}


@cache
def target(folder: Path) -> Path:
    return make_checkpoint(folder / "target", "llama", **SHAPE)


def random_head(seed: int = 0) -> dict[str, Tensor]:
    """The tensors of the published layout."""
    dice = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=dice) * 1.5 / columns**0.5

    def norm() -> Tensor:
        return 1.0 + 0.2 * torch.randn(HIDDEN, generator=dice)

    ids = torch.randperm(VOCAB, generator=dice)[:DRAFTED].sort().values
    is_drafted = torch.zeros(VOCAB, dtype=torch.bool)
    is_drafted[ids] = True
    return {
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj.weight": matrix(HEADS * WIDTH, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": matrix(KV_HEADS * WIDTH, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": matrix(KV_HEADS * WIDTH, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * WIDTH),
        "midlayer.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
        "midlayer.mlp.up_proj.weight": matrix(INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "norm.weight": norm(),
        "lm_head.weight": matrix(DRAFTED, HIDDEN),
        "d2t": ids - torch.arange(DRAFTED),
        "t2d": is_drafted,
    }


def write_head(path: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """As yuhuili/EAGLE3-LLaMA3.1-Instruct-8B has its config.json."""
    path.mkdir(parents=True, exist_ok=True)
    described = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INNER,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.46.2",
        "use_cache": True,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFTED,
        **config,
    }
    described = {key: value for key, value in described.items() if value is not None}
    (path / "config.json").write_text(json.dumps(described))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def engine_asked(model: Path, head: Path | None, blocks: int = 300, **changes: Any) -> EngineConfig:
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=160, prefill_chunk=112, admission="prompt")
    asked = EngineConfig(
        model=str(model),
        device="cpu",
        num_threads=1,
        packed_cache=False,
        max_model_len=400,
        speculation="off" if head is None else f"eagle:{head}",
        **{"limits": limits, **changes},
    )
    return replace(asked, kv_memory=blocks * resolve(asked).bytes_per_block)


class Generous(RowCosts):
    """All guesses pay."""

    def best_round(self, rows: int, shares: Sequence[float], most: int, drafting: DraftingCosts) -> tuple[int, int]:
        return len(shares), most


def guessing(asked: EngineConfig, costs: type[RowCosts] = Generous) -> tuple[BuiltEngine, Speculation, EagleDrafter]:
    """An engine whose drafter is asked whether it is right or not."""
    built = build(asked)
    speculation = built.scheduler._speculation
    assert speculation is not None
    assert isinstance(speculation._drafter, EagleDrafter)
    speculation._costs = costs()
    return built, speculation, speculation._drafter


def requests(count: int = 8, *, heat: float = 0.8, longest: int = 150) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=f"{number}",
            prompt_token_ids=tuple((7 * number + 13 * i) % 480 + 20 for i in range(5 + number * longest // count)),
            sampling=SamplingParams(temperature=heat if number % 2 else 0.0, seed=number, num_logprobs=1),
            stop=StopParams(max_new_tokens=50),
            n=2 if number == 3 else 1,
        )
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eagle")


def plain(tensors: dict[str, Tensor], known: list[int], entered: Tensor, embedding: Tensor, most: int) -> list[int]:
    """The guesses behind `known` by a head in plain torch, everything computed anew for each; `entered` [n - 1, 3H]."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-5) * tensors[name + ".weight"]

    def rotated(heads: Tensor) -> Tensor:
        angles = torch.arange(len(heads)).unsqueeze(1) / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        cos, sin = (torch.cat([f(angles)] * 2, dim=1).unsqueeze(1) for f in (torch.cos, torch.sin))
        low, high = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat([-high, low], dim=-1) * sin

    hidden, tokens, found = entered @ tensors["fc.weight"].T, list(known), list[int]()
    for _ in range(most):
        embedded = embedding[torch.tensor(tokens[1:])]
        both = torch.cat([norm(embedded, "midlayer.input_layernorm"), norm(hidden, "midlayer.hidden_norm")], dim=1)
        q, k, v = (
            (both @ tensors[f"midlayer.self_attn.{name}_proj.weight"].T).view(len(both), -1, WIDTH) for name in "qkv"
        )
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (rotated(k), v))
        scores = torch.einsum("qhd,khd->hqk", rotated(q), k) / WIDTH**0.5
        seen = torch.ones(len(both), len(both)).tril().bool()
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)
        x = hidden + mixed @ tensors["midlayer.self_attn.o_proj.weight"].T
        inner = norm(x, "midlayer.post_attention_layernorm")
        gate, up = (inner @ tensors[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ tensors["midlayer.mlp.down_proj.weight"].T
        column = int((norm(x[-1:], "norm") @ tensors["lm_head.weight"].T).argmax())
        found.append(column + int(tensors["d2t"][column]))
        tokens.append(found[-1])
        hidden = torch.cat([hidden, x[-1:]])  # in place of what the model would make of the guess
    return found


@pytest.mark.parametrize("own_embedding", [False, True])
def test_guesses_are_those_of_the_published_head(folder, own_embedding):
    """Whatever was computed in which pieces and rejected before; the rows come from transformers' own model."""
    tensors = random_head()
    oracle = make_model("llama", **SHAPE)
    embedding = oracle.model.embed_tokens.weight.detach()
    if own_embedding:
        embedding = tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    head = write_head(folder / f"random-{own_embedding}", tensors)
    asked = engine_asked(target(folder), head, kernels="reference", dtype="float32")
    built, _, drafter = guessing(asked)
    guess, told = drafter.draft, list[tuple[list[int], int, tuple[int, ...]]]()

    def draft(wishes: list[Wish]) -> list[Any]:
        found = guess(wishes)
        told.extend((list(w.token_ids), w.most, d.token_ids) for w, d in zip(wishes, found, strict=True))
        return found

    drafter.draft = draft  # type: ignore[method-assign,assignment]
    wanted = [replace(each, n=1) for each in requests(6)]
    generate(built, wanted)
    assert sum(len(guesses) == 5 for *_, guesses in told) > 200
    for known, most, guesses in told[::3]:
        with torch.inference_mode():
            states = oracle(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
        entered = torch.cat([states[layer][0] for layer in ENTERING], dim=1)
        assert list(guesses) == plain(tensors, known, entered, embedding, most), len(known)


@pytest.mark.parametrize("blocks", [300, 45])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_head_changes_no_answer(folder, quantization, blocks):
    """Greedy and drawn, in two choices, with log-probabilities; some are preempted, of others a prefix is cached."""
    head = write_head(folder / "random", random_head())
    changes: dict[str, Any] = {"dtype": "bfloat16", "quantization": quantization}
    right = generate(build(engine_asked(target(folder), None, **changes)), requests())
    built, speculation, drafter = guessing(engine_asked(target(folder), head, blocks, **changes))
    for _ in range(2):
        assert generate(built, requests()) == right
    assert speculation.total_draft_tokens > 1000
    assert built.scheduler.stats().blocks_used == 0
    if blocks == 45:
        assert built.scheduler.stats().total_preemptions > 0
    built.scheduler._kv.take_released()
    for sequence_id in list(drafter._held):  # of the last step, which no other tells of
        drafter.forget(sequence_id)
    assert sorted(drafter._free) == list(range(len(drafter._free)))


def chained(folder: Path) -> tuple[Path, Path]:
    """A model whose layers add nothing, so that a token follows from the one before it, and a head that knows which."""
    model = make_checkpoint(folder / "chained", "llama", **SHAPE)
    weights = load_file(model / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name].zero_()
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    embedding = weights["model.embed_tokens.weight"]
    normed = embedding / (embedding * embedding).mean(dim=1, keepdim=True).sqrt()
    following = (normed * weights["model.norm.weight"] @ weights["lm_head.weight"].T).argmax(dim=1)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in random_head().items() if name != "t2d"}
    tensors["fc.weight"] = torch.cat([torch.zeros(HIDDEN, 2 * HIDDEN), torch.eye(HIDDEN)], dim=1)
    for name in tensors:
        if "norm" in name:
            tensors[name] = torch.ones(HIDDEN)
    # Of each token a logit, which leads to the token that comes two places behind it.
    tensors["lm_head.weight"], tensors["d2t"] = normed, following[following] - torch.arange(VOCAB)
    return model, write_head(folder / "knowing", tensors, draft_vocab_size=VOCAB)


def test_a_head_that_knows_what_follows_is_right(folder):
    """Of its guesses the first ones, as it is made; no answer changes by that."""
    model, head = chained(folder)
    wanted = [replace(each, sampling=SamplingParams(temperature=0.0)) for each in requests()]
    built, speculation, _ = guessing(engine_asked(model, head, dtype="bfloat16"))
    assert generate(built, wanted) == generate(build(engine_asked(model, None, dtype="bfloat16")), wanted)
    assert speculation.accepted_by_position[0] > 0.9 * speculation.total_drafts > 50


def test_a_failing_head_costs_guesses_and_a_line_in_the_log(folder, caplog):
    built, speculation, drafter = guessing(engine_asked(target(folder), write_head(folder / "random", random_head())))

    def fail(entered: Tensor) -> Tensor:
        raise RuntimeError("planted")

    drafter._head.joined = fail  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        found = generate(built, requests())
    assert found == generate(build(engine_asked(target(folder), None)), requests())
    assert speculation.total_draft_tokens == 0
    assert [record.message for record in caplog.records if "planted" in record.message] == [
        "the draft model failed, and requests where it does go on without guesses: planted"
    ]


def test_the_memory_of_a_head_is_bounded_and_planned(folder):
    head = write_head(folder / "random", random_head())
    asked = engine_asked(target(folder), head, 40)
    resolved = resolve(asked)
    pool = resolved.pool(40 * resolved.bytes_per_block)
    assert resolved.draft_blocks(pool) == 40 * 6 // 4, "a quarter of the bytes, of blocks of one layer instead of six"
    without = resolve(replace(asked, speculation="off"))
    assert resolved.bytes_beside_pool > without.bytes_beside_pool
    plan = build(asked).plan
    assert plan.draft_bytes == resolved.draft_weights + 60 * resolved.draft_block_bytes
    assert str(head) in plan_text(plan)


def _without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


REFUSED: tuple[tuple[dict[str, Any], Callable[[dict[str, Tensor]], dict[str, Tensor]], str], ...] = (
    ({"architectures": ["LlamaForCausalLMEagle"]}, dict, r"architectures=\['LlamaForCausalLMEagle'\] is no EAGLE-3"),
    ({"architectures": ["LlamaForCausalLM"]}, dict, "is no EAGLE-3 head; only LlamaForCausalLMEagle3"),
    ({"architectures": None}, dict, "architectures=None is no EAGLE-3 head"),
    ({"hidden_size": 128}, dict, "hidden_size=128, but the model's is 64"),
    ({"vocab_size": 600}, dict, "vocab_size=600, but the model's is 512"),
    ({"num_hidden_layers": 2}, dict, "num_hidden_layers=2: a head has one layer"),
    ({"attention_bias": True}, dict, "attention_bias and mlp_bias of a head are not supported"),
    ({"draft_vocab_size": 700}, dict, "draft_vocab_size=700 is more than vocab_size=512"),
    ({"draft_vocab_size": 95}, dict, r"d2t is I64 \[96\], not I64 \[95\]"),
    ({"norm_before_residual": True}, dict, "norm_before_residual=True is not supported for LlamaForCausalLMEagle3"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 6, 2]}, dict, r"layer_ids=\[1, 6, 2\], and the model has 6"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, dict, r"layer_ids=\[1, 2\], and the model has 6"),
    ({"head_dim": 32}, dict, r"q_proj.weight has shape \[64, 128\], the configuration implies \[128, 128\]"),
    ({}, _without("d2t"), "missing tensors: d2t, with draft_vocab_size=96 of 512"),
    ({}, _without("fc.weight"), "missing tensors: fc.weight"),
    ({}, lambda tensors: {**tensors, "layers.1.x": tensors["fc.weight"] + 1}, "does not use: layers.1.x"),
    ({}, lambda tensors: {**tensors, "d2t": tensors["d2t"] + 500}, "d2t leads to a token outside the model's 512"),
    ({}, lambda tensors: {**tensors, "t2d": tensors["t2d"][1:]}, r"t2d is BOOL \[511\], not BOOL \[512\]"),
)


@pytest.mark.parametrize(("config", "change", "message"), REFUSED)
def test_other_heads_are_refused_by_name(folder, tmp_path, config, change, message):
    head = write_head(tmp_path / "head", change(random_head()), **config)
    with pytest.raises(ConfigError, match=message) as refused:
        engine_asked(target(folder), head)
    assert str(refused.value).startswith(f"speculation=eagle:{head}: the head cannot be used: ")


def test_models_that_have_no_such_layers_are_refused_by_name(folder, tmp_path):
    head = write_head(folder / "random", random_head())
    small = make_checkpoint(tmp_path / "small", "llama", num_hidden_layers=2)
    with pytest.raises(ConfigError, match=r"the head reads layers \[2, 1, -1\], and the model has 2"):
        engine_asked(small, head)
    with pytest.raises(ConfigError, match="transformers' code computes the model"):
        engine_asked(target(folder), head, model_impl="transformers")
    windowed = make_checkpoint(tmp_path / "windowed", "gemma3", num_hidden_layers=6, layer_types=None)
    with pytest.raises(ConfigError, match=r"sliding window|another model"):
        engine_asked(windowed, head)


def test_a_head_is_of_no_use_without_its_files(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"the head cannot be used: .*config\.json"):
        engine_asked(target(folder), tmp_path)
