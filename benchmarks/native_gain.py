"""Tokens a second of our own layers over those of the same model by transformers' code, family by family.

    python -m benchmarks.native_gain [--families gemma3_text,phi3,...] [--streams 1,32] [--rounds 5] [--layers 8]

Each model has random weights in bf16, real widths and few layers, so that a layer costs what it costs and the start is
short. Two engines in this process, `--model-impl native` and `transformers`, take turns at the same prompts; ratios are
of one round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from quire_engine.build import build, resolve
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import GenerationRequest, SamplingParams, StepOutput, StopParams
from quire_engine.engine import Engine

VOCABULARY = 32_000
WIDTHS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
# What a family has beside the widths; nothing: they say it all.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 64, "sliding_window": 512},
    "gemma3_text": {"query_pre_attn_scalar": 64, "sliding_window": 512},
    "phi3": {},
    "granite": {"attention_multiplier": 0.125, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    "smollm3": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 512},
    "glm4": {},
    "cohere": {},
    "cohere2": {"sliding_window": 512},
    "ministral": {"sliding_window": 512},
    "qwen3_moe": EXPERTS,
    "gpt_oss": {**EXPERTS, "intermediate_size": 512, "sliding_window": 128},
}


def write_checkpoint(family: str, layers: int, folder: Path) -> None:
    """A model of the family with random weights."""
    config = AutoConfig.for_model(family, **{**WIDTHS, **FAMILIES[family], "num_hidden_layers": layers})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)


class Side:
    """An engine with one way to compute the model."""

    def __init__(self, asked: EngineConfig) -> None:
        built = build(asked)
        self.engine = Engine(built.scheduler, built.executor)
        self.engine.on_step = self._take
        self.num_tokens = 0

    def _take(self, step: StepOutput) -> None:
        for output in step.outputs:
            if output.error is not None:
                raise SystemExit(output.error)
            self.num_tokens += len(output.token_ids)

    def run(self, streams: int, tokens: int, seed: int) -> float:
        """Tokens a second of so many streams, prompts of 32 tokens counted in."""
        for stream in range(streams):
            self.engine.submit(
                GenerationRequest(
                    request_id=f"{seed}-{stream}",
                    prompt_token_ids=tuple(
                        3 + (seed * 7919 + stream * 131 + i * 17) % (VOCABULARY - 3) for i in range(32)
                    ),
                    sampling=SamplingParams(temperature=0.0),
                    stop=StopParams(max_new_tokens=tokens),
                )
            )
        self.num_tokens, began = 0, time.perf_counter()
        while self.engine.has_work:
            self.engine.step()
        return self.num_tokens / (time.perf_counter() - began)


def measure(family: str, asked: argparse.Namespace) -> list[tuple[str, ...]]:
    """A row of the table for each number of streams."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(family, asked.layers, Path(folder))
        config = EngineConfig(
            model=folder,
            device="cpu",
            max_model_len=256,
            limits=SchedulerLimits(max_num_seqs=max(asked.streams)),
            packed_cache=False,
        )
        blocks = (max(asked.streams) + 1) * (256 // config.limits.block_size)
        config = replace(config, kv_memory=blocks * resolve(config).bytes_per_block)
        sides = {impl: Side(replace(config, model_impl=impl)) for impl in ("native", "transformers")}
        for streams in asked.streams:
            found: dict[str, list[float]] = {name: [] for name in sides}
            for seed in range(asked.rounds + 1):
                for name in list(sides)[:: 1 if seed % 2 else -1]:
                    found[name].append(sides[name].run(streams, asked.tokens, seed))
            ours, theirs = found["native"][1:], found["transformers"][1:]  # the first round touches pages
            ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
            rows.append(
                (
                    family,
                    str(streams),
                    f"{statistics.median(ours):.0f}",
                    f"{statistics.median(theirs):.0f}",
                    f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f}-{ratios[-1]:.2f})",
                )
            )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="model types (all)")
    parser.add_argument("--streams", default="1,32", help="numbers of streams (1,32)")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer (64)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    asked = parser.parse_args(argv)
    asked.streams = [int(each) for each in asked.streams.split(",")]
    unknown = sorted(set(asked.families.split(",")) - set(FAMILIES))
    if unknown:
        parser.error(f"unknown families: {', '.join(unknown)}; known: {', '.join(FAMILIES)}")
    table = Table(title=f"native over transformers' code, bf16, {asked.layers} layers, 32 + {asked.tokens} tokens")
    for column in ("family", "streams", "native tok/s", "fallback tok/s", "native is"):
        table.add_column(column, justify="left" if column == "family" else "right")
    for family in asked.families.split(","):
        for row in measure(family, asked):
            print(*row, flush=True)
            table.add_row(*row)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
