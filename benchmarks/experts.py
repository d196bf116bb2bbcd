"""What a mixture of experts makes of this machine: decoding against what memory delivers, prompts against grouped_mm.

    python -m benchmarks.experts [--layers 8] [--rounds 5] [--tokens 64] [--rows 512,2048]

The model has the widths of Qwen3-30B-A3B in the mixture of types of Q4_K_M (`make_gguf.py`) with fewer layers, and a
vocabulary smaller by as much, so that the head keeps its share of a token. Decoding is one stream in an engine in this
process; of memory it reads the matrices that every token takes, the chosen experts' and the keys and values of the
context. The read rate is what the probe finds before or after a round, whichever is better. A prompt's rows
go through one layer's block of experts alone, router included: ours as it serves them, ours in bf16, and transformers'
block with `grouped_mm` in bf16, in turns. Ratios are of one round.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import make_gguf as files
from quire_engine.build import build
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.kv_groups import one_group
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import GenerationRequest, SamplingParams, StepOutput, StopParams
from quire_engine.engine import Engine
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.models.weights import CheckpointSource, assemble, checked_checkpoint
from quire_engine.execution.progress import tell_nobody
from quire_kernels.cpu.ops import cpu_kernel_set
from quire_kernels.kernel_set import KernelSet, MixExperts
from quire_server.checkpoint.gguf_folder import unfolded

SHAPE = files.SHAPES["qwen3-30b-a3b"]
SERVED, THEIRS = "ours, as stored (Q4_K, Q6_K)", "transformers, bf16"
PROMPT = 32
Block = Callable[[Tensor], Tensor]


def read_rate() -> float:
    """Bytes a second that all cores read, now."""
    command = [sys.executable, "-P", "-m", "quire_kernels.cpu.probe", "--seconds", "0.01"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return float(found["read_bytes_per_second"])


class Decoding:
    """One stream of an engine in this process."""

    def __init__(self, model: Path, most: int) -> None:
        config = EngineConfig(
            model=str(model),
            device="cpu",
            max_model_len=most,
            limits=SchedulerLimits(max_num_seqs=1),
            kv_memory=64 << 20,
        )
        built = build(config)
        self.plan = built.plan
        self._engine = Engine(built.scheduler, built.executor)
        self._engine.on_step = self._take
        self._times: list[float] = []

    def _take(self, step: StepOutput) -> None:
        for output in step.outputs:
            if output.error is not None:
                raise SystemExit(output.error)
            self._times += [time.perf_counter()] * len(output.token_ids)

    def seconds(self, tokens: int, seed: int) -> float:
        """Of one token, after a prompt."""
        ids = tuple(3 + (seed * 7919 + i * 17) % (self.plan.model.vocab_size - 3) for i in range(PROMPT))
        sampling, stop = SamplingParams(temperature=0.0), StopParams(max_new_tokens=tokens)
        self._engine.submit(GenerationRequest(request_id=str(seed), prompt_token_ids=ids, sampling=sampling, stop=stop))
        self._times.clear()
        while self._engine.has_work:
            self._engine.step()
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1)

    def bytes_read(self, tokens: int) -> float:
        """Of a token in the middle of an answer."""
        limits = self.plan.scheduler.limits
        pool_bytes = (PROMPT + tokens / 2) * self.plan.pool.bytes_per_block / limits.block_size
        return self.plan.cost.weights_read(1) + pool_bytes


def blocks(folder: Path) -> dict[str, Block]:
    """One layer's experts and their router, each with random weights."""
    model = unfolded(files.make(folder, SHAPE._replace(layers=1, vocabulary=4096)))
    kernels = cpu_kernel_set()
    plain = replace(kernels, pack_stored=None, embed_stored=None, stored_bits=None, stored_experts=False)
    made = {name: _ours(model, each) for name, each in ((SERVED, kernels), ("ours, bf16", plain))}
    return {**made, THEIRS: _theirs()}


def _ours(model: Path, kernels: KernelSet) -> Block:
    config, cpu = load_model_config(model), torch.device("cpu")
    with checked_checkpoint(model, config) as checkpoint:
        source = CheckpointSource(checkpoint, kernels, torch.bfloat16, cpu, tell=tell_nobody)
        layout = one_group(config.kv_heads)
        program = assemble(source, config, kernels, layout=layout, device=cpu, max_model_len=64).program
    op = next(op for op in program if isinstance(op, MixExperts))
    mix = kernels.mix_experts
    assert mix is not None
    return lambda x: mix(x, None, op.routing, op.experts, 1.0, None)


