"""Models that transformers' code computes over our pool: what they answer, what is refused, what is kept of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import transformers

from quire_engine.build import BuiltEngine, build, resolve, resolve_plan
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError, InfeasibleRequest, ModelLoadError, NotNative
from quire_engine.contract.types import BeamParams, GenerationRequest, SamplingParams, StopParams
from quire_engine.execution import loading
from quire_engine.execution.models.fallback import parts, proof
from quire_engine.execution.models.fallback.interface import _attend
from quire_engine.execution.models.fallback.model_class import OURS, ModelClass, model_class
from quire_engine.execution.models.fallback.products import FusedExperts
from quire_engine.execution.models.fallback.routers import FusedRouter, form_of
from quire_engine.execution.models.fallback.states import COPIES, States
from quire_engine.memory_plan import plan_text
from quire_engine.scheduling.gate import check_request
from support.checkpoints import make_checkpoint, shared_checkpoint
from support.covering import few
from support.fallback_steps import FallbackSteps
from support.limits import engine_config
from support.model_steps import scheduled
from support.offline import generate
from sweep.__main__ import RESULT, SCHEDULE, TABLE, held_against_plain, plain, prompts, save_random, tiny, written

# One of each kind: softcaps, sinks, experts, latent attention, heads of two widths, recurrent layers, LayerNorm.
FAMILIES = ("gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3", "gemma4_text", "qwen3_5_text", "gpt2")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads without a folder of their own share one: each model is proven at its first load."""
    monkeypatch.setattr(parts, "prove", lambda made, longest, folder: proof.prove(made, longest, folder or proofs()))


@cache
def proofs() -> Path:
    return Path(mkdtemp(prefix="quire-proofs-"))


