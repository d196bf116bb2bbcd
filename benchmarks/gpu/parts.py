"""The parts of `gpu-bench` that can run alone, the most wanted first, and what each needs.

Promises: a part that needs what this machine does not have raises `NotHere` with one line; a part owns what it makes.
Must not know: how results are shown.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from gpu.compiled import compiled_rows
from gpu.contiguous import contiguous_rows
from gpu.shapes import QWEN3_06B, QWEN3_8B, TINY, ModelShape, write_checkpoint
from gpu.steps import StepBench, StepSizes, engine_config
from gpu.swaps import measured as measured_swaps
from quire_bench.own_server import own_server
from quire_engine.build import build
from quire_engine.contract.config import EngineConfig, KernelChoice, KVCacheDType
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import GenerationRequest, SamplingParams, StepOutput, StopParams
from quire_engine.demo import demo_model_path
from quire_engine.engine import Engine
from quire_engine.own_modules import module_command
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.tools.gpu_limits import Limits

Row = dict[str, str | int | float]


class NotHere(RuntimeError):
    """This machine lacks what a part needs; carries one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSizes:
    """What the parts measure, for one kind of machine."""

    small: ModelShape
    large: ModelShape
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    prefills: tuple[int, ...]
    nano: tuple[int, int, int]  # requests, the shortest and the longest of prompts and answers
    kv_types: tuple[KVCacheDType, ...]
    streams: tuple[int, ...]  # over HTTP
    api_servers: tuple[int, ...]
    compiled: tuple[int, ...]  # streams of the static decode
    repeat: int


