"""The cost of ranks: the exchange of columns between processes, and steps by one rank of two threads and by two ranks.

    python -m benchmarks.ranks [--gathers 20000]
    python benchmarks/make_big.py DIRECTORY --scale 0.02
    python -m benchmarks.ranks --model DIRECTORY [--rounds 5]

The first command times gathers of two processes on two cores, through shared memory and by gloo. The second has one
engine of each kind, measured in turns, the other idle; ratios are of one round, medians and ranges over the rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist

from quire_engine.build import build
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_engine.engine import Engine
from quire_kernels.cpu.choice import load_chosen
from quire_kernels.cpu.ranks import SharedMemory, new_exchange
from quire_kernels.ranks import Collective, TorchDistributed

GATHERS = ((1, 1024), (8, 1024), (8, 4096), (64, 4096))  # rows and columns of bfloat16
_SLOW = 20  # times fewer gathers by gloo
LOADS = ((1, 16, 96), (8, 16, 64), (1, 1024, 1))  # streams, tokens of each prompt, tokens of each output


def times_of(collective: Collective, rows: int, columns: int, count: int) -> list[float]:
    """Microseconds of each gather, half of the columns from each of two ranks."""
    width = 2 * columns
    data, starts = torch.zeros(rows, width, dtype=torch.uint8), [0, width // 2, width]
    found = []
    for _ in range(count):
        started = time.perf_counter_ns()
        collective.gather(data, starts)
        found.append((time.perf_counter_ns() - started) / 1000)
    return sorted(found)


def in_c(collective: SharedMemory, rows: int, columns: int, count: int) -> list[float]:
    """The same as C++ calls it, without the checks of Python."""
    width = 2 * columns
    data = torch.zeros(rows, width, dtype=torch.uint8)
    starts = (ctypes.c_int64 * 3)(0, width // 2, width)
    call = collective.library.quire_ranks_gather
    arguments = collective.handle, data.data_ptr(), rows, width, starts
    found = []
    for _ in range(count):
        started = time.perf_counter_ns()
        call(*arguments)
        found.append((time.perf_counter_ns() - started) / 1000)
    return sorted(found)


def rank(number: int, fd: int, port: int, count: int, cores: Sequence[int]) -> None:
    """One of two processes, on a core of its own; rank 0 prints."""
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    torch.set_num_threads(1)
    shared = SharedMemory(load_chosen(None).library, fd, number, 2)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2)
    by_gloo = TorchDistributed(dist.group.WORLD)  # type: ignore[arg-type]
    for rows, columns in GATHERS:
        shown = {
            "shared memory": in_c(shared, rows, columns, count),
            "the same, called from Python": times_of(shared, rows, columns, count),
            "gloo": times_of(by_gloo, rows, columns, max(100, count // _SLOW)),
        }
        for name, found in shown.items():
            if number == 0:
                median, late = found[len(found) // 2], found[len(found) * 99 // 100]
                print(f"{rows} x {columns} bf16, {name:<30} median {median:8.2f} us, p99 {late:9.1f} us", flush=True)
    dist.destroy_process_group()


def gathers(count: int) -> None:
    """Time gathers in two processes."""
    cores = sorted(os.sched_getaffinity(0))
    fd = new_exchange(load_chosen(None).library, 2)
    os.set_inheritable(fd, True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("fork")
    ranks = [context.Process(target=rank, args=(number, fd, port, count, cores)) for number in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()


def worker(model: str, size: int) -> None:
    """An engine of `size` ranks and two threads: for each line on stdin that names a load, its seconds a token."""
    limits = replace(SchedulerLimits(), max_num_seqs=8, enable_prefix_caching=False)
    config = EngineConfig(
        model=model,
        device="cpu",
        kernels="cpu",
        num_threads=2,
        tensor_parallel_size=size,
        max_model_len=2048,
        kv_memory=1 << 30,
        packed_cache=False,
        limits=limits,
    )
    built = build(config)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        streams, prompt, output = json.loads(line)
        engine = Engine(built.scheduler, built.executor)
        stop = StopParams(max_new_tokens=output)
        for i in range(streams):
            ids = tuple(3 + (i * 7 + 11 * at) % 2000 for at in range(prompt))
            sampling = SamplingParams(temperature=0.0)
            engine.submit(GenerationRequest(request_id=f"r{i}", prompt_token_ids=ids, sampling=sampling, stop=stop))
        seconds = []
        while engine.has_work:
            started = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - started)
        # Of decodes the usual step; of a prompt all steps.
        print(json.dumps(statistics.median(seconds[2:]) if output > 1 else sum(seconds)), flush=True)
    built.close()


class Worker:
    """A `worker` as a child process."""

    def __init__(self, model: str, size: int) -> None:
        command = [sys.executable, "-P", str(Path(__file__)), "--model", model, "--worker", str(size)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._reply()

    def seconds(self, load: tuple[int, int, int]) -> float:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(load) + "\n")
        self._child.stdin.flush()
        return float(self._reply())

    def close(self) -> None:
        self._child.communicate()

    def _reply(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine has ended with {self._child.wait()}")
        return str(json.loads(line))


def models(model: str, rounds: int) -> None:
    """Compare one rank of two threads with two ranks of one."""
    one, two = Worker(model, 1), Worker(model, 2)
    try:
        for load in LOADS:
            one.seconds(load), two.seconds(load)  # for the first time memory is taken
            pairs = [(one.seconds(load), two.seconds(load)) for _ in range(rounds)]
            streams, prompt, output = load
            what = f"{streams} streams, a step" if output > 1 else f"a prompt of {prompt}"
            shown = [f"{1000 * statistics.median(each):.2f} ms" for each in zip(*pairs, strict=True)]
            ratios = sorted(alone / divided for alone, divided in pairs)
            print(
                f"{what}: one rank of two threads {shown[0]}, two ranks of one {shown[1]};"
                f" {statistics.median(ratios):.3f}x ({ratios[0]:.3f}-{ratios[-1]:.3f}) of its speed",
                flush=True,
            )
    finally:
        one.close()
        two.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("--gathers", type=int, default=20_000)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(str(given.model), given.worker)
    elif given.model:
        models(str(given.model), given.rounds)
    else:
        gathers(given.gathers)


if __name__ == "__main__":
    main()