@cache
def checkpoint(model_type: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    folder = Path(mkdtemp(prefix="quire-fallback-"))
    save_random(tiny(model_type), folder, dtype)
    return folder


@pytest.mark.parametrize("model_type", few(FAMILIES, "qwen3_5_text", "gpt2"))
def test_a_checkpoint_answers_as_transformers_does(model_type: str, tmp_path: Path):
    found = held_against_plain(tiny(model_type), tmp_path)
    assert found["difference"] < 1e-5
    assert found["greedy"] == 48


@pytest.mark.parametrize(("model_type", "options"), [("gemma2", {"sliding_window": 60}), ("deepseek_v3", {})])
def test_attention_in_torch_is_right_over_many_chunks_of_keys(model_type: str, options: dict[str, int], tmp_path: Path):
    model = save_random(tiny(model_type, max_position_embeddings=512, **options), tmp_path)
    steps = FallbackSteps(tmp_path, max_model_len=512)
    source = torch.Generator().manual_seed(1)
    ids = {
        key: torch.randint(3, 120, (length,), generator=source).tolist() for key, length in enumerate((300, 170, 40))
    }
    mixed = steps.run(ids, [[(0, 150), (1, 64)], [(0, 100), (1, 105), (2, 39)], [(0, 49), (1, 1), (2, 1)], [(0, 1)]])
    for key, tokens in ids.items():
        pieces = [(key, min(37, len(tokens) - start)) for start in range(0, len(tokens), 37)]
        assert torch.equal(steps.run({key: tokens}, [[piece] for piece in pieces])[key], mixed[key])
        with torch.inference_mode():
            wanted = plain(model, tokens)
        assert (mixed[key] - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    ("model_type", "quantization"),
    few(
        itertools.product((*FAMILIES, "granitemoehybrid", "granitemoe", "lfm2"), (None, "int4")),
        *(("gemma2", None), ("gpt_oss", "int4"), ("qwen3_5_text", None)),
    ),
)
def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_chunks(model_type: str, quantization: str | None):
    steps = FallbackSteps(checkpoint(model_type), dtype="bfloat16", quantization=quantization)
    ids = prompts()
    mixed = steps.run(ids, SCHEDULE)
    for key, tokens in ids.items():
        whole = steps.run({key: tokens}, [[(key, len(tokens))]])[key]
        one_by_one = steps.run({key: tokens}, [[(key, 1)]] * len(tokens))[key]
        assert torch.equal(mixed[key], whole), "in a batch, alone"
        assert torch.equal(whole, one_by_one), "whole, token by token"


@pytest.mark.parametrize(
    ("model_type", "is_plain"),
    few([("qwen3_moe", True), ("gemma2", False), ("granite", False)], ("qwen3_moe", True), ("gemma2", False)),
)
def test_the_greatest_logit_is_found_without_the_logits(model_type: str, is_plain: bool):
    steps = FallbackSteps(checkpoint(model_type), dtype="bfloat16")
    steps.run({0: [5, 6]}, [[(0, 2)]])
    hidden = torch.randn(20, steps.resolved.model.hidden_size, generator=torch.Generator().manual_seed(2)).bfloat16()
    found = steps.model.greedy(hidden, None)
    assert (found is not None) == is_plain
    if found is not None:
        assert found[0] == steps.model.logits(hidden).argmax(dim=-1).tolist()


@pytest.mark.parametrize(
    ("model_type", "is_one"),
    few([("qwen3_moe", True), ("granitemoe", True), ("gpt_oss", False)], ("qwen3_moe", True), ("gpt_oss", False)),
)
def test_experts_whose_activation_the_kernels_have_are_one_op(model_type: str, is_one: bool):
    model = FallbackSteps(checkpoint(model_type), dtype="bfloat16").model._model
    found = [module.__dict__["quire_experts"] for module in model.modules() if "quire_experts" in module.__dict__]
    assert found
    assert {isinstance(each, FusedExperts) for each in found} == {is_one}


@pytest.mark.parametrize(
    ("model_type", "dtype", "is_one"),
    [
        pytest.param("deepseek_v3", "bfloat16", True, marks=pytest.mark.matrix),
        ("deepseek_v3", "float32", True),
        pytest.param("ernie4_5_moe", "float32", True, marks=pytest.mark.matrix),
        ("ernie4_5_moe", "bfloat16", False),  # its weights are rounded to bfloat16
        pytest.param("gpt_oss", "float32", True, marks=pytest.mark.matrix),
        pytest.param("qwen3_moe", "bfloat16", False, marks=pytest.mark.matrix),  # its logits are bfloat16
    ],
)
def test_routers_that_choose_as_the_kernels_do_are_one_op(model_type: str, dtype: str, is_one: bool):
    steps = FallbackSteps(checkpoint(model_type), dtype=dtype)
    found = [module for module in steps.model._model.modules() if type(module).__name__.endswith("Router")]
    assert found
    assert {isinstance(each, FusedRouter) for each in found} == {is_one}


def test_a_router_that_differs_stays_as_it_is():
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    config = tiny("deepseek_v3").config
    with torch.device("meta"):
        router = modeling.DeepseekV3TopkRouter(config)
    assert form_of(router, config, torch.float32) is not None

    class Rounding(modeling.DeepseekV3TopkRouter):
        def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits, weights, index = super().forward(hidden_states)
            return logits, weights * 1.01, index

    class Failing(modeling.DeepseekV3TopkRouter):
        def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
            raise KeyError(hidden_states)

    for kind in (Rounding, Failing):
        router.__class__ = kind
        assert form_of(router, config, torch.float32) is None


def test_quantized_experts_take_a_quarter(tmp_path: Path):
    sizes = [
        FallbackSteps(checkpoint("qwen3_moe"), dtype="bfloat16", quantization=kind).model.packed_bytes or 0
        for kind in (None, "int4")
    ]
    assert sizes[1] < 0.55 * sizes[0]  # rows of a tiny model are padded


def test_native_refuses_what_auto_computes_by_transformers(caplog: pytest.LogCaptureFixture):
    path = str(checkpoint("gpt2"))
    with pytest.raises(NotNative, match="GPT2LMHeadModel"):
        resolve_plan(EngineConfig(model=path, device="cpu", model_impl="native"))
    plan = resolve_plan(EngineConfig(model=path, device="cpu"))
    assert plan.model.implementation == f"transformers {transformers.__version__}"
    assert "GPT2LMHeadModel" in caplog.text
    ours = str(shared_checkpoint("qwen3"))
    assert resolve_plan(EngineConfig(model=ours, device="cpu")).model.implementation == ""
    assert resolve_plan(EngineConfig(model=ours, device="cpu", model_impl="transformers")).model.implementation


def test_an_option_that_our_entry_does_not_know_falls_back(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = make_checkpoint(tmp_path / "m", "llama")
    change(folder, final_logit_softcapping=None, attention_sinks=True)
    assert resolve_plan(EngineConfig(model=str(folder), device="cpu")).model.implementation
    assert "attention_sinks=True" in caplog.text


def change(folder: Path, **options: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **options}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, "has no NoSuchForCausalLM"),
        ({"architectures": ["BertForMaskedLM"]}, "has no BertForMaskedLM"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "has no T5"),
        ({"model_type": "nothing"}, "does not know model_type='nothing'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quant_method is missing"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "MXFP4 is not read for models that transformers"),
        ({"quantization_config": {"quant_method": "hqq"}}, "use a GPTQ or AWQ version of the model"),
        ({"hidden_size": "wide"}, "cannot read it"),
    ],
)
def test_what_transformers_cannot_compute_is_refused_in_one_line(tmp_path: Path, options: dict[str, Any], words: str):
    folder = make_checkpoint(tmp_path / "m", "llama")
    change(folder, **options)
    with pytest.raises(ModelLoadError) as caught:
        resolve_plan(EngineConfig(model=str(folder), device="cpu", model_impl="transformers"))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path):
    folder = make_checkpoint(tmp_path / "m", "llama")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    change(folder, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    assert resolve_plan(EngineConfig(model=str(folder), device="cpu", model_impl="transformers")).model.num_parameters
    assert not (tmp_path / "ran").exists()


def test_weights_that_do_not_fit_are_named(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "m"
    save_random(tiny("gemma2"), folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)

    def refusal(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, file)
        with pytest.raises(ModelLoadError) as caught:
            FallbackSteps(folder)
        return str(caught.value)

    name = "model.layers.1.self_attn.o_proj.weight"
    assert name in refusal({key: value for key, value in tensors.items() if key != name})
    assert "is not used" in refusal({**tensors, "model.layers.9.extra.weight": torch.zeros(2)})
    assert "has shape [3, 3]" in refusal({**tensors, name: torch.zeros(3, 3)})
    assert "not finite" in refusal({**tensors, name: torch.full_like(tensors[name], torch.inf)})


class TestProof:
    def test_a_dropped_window_is_refused_with_the_layer(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        save_random(tiny("mistral"), tmp_path)
        FallbackSteps(tmp_path)

        def careless(*args: Any, sliding_window: int | None = None, **kwargs: Any) -> Any:
            return _attend(*args, **kwargs)

        monkeypatch.setitem(transformers.AttentionInterface._global_mapping, OURS, careless)
        monkeypatch.setattr(parts, "prove", proof.prove)  # as at a first load
        with pytest.raises(ModelLoadError, match=r"MistralForCausalLM .*differs .* first in layers\.0") as caught:
            FallbackSteps(tmp_path)
        assert "\n" not in str(caught.value)

    def test_a_window_that_only_the_mask_carries_is_found(self):
        with pytest.raises(ModelLoadError, match="differs"):
            proof.prove(tiny("phimoe", sliding_window=6), 64, None)
        proof.prove(tiny("phimoe", sliding_window=None), 64, None)

    def test_chunks_are_refused_only_where_sequences_leave_them(self):
        made = tiny("llama4_text", attention_chunk_size=128)
        proof.prove(made, 128, None)
        with pytest.raises(ModelLoadError, match="max_model_len of 128 or less"):
            proof.prove(made, 256, None)

    def test_it_is_made_once_for_each_configuration(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        folder = tmp_path / "kept"
        proof.prove(tiny("gemma2"), 64, folder)
        made: list[ModelClass] = []
        monkeypatch.setattr(proof, "compare", lambda small: made.append(small) or (0.0, ""))
        proof.prove(tiny("gemma2"), 64, folder)
        assert not made
        proof.prove(tiny("gemma2", query_pre_attn_scalar=5), 64, folder)
        assert len(made) == 1

    def test_a_failed_proof_is_not_remembered(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        monkeypatch.setattr(proof, "compare", lambda small: (0.5, "layers.3"))
        for _ in range(2):
            with pytest.raises(ModelLoadError, match=r"layers\.3"):
                proof.prove(tiny("gemma2"), 64, tmp_path / "kept")

    def test_a_real_configuration_becomes_a_small_one_of_the_same_kind(self):
        config = transformers.Gemma3TextConfig()
        small = proof.shrunk(ModelClass(transformers.Gemma3ForCausalLM, config), 1 << 20).config
        assert set(small.layer_types) == set(config.layer_types)
        assert small.sliding_window == 6
        assert small.hidden_size == 64
        assert proof.shrunk(ModelClass(transformers.Gemma3ForCausalLM, config), 64).config.sliding_window > 1000


_FACTORS = {"short_factor": [1.0] * 48, "long_factor": [float(i + 1) for i in range(48)]}
_LONGROPE = {"original_max_position_embeddings": 4096, "rope_scaling": {"type": "longrope", **_FACTORS}}
_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}
# Numbers of published models, where they differ from the defaults of their classes.
PUBLISHED: dict[str, tuple[str, dict[str, Any], int]] = {
    "Phi3Config": (
        "Phi3ForCausalLM",
        {
            **{"hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064},
            **{"partial_rotary_factor": 0.75, "max_position_embeddings": 131072, "sliding_window": 262144, **_LONGROPE},
        },
        131072,
    ),
    "GptOssConfig": ("GptOssForCausalLM", {}, 131072),
    "DeepseekV3Config": (
        "DeepseekV3ForCausalLM",
        {"rope_scaling": {**_YARN, "original_max_position_embeddings": 4096}},
        4096,
    ),
    "Qwen3_5MoeConfig": ("Qwen3_5MoeForConditionalGeneration", {}, 262144),
    "Qwen3NextConfig": ("Qwen3NextForCausalLM", {}, 262144),
    "Gemma4Config": ("Gemma4ForConditionalGeneration", {}, 131072),
    "Gemma4TextConfig": (
        "Gemma4ForCausalLM",
        {"num_kv_shared_layers": 20, "num_hidden_layers": 35, "use_double_wide_mlp": True},
        32768,
    ),
    "Gemma3nTextConfig": ("Gemma3nForCausalLM", {}, 32768),
    "GraniteMoeHybridConfig": (
        "GraniteMoeHybridForCausalLM",
        {
            **{"layer_types": (["mamba"] * 5 + ["attention"]) * 4, "num_hidden_layers": 24, "hidden_size": 2048},
            **{"mamba_n_heads": 64, "mamba_d_head": 64, "mamba_expand": 2},
        },
        32768,
    ),
    "NemotronHConfig": ("NemotronHForCausalLM", {}, 32768),
    "BambaConfig": ("BambaForCausalLM", {"attn_layer_indices": [9, 18, 27]}, 32768),
    "Llama4Config": ("Llama4ForConditionalGeneration", {}, 4096),
}


@pytest.mark.parametrize("name", few(PUBLISHED, "Phi3Config", "DeepseekV3Config"))
def test_models_of_published_shapes_are_proven(name: str):
    kind, options, longest = PUBLISHED[name]
    made = getattr(transformers, name)(**options)
    proof.prove(ModelClass(getattr(transformers, kind), type(made).from_dict(made.to_dict())), longest, None)


class TestPackedWeights:
    @pytest.mark.parametrize("model_type", few(["gpt_oss", "gpt2"], "gpt2"))
    def test_a_later_start_maps_the_same_bits(
        self, model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ):
        monkeypatch.setattr(loading, "LEAST_BYTES", 0)
        texts = []
        for _ in range(2):
            built = build(config(checkpoint(model_type), tmp_path / "packed", quantization="int8"))
            texts.append(generate(built, [request("a", range(3, 40))])["a", 0].token_ids)
        unkept = build(config(checkpoint(model_type), quantization="int8"))
        texts.append(generate(unkept, [request("a", range(3, 40))])["a", 0].token_ids)
        assert texts[0] == texts[1] == texts[2]
        assert len(list((tmp_path / "packed").glob("*.packed"))) == 1
        assert len(list((tmp_path / "packed").glob("*.proof"))) == 1


def config(path: Path, folder: Path | None = None, **changes: Any) -> EngineConfig:
    return engine_config(
        model=str(path),
        device="cpu",
        dtype="bfloat16",
        num_threads=2,
        packed_cache=folder is not None,
        packed_cache_dir=str(folder),
        **{"kv_memory": 1 << 22, "max_model_len": 128, "model_impl": "transformers", **changes},
    )


@cache
def shared(model_type: str) -> BuiltEngine:
    """An engine of the usual configuration, for tests that only generate with it."""
    return build(config(checkpoint(model_type), max_num_seqs=16))


def request(name: str, ids: Any, *, num_tokens: int = 24, **changes: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(ids),
        sampling=SamplingParams(temperature=0.0, **changes),
        stop=StopParams(max_new_tokens=num_tokens),
    )


class TestEngine:
    """The whole engine over such a model."""

    @pytest.mark.parametrize("model_type", few(["gpt_oss", "qwen3_moe", "qwen3_5_text"], "qwen3_5_text"))
    def test_preempted_requests_answer_as_alone(self, model_type: str):
        path = checkpoint(model_type)
        requests = [request(str(i), [(7 * i + j) % 110 + 5 for j in range(30 + i)]) for i in range(4)]
        roomy = shared(model_type)
        alone = {i: generate(roomy, [each])[each.request_id, 0].token_ids for i, each in enumerate(requests)}
        fewest = 1 + roomy.plan.scheduler.num_blocks_for(128)
        narrow = build(config(path, kv_memory=fewest * roomy.plan.pool.bytes_per_block, max_num_seqs=6))
        found = generate(narrow, requests)
        assert sum(each.num_preemptions for each in found.values())
        assert {i: found[each.request_id, 0].token_ids for i, each in enumerate(requests)} == alone

    def test_prefixes_are_shared_unless_a_state_is_recurrent(self):
        prompt = list(range(5, 69))
        cached = {}
        for model_type in ("gemma2", "qwen3_5_text"):
            built = shared(model_type)
            first = generate(built, [request("a", prompt)])["a", 0]
            again = generate(built, [request("b", prompt)])["b", 0]
            assert first.token_ids == again.token_ids
            cached[model_type] = again.num_cached_tokens
        assert cached["gemma2"] >= 48
        assert cached["qwen3_5_text"] == 0

    def test_choices_of_a_recurrent_model_each_have_the_state(self):
        built = shared("qwen3_5_text")
        single = [generate(built, [sampled("a", 1, seed=5)])["a", 0].token_ids]
        three = generate(built, [sampled("b", 3, seed=5)])
        assert three["b", 0].token_ids == single[0]
        assert len({tuple(three["b", choice].token_ids) for choice in range(3)}) > 1
        assert all(three["b", choice].finish == "length" for choice in range(3))

    def test_states_of_requests_that_ended_are_given_back(self):
        built = shared("qwen3_5_text")
        states = built.executor._runner._decoder._states
        generate(built, [request(f"r{i}", range(5, 20 + i), num_tokens=4) for i in range(12)])
        generate(built, [request("last", range(5, 30), num_tokens=4)])
        assert len(states) == 1
        assert len(states._before) <= 1

    def test_beams_of_a_recurrent_model_are_refused(self):
        built = shared("qwen3_5_text")
        asked = replace(request("b", range(5, 30)), beam=BeamParams(width=2))
        with pytest.raises(InfeasibleRequest, match="recurrent state"):
            check_request(built.plan.scheduler, asked)
        assert generate(shared("gemma2"), [asked])["b", 0].token_ids

    @pytest.mark.parametrize("speculation", few(["suffix", "outputs"], "suffix"))
    def test_guesses_for_a_recurrent_model_are_refused(self, speculation: str):
        """Those for another model of the fallback change nothing."""
        reason = f"speculation={speculation}: this model keeps a recurrent state, which a wrong guess would change"
        with pytest.raises(ConfigError, match=reason):
            build(config(checkpoint("qwen3_5_text"), speculation=speculation))
        asked = request("a", [*range(5, 30)] * 3)
        plain = generate(shared("gemma2"), [asked])
        assert generate(build(config(checkpoint("gemma2"), speculation=speculation)), [asked]) == plain

    def test_guesses_where_they_can_be(self):
        for name, said in (("qwen3_5_text", "off: this model keeps a recurrent state"), ("gemma2", "suffix")):
            built = build(config(checkpoint(name), speculation="auto"))
            assert built.plan.speculation.text.startswith(said)
            assert f"speculation      {said}" in plan_text(built.plan)
            assert (built.scheduler._speculation is None) == said.startswith("off")

    def test_embeddings_are_the_rows_behind_the_final_norm(self):
        built = shared("gemma2")
        vectors = [
            generate(built, [GenerationRequest(
                request_id="v", prompt_token_ids=tuple(range(5, 45)), sampling=SamplingParams(),
                stop=StopParams(max_new_tokens=0), pooling="mean",
            )])["v", 0].embedding
            for _ in range(2)
        ]  # fmt: skip
        assert vectors[0] is not None
        assert len(vectors[0]) == built.plan.model.hidden_size
        assert vectors[0] == vectors[1]


def sampled(name: str, n: int, *, seed: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(range(5, 40)),
        sampling=SamplingParams(temperature=1.0, seed=seed),
        stop=StopParams(max_new_tokens=10),
        n=n,
    )


class TestStates:
    def test_what_ends_is_forgotten_and_what_is_left_over_is_bounded(self):
        model = tiny("qwen3_5_text").without_parameters(torch.float32)
        states = States(model, (), most=2)
        for sequence in range(20):
            states.begin([sequence], [0], [3])
            states.end([sequence], [3], [()])
        assert len(states) == 4
        states.forget([19, 18, 3])
        assert len(states) == 2

    def test_a_sequence_without_its_state_cannot_go_on(self):
        states = States(tiny("qwen3_5_text").without_parameters(torch.float32), (), most=2)
        with pytest.raises(ValueError, match="position 4 needs the recurrent state before it; there are states of no"):
            states.begin([1], [4], [1])
        states.begin([1], [0], [4])
        states.end([1], [4], [(2,)])
        states.begin([1, 2], [4, 4], [1, 1])
        states.end([1, 2], [5, 5], [(), ()])
        with pytest.raises(ValueError, match="states of 5, 4 tokens"):
            states.begin([1], [6], [1])

    @torch.inference_mode()
    def test_a_step_can_be_computed_again(self):
        steps = FallbackSteps(checkpoint("qwen3_5_text"), dtype="bfloat16")
        ids, table = prompts()[1], steps.blocks().take(26)

        def at(start: int, count: int) -> torch.Tensor:
            return steps.step(replace(scheduled(ids, table, start, count), sequence_id=1))[0]

        at(0, 20)
        first = at(20, 2)
        assert torch.equal(at(20, 2), first), "as after a failure behind the model"
        third = at(22, 1)
        assert torch.equal(at(22, 1), third)
        assert torch.equal(torch.cat([first, third]), steps.run({3: ids}, [[(3, 26)]])[3][20:23])

    def test_a_state_is_counted(self):
        resolved = resolve(config(checkpoint("qwen3_5_text"), max_num_seqs=8))
        steps = FallbackSteps(checkpoint("qwen3_5_text"), dtype="bfloat16")
        steps.run({1: [5, 6, 7]}, [[(1, 3)]])
        (state,) = steps.model._states._of.values()
        assert resolved.kept_bytes == 8 * COPIES * state.num_bytes > 0

    def test_swapping_is_refused(self):
        with pytest.raises(ConfigError, match="swap_space"):
            resolve_plan(config(checkpoint("qwen3_5_text"), swap_space=1 << 24))
        with pytest.raises(ConfigError, match="kv_offload_dir=/kv is not possible: the model keeps a recurrent state"):
            resolve_plan(config(checkpoint("qwen3_5_text"), kv_offload_dir="/kv"))


TEXT: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
QWEN_IDS = {"image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 0, "vision_end_token_id": 0}
SIGLIP = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}


@pytest.mark.parametrize(
    ("name", "text", "rest"),
    [
        pytest.param(
            "Gemma3",
            {"sliding_window": 6},
            {"vision_config": SIGLIP, "mm_tokens_per_image": 4, "image_token_index": 1, "boi_token_index": 0},
            marks=pytest.mark.matrix,
        ),
        (
            "Qwen3VL",
            {"rope_parameters": SECTIONS},
            {"vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]}, **QWEN_IDS},
        ),
        pytest.param(
            "Qwen3_5",
            {"layer_types": ["linear_attention", "full_attention"]},
            {"vision_config": QWEN_VISION, **QWEN_IDS},
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_the_text_of_a_vision_model_is_served_without_its_tower(
    name: str, text: dict[str, Any], rest: dict[str, Any], tmp_path: Path
):
    made = getattr(transformers, f"{name}Config")(text_config={**TEXT, **text}, **rest)
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    assert held_against_plain(ModelClass(kind, made), tmp_path)["difference"] < 1e-5
    assert model_class(tmp_path).name == kind.__name__
    steps = FallbackSteps(tmp_path)
    assert steps.resolved.model.idle
    loaded = steps.model._model.named_parameters()
    assert all(value.device.type == "meta" for name, value in loaded if "vision" in name or "visual" in name)


def test_the_table_of_models_is_that_of_the_last_sweep():
    recorded = json.loads(RESULT.read_text())
    passed = {each["model"] for each in recorded["models"] if each["passed"]}
    assert len(passed) >= 95
    assert passed >= {
        *FAMILIES,
        "qwen3_5_moe_text",
        "gemma3_text",
        "phi3",
        "granite",
        "mixtral",
        "olmo3",
        "llama4_text",
    }
    page = TABLE.read_text()
    assert page == written(page, recorded)


def test_no_gpu_is_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="set device to cpu"):
        resolve_plan(EngineConfig(model=str(checkpoint("gpt2")), device="cuda"))
