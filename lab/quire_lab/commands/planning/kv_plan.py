"""`quire plan --kv`: the memory of a checkpoint's KV cache, from its config.json alone.

Promises: bytes exactly, and in the units that people use; no weight is read. Must not know: torch.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from rich.console import Console
from rich.table import Table

from quire_engine.contract.errors import ConfigError
from quire_engine.memory_plan import bytes_text
from quire_lab.simulation.kv_memory import KVShape, kv_shape, sequence_memory, shared_prefix
from quire_server.showing.terminal import whole_number

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SHAPE = ("layers", "kv_heads", "head_dim", "bytes_per_value")


def add_kv_flags(parser: argparse.ArgumentParser, default_model: str) -> None:
    """Add the flags of `--kv`."""
    group = parser.add_argument_group("Memory of a KV cache")
    group.add_argument("--kv", action="store_true", help="print it")
    group.add_argument(
        "--model",
        default=default_model,
        metavar="DIR",
        help=f"checkpoint, of which only config.json is read [{default_model}]",
    )
    group.add_argument("--shape", metavar="L,H,D,B", help="instead: layers, KV heads, head width, bytes of a number")
    group.add_argument("--block-size", type=whole_number, default=16, metavar="N", help="tokens of a block [16]")
    group.add_argument("--tokens", type=whole_number, default=500, metavar="N", help="of a sequence [500]")
    group.add_argument(
        "--max-len", type=whole_number, metavar="N", help="what would be reserved for it [4096, or the model's]"
    )
    group.add_argument("--memory", type=_bytes, metavar="SIZE", help="a pool, such as 60GB or 60GiB: its blocks")
    group.add_argument(
        "--ranks",
        type=whole_number,
        metavar="N",
        help="what each of so many ranks holds; for a load: servers of so many",
    )
    group.add_argument("--stages", type=whole_number, metavar="N", help="the same of stages of a pipeline of layers")
    group.add_argument("--prefix", type=whole_number, metavar="N", help="tokens that sessions have in common")
    group.add_argument("--sessions", type=whole_number, default=16, metavar="N", help="how many have them [16]")


def print_kv(given: argparse.Namespace, folder: Path, console: Console) -> int:
    """Print the tables; returns 0. Raises ConfigError, ModelLoadError."""
    shape = _given_shape(given.shape) if given.shape else kv_shape(folder)
    size, max_len = given.block_size, given.max_len or min(4096, shape.max_len or 4096)
    if given.tokens > max_len:
        raise ConfigError(f"--tokens {given.tokens} is more than --max-len {max_len}")
    one = sequence_memory(shape, tokens=given.tokens, max_len=max_len, block_size=size)
    kinds = " or ".join(f"{heads.number} KV heads of {heads.width}" for heads in dict.fromkeys(shape.heads))
    heads = kinds if not shape.values_per_token else "one latent"
    table = Table(title=f"{shape.layers} layers, {heads}, {shape.bytes_per_value} bytes a number", title_justify="left")
    for column in ("", "bytes", "decimal", "binary"):
        table.add_column(column, justify="left" if not column else "right")
    layer = shape.layer_bytes_per_token
    for name, count in (
        ("a token", shape.bytes_per_token),
        (f"a block of {size} tokens", shape.bytes_per_block(size)),
        (f"a layer at {max_len:,} tokens", layer * max_len),
        (f"{one.tokens:,} tokens, what they need", one.live_bytes),
        (f"{one.tokens:,} tokens in {one.blocks:,} blocks", one.paged_bytes),
        (f"{max_len:,} tokens reserved", one.reserved_bytes),
    ):
        table.add_row(name, f"{count:,}", _decimal(count), bytes_text(count))
    console.print(table)
    console.print(
        f"reserved : paged = {one.ratio:.3g} : 1; of a reservation {one.reserved_waste:.1%} would be waste, of the"
        f" blocks {one.slack} slots are ({one.slack / (one.blocks * size):.1%})",
        highlight=False,
    )
    if given.memory is not None:
        blocks = given.memory // shape.bytes_per_block(size)
        console.print(
            f"{given.memory:,} bytes hold {blocks:,} blocks = {blocks * size:,} tokens ="
            f" {blocks // one.blocks:,} such sequences, or {given.memory // one.reserved_bytes:,} reserved ones",
            highlight=False,
        )
    _print_parts(given, shape, console)
    if given.prefix is not None:
        found = shared_prefix(prefix=given.prefix, sessions=given.sessions, block_size=size)
        saved = bytes_text(found.saved_blocks * shape.bytes_per_block(size))
        console.print(
            f"{found.sessions:,} sessions with {found.prefix:,} tokens in common: {found.shared_blocks:,} blocks"
            f" shared, {found.separate_blocks:,} separate, {found.saved_blocks:,} saved ({saved})",
            highlight=False,
        )
    return 0


def _print_parts(given: argparse.Namespace, shape: KVShape, console: Console) -> None:
    """The parts of a block that ranks, and stages of a pipeline, hold."""
    whole = shape.bytes_per_token * given.block_size
    if given.ranks is not None:
        own = shape.of_rank(given.ranks).bytes_per_token * given.block_size
        twice = "nothing twice" if own * given.ranks == whole else f"each head {own * given.ranks // whole} times"
        console.print(
            f"{given.ranks} ranks: one table for all; of a block's {bytes_text(whole)} each holds its heads' part in"
            f" every layer, {bytes_text(own)}, {twice}",
            highlight=False,
        )
    if given.stages is not None:
        parts = shape.stage_bytes(given.stages, given.block_size)
        console.print(
            f"{given.stages} stages: one table for all; of a block's {bytes_text(whole)} each holds its layers' part,"
            f" at most {bytes_text(max(parts))}, nothing twice",
            highlight=False,
        )


def _given_shape(text: str) -> KVShape:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != len(_SHAPE) or min(numbers) < 1:
        raise ConfigError(f"--shape is {text!r}, must be four numbers such as 32,8,128,2")
    layers, kv_heads, head_dim, bytes_per_value = numbers
    return KVShape(layers=layers, kv_heads=kv_heads, head_dim=head_dim, bytes_per_value=bytes_per_value)


def _decimal(count: int) -> str:
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if count >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count} B"


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?b)?", text, re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 60GB or 60GiB, got {text!r}")
    return int(float(found[1]) * _UNITS[(found[2] or "").upper()])