ON_GPU = PartSizes(
    small=QWEN3_06B,
    large=QWEN3_8B,
    batches=(1, 8, 32, 64, 128, 256),
    contexts=(512, 4096),
    steps=48,
    prefills=(1024, 4096, 16384),
    nano=(256, 100, 1024),
    kv_types=("auto", "fp8"),
    streams=(1, 8, 64, 256),
    api_servers=(1, 2, 4),
    compiled=(1, 8, 64),
    repeat=5,
)
ON_CPU = PartSizes(
    small=TINY,
    large=TINY,
    batches=(1, 2),
    contexts=(20,),
    steps=4,
    prefills=(24,),
    nano=(3, 4, 9),
    kv_types=("auto",),
    streams=(1,),
    api_servers=(1,),
    compiled=(1, 2),
    repeat=1,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What a part works with."""

    device: str
    kernels: KernelChoice
    sizes: PartSizes
    limits: Limits
    folder: Path  # for checkpoints, which parts share
    tell: Callable[[str], None]

    def checkpoint(self, shape: ModelShape) -> Path:
        """Of random weights; written once."""
        path = self.folder / shape.name.replace(" ", "-")
        return path if path.exists() else write_checkpoint(shape, path)

    def config(self, shape: ModelShape, sizes: StepSizes, **changes: Any) -> EngineConfig:
        return replace(engine_config(self.checkpoint(shape), self.device, sizes, self.kernels), **changes)

    def steps(self, context: int, batches: Iterable[int] | None = None) -> StepSizes:
        sizes = self.sizes
        return StepSizes(
            batches=tuple(batches or sizes.batches),
            context=context,
            steps=sizes.steps,
            prefills=tuple(length for length in sizes.prefills if length <= 4096),
            requests=0,
            lengths=(1, 1),
            repeat=sizes.repeat,
        )

    def needs_gpu(self, what: str) -> None:
        if self.device != "cuda":
            raise NotHere(f"{what} needs a GPU")

    def release(self) -> None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def _decode_rows(bench: Bench, shape: ModelShape, what: str, contexts: Iterable[int], **changes: Any) -> list[Row]:
    """Decode steps by the number of streams: as many of them as the pool holds."""
    found: list[Row] = []
    for context in contexts:
        sizes = bench.steps(context)
        built = build(bench.config(shape, sizes, **changes))
        capacity = built.plan.scheduler.num_blocks * built.plan.scheduler.limits.block_size
        fitting = tuple(count for count in sizes.batches if count * (context + 4 * sizes.steps) < capacity)
        steps = StepBench(built.plan, built.executor, replace(sizes, batches=fitting), bench.tell)
        for one in steps.decodes(what):
            found.append(
                {
                    "what": what,
                    "streams": one.batch,
                    "context": context,
                    "ms": one.seconds * 1e3,
                    "tokens/s": one.batch / one.seconds,
                    "of memory": one.num_bytes / one.seconds / bench.limits.read_bytes_per_second,
                    "pool tokens": capacity,
                }
            )
        del built, steps
        bench.release()
    return found


def decode(bench: Bench) -> list[Row]:
    return _decode_rows(bench, bench.sizes.small, bench.sizes.small.name, bench.sizes.contexts)


def large(bench: Bench) -> list[Row]:
    return _decode_rows(bench, bench.sizes.large, bench.sizes.large.name, bench.sizes.contexts)


def deterministic(bench: Bench) -> list[Row]:
    """Decodes and prompts with `--deterministic` and without."""
    found, context = list[Row](), bench.sizes.contexts[0]
    for asked in (False, True):
        name = "deterministic" if asked else "usual"
        found += _decode_rows(bench, bench.sizes.small, name, (context,), deterministic=asked)
        built = build(bench.config(bench.sizes.small, bench.steps(context), deterministic=asked))
        steps = StepBench(built.plan, built.executor, bench.steps(context), bench.tell)
        found += [{"what": name, "prompt": each.tokens, "ms": each.seconds * 1e3} for each in steps.prefills()]
        del built, steps
        bench.release()
    return found


def kv_types(bench: Bench) -> list[Row]:
    """Speed and capacity; what is lost in quality is told by `quire eval-quant`."""
    if len(bench.sizes.kv_types) < 2:
        raise NotHere("an FP8 KV cache needs a GPU")
    return [
        row
        for kind in bench.sizes.kv_types
        for row in _decode_rows(bench, bench.sizes.small, kind, bench.sizes.contexts, kv_cache_dtype=kind)
    ]


def nano(bench: Bench) -> list[Row]:
    """nano-vllm's bench.py: its seed and its draws in their order, first and second run apart."""
    count, low, high = bench.sizes.nano
    draws = random.Random(0)
    prompts = [[draws.randint(0, 10000) for _ in range(draws.randint(low, high))] for _ in range(count)]
    answers = [draws.randint(low, high) for _ in range(count)]
    limits = SchedulerLimits(
        max_num_seqs=256 if count > 256 else count, max_num_batched_tokens=max(2048, 2 * high), prefill_chunk=2 * high
    )
    config = EngineConfig(
        model=str(bench.checkpoint(bench.sizes.small)),
        device=cast(Any, bench.device),
        kernels=bench.kernels,
        max_model_len=2 * high,
        limits=limits,
    )
    built, found = build(config), list[Row]()
    vocabulary, scheduler = built.plan.model.vocab_size, Scheduler(built.plan.scheduler)
    for run in ("first", "second"):
        requests = [
            GenerationRequest(
                request_id=f"{run}-{i}",
                prompt_token_ids=tuple(token % vocabulary for token in prompt),
                sampling=SamplingParams(temperature=0.6, seed=i),
                stop=StopParams(max_new_tokens=answer),
            )
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        seconds, host = _to_the_end(Engine(scheduler, built.executor), requests)
        found.append(
            {
                "run": run,
                "requests": count,
                "tokens out": sum(answers),
                "s": seconds,
                "tokens/s": sum(answers) / seconds,
                "host ms a step": host * 1e3,
            }
        )
    return found


def _to_the_end(engine: Engine, requests: list[GenerationRequest]) -> tuple[float, float]:
    """Seconds of all requests, and the median of the host's in a step. RuntimeError where a request fails."""
    failed, host = list[str](), list[float]()

    def take(step: StepOutput) -> None:
        host.append(step.stats.host_seconds)
        failed.extend(output.error for output in step.outputs if output.error is not None)

    engine.on_step = take
    started = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first with: {failed[0]}")
    return time.perf_counter() - started, statistics.median(host)


def http(bench: Bench) -> list[Row]:
    """Streams over HTTP by the number of API servers, as `quire bench` counts them.

    Lengths are drawn evenly, with ShareGPT's means; prompts are ids of the embedded model's tokenizer.
    """
    found: list[Row] = []
    for servers in bench.sizes.api_servers:
        found += asyncio.run(_served(bench, servers))
        bench.release()
    return found


async def _served(bench: Bench, servers: int) -> list[Row]:
    small = bench.device == "cpu"
    embedded = str(demo_model_path())
    model = embedded if small else str(bench.checkpoint(bench.sizes.small))
    flags = [model, "--tokenizer", embedded, "--device", bench.device, "--api-server-count", str(servers)]
    flags += ["--max-num-seqs", str(max(bench.sizes.streams)), "--set", f"kernels={bench.kernels}"]
    out = bench.folder / f"http-{servers}.json"
    lengths = ["--input", "4-8", "--output", "2-4"] if small else ["--input", "16-430", "--output", "16-390"]
    async with own_server(flags) as address:
        load = ["--url", address, "--concurrency", ",".join(map(str, bench.sizes.streams)), *lengths, "--no-probe"]
        command = module_command("quire_server.cli", "bench", *load, "--repeat", "1", "--token-ids", "--json", str(out))
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=sys.stderr)
        await process.communicate()
    if process.returncode:
        raise RuntimeError(f"quire bench ended with {process.returncode}")
    return [
        {
            "API servers": servers,
            "streams": int(point["point"]["value"]),
            "tokens/s": measures["output_tok_s"],
            "TTFT ms": measures["ttft_ms"]["p50"],
            "TPOT ms": measures["tpot_ms"]["p50"],
            "failed": measures["requests"] - measures["ok"],
        }
        for point in json.loads(out.read_text())["points"]
        for measures in point["servers"][0]["rounds"]
    ]


def swap(bench: Bench) -> list[Row]:
    """Blocks on their way beside decode steps, on the large shape, and when a copy is cheaper than computing."""
    bench.needs_gpu("swapping to the host")
    sizes = bench.steps(bench.sizes.contexts[0], (8, 64))
    return [cast(Row, fact) for fact in measured_swaps(bench.sizes.large, bench.device, sizes)]


def gaps(bench: Bench) -> list[Row]:
    bench.needs_gpu("the gap between launches")
    from gpu.chains import gap_rows  # noqa: PLC0415 - needs Triton

    return gap_rows(torch.device("cuda"), repeat=bench.sizes.repeat)


def chains(bench: Bench) -> list[Row]:
    bench.needs_gpu("a chain of launches")
    from gpu.chains import chain_rows  # noqa: PLC0415 - needs Triton

    shapes = (bench.sizes.small, bench.sizes.large)
    rows = [count for count in bench.sizes.batches if count <= 64]
    return [row for shape in shapes for row in chain_rows(shape, rows, bench.limits, torch.device("cuda"))]


def compiled(bench: Bench) -> list[Row]:
    path, context = bench.checkpoint(bench.sizes.small), bench.sizes.contexts[0]
    return compiled_rows(path, torch.device(bench.device), bench.sizes.compiled, context, bench.sizes.steps)


def contiguous(bench: Bench) -> list[Row]:
    """Our attention over the paged pool, and torch's and installed libraries' over keys and values in one piece."""
    return contiguous_rows(
        bench.sizes.small,
        torch.device(bench.device),
        bench.kernels,
        decodes=[(count, context) for count in bench.sizes.batches[:4] for context in bench.sizes.contexts],
        prefills=bench.sizes.prefills,
        repeat=bench.sizes.repeat,
    )


# By name, the most wanted first.
PARTS: dict[str, Callable[[Bench], list[Row]]] = {
    "decode": decode,
    "gaps": gaps,
    "chains": chains,
    "large": large,
    "nano": nano,
    "compiled": compiled,
    "http": http,
    "deterministic": deterministic,
    "kv-types": kv_types,
    "contiguous": contiguous,
    "swap": swap,
}
