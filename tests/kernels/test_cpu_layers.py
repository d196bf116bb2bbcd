"""All layers in one C++ call: bitwise what the ops give one by one, whatever rows are asked for."""

from dataclasses import replace

import pytest
import torch

from quire_engine.execution.kv.kv_storage import KVStorage
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.models.decoder import Decoder
from quire_engine.execution.models.weights import load_decoder
from quire_kernels.cpu.ops import cpu_kernel_set
from quire_kernels.kernel_set import KernelSet, LinearAdd
from support.checkpoints import ALL_FAMILIES, shared_checkpoint
from support.model_steps import Blocks, batch_of, input_of, random_ids, scheduled

CPU, BF16 = torch.device("cpu"), torch.bfloat16
# Rows that each of the two sequences wants logits of.
ALL = {"wants_sample": True, "wants_prompt_logprobs": True}
LAST = {"wants_sample": True, "wants_prompt_logprobs": False}
NONE = {"wants_sample": False, "wants_prompt_logprobs": False}


# Families whose ops, and their order, are those of other families.
LIKE_OTHERS = {"dots1", "ernie4_5_moe", "flex_olmo"}
CASES = [
    (family, kind)
    for kind in (None, "int8", "int4")
    for family in ALL_FAMILIES
    if kind is None or family not in LIKE_OTHERS
]


@pytest.mark.parametrize(("family", "quantization"), CASES)
def test_bound_layers_equal_the_ops_one_by_one(family: str, quantization: str | None) -> None:
    path = shared_checkpoint(family)
    config = load_model_config(path)
    kernels = cpu_kernel_set(2, quantization)  # type: ignore[arg-type]
    ids = random_ids(90, config.vocab_size)

    def load(ops: KernelSet) -> Decoder:
        return load_decoder(path, config, kernels=ops, dtype=BF16, device=CPU, max_model_len=256)

    def run(decoder: Decoder, wanted: tuple[dict[str, bool], ...]) -> tuple[torch.Tensor, list[int], torch.Tensor]:
        """Hidden states, the rows they are of, the pool."""
        kv = KVStorage(kernels, config, 32, 16, BF16, CPU)
        blocks = Blocks(32, 16)
        tables = [blocks.take(64), blocks.take(30)]
        hidden, rows, before = [], [], 0
        # A prefill with a decode beside it, then the other way round.
        for first, second in [((0, 40), (0, 1)), ((40, 24), (1, 29))]:
            items = (scheduled(ids[:64], tables[0], *first), scheduled(ids[60:90], tables[1], *second))
            batch = batch_of(*(replace(item, **flags) for item, flags in zip(items, wanted, strict=True)))
            step = input_of(batch, 16, CPU)
            hidden.append(decoder.forward(step, kv.tensor).clone())
            rows += [before + row for row in step.sample_rows.tolist()]
            before += batch.num_tokens
        return torch.cat(hidden), rows, kv.tensor.clone()

    bound, single = load(kernels), load(replace(kernels, bind_layers=None))
    every, _, every_kv = run(bound, (ALL, ALL))
    assert torch.isfinite(every).all()
    for asked in ((ALL, ALL), (LAST, LAST), (NONE, LAST), (LAST, ALL), (NONE, NONE)):
        for decoder in (bound, single):
            hidden, rows, kv = run(decoder, asked)
            assert torch.equal(hidden, every[rows]), asked
            assert torch.equal(kv, every_kv), asked


@pytest.mark.parametrize("rows", [[1, 0], [0, 0], [0, 4], [-1, 0], [0]])
def test_rows_that_are_not_in_the_step_are_refused(rows: list[int]) -> None:
    path = shared_checkpoint("qwen3")
    config = load_model_config(path)
    kernels = cpu_kernel_set(1)
    decoder = load_decoder(path, config, kernels=kernels, dtype=BF16, device=CPU, max_model_len=64)
    kv = KVStorage(kernels, config, 4, 16, BF16, CPU)
    items = (scheduled([1, 2], [block], 0, 2, all_logits=False) for block in (1, 2))
    step = input_of(batch_of(*items), 16, CPU)
    with pytest.raises(ValueError, match="sample_rows must"):
        decoder.forward(replace(step, sample_rows=torch.tensor(rows)), kv.tensor)


def test_layers_that_do_not_fit_are_refused() -> None:
    path = shared_checkpoint("qwen3")
    config = load_model_config(path)
    kernels = cpu_kernel_set(1)
    narrow = kernels.pack_linear(torch.zeros(8, 16, dtype=BF16), None)
    decoder = load_decoder(path, config, kernels=kernels, dtype=BF16, device=CPU, max_model_len=64)
    assert kernels.bind_layers is not None
    program = decoder._weights.program
    projection = next(op for op in program if isinstance(op, LinearAdd))
    with pytest.raises(ValueError, match="do not fit"):
        kernels.bind_layers([*program, replace(projection, weight=narrow)])
