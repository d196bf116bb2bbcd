"""All layers in one C++ call: bitwise what the ops give one by one."""

from dataclasses import replace

import pytest
import torch

from checkpoints import shared_checkpoint
from model_steps import Blocks, batch_of, random_ids, scheduled
from quire_engine.kv_storage import KVStorage
from quire_engine.model_input import build_model_input
from quire_engine.models.config import load_model_config
from quire_engine.models.weights import load_decoder
from quire_kernels.cpu.ops import cpu_kernel_set

CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_bound_layers_equal_the_ops_one_by_one(family: str, quantization: str | None) -> None:
    path = shared_checkpoint(family)
    config = load_model_config(path)
    kernels = cpu_kernel_set(2, quantization)  # type: ignore[arg-type]
    ids = random_ids(90, config.vocab_size)
    results = []
    for ops in (kernels, replace(kernels, bind_layers=None)):
        decoder = load_decoder(path, config, kernels=ops, dtype=BF16, device=CPU, max_model_len=256)
        kv = KVStorage(ops, config, 32, 16, BF16, CPU)
        blocks = Blocks(32, 16)
        tables = [blocks.take(64), blocks.take(30)]
        chunks = [((0, 40), (0, 1)), ((40, 24), (1, 29))]  # a prefill with a decode beside it, then the other way round
        hidden = []
        for first, second in chunks:
            batch = batch_of(scheduled(ids[:64], tables[0], *first), scheduled(ids[60:90], tables[1], *second))
            step, _ = build_model_input(batch, 16, CPU)
            hidden.append(decoder.forward(step, kv.tensor).clone())
        results.append((torch.cat(hidden), kv.tensor.clone()))
    (bound, bound_kv), (single, single_kv) = results
    assert torch.equal(bound, single)
    assert torch.equal(bound_kv, single_kv)
    assert torch.isfinite(bound).all()


def test_layers_that_do_not_fit_are_refused() -> None:
    path = shared_checkpoint("qwen3")
    config = load_model_config(path)
    kernels = cpu_kernel_set(1)
    narrow = kernels.pack_linear(torch.zeros(8, 16, dtype=BF16), None)
    decoder = load_decoder(path, config, kernels=kernels, dtype=BF16, device=CPU, max_model_len=64)
    layers = decoder._weights.layers
    assert kernels.bind_layers is not None
    with pytest.raises(ValueError, match="do not fit"):
        kernels.bind_layers([*layers, replace(layers[0], o=narrow)], decoder._weights.rope, 1e-6)
