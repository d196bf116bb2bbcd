"""Every family through the C++ kernels in bfloat16: as near the truth as the reference, and the same in any chunks."""

from __future__ import annotations

import pytest
import torch

from quire_kernels.cpu.ops import cpu_kernel_set
from support.checkpoints import ALL_FAMILIES, make_checkpoint
from support.model_steps import Model, random_ids

# What their default shapes leave out.
OPTIONS = {"phi3": {"rope_parameters": {"partial_rotary_factor": 0.75, "rope_theta": 1e4}}}


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_family_computes_what_the_reference_does(family, tmp_path):
    path = make_checkpoint(tmp_path, family, dtype="bfloat16", **OPTIONS.get(family, {}))
    token_ids = random_ids(150)
    truth = Model(path, dtype=torch.float32).logits(token_ids)
    plain = Model(path, dtype=torch.bfloat16).logits(token_ids)
    model = Model(path, dtype=torch.bfloat16, kernels=cpu_kernel_set(2))
    ours = model.logits(token_ids)

    def error(found: torch.Tensor) -> torch.Tensor:
        return (found - truth).square().mean().sqrt()

    assert error(ours) <= 1.5 * error(plain)
    for chunk in (1, 7, 64):
        assert torch.equal(model.logits(token_ids, chunk, seed=chunk), ours), f"chunks of {chunk}"
