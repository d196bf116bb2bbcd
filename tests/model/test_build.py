"""Plans resolved from real checkpoint directories: what is chosen, what is refused and with which advice."""

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch

import quire_engine.build
import quire_engine.execution.memory
from quire_engine.build import build, plan_text, resolve_plan
from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_engine.execution import kernel_checks
from quire_engine.execution.memory import largest_batches
from quire_kernels.reference import REFERENCE
from quire_kernels.select import PROVIDERS, select
from support.checkpoints import VOCAB_SIZE, make_checkpoint, shared_checkpoint
from support.limits import engine_config
from support.offline import generate


@pytest.fixture(autouse=True)
def _keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def config(**changes):
    return engine_config(**{"model": str(shared_checkpoint()), "device": "cpu", "num_threads": 1, **changes})


def request(**changes):
    return GenerationRequest(
        request_id="a",
        prompt_token_ids=(5, 6, 7),
        sampling=SamplingParams(temperature=0.0, num_logprobs=1),
        stop=StopParams(max_new_tokens=6),
        **changes,
    )


def test_a_built_engine_follows_the_plan_of_the_dry_run():
    dry = resolve_plan(config())
    built = build(config())
    assert built.plan.load_seconds > 0 == dry.load_seconds
    for name in ("path", "architecture", "num_parameters", "dtype", "vocab_size"):
        assert getattr(built.plan.model, name) == getattr(dry.model, name)
    for name in ("device", "kernels", "num_threads"):
        assert getattr(built.plan.machine, name) == getattr(dry.machine, name)
    assert built.plan.identity == dry.identity
    assert built.plan.scheduler == dry.scheduler
    assert (dry.model.architecture, dry.model.vocab_size, dry.machine.device) == ("Qwen3ForCausalLM", VOCAB_SIZE, "cpu")
    assert torch.get_num_threads() == 1
    result = generate(built, [request()])["a", 0]
    assert (len(result.token_ids), result.finish) == (6, "length")


def test_sizes_are_those_of_the_checkpoint_and_the_pool():
    plan = build(config(max_num_seqs=3, max_model_len=100, dtype="bfloat16", kernels="reference")).plan
    assert plan.machine.deterministic, "on a CPU, asked for or not"
    assert plan.model.weights_bytes == 2 * plan.model.num_parameters
    assert plan.pool.bytes_per_block == 2 * 2 * 2 * 16 * 32 * 2  # layers, K and V, heads, slots, width, bytes
    assert plan.scheduler.num_blocks == 3 * 7  # no more than three sequences of 100 tokens can use
    assert plan.pool.num_bytes == 21 * plan.pool.bytes_per_block
    assert plan.scheduler.num_slots == 21 * 16
    assert "21 blocks" in plan_text(plan)


@pytest.mark.parametrize("tied", [True, False])
def test_what_a_token_costs(tied):
    path = shared_checkpoint("qwen3", tie_word_embeddings=tied)
    plan = resolve_plan(config(model=str(path)))
    table, attention_width = VOCAB_SIZE * 64, 4 * 32  # heads, width
    last_layers_end = attention_width * 64 + 3 * 64 * 96
    assert plan.cost.sampled_parameters == table + last_layers_end
    assert plan.cost.layer_parameters == plan.model.num_parameters - last_layers_end - table * (1 if tied else 2)
    assert (plan.cost.layer_attention, plan.cost.sampled_attention) == (attention_width, attention_width)  # two layers


def test_a_token_costs_the_experts_that_it_chooses():
    """Three layers, of which two have 8 experts of 40 and a token chooses 3."""
    path = shared_checkpoint("qwen3_moe", dtype="bfloat16")
    plan = resolve_plan(config(model=str(path), dtype="bfloat16", kernels="reference"))
    table, one = VOCAB_SIZE * 64, 3 * 64 * 40
    last_layers_end = 4 * 32 * 64 + 8 * 64 + 3 * one
    assert plan.cost.sampled_parameters == table + last_layers_end
    assert plan.cost.layer_parameters == plan.model.num_parameters - 2 * table - 2 * 8 * one + 3 * one - (
        last_layers_end - 3 * one
    )
    assert plan.cost.expert_bytes == 2 * 2 * 8 * one
    active = plan.cost.layer_parameters + plan.cost.sampled_parameters
    assert plan.cost.weights_read(1) == plan.cost.weights_read_bytes == 2 * active
    touched = 1 - (1 - 3 / 8) ** 8
    assert plan.cost.weights_read(8) == pytest.approx(2 * active + (touched - 3 / 8) * plan.cost.expert_bytes, abs=2)
    assert plan.cost.weights_read(10_000) == 2 * active + 2 * 2 * 5 * one
    text = plan_text(plan)
    assert f"{plan.model.num_parameters:,} parameters, {active:,} of them for a token" in text
    assert "; a step reads" in text
    dense = resolve_plan(config())
    assert dense.cost.weights_read(64) == dense.cost.weights_read_bytes
    assert "of them for a token" not in plan_text(dense)


