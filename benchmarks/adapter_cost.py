"""Tokens a second with several LoRA adapters in a batch, over those of the model alone.

    python -m benchmarks.adapter_cost MODEL_DIRECTORY [--adapters 8] [--rank 16] [--streams 16] [--rounds 7]

The adapters are random, of all projections of every layer, and dealt over the streams in turns. One engine with
adapters enabled takes turns at the same prompts with and without them; a second one without adapters says what it
costs to have them enabled. Ratios are of one round.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file

from quire import LLM, LoRARequest, SamplingParams

_MODULE = re.compile(r"(model\.layers\.\d+\.(?:self_attn|mlp)\.(\w+_proj))\.weight")


def write_adapter(folder: Path, model: Path, rank: int, seed: int) -> None:
    """An adapter of all projections, as PEFT saves it."""
    generator = torch.Generator().manual_seed(seed)
    tensors, names = {}, set()
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - it is no dict
                if (found := _MODULE.fullmatch(name)) is None:
                    continue
                rows, columns = weights.get_slice(name).get_shape()
                names.add(found[2])
                for part, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                    values = torch.randn(shape, generator=generator) / math.sqrt(shape[1])
                    tensors[f"base_model.model.{found[1]}.lora_{part}.weight"] = values.to(torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": sorted(names)}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM", "lora_dropout": 0.0}))


def rate(llm: LLM, prompts: Sequence[list[int]], tokens: int, adapters: Sequence[LoRARequest]) -> float:
    """Tokens a second of all prompts together, with the adapters in turns."""
    asked = [adapters[i % len(adapters)] for i in range(len(prompts))] if adapters else None
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False, lora_request=asked)
    return sum(len(each.outputs[0].token_ids) for each in answers) / (time.perf_counter() - began)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer (48)")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args(argv)
    prompts = [[3 + (stream * 131 + i * 17) % 1000 for i in range(16)] for stream in range(asked.streams)]
    sizes = {"max_model_len": 512, "max_num_seqs": asked.streams, "kv_memory": "512MiB", "enable_prefix_caching": False}
    with tempfile.TemporaryDirectory() as made:
        requests = []
        for number in range(asked.adapters):
            write_adapter(Path(made) / str(number), asked.model, asked.rank, number)
            requests.append(LoRARequest(f"adapter-{number}", number + 1, str(Path(made) / str(number))))
        most = {"enable_lora": True, "max_loras": asked.adapters, "max_lora_rank": asked.rank}
        with LLM(str(asked.model), **sizes, **most) as able, LLM(str(asked.model), **sizes) as plain:
            ways = {
                "without --enable-lora": (plain, ()),
                "enabled, none asked for": (able, ()),
                f"{asked.adapters} adapters": (able, requests),
            }
            found: dict[str, list[float]] = {name: [] for name in ways}
            for number in range(asked.rounds + 1):
                for name in list(ways)[:: 1 if number % 2 else -1]:
                    found[name].append(rate(ways[name][0], prompts, asked.tokens, ways[name][1]))
    table = Table(title=f"{asked.model}, rank {asked.rank}, {asked.streams} streams")
    for column in ("", "tokens/s", "over plain"):
        table.add_column(column, justify="right" if column else "left")
    base = next(iter(found.values()))[1:]  # the first round touches pages and loads adapters
    for name, rates in found.items():
        ratios = sorted(mine / other for mine, other in zip(rates[1:], base, strict=True))
        spread = f"{statistics.median(ratios):.3f}x ({ratios[0]:.3f}-{ratios[-1]:.3f})"
        table.add_row(name, f"{statistics.median(rates[1:]):.1f}", spread)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