def _theirs() -> Block:
    config = Qwen3MoeConfig(
        hidden_size=SHAPE.hidden,
        moe_intermediate_size=SHAPE.inner,
        num_experts=SHAPE.experts,
        num_experts_per_tok=SHAPE.chosen,
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    block = Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16).eval()
    for values in block.parameters():
        values.data.normal_(0.0, 0.02)
    return lambda x: block(x[None])[0]


def rows_a_second(block: Block, rows: int) -> float:
    x = torch.randn(rows, SHAPE.hidden, dtype=torch.bfloat16)
    began = time.perf_counter()
    with torch.inference_mode():
        block(x)
    return rows / (time.perf_counter() - began)


def measure_decoding(folder: Path, asked: argparse.Namespace) -> Table:
    vocabulary = max(4096, SHAPE.vocabulary * asked.layers // SHAPE.layers)
    path = files.make(folder, SHAPE._replace(layers=asked.layers, vocabulary=vocabulary))
    stream = Decoding(unfolded(path), PROMPT + asked.tokens)
    stream.seconds(asked.tokens, 0)  # touches pages
    gc.collect()
    gc.freeze()
    gc.disable()  # an engine process collects cycles while it rests, and not amid steps as this one would
    rates, seconds = [read_rate()], []
    for number in range(asked.rounds):
        seconds.append(stream.seconds(asked.tokens, number + 1))
        rates.append(read_rate())
    gc.enable()
    read = stream.bytes_read(asked.tokens)
    beside = [max(pair) for pair in pairwise(rates)]
    shares = sorted(read / each / rate for each, rate in zip(seconds, beside, strict=True))
    table = Table(title=f"decoding, one stream, {asked.layers} of {SHAPE.layers} layers")
    for column in ("weights", "read a token", "tokens/s", "read rate", "share of it"):
        table.add_column(column, justify="right")
    table.add_row(
        f"{stream.plan.model.weights_bytes / 1e9:.2f} GB",
        f"{read / 1e6:.1f} MB",
        f"{1 / statistics.median(seconds):.1f} ({1 / max(seconds):.1f}-{1 / min(seconds):.1f})",
        f"{statistics.median(beside) / 1e9:.1f} GB/s ({min(beside) / 1e9:.1f}-{max(beside) / 1e9:.1f})",
        f"{statistics.median(shares):.0%} ({shares[0]:.0%}-{shares[-1]:.0%})",
    )
    return table


def measure_prompts(folder: Path, asked: argparse.Namespace) -> Table:
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # for transformers; ours has workers of its own
    ways = blocks(folder)
    table = Table(title="a layer's experts, rows of prompts")
    for column in ("rows", "", "rows/s", "over grouped_mm"):
        table.add_column(column, justify="right" if column else "left")
    for rows in asked.rows:
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(asked.rounds + 1):
            for name in list(ways)[:: 1 if number % 2 else -1]:
                found[name].append(rows_a_second(ways[name], rows))
        base = found[THEIRS][1:]  # the first round touches pages
        for name, rates in found.items():
            ratios = sorted(mine / other for mine, other in zip(rates[1:], base, strict=True))
            spread = f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f}-{ratios[-1]:.2f})"
            table.add_row(str(rows), name, f"{statistics.median(rates[1:]):.0f}", spread)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="of the model that decodes (8: 2.8 GB)")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer (64)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default="512,2048", help="of prompts (512,2048)")
    parser.add_argument("--only", choices=("decoding", "prompts"), help="one of both")
    asked = parser.parse_args(argv)
    try:
        asked.rows = [int(each) for each in asked.rows.split(",")]
    except ValueError:
        parser.error(f"--rows: numbers of rows, as in 512,2048, not {asked.rows!r}")
    for name, least in (("layers", 1), ("tokens", 2), ("rounds", 1)):
        if getattr(asked, name) < least:
            parser.error(f"--{name}: at least {least}")
    if min(asked.rows) < 1:
        parser.error("--rows: at least 1")
    ways = {"decoding": measure_decoding, "prompts": measure_prompts}
    for name, measure in ways.items():
        if asked.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="quire-experts-") as folder:
                Console().print(measure(Path(folder), asked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
