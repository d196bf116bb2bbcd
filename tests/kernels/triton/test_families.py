"""Families whose layers need more than the embedded model's, on the Triton kernels: the reference's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire_kernels.kernel_set import KernelSet
from quire_kernels.triton.set import make_triton_set
from quire_kernels.triton.stored_product import StoredLinear
from support.checkpoints import shared_checkpoint
from support.covering import few
from support.guarded import DEVICE
from support.model_steps import Model, random_ids
from support.quantised import FORMS, make_quantised

pytest.importorskip("transformers")


def _model(path: Path, kernels: KernelSet | None) -> Model:
    return Model(path, dtype=torch.bfloat16, device=str(DEVICE), num_blocks=32, kernels=kernels)


@pytest.mark.parametrize("deterministic", [False, True])
def test_dense_gemma4_has_heads_of_two_widths_in_one_pool(deterministic):
    """Of 512 in layers without a window, whose values are keys; with `deterministic` in chunks too, bit for bit."""
    path = shared_checkpoint("gemma4", global_head_dim=512)
    model = _model(path, make_triton_set(deterministic=deterministic))
    widths = {op.shape.head_dim for op in model.decoder._weights.program if hasattr(op, "rope")}
    assert widths == {16, 512}
    ids = random_ids(45)
    whole, wanted = model.logits(ids), _model(path, None).logits(ids)
    assert (whole - wanted).abs().max() < 0.05 * wanted.abs().max()
    if deterministic:
        assert torch.equal(model.logits(ids, chunk=17, seed=1), whole)


# Each form's products have tests of their own; here a kind with points and one without.
@pytest.mark.parametrize("name", few(["gptq", "awq", "W8A16", "fp8 by row"], "awq", "fp8 by row"))
def test_matrices_of_quantised_checkpoints_stay_as_they_are_stored(name, tmp_path):
    """In chunks too, bit for bit: decoded in the loop of a product."""
    quantised, dense = make_quantised(tmp_path, FORMS[name])
    model = _model(quantised, make_triton_set(deterministic=True))
    kept = [op.weight for op in model.decoder._weights.program if hasattr(op, "weight")]
    assert all(isinstance(weight, StoredLinear) for weight in kept)
    ids = random_ids(20, vocab_size=200)
    wanted, found = Model(dense).logits(ids), model.logits(ids)
    assert (found - wanted).norm() < 0.02 * wanted.norm()
    assert torch.equal(model.logits(ids, 7, seed=1), found)


# Those with biases and with a gate of attention stand for the plain ones.
@pytest.mark.parametrize(
    ("family", "experts"), few([("qwen3_moe", 8), ("gpt_oss", 4), ("afmoe", 6)], ("gpt_oss", 4), ("afmoe", 6))
)
def test_mixtures_of_experts_give_the_references_logits(family, experts):
    """Each row takes all experts, so that no rounding decides between two. In chunks too, bit for bit."""
    path = shared_checkpoint(family, num_experts_per_tok=experts)
    model = _model(path, make_triton_set(deterministic=True))
    ids = random_ids(20)
    whole, wanted = model.logits(ids), _model(path, None).logits(ids)
    assert (whole - wanted).norm() < 0.02 * wanted.norm()
    assert torch.equal(model.logits(ids, chunk=7, seed=1), whole)