@pytest.mark.parametrize(
    ("family", "beside"),
    [("qwen2_moe", 3 * 64 * 56 + 64), ("ernie4_5_moe", 3 * 64 * 80), ("gemma4_moe", 3 * 64 * 96)],
)
def test_every_token_costs_what_stands_beside_its_experts(family, beside):
    """The last layer has 6 experts of 40, of which a token chooses 2."""
    plan = resolve_plan(config(model=str(shared_checkpoint(family, dtype="bfloat16")), dtype="bfloat16"))
    one, heads = 3 * 64 * 40, 4 * 32 if family == "gemma4_moe" else 64
    assert plan.cost.sampled_parameters == VOCAB_SIZE * 64 + heads * 64 + 6 * 64 + 2 * one + beside
    assert (plan.cost.experts, plan.cost.experts_per_token) == (6, 2)


def test_kv_memory_is_taken_at_its_word():
    plan = resolve_plan(config(kv_memory=50 << 20, max_num_seqs=1, max_model_len=16))
    assert plan.pool.num_bytes == 50 << 20


def test_parameters_are_counted_as_transformers_counts_them():
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(shared_checkpoint(family))
        assert resolve_plan(config(model=str(shared_checkpoint(family)))).model.num_parameters == model.num_parameters()


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_the_dtype_is_the_checkpoints_unless_asked_otherwise(stored):
    path = str(shared_checkpoint("qwen2", dtype=stored))
    assert resolve_plan(config(model=path, kernels="reference")).model.dtype == stored
    for asked in ("float32", "bfloat16", "float16"):
        built = build(config(model=path, dtype=asked))
        assert built.plan.model.dtype == asked
        assert generate(built, [request()])["a", 0].finish == "length"


def test_a_float16_checkpoint_gets_the_fast_kernels_of_a_cpu():
    path = str(shared_checkpoint("qwen2", dtype="float16"))
    built = build(config(model=path))
    assert (built.plan.model.dtype, built.plan.machine.kernels) == ("bfloat16", "cpu")
    (line,) = (line for line in plan_text(built.plan).splitlines() if line.startswith("dtype "))
    assert line.split(None, 1)[1] == (
        "float16 weights are computed in bfloat16 by the C++ kernels; set dtype to float16 to keep them, many times"
        " slower"
    )
    assert generate(built, [request()])["a", 0].finish == "length"
    quantized = resolve_plan(config(model=path, quantization="int8"))
    assert (quantized.model.dtype, quantized.machine.kernels) == ("bfloat16", "cpu")
    for changes in ({"dtype": "float16"}, {"kernels": "reference"}):
        plan = resolve_plan(config(model=path, **changes))
        assert (plan.model.dtype, plan.machine.kernels, plan.model.why_dtype) == ("float16", "reference", "")


def test_the_length_shrinks_to_what_the_memory_holds():
    whole = resolve_plan(config())
    assert whole.scheduler.max_model_len == 512
    small = build(config(kv_memory=5 * whole.pool.bytes_per_block)).plan
    assert (small.scheduler.num_blocks, small.scheduler.max_model_len) == (5, 80)


def test_a_length_that_does_not_fit_names_what_would():
    size = resolve_plan(config()).pool.bytes_per_block
    with pytest.raises(ConfigError) as failure:
        resolve_plan(config(kv_memory=5 * size, max_model_len=100))
    assert f"set max_model_len to 80 or less, or kv_memory to {7 * size} or more" in str(failure.value)
    assert resolve_plan(config(kv_memory=5 * size, max_model_len=80)).scheduler.num_blocks == 5
    assert resolve_plan(config(kv_memory=7 * size, max_model_len=100)).scheduler.num_blocks == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 513}, "set max_model_len to 512 or less"),
        ({"kv_memory": 1 << 60}, "set kv_memory to .* or less"),
        ({"kv_memory": 1000}, "set kv_memory to 16384 or more"),
        ({"dtype": "int8"}, "dtype=int8 is unknown"),
        ({"device": "tpu"}, "device=tpu is unknown"),
        (
            {"async_scheduling": "on"},
            "planned ahead on a GPU only, on CPUs it was slower; set async_scheduling to auto",
        ),
        ({"kernels": "abacus"}, "kernels=abacus"),
        ({"max_num_seqs": 600}, "max_num_batched_tokens"),
        ({"min_chunk": 600, "max_num_batched_tokens": 1000}, "min_chunk"),
    ],
)
def test_impossible_settings_are_refused_before_the_weights_are_read(changes, message, monkeypatch):
    monkeypatch.setattr(quire_engine.build.Loading, "load", None)
    for resolve in (resolve_plan, build):
        with pytest.raises(ConfigError, match=message):
            resolve(config(**changes))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused():
    assert resolve_plan(config(device="auto")).machine.device == "cpu"
    with pytest.raises(ConfigError, match="set device to cpu or auto"):
        resolve_plan(config(device="cuda"))


