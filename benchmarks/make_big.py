"""A checkpoint of random weights in the shape of Llama 3.1 8B, as fast as the disk takes it: for starts and crashes.

    python benchmarks/make_big.py DIRECTORY [--scale 0.1]

16 GB of bf16 in shards, with the embedded model's tokenizer. One block of random numbers is written again and again,
from another place in it for each tensor; what packing takes and what steps cost does not depend on it.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch

from quire_engine.demo import demo_model_path

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")  # of the embedded model: prompts are its token ids
_HEAD_DIM = 128
_SHARD_BYTES = 5 << 30
_BLOCK_VALUES = 32 << 20
_STEP = 1_000_003  # values between the beginnings of two tensors in the block: prime, so that rows do not repeat soon
_DEVIATION = 0.02


def config(scale: float) -> dict[str, object]:
    """Of the shape with about `scale` of its parameters: every dimension by the same factor."""
    factor = scale ** (1 / 3)
    heads = max(4, round(32 * factor / 4) * 4)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": max(2560, round(128256 * factor / 64) * 64),  # the tokenizer's at least
        "hidden_size": heads * _HEAD_DIM,
        "intermediate_size": heads * _HEAD_DIM * 7 // 2,
        "num_hidden_layers": max(1, round(32 * factor)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-05,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def shapes(of: dict[str, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a configuration, in the order of the layers."""
    sizes = ("hidden_size", "intermediate_size", "vocab_size", "num_key_value_heads", "num_hidden_layers")
    hidden, inner, vocab, kv_heads, layers = (int(str(of[name])) for name in sizes)
    kv = kv_heads * _HEAD_DIM
    yield "model.embed_tokens.weight", (vocab, hidden)
    for index in range(layers):
        layer = f"model.layers.{index}."
        yield layer + "input_layernorm.weight", (hidden,)
        yield layer + "self_attn.q_proj.weight", (hidden, hidden)
        yield layer + "self_attn.k_proj.weight", (kv, hidden)
        yield layer + "self_attn.v_proj.weight", (kv, hidden)
        yield layer + "self_attn.o_proj.weight", (hidden, hidden)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        yield layer + "mlp.gate_proj.weight", (inner, hidden)
        yield layer + "mlp.up_proj.weight", (inner, hidden)
        yield layer + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def make(path: Path, scale: float = 1.0) -> int:
    """Write the checkpoint; the bytes of its tensors."""
    path.mkdir(parents=True, exist_ok=True)
    facts = config(scale)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes(facts):
        if size + 2 * math.prod(shape) > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += 2 * math.prod(shape)
    values = torch.empty(_BLOCK_VALUES).normal_(0, _DEVIATION, generator=torch.Generator().manual_seed(0))
    block = memoryview(values.bfloat16().view(torch.int16).numpy()).cast("B")
    index: dict[str, str] = {}
    at = 0
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with (path / file_name).open("wb") as file:
            file.write(_header(shard))
            for name, shape in shard.items():
                if len(shape) == 1:
                    file.write(torch.ones(shape, dtype=torch.bfloat16).view(torch.int16).numpy().tobytes())
                else:
                    at = _write(file, block, at, 2 * math.prod(shape))
                index[name] = file_name
    total = sum(2 * math.prod(shape) for shard in shards for shape in shard.values())
    weight_map = {"metadata": {"total_size": total}, "weight_map": index}
    (path / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    (path / "config.json").write_text(json.dumps(facts, indent=1))
    for name in TOKENIZER:
        shutil.copy(demo_model_path() / name, path / name)
    return total


def _header(shard: dict[str, tuple[int, ...]]) -> bytes:
    """As the safetensors format has it: a length, then JSON, padded to eight bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shard.items():
        end = at + 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(file: BinaryIO, block: memoryview, at: int, count: int) -> int:
    """`count` bytes from place `at` of the block on, around its end; where the next tensor begins."""
    place = at
    while count:
        part = block[place : place + count]
        file.write(part)
        count -= len(part)
        place = 0
    return (at + 2 * _STEP) % len(block)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make_big", description="Write a checkpoint of random weights.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="of 8 billion parameters [1]")
    given = parser.parse_args()
    started = time.monotonic()
    size = make(given.directory, given.scale)
    print(f"{given.directory}: {size / 1e9:.1f} GB in {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
