"""Copies of the pool's blocks: by indexing, or by the kernel set's own op where it has one."""

from dataclasses import replace

import pytest
import torch

from quire_engine.execution.kv.kv_storage import KVStorage
from quire_engine.execution.models.config import load_model_config
from quire_kernels.reference import REFERENCE
from support.checkpoints import shared_checkpoint

CPU = torch.device("cpu")
PAIRS = ((1, 2), (2, 3), (4, 4))


@pytest.fixture
def model():
    return load_model_config(shared_checkpoint("qwen3"))


def storage(model, kernels=REFERENCE) -> KVStorage:
    kv = KVStorage(kernels, model, 5, 16, torch.float32, CPU)
    kv.tensor.copy_(torch.arange(kv.tensor.numel()).view(kv.tensor.shape))
    return kv


def test_every_source_is_read_before_any_target_is_written(model):
    kv = storage(model)
    before = kv.tensor.clone()
    kv.copy_blocks(PAIRS)
    assert [kv.tensor.eq(before[source]).flatten(1).all(dim=1)[target].item() for source, target in PAIRS] == [True] * 3
    assert torch.equal(kv.tensor[:2], before[:2])


def test_a_set_that_copies_by_itself_is_asked_to(model):
    asked = []
    kv = storage(model, replace(REFERENCE, copy_blocks=lambda pool, pairs: asked.append((pool, pairs))))
    before = kv.tensor.clone()
    kv.copy_blocks(())
    assert not asked
    kv.copy_blocks(PAIRS)
    assert [(pool is kv.tensor, pairs) for pool, pairs in asked] == [(True, PAIRS)]
    assert torch.equal(kv.tensor, before)
