"""Ranks of a model: threads of one process, with the same exchange as between processes, in milliseconds; or processes.

Must not know: how ranks are started.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from quire_engine.contract.kv_groups import one_group
from quire_engine.execution.kv.kv_storage import KVStorage
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.models.weights import load_decoder
from quire_engine.ranks import ALONE, Rank, heads_of_rank
from quire_kernels.cpu.choice import load_chosen
from quire_kernels.cpu.ops import cpu_kernel_set
from quire_kernels.cpu.ranks import SharedMemory, new_exchange
from quire_kernels.ranks import Collective, TorchDistributed
from support.model_steps import Blocks, batch_of, input_of, random_ids, scheduled

CPU, BF16 = torch.device("cpu"), torch.bfloat16
LAST = {"wants_sample": True, "wants_prompt_logprobs": False}
Made = TypeVar("Made")
PATIENCE = 60.0


def library() -> ctypes.CDLL:
    """The kernels of this machine."""
    return load_chosen(None).library


def exchanges(size: int, *, patience: float = PATIENCE) -> list[SharedMemory]:
    """One for each of `size` ranks, through one file of memory."""
    loaded = library()
    fd = new_exchange(loaded, size)
    try:
        return [SharedMemory(loaded, fd, rank, size, patience=patience) for rank in range(size)]
    finally:
        os.close(fd)


def together(runs: Sequence[Callable[[], Made]]) -> list[Made]:
    """What each gives, all run at once; the first exception where there are some."""
    with ThreadPoolExecutor(len(runs)) as pool:
        return [future.result() for future in [pool.submit(run) for run in runs]]


def answers(path, quantization, kv_type, exchange, threads):  # type: ignore[no-untyped-def]
    """What one rank computes in mixed steps: hidden states, logits and greatest tokens, whole."""
    rank = ALONE if exchange is None else Rank(exchange.rank, exchange.size)
    config = load_model_config(path)
    kernels = cpu_kernel_set(threads, quantization, kv_type=kv_type)
    if exchange is not None:
        assert kernels.join is not None
        kernels.join(exchange)
    decoder = load_decoder(path, config, kernels=kernels, dtype=BF16, device=CPU, max_model_len=256, rank=rank)
    layout = one_group(heads_of_rank(config.kv_heads, rank.size))
    kv = KVStorage(kernels, config, 32, 16, BF16, CPU, layout=layout)
    ids, blocks = random_ids(90, vocab_size=config.vocab_size), Blocks(32, 16)
    tables = [blocks.take(64), blocks.take(30)]
    found = []
    for first, second in [((0, 40), (0, 1)), ((40, 23), (1, 28)), ((63, 1), (29, 1))]:
        items = (scheduled(ids[:64], tables[0], *first), scheduled(ids[60:90], tables[1], *second))
        for flags in ({}, LAST):  # all rows to the end, and the last of each sequence alone
            batch = batch_of(*(replace(item, **flags) for item in items))
            hidden = decoder.forward(input_of(batch, 16, CPU), kv.tensor).clone()
            found += [hidden, decoder.logits(hidden), decoder.greedy(hidden)]
    return found


def assert_same(one, others):  # type: ignore[no-untyped-def]
    for number, other in enumerate(others):
        for at, (wanted, got) in enumerate(zip(one, other, strict=True)):
            same = torch.equal(wanted, got) if isinstance(wanted, torch.Tensor) else wanted == got
            assert same, f"rank {number}, result {at}"


def processes(way: str, path: Path, folder: Path) -> list[list[Any]]:
    """What each of two processes computes that exchange columns by gloo, or through shared memory."""
    fd = new_exchange(library(), 2)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "support.ranks", way, str(rank), str(fd), str(path), str(folder)],
            pass_fds=[fd],
            env=environment,
        )
        for rank in range(2)
    ]
    os.close(fd)
    assert [child.wait(240) for child in children] == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def _main(way: str, rank: int, fd: int, path: Path, folder: Path) -> None:
    collective: Collective
    if way == "gloo":
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
        assert dist.group.WORLD is not None
        collective = TorchDistributed(dist.group.WORLD)
    else:
        collective = SharedMemory(library(), fd, rank, 2)
    said = bytes(5000) + b"said"
    assert collective.broadcast(said if rank == 0 else None) == said

    def waited() -> list[float]:
        for _ in range(2):  # by torch.distributed an exchange tells of those before it
            collective.gather(torch.zeros(2, 5, dtype=torch.uint8), [0, 3, 5])
        return list(collective.waited())

    before = waited()
    if rank == 0:
        time.sleep(0.5)  # so that the other one waits
    grown = [after - was for was, after in zip(before, waited(), strict=True)]
    assert grown[1] > grown[0], grown
    torch.save(answers(path, None, "bf16", collective, 1), folder / f"{rank}.pt")
    if way == "gloo":
        dist.barrier()
        # The kernels keep the group to the end, and an interpreter that ends with it may abort in gloo's own threads.
        os._exit(0)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
