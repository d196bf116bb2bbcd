"""Products, attention and whole models divided among ranks: bitwise what one rank computes."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from quire_engine.execution.models.config import load_model_config
from quire_engine.ranks import dividing
from quire_kernels.cpu.ops import cpu_kernel_set
from quire_kernels.cpu.ranks import SharedMemory, new_exchange
from quire_kernels.kernel_set import KernelSet, Norm
from quire_kernels.ranks import RankLost, TorchDistributed
from quire_server.checkpoint.gguf_folder import unfolded
from support.checkpoints import ALL_FAMILIES, make_checkpoint, shared_checkpoint
from support.gguf_models import make_gguf
from support.quantised import FORMS, make_quantised
from support.ranks import answers, assert_same, exchanges, library, processes, together

BF16 = torch.bfloat16
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
# Every family once, and the kinds of weights and pools with those that have experts, norms over rows, or fused heads.
CASES = [
    *((family, None, "bf16", 2) for family in ALL_FAMILIES),
    *((family, "int8", "int8", 2) for family in ("qwen3", "gpt_oss", "gemma4_moe")),
    *((family, "int4", "bf16", 4) for family in ("llama", "qwen3_moe", "phi3")),
    ("qwen2", None, "int8", 4),
    ("gemma3", "int8", "bf16", 4),
]


@pytest.mark.parametrize(("family", "quantization", "kv_type", "size"), CASES)
def test_ranks_compute_the_bits_of_one(family: str, quantization: str | None, kv_type: str, size: int) -> None:
    path = shared_checkpoint(family)
    one = answers(path, quantization, kv_type, None, 2)
    assert all(torch.isfinite(found).all() for found in one if isinstance(found, torch.Tensor))
    runs = [partial(answers, path, quantization, kv_type, each, 1 + each.rank % 2) for each in exchanges(size)]
    assert_same(one, together(runs))


@pytest.mark.parametrize(("family", "size"), [("qwen3", 3), ("olmo2", 3), ("qwen3_moe", 6)])
def test_widths_and_heads_that_are_no_powers_of_two(family: str, size: int, tmp_path) -> None:  # type: ignore[no-untyped-def]
    sizes = {"hidden_size": 192, "intermediate_size": 360, "num_attention_heads": 12, "num_key_value_heads": 3}
    path = make_checkpoint(tmp_path / "model", family, **sizes)
    one = answers(path, None, "bf16", None, 2)
    runs = [partial(answers, path, None, "bf16", each, 1) for each in exchanges(size)]
    assert_same(one, together(runs))


def mixed(name: str, shape: tuple[int, ...]) -> str:
    """Of GGUF files: queries, keys and values of one matrix in two kinds, experts in a third."""
    if len(shape) == 1 or "gate_inp" in name:
        return "F32"
    return "Q6_K" if "ffn_down" in name or "attn_v" in name or "token_embd" in name else "Q4_K"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_matrices_of_gguf_files_stay_as_they_are_stored(family: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    of_experts = {"mlp_only_layers": [], "moe_intermediate_size": 256} if family == "qwen3_moe" else {}
    path = unfolded(make_gguf(tmp_path, family, kinds=mixed, **sizes, **of_experts)[0])
    one = answers(path, None, "bf16", None, 2)
    assert_same(one, together([partial(answers, path, None, "bf16", each, 1) for each in exchanges(4)]))


@pytest.mark.parametrize("form", ["gptq", "awq", "W8A8", "fp8 by row", "NVFP4", "MXFP4"])
def test_matrices_that_others_quantised_stay_as_they_are_stored(form: str, tmp_path: Path) -> None:
    path = make_quantised(tmp_path, FORMS[form])[0]
    one = answers(path, None, "bf16", None, 2)
    assert_same(one, together([partial(answers, path, None, "bf16", each, 1) for each in exchanges(2)]))


def products(kernels: KernelSet, rows: int, outputs: int, inputs: int):  # type: ignore[no-untyped-def]
    source = torch.Generator().manual_seed(outputs)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source).to(BF16)

    x, bias, residual = values(rows, inputs), values(outputs), values(rows, outputs)
    w = kernels.pack_linear(values(outputs, inputs), bias)
    pair = kernels.pack_gate_up(values(outputs, inputs), values(outputs, inputs), values(2 * outputs))
    norm = Norm(values(inputs).abs(), 1e-6)
    assert kernels.greedy is not None
    allowed = torch.full((rows, -(-outputs // 64)), 0x5555555555555555)
    return [
        kernels.norm_linear(x, norm, w),
        kernels.norm_gate_up(x, norm, pair, "silu"),
        kernels.linear_add(x, w, residual.clone(), 0.5),
        kernels.logits(x, norm, w),
        kernels.greedy(x, norm, w, None),
        kernels.greedy(x, norm, w, allowed),
    ]


@pytest.mark.parametrize("kind", [None, "int8", "int4"])
def test_products_of_any_size_are_divided(kind) -> None:  # type: ignore[no-untyped-def]
    """Matrices of fewer panels than ranks, of broken panels, and of rows enough for every way to compute them."""
    cases = list(itertools.product((1, 7, 70), (40, 200, 1000), (96,)))
    one = [products(cpu_kernel_set(2, kind), *case) for case in cases]

    def divided(exchange):  # type: ignore[no-untyped-def]
        kernels = cpu_kernel_set(1, kind)
        kernels.join(exchange)  # type: ignore[misc]
        return [products(kernels, *case) for case in cases]

    for size in (2, 5):
        for found in together([partial(divided, each) for each in exchanges(size)]):
            for case, wanted, got in zip(cases, one, found, strict=True):
                assert_same(wanted, [got])
                assert len(wanted) == 6, case


def test_a_rank_that_stops_ends_the_wait_of_the_others() -> None:
    waits, _ = exchanges(2, patience=0.2)
    data = torch.zeros(1, 8, dtype=torch.uint8)
    with pytest.raises(RankLost):
        waits.gather(data, [0, 4, 8])


def test_whom_the_others_wait_for_has_waited_least() -> None:
    first, second = exchanges(2)
    data = [torch.zeros(1, 8, dtype=torch.uint8) for _ in range(2)]

    def late() -> None:
        time.sleep(0.2)
        second.gather(data[1], [0, 4, 8])

    together([lambda: first.gather(data[0], [0, 4, 8]), late])
    assert first.waited() == second.waited()
    assert first.waited()[0] > first.waited()[1]


def test_a_lost_rank_ends_a_model_s_step() -> None:
    path, exchange = shared_checkpoint("qwen3"), exchanges(2, patience=0.2)[0]
    with pytest.raises(RankLost):
        answers(path, None, "bf16", exchange, 1)


@pytest.mark.parametrize("way", ["gloo", "shared memory"])
def test_processes_compute_the_bits_of_one(way: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """By torch.distributed, which is the reference for the exchange, and through shared memory."""
    path = shared_checkpoint("qwen3_moe")
    one = answers(path, None, "bf16", None, 2)
    assert_same(one, processes(way, path, tmp_path))


def test_a_killed_process_ends_the_wait_of_the_others_at_once() -> None:
    loaded = library()
    fd = new_exchange(loaded, 2)
    attach = (
        "import sys, time; from support.ranks import library; from quire_kernels.cpu.ranks import SharedMemory;"
        f"kept = SharedMemory(library(), {fd}, 1, 2); print('there', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", attach], pass_fds=[fd], stdout=subprocess.PIPE, env=ENVIRONMENT)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"there\n"
        waits = SharedMemory(loaded, fd, 0, 2, patience=600.0)
        child.send_signal(signal.SIGKILL)
        with pytest.raises(RankLost):  # also before anybody has reaped it
            waits.gather(torch.zeros(1, 8, dtype=torch.uint8), [0, 4, 8])
    finally:
        child.kill()
        child.communicate()
        os.close(fd)


@pytest.mark.parametrize("sizes", [(0,), (1, 4087), (4088, 4089, 3 << 20)])
def test_what_rank_0_broadcasts_arrives_whole(sizes: tuple[int, ...]) -> None:
    said = [bytes(range(256)) * (size // 256) + bytes(size % 256) for size in sizes]
    first, second = exchanges(2)
    got = together([lambda: [first.broadcast(each) for each in said], lambda: [second.broadcast(None) for _ in said]])
    assert got == [said, said]


def test_gathers_of_any_widths_and_of_more_than_a_buffer() -> None:
    for rows, starts in [
        (1, [0, 3, 3, 10]),
        (5, [0, 64, 1000, 1001]),
        (3, [0, 0, 700_000, 900_000]),
        (0, [0, 1, 2, 3]),
    ]:
        whole = torch.randint(0, 256, (rows, starts[-1]), dtype=torch.uint8)

        def gathered(each: SharedMemory, whole: torch.Tensor = whole, starts: list[int] = starts) -> torch.Tensor:
            data = torch.zeros_like(whole)
            own = slice(starts[each.rank], starts[each.rank + 1])
            data[:, own] = whole[:, own]
            each.gather(data, starts)
            return data

        for found in together([partial(gathered, each) for each in exchanges(3)]):
            assert torch.equal(found, whole)


def test_heads_are_divided_whole() -> None:
    config = load_model_config(shared_checkpoint("qwen3"))  # 4 heads, 2 of keys
    assert dividing(config.num_heads, config.kv_heads, 64) == [1, 2, 4]
    assert dividing(config.num_heads, config.kv_heads, 64, normed_rows=True) == [1, 2]


@pytest.mark.parametrize(("backend", "device"), [("gloo", "cpu"), pytest.param("nccl", "cuda", marks=pytest.mark.gpu)])
def test_a_process_group_of_one_rank_runs_the_path_of_many(backend: str, device: str, tmp_path: Path) -> None:
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        collective = TorchDistributed(dist.group.WORLD, torch.device(device))
        assert (collective.rank, collective.size) == (0, 1)
        data = torch.randint(0, 256, (5, 48), dtype=torch.uint8, device=device)
        before = data.clone()
        collective.gather(data, [0, 48])
        assert 0 < collective.waited()[0] < 60
        assert torch.equal(data, before)
        assert collective.broadcast(b"told" * 2000) == b"told" * 2000
    finally:
        dist.destroy_process_group()
