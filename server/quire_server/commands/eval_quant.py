"""`quire eval-quant`: measures the quality loss by int8 or int4 weights, or by a KV cache in int8 or fp8.

Promises: exit code 0 when everything was measured, 1 when the model cannot be, 2 for flags that cannot work; each with
one clear line. Must not know: torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
from rich.console import Console
from rich.table import Table

from quire_engine.contract.config import Device, KVCacheDType
from quire_engine.contract.errors import QuireError
from quire_engine.demo import demo_model_path
from quire_engine.quality_store import Quality
from quire_server.checkpoint.locate import checkpoint_directory
from quire_server.engine.json_child import ask
from quire_server.errors import ApiError
from quire_server.settings import DEMO_MODEL
from quire_server.showing.terminal import BAD_USAGE, DONE, FAILED, Parser, complain, whole_number, wide_console
from quire_server.text.quality_prompts import prompt_ids
from quire_server.text.tokenizer import TextTokenizer

MEANING = (
    "KL is how far the distribution of the next token moves, in nats: 0 is not at all, and a mean of at most 0.01 is"
    " what we ask of int8 on the embedded model. Greedy agreement is the share of positions where both find the same"
    " token likeliest, given the same text before it; continuation is how much of an answer of up to 32 tokens comes"
    " before the first one that differs. A perplexity says how well the model knows these texts: it matters only beside"
    " the other."
)


def run(argv: Sequence[str]) -> int:
    """Measure and print; the process's exit code."""
    given = build_parser().parse_args(argv)
    if given.json is not None and not given.json.absolute().parent.is_dir():
        return complain("eval-quant", f"{given.json} cannot be written: there is no such directory", BAD_USAGE)
    variants = [{"quantization": name, "kv_cache_dtype": given.kv_cache_dtype} for name in given.quantization]
    if {"quantization": None, "kv_cache_dtype": "auto"} in variants:
        return complain("eval-quant", "--quantization none leaves nothing to measure; add --kv-cache-dtype", BAD_USAGE)
    try:
        found = ask("quality", _question(given, variants), Quality)
    except (QuireError, ApiError) as error:
        return complain("eval-quant", str(error), FAILED)
    if given.json is not None:
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode({"model": given.model, "results": found})))
    print_table(given.model, found)
    return DONE


def build_parser() -> argparse.ArgumentParser:
    """The command\'s own flags."""
    parser = Parser(
        prog="quire eval-quant",
        description="Compare a model with itself in bf16 on a fixed set of prompts. `quire serve` shows the result.",
    )
    parser.add_argument("model", nargs="?", default=DEMO_MODEL, help="directory of a checkpoint, or quire-demo")
    parser.add_argument("--tokenizer", type=Path, help="directory of the tokenizer, when it is not the model's")
    parser.add_argument(
        "--quantization",
        type=_names,
        default=["int8", "int4"],
        metavar="LIST",
        help="what to measure, of int8, int4 and none (weights in bf16); default: int8,int4",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=get_args(KVCacheDType),
        default="auto",
        help="of the quantised model: int8 on a CPU, fp8 on a GPU",
    )
    parser.add_argument("--device", choices=get_args(Device), default="auto", help="default: a GPU where there is one")
    parser.add_argument("--num-threads", type=whole_number, help="compute threads; default: one for each usable core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    return parser


def _names(text: str) -> list[str | None]:
    names = list(dict.fromkeys(text.split(",")))
    if unknown := set(names) - {"int8", "int4", "none"}:
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is unknown; use int8, int4 or none")
    return [None if name == "none" else name for name in names]


def _question(given: argparse.Namespace, variants: object) -> dict[str, object]:
    """The input of the measuring process. Raises ModelLoadError, BadRequest."""
    path = demo_model_path() if given.model == DEMO_MODEL else checkpoint_directory(given.model)
    prompts: list[list[int]] | None = None
    ends: tuple[int, ...] = ()
    if given.tokenizer is not None or (path / "tokenizer.json").exists():
        tokenizer = TextTokenizer.load(given.tokenizer or path)
        prompts, ends = prompt_ids(tokenizer), tokenizer.eos_token_ids
    else:
        print("there is no tokenizer.json: measuring on pseudo-random tokens", file=sys.stderr)
    return {
        "model": str(path),
        "variants": variants,
        "prompts": prompts,
        "end_token_ids": ends,
        "num_threads": given.num_threads,
        "device": given.device,
    }


def print_table(model: str, found: Sequence[Quality], console: Console | None = None) -> None:
    """The numbers and what they mean."""
    console = wide_console(console)
    where = f"{found[0].num_positions:,} positions of {found[0].prompts}, on {found[0].device}"
    table = Table(title=f"{model} beside itself in bf16, {where}", title_justify="left")
    for title in ("weights", "KV cache"):
        table.add_column(title)
    for title in ("mean KL", "max KL", "greedy agreement", "continuation", "perplexity", "in bf16"):
        table.add_column(title, justify="right")
    for one in found:
        table.add_row(
            one.quantization or "bf16",
            "bf16" if one.kv_cache_dtype == "auto" else one.kv_cache_dtype,
            f"{one.mean_kl:.2g}",
            f"{one.max_kl:.2g}",
            f"{one.greedy_agreement:.1%}",
            f"{one.continuation_agreement:.1%}",
            f"{one.perplexity:.4g}",
            f"{one.bf16_perplexity:.4g}",
        )
    console.print(table)
    console.print(MEANING, highlight=False)
