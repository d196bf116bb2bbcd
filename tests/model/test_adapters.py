"""Adapters in a model: equal to merged checkpoints, the same bits alone and in any batch, never another's prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from quire_engine.build import BuiltEngine, build, resolve_plan
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.types import Adapter, GenerationRequest, SamplingParams, StopParams
from quire_engine.execution.adapters import pack
from quire_engine.execution.model_input import model_input
from quire_engine.execution.models.adapter import ReadAdapter, read_adapter
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.step_tensors import step_tensors
from quire_kernels.cpu.ops import cpu_kernel_set
from quire_kernels.kernel_set import StepAdapters
from quire_kernels.reference import REFERENCE
from support.adapters import fused, merged, write_adapter
from support.checkpoints import shared_checkpoint
from support.covering import few
from support.limits import engine_config
from support.model_steps import Model, batch_of, random_ids, scheduled
from support.offline import generate

FAMILIES = (
    *("llama", "qwen2", "qwen3", "gemma2", "gemma3", "gemma4", "phi3", "granite", "olmo2", "glm4", "cohere2"),
    # With experts that all rows share: behind a gate, beside others that sigmoids choose, and with a norm after them.
    *("qwen2_moe", "glm4_moe", "afmoe"),
    *("qwen3_moe", "mixtral", "olmoe", "gemma4_moe"),
)
FORMS = (  # of eight adapters
    {},
    {"rank": 1, "alpha": 1.0},
    {"rank": 16, "alpha": 24.0, "use_rslora": True},
    {"targets": ("q_proj", "v_proj", "qkv_proj")},
    {"targets": ("down_proj", "w2"), "rank": 3},
    {"layers": (1,)},
    {"ranks": {"q_proj": 7, "up_proj": 2, "qkv_proj": 7, "o_proj": 9}, "alpha_pattern": {"o_proj": 3.0, "k_proj": 5}},
    {"dtype": torch.bfloat16, "targets": ("k_proj", "up_proj", "qkv_proj", "gate_up_proj")},
)
BF16 = {"family": "qwen3", "dtype": "bfloat16"}
COMPUTED = {
    "reference": ({"family": "qwen3"}, {}),
    "bf16": (BF16, {"kernels": "cpu"}),
    "windows": ({"family": "gemma3", "dtype": "bfloat16"}, {"kernels": "cpu"}),
    "a shared expert": ({"family": "glm4_moe", "dtype": "bfloat16"}, {"kernels": "cpu"}),
    "experts": ({"family": "qwen3_moe", "dtype": "bfloat16"}, {"kernels": "cpu"}),
    "int8": (BF16, {"quantization": "int8"}),
    "int4": (BF16, {"quantization": "int4"}),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def adapters_of(tmp_path: Path, model: Path, count: int = 8) -> list[Path]:
    return [write_adapter(tmp_path / f"a{i}", model, seed=i, **FORMS[i % 8]) for i in range(count)]


@pytest.mark.parametrize("family", few(FAMILIES, "gemma4", "phi3", "afmoe"))
def test_eight_adapters_in_one_batch_equal_the_merged_checkpoints(family: str, tmp_path: Path) -> None:
    path = shared_checkpoint(family)
    config = load_model_config(path)
    adapters = adapters_of(tmp_path, path)
    packed = [pack(read_adapter(each, config, max_rank=16), config, REFERENCE.adapted).sites for each in adapters]
    model = Model(path)
    blocks, ids = model.blocks(), random_ids(40)
    # The last two items have no adapter, and the fourth one as well.
    slots = [0, 1, 2, 3, 4, 5, 6, 7, -1, 3, -1]
    items = [scheduled(ids[i : i + 20], blocks.take(20), 0, 20) for i in range(len(slots))]
    step = step_tensors(batch_of(*items), model.block_size, config.vocab_size)
    rows = model_input(step, model.block_size, model.device)
    of_rows = torch.tensor(slots, dtype=torch.int32).repeat_interleave(20)
    adapted = replace(rows, adapters=StepAdapters(slots=of_rows, adapters=tuple(packed)))
    logits = model.decoder.logits(model.decoder.forward(adapted, model.kv.tensor)).split(20)
    plain = Model(path)
    for i, slot in enumerate(slots):
        if slot < 0:
            assert torch.equal(logits[i], plain.logits(ids[i : i + 20])), i
            continue
        with_merged = Model(merged(tmp_path / f"m{i}", path, adapters[slot])).logits(ids[i : i + 20])
        assert not torch.allclose(with_merged, plain.logits(ids[i : i + 20]), atol=0.05)
        assert (logits[i] - with_merged).abs().max() <= 1e-4 * with_merged.abs().max(), slot


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_pairs_for_all_experts_together_are_those_of_each(family: str, tmp_path: Path) -> None:
    path = shared_checkpoint(family)
    config = load_model_config(path)
    each = write_adapter(tmp_path / "each", path)
    together = fused(tmp_path / "together", each)
    found = [adapted_logits(Model(path), read_adapter(adapter, config, max_rank=16)) for adapter in (each, together)]
    with_merged = Model(merged(tmp_path / "merged", path, each)).logits(random_ids(20))
    for logits in found:
        assert (logits - with_merged).abs().max() <= 1e-4 * with_merged.abs().max()


def adapted_logits(model: Model, adapter: ReadAdapter) -> torch.Tensor:
    """Of twenty rows with one adapter."""
    config = model.decoder.config
    step = step_tensors(batch_of(scheduled(random_ids(20), model.blocks().take(20), 0, 20)), 16, config.vocab_size)
    sites = pack(adapter, config, REFERENCE.adapted).sites
    rows = model_input(step, model.block_size, model.device)
    rows = replace(rows, adapters=StepAdapters(slots=torch.zeros(20, dtype=torch.int32), adapters=(sites,)))
    return model.decoder.logits(model.decoder.forward(rows, model.kv.tensor))


def engine(computed: str, **changes: object) -> BuiltEngine:
    checkpoint, settings = COMPUTED[computed]
    defaults = {
        "device": "cpu",
        "num_threads": 1,
        "max_num_seqs": 16,
        "kv_memory": 16 << 20,
        "enable_lora": True,
        "max_loras": 8,
        "max_lora_rank": 16,
    }
    return build(engine_config(model=str(shared_checkpoint(**checkpoint)), **{**defaults, **settings, **changes}))


def bound(path: Path, computed: str) -> Adapter:
    config = load_model_config(shared_checkpoint(**COMPUTED[computed][0]))
    return Adapter(name=path.name, path=str(path), digest=read_adapter(path, config, max_rank=16).digest)


def request(name: str, adapter: Adapter | None, *, prompt: int = 40, seed: int = 0, n: int = 1) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(random_ids(200)[seed : seed + prompt]),
        sampling=SamplingParams(temperature=0.8, seed=seed, num_logprobs=2, num_prompt_logprobs=None),
        stop=StopParams(max_new_tokens=8),
        n=n,
    ).bound_to(adapter)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Adapter]]:
    """Four adapters of a way of computing, written at the first call."""

    @cache
    def of(computed: str) -> list[Adapter]:
        folder = tmp_path_factory.mktemp(computed)
        paths = adapters_of(folder, shared_checkpoint(**COMPUTED[computed][0]), 4)
        return [bound(path, computed) for path in paths]

    return of


def mixture(adapters: list[Adapter]) -> list[GenerationRequest]:
    """Of every adapter and of none, each prompt with all of them, one with several choices."""
    choices = [None, *adapters]
    return [
        request(f"r{i}", choices[i % len(choices)], prompt=30, seed=i // len(choices), n=2 if i == 7 else 1)
        for i in range(15)
    ]


@pytest.mark.parametrize("computed", few(COMPUTED, "experts", "int4"))
def test_alone_batched_chunked_cached_and_preempted_give_the_same_bits(computed: str, made) -> None:
    requests = mixture(made(computed))
    alone = engine(computed, enable_prefix_caching=False)
    wanted = {}
    for each in requests:
        wanted |= generate(alone, [each])
    assert len({tuple(result.token_ids) for result in wanted.values()}) > 8
    assert generate(engine(computed), requests) == wanted
    small = {"max_num_batched_tokens": 32, "prefill_chunk": 7, "min_chunk": 7}
    assert generate(engine(computed, **small), requests) == wanted
    few = engine(computed, max_loras=1, elder_age_steps=3)  # one place, of which every adapter has its turns
    assert generate(few, requests) == wanted
    again = generate(few, [replace(each, request_id=f"again {each.request_id}") for each in requests])
    assert again == {(f"again {name}", choice): result for (name, choice), result in wanted.items()}
    tight = generate(engine(computed, admission="prompt", **pool_of(computed, 10)), requests)
    assert tight == wanted
    assert max(result.num_preemptions for result in tight.values()) > 0


def pool_of(computed: str, blocks: int) -> dict[str, object]:
    checkpoint, settings = COMPUTED[computed]
    plan = resolve_plan(engine_config(model=str(shared_checkpoint(**checkpoint)), device="cpu", **settings))
    return {"kv_memory": blocks * plan.pool.bytes_per_block, "max_model_len": 64}


def test_no_prefix_is_shared_with_another_adapter_or_the_model(made) -> None:
    adapters = made("reference")
    built = engine("reference")
    for i, adapter in enumerate([None, *adapters]):
        first = generate(built, [request(f"first {i}", adapter)])
        assert next(iter(first.values())).num_cached_tokens == 0, adapter
        second = generate(built, [request(f"second {i}", adapter)])
        assert next(iter(second.values())).num_cached_tokens >= 32, adapter


def test_a_request_without_an_adapter_has_the_bits_of_a_server_without_adapters(made) -> None:
    plain = [each for each in mixture(made("bf16")) if each.adapter is None]
    beside = generate(engine("bf16"), mixture(made("bf16")))
    for key, result in generate(engine("bf16", enable_lora=False), plain).items():
        assert beside[key] == result


def test_scored_prompts_and_vectors_have_the_adapters_numbers(made) -> None:
    adapter, built = made("reference")[0], engine("reference")
    scored = replace(request("scores", adapter), sampling=SamplingParams(num_prompt_logprobs=1))
    vector = replace(
        request("vector", adapter), sampling=SamplingParams(temperature=0.0), pooling="mean",
        stop=StopParams(max_new_tokens=0),
    )  # fmt: skip
    found = generate(built, [scored, vector])
    assert all(result.error is None for result in found.values())
    for each in (scored, vector):
        bare = replace(each, request_id="bare", adapter=None, cache_salt="")
        assert generate(built, [bare])["bare", 0] != found[each.request_id, 0]


@pytest.mark.parametrize("speculation", few(["suffix", "model"], "suffix"))
def test_guesses_change_no_answer(speculation: str, made) -> None:
    requests = mixture(made("reference"))
    asked = f"model:{shared_checkpoint('llama')}" if speculation == "model" else speculation
    assert generate(engine("reference", speculation=asked), requests) == generate(engine("reference"), requests)


def test_files_that_changed_end_the_request_with_a_clear_error(made, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "x", shared_checkpoint("qwen3"), seed=50)
    adapter = bound(path, "reference")
    write_adapter(path, shared_checkpoint("qwen3"), seed=51)
    result = generate(engine("reference"), [request("changed", adapter), request("base", None)])
    assert "no longer those that it was loaded from" in (result["changed", 0].error or "")
    assert result["base", 0].error is None
    (path / "adapter_config.json").unlink()
    result = generate(engine("reference"), [request("gone", adapter)])
    assert "cannot be loaded" in (result["gone", 0].error or "")


def test_the_plan_counts_the_memory_of_adapters(tmp_path: Path) -> None:
    path = str(shared_checkpoint("qwen3"))
    plan = resolve_plan(engine_config(model=path, device="cpu", enable_lora=True, max_loras=2, max_cpu_loras=5))
    one = resolve_plan(engine_config(model=path, device="cpu", enable_lora=True)).adapters.num_bytes
    assert (plan.adapters.max_kept, plan.adapters.num_bytes, plan.adapters.max_rank) == (5, 5 * one, 16)
    config = load_model_config(Path(path))
    read = read_adapter(write_adapter(tmp_path, Path(path), rank=16), config, max_rank=16)
    for kernels in (REFERENCE, cpu_kernel_set(1)):
        of_kernels = pack(read, config, kernels.adapted).num_bytes
        assert of_kernels <= one * kernels.adapted.itemsize / REFERENCE.adapted.itemsize


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_cpu_loras": 3}, "max_cpu_loras=3 is less than max_loras"),
        ({"max_lora_rank": 0}, "max_lora_rank is 0"),
        ({"model_impl": "transformers"}, "enable_lora: transformers' code computes"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine("reference", **changes)