def test_weights_larger_than_the_memory_are_refused(monkeypatch):
    monkeypatch.setattr(quire_engine.execution.memory, "available_memory", lambda: 100_000)
    with pytest.raises(ConfigError, match="the weights need 594 KiB"):
        build(config())


@pytest.mark.parametrize(("quantization", "bits"), [(None, 12.0), ("int8", 8.0), ("int4", 4.25)])
def test_packed_weights_are_counted_as_they_are_held(quantization, bits):
    asked = config(dtype="bfloat16", kernels="cpu", quantization=quantization)
    plan, estimate = build(asked).plan, resolve_plan(asked)
    multiplied = plan.cost.layer_parameters + plan.cost.sampled_parameters
    assert bits < 8 * plan.cost.weights_read_bytes / multiplied < 1.2 * bits  # whole panels, scales, repairs
    assert plan.model.weights_bytes - plan.cost.weights_read_bytes == 2 * VOCAB_SIZE * 64  # the embedding stays in bf16
    assert estimate.model.weights_bytes == pytest.approx(plan.model.weights_bytes, rel=0.3)
    assert quantization is not None or estimate.model.weights_bytes == 2 * plan.model.num_parameters
    assert f"in {quantization}" in plan_text(plan) or quantization is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kernels": "reference", "quantization": "int8"},
            r"not in int8 \(leave quantization out\); set kernels to auto",
        ),
        ({"kernels": "reference", "kv_cache_dtype": "int8"}, r"\(set kv_cache_dtype to auto\); set kernels to auto"),
        ({"kernels": "cpu", "dtype": "float32"}, r"\(set dtype to bfloat16\); set kernels to auto"),
        ({"quantization": "int4", "dtype": "float16"}, r"\(set dtype to bfloat16\); .*\(leave quantization out\)$"),
        ({"kernels": "cpu", "device": "cuda"}, r"\(set device to cpu\); set kernels to auto"),
        ({"quantization": "int8", "device": "cuda"}, r"\(set device to cpu\); .*\(leave quantization out\)$"),
        ({"kv_cache_dtype": "int8", "device": "cuda"}, r"\(set device to cpu\); .*\(set kv_cache_dtype to auto\)$"),
        (
            {"kernels": "reference", "device": "cuda", "deterministic": True},
            r"depends on the others \(leave deterministic out\)",
        ),
        (
            {"attention": "flash-attn"},
            r"attention=flash-attn: the cpu kernels .* not by flash-attn \(set attention to auto",
        ),
        ({"kernels": "cpu", "block_size": 8}, r"not block_size 8 \(set block_size to 16\); set kernels to auto"),
        ({"block_size": 24, "quantization": "int8"}, "not block_size 24"),
    ],
)
def test_what_no_kernels_can_serve_together_is_refused_with_the_fix(changes, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for resolve in (resolve_plan, build):
        with pytest.raises(ConfigError, match=message) as failure:
            resolve(config(**{"dtype": "bfloat16", **changes}))
        assert str(failure.value).startswith(f"kernels={changes.get('kernels', 'auto')}")
        assert ": the " in str(failure.value)


@pytest.mark.parametrize(
    ("path_options", "changes", "reason"),
    [
        ({"head_dim": 24}, {}, "not head_dim 24"),
        ({"head_dim": 8}, {}, "not head_dim 8"),
        ({}, {"block_size": 8}, "not block_size 8"),
        ({}, {"dtype": "float32"}, "in bfloat16, not in float32"),
    ],
)
def test_the_reference_serves_as_a_whole_what_the_cpu_kernels_cannot(path_options, changes, reason, caplog):
    """Never products by one and attention by the other: the plan names one set, and its numbers are that set's."""
    path = str(shared_checkpoint("qwen3", **path_options))
    asked = {"model": path, "dtype": "bfloat16", "max_num_seqs": 4, **changes}
    built = build(config(**asked))
    assert built.plan.machine.kernels == "reference"
    (record,) = caplog.records
    assert record.getMessage().startswith("serving with the slower reference kernels: the cpu kernels ")
    assert reason in record.getMessage()
    ours = generate(built, [request()])["a", 0]
    assert ours == generate(build(config(**asked, kernels="reference")), [request()])["a", 0]
    assert ours.finish == "length"
    assert len(caplog.records) == 1


def test_new_kernels_need_no_change_of_the_composition(monkeypatch):
    """A set under a name that nothing here knows, with workers of its own."""

    class Provider:
        name = "abacus"
        devices = ("cpu",)

        def why_not(self, required):
            return None

        def make(self, required):
            assert (required.device, required.dtype) == (torch.device("cpu"), torch.float32)
            assert (required.quantization, required.kv.head_dim, required.threads) == (None, 32, 3)
            return replace(REFERENCE, name=self.name, own_threads=True)

    monkeypatch.setattr(kernel_checks, "select", partial(select, providers=(Provider(), *PROVIDERS)))
    for asked in ("auto", "abacus"):
        built = build(config(kernels=asked, num_threads=3))
        assert (built.plan.machine.kernels, built.plan.machine.num_threads, torch.get_num_threads()) == ("abacus", 3, 1)
        assert generate(built, [request()])["a", 0].finish == "length"
    assert build(config(kernels="reference", num_threads=2)).plan.machine.kernels == "reference"
    assert torch.get_num_threads() == 2


def test_a_quarter_of_the_free_memory_is_the_default(monkeypatch):
    weights = resolve_plan(config()).model.weights_bytes
    monkeypatch.setattr(quire_engine.execution.memory, "available_memory", lambda: weights + (4 << 20))
    assert resolve_plan(config()).pool.num_bytes == 1 << 20


def test_a_missing_or_misshapen_checkpoint_is_refused_by_the_dry_run_too(tmp_path):
    with pytest.raises(ModelLoadError):
        resolve_plan(config(model=str(tmp_path / "nowhere")))
    path = make_checkpoint(tmp_path / "model", "llama")
    options = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**options, "intermediate_size": 97}))
    for resolve in (resolve_plan, build):
        with pytest.raises(ModelLoadError, match="shape"):
            resolve(config(model=str(path)))
    (path / "config.json").write_text(json.dumps(options))
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError):
        resolve_plan(config(model=str(path)))


