"""The embedded model on the Triton kernels: the reference's tokens, a sequence's own bits, launches of a layer."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from quire_engine.demo import demo_model_path
from quire_engine.execution.model_input import model_input
from quire_engine.execution.models.adapter import adapted_products, read_adapter
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.step_tensors import step_tensors
from quire_kernels.adapter_places import AdapterPlaces
from quire_kernels.kernel_set import KernelSet, StepAdapters
from quire_kernels.triton import activation
from quire_kernels.triton.set import make_triton_set
from support.adapters import merged, write_adapter
from support.guarded import DEVICE
from support.model_steps import Model, batch_of, scheduled

PROMPTS = ((5, 9, 77, 30, 12), tuple(range(20, 53)), (7, 8, 9))


def _model(kernels: KernelSet | None, dtype: torch.dtype = torch.bfloat16) -> Model:
    return Model(demo_model_path(), dtype=dtype, device=str(DEVICE), num_blocks=32, max_model_len=256, kernels=kernels)


def _logits(model: Model, *lengths: tuple[int, int, int]) -> list[torch.Tensor]:
    """Logits of the last row of slices (prompt, start, end), in one step."""
    items = [scheduled(PROMPTS[i], _blocks(i), start, end - start, all_logits=False) for i, start, end in lengths]
    return [rows[-1] for rows in model.step(*items)]


def _blocks(prompt: int) -> list[int]:
    """Three blocks of a prompt's own, in no order."""
    return [[9, 3, 14], [2, 11, 6], [5, 1, 8]][prompt]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.sim)], ids=str)
def test_tokens_are_the_references(dtype):
    assert _model(make_triton_set(), dtype).greedy(PROMPTS, 3) == _model(None, dtype).greedy(PROMPTS, 3)


def test_greedy_is_the_argmax_of_the_logits():
    model = _model(make_triton_set())
    hidden = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    hidden[1, 7] = float("nan")
    ids, finite = model.decoder.greedy(hidden)
    assert finite == [True, False, True]
    logits = model.decoder.logits(hidden[[0, 2]])
    assert [ids[0], ids[2]] == logits.argmax(dim=1).tolist()
    allowed = torch.zeros(3, -(-logits.shape[1] // 64), dtype=torch.int64)
    allowed[0, 1] = -(2**63) | 9  # columns 64, 67, 127
    allowed[1] = -1
    ids, finite = model.decoder.greedy(hidden, allowed)
    assert finite == [True, False, True]
    columns = [64, 67, 127]
    assert ids[0] == columns[int(logits[0, columns].argmax())]
    assert ids[2] == -1


def test_chunks_in_a_batch_have_the_bits_of_the_whole_alone():
    """A decoding row and the rest of a prompt in one step, against either prompt at once and by itself."""
    kernels = make_triton_set(deterministic=True)
    together, alone = _model(kernels), _model(kernels)
    _logits(together, (0, 0, 4), (1, 0, 8))
    decoded, prefilled = _logits(together, (0, 4, 5), (1, 8, 33))
    assert torch.equal(_logits(alone, (0, 0, 5))[0], decoded)
    assert torch.equal(_logits(alone, (1, 0, 33))[0], prefilled)


@pytest.mark.sim
@pytest.mark.parametrize("kv_type", ["auto", "fp8"])
def test_a_batch_of_several_steps_has_the_bits_of_each_alone(kv_type):
    """Also with keys and values in eight bits, which are rounded row by row."""
    kernels = make_triton_set(kv_type=kv_type, deterministic=True)
    together = _model(kernels).greedy(PROMPTS, 4)
    assert together == [_model(kernels).greedy([prompt], 4)[0] for prompt in PROMPTS]
    assert kv_type == "fp8" or together == _model(None).greedy(PROMPTS, 4)


def test_fp8_keys_and_values_cost_what_their_rounding_costs():
    """e4m3 keeps three bits: relative steps of up to 1/16 in K and V, averaged by attention."""
    exact, rounded = (_model(kernels) for kernels in (None, make_triton_set(kv_type="fp8")))
    expected, found = (_logits(model, (1, 0, 33))[0] for model in (exact, rounded))
    error = (found - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.05


@pytest.mark.sim
def test_rows_with_adapters_have_the_bits_that_they_have_alone(tmp_path):
    """Beside others and a sequence without one, which keeps those of a step without adapters; near merged weights."""
    kernels, path = make_triton_set(deterministic=True), demo_model_path()
    config = load_model_config(path)
    written = [write_adapter(tmp_path / str(i), path, seed=i, rank=3 + i) for i in range(2)]
    places = AdapterPlaces(adapted_products(config), 2, 16, torch.bfloat16, DEVICE)
    for index, each in enumerate(written):
        host = torch.empty(len(places.place(0)), dtype=torch.uint8)
        places.fill(host, read_adapter(each, config, max_rank=16).matrices)
        places.place(index).copy_(host)

    def logits(*asked: tuple[int, int]) -> list[torch.Tensor]:
        """Of whole prompts with a place each."""
        model = _model(kernels)
        items = [scheduled(PROMPTS[i], _blocks(i), 0, len(PROMPTS[i])) for i, _ in asked]
        step = step_tensors(batch_of(*items), model.block_size, config.vocab_size)
        slots = [place for i, place in asked for _ in PROMPTS[i]]
        adapters = StepAdapters(slots=torch.tensor(slots, dtype=torch.int32, device=DEVICE), adapters=(places,))
        rows = replace(model_input(step, model.block_size, DEVICE), adapters=adapters)
        found = model.decoder.logits(model.decoder.forward(rows, model.kv.tensor)).cpu()
        return list(found.split([len(PROMPTS[i]) for i, _ in asked]))

    together = logits((0, 1), (1, 0), (2, -1))
    assert torch.equal(together[0], logits((0, 1))[0])
    assert torch.equal(together[1], logits((1, 0))[0])
    whole = scheduled(PROMPTS[2], _blocks(2), 0, len(PROMPTS[2]))
    assert torch.equal(together[2], _model(kernels).step(whole)[0])
    with_merged = Model(merged(tmp_path / "merged", path, written[0]), num_blocks=32, max_model_len=256)
    wanted = with_merged.logits(PROMPTS[1])
    assert (together[1] - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.skipif("ttsem" in sys.modules, reason="the sanitizer launches in its own way")
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_layer_takes_nine_launches(deterministic):
    """Of Triton's kernels, which are not run, and of torch's products, whose results nobody needs; or eight."""
    launched: Counter[str] = Counter()

    def note(kernel: object, *args: object, **kwargs: object) -> None:
        launched[kernel.__name__] += 1

    model = _model(make_triton_set(deterministic=deterministic))
    with (
        patch.object(type(activation.gate_mul_kernel), "run", note),
        patch.object(torch.nn.functional, "linear", _counted(launched, torch.nn.functional.linear)),
        patch.object(torch.Tensor, "addmm_", _counted(launched, torch.Tensor.addmm_)),
    ):
        _logits(model, (0, 4, 5), (2, 2, 3))
    layers = model.decoder.config.num_layers
    assert launched["rms_norm_kernel"] == 2 * layers + 1, "and the final norm"
    assert sum(launched.values()) == (8 if deterministic else 9) * layers + 2, launched


def _counted(launched: Counter[str], function):
    def counted(*args, **kwargs):
        launched[function.__name__] += 1
        return function(*args, **kwargs)

    return counted