def test_the_engine_does_not_need_the_files_once_it_is_built(tmp_path):
    path = make_checkpoint(tmp_path / "model", "llama")
    built = build(config(model=str(path)))
    expected = generate(build(config(model=str(path))), [request()])
    shutil.rmtree(path)
    assert generate(built, [request()]) == expected


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 100, "max_num_seqs": 20, "prefill_chunk": 256},
        {"max_num_batched_tokens": 2000, "max_model_len": 40},
        {"max_num_batched_tokens": 64, "max_num_seqs": 64},
    ],
)
def test_the_largest_batches_reach_the_limits_and_keep_them(limits):
    asked = config(**{"max_model_len": 512, **limits})
    bounds, full = asked.limits, {asked.max_model_len}
    chunk = min(bounds.prefill_chunk, asked.max_model_len)
    prompts, decodes = largest_batches(asked)
    for largest in (prompts, decodes):
        assert largest.num_tokens == sum(item.num_tokens for item in largest.items) <= bounds.max_num_batched_tokens
        assert len(largest.items) <= bounds.max_num_seqs
        assert {item.end for item in largest.items} == full
    assert prompts.items[0].num_tokens == min(chunk, bounds.max_num_batched_tokens)
    assert prompts.num_tokens == bounds.max_num_batched_tokens or len(prompts.items) == bounds.max_num_seqs
    alone = sum(item.num_tokens == 1 for item in decodes.items)
    assert len(decodes.items) == bounds.max_num_seqs
    assert alone >= max(1, bounds.max_num_seqs - 1), "what attention keeps of every decode is part of the peak"
    assert alone == bounds.max_num_seqs or decodes.items[0].num_tokens == min(
        chunk, bounds.max_num_batched_tokens - alone
    )


@pytest.mark.gpu
def test_a_gpu_pool_is_measured():
    asked = config(device="cuda", gpu_memory_utilization=0.5)
    built = build(asked)
    _, total = torch.cuda.mem_get_info()
    assert 0 < built.plan.pool.num_bytes < 0.5 * total
    assert generate(built, [request()])["a", 0].finish == "length"
