"""A GGUF file of random weights in the shape and the mixture of types of a real one: for the rate of decoding.

    python benchmarks/make_gguf.py DIRECTORY [--shape qwen3-0.6b] [--layers 28]

The types are those of files called Q4_K_M (llama.cpp, llama_tensor_get_type): Q6_K for the head and for half of the
values' and of the down projections, Q4_K for the other matrices. The vocabulary is the embedded model's with names for
the places that are left, its tokenizer.json lies beside the file. One piece of random blocks is written again and
again, from another place in it for each matrix; what a step reads and takes does not depend on it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire_engine.demo import demo_model_path
from quire_engine.gguf import KINDS

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_NUMBERS = {kind.name: number for number, kind in KINDS.items()}
_KINDS = {kind.name: kind for kind in KINDS.values()}
_ALIGNMENT = 32
_BLOCKS = 1 << 15  # random ones of a type
_STEP = 1009  # blocks between the beginnings of two matrices in the piece
# Of each type where its scales of 16 bits lie, and what they are, so that weights are of about 0.02.
_SCALES = {"Q4_K": ((0, 0.02 / 240), (2, 0.15 / 240)), "Q6_K": ((208, 0.02 / 1370),)}


class Shape(NamedTuple):
    """The dimensions of a model of the architecture `qwen3`, `qwen3moe` or `llama`."""

    architecture: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    theta: float
    tied: bool
    experts: int = 0  # of which `inner` is the width of one
    chosen: int = 0


SHAPES = {
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 1e6, True),
    "qwen3-30b-a3b": Shape("qwen3moe", 48, 2048, 768, 32, 4, 128, 151936, 1e6, False, experts=128, chosen=8),
    "qwen3-4b": Shape("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 1e6, True),
    "llama3-8b": Shape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 5e5, False),
}


def tensors(shape: Shape) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape (rows first) of every tensor."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", "Q6_K" if shape.tied else "Q4_K", (shape.vocabulary, shape.hidden)
    for index in range(shape.layers):
        layer, some = f"blk.{index}.", "Q6_K" if _has_more_bits(index, shape.layers) else "Q4_K"
        yield layer + "attn_norm.weight", "F32", (shape.hidden,)
        yield layer + "attn_q.weight", "Q4_K", (queries, shape.hidden)
        yield layer + "attn_k.weight", "Q4_K", (keys, shape.hidden)
        yield layer + "attn_v.weight", some, (keys, shape.hidden)
        yield layer + "attn_output.weight", "Q4_K", (shape.hidden, queries)
        if shape.architecture.startswith("qwen3"):
            yield layer + "attn_q_norm.weight", "F32", (shape.head_dim,)
            yield layer + "attn_k_norm.weight", "F32", (shape.head_dim,)
        yield layer + "ffn_norm.weight", "F32", (shape.hidden,)
        of, each = ("", ()) if not shape.experts else ("_exps", (shape.experts,))
        if shape.experts:
            yield layer + "ffn_gate_inp.weight", "F32", (shape.experts, shape.hidden)
        yield f"{layer}ffn_gate{of}.weight", "Q4_K", (*each, shape.inner, shape.hidden)
        yield f"{layer}ffn_up{of}.weight", "Q4_K", (*each, shape.inner, shape.hidden)
        yield f"{layer}ffn_down{of}.weight", some, (*each, shape.hidden, shape.inner)
    yield "output_norm.weight", "F32", (shape.hidden,)
    if not shape.tied:
        yield "output.weight", "Q6_K", (shape.vocabulary, shape.hidden)


def _has_more_bits(layer: int, layers: int) -> bool:
    """As llama.cpp's use_more_bits."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def metadata(shape: Shape) -> dict[str, Any]:
    """What files of the architecture say, and a vocabulary."""
    of = {
        "context_length": 40960,
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.inner,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": shape.theta,
        "rope.dimension_count": shape.head_dim,
    }
    if shape.experts:
        of |= {
            "expert_count": shape.experts,
            "expert_used_count": shape.chosen,
            "expert_feed_forward_length": shape.inner,
        }
    found: dict[str, Any] = {
        "general.architecture": shape.architecture,
        "general.type": "model",
        "general.name": "random",
    }
    found |= {f"{shape.architecture}.{key}": value for key, value in of.items()}
    return found | _vocabulary(shape.vocabulary)


def _vocabulary(count: int) -> dict[str, Any]:
    whole = json.loads((demo_model_path() / TOKENIZER[0]).read_text())
    ids = dict(whole["model"]["vocab"]) | {token["content"]: token["id"] for token in whole["added_tokens"]}
    known = sorted(ids, key=lambda token: ids[token])
    if count < len(known):
        raise SystemExit(f"a vocabulary of {count} tokens is smaller than the {len(known)} of the embedded model")
    added = {token["content"] for token in whole["added_tokens"]}
    merges = [each if isinstance(each, str) else " ".join(each) for each in whole["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": known + [f"[unused{place}]" for place in range(count - len(known))],
        "tokenizer.ggml.token_type": [3 if token in added else 1 for token in known] + [5] * (count - len(known)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def make(folder: Path, shape: Shape, name: str = "random-Q4_K_M.gguf") -> Path:
    """Write the file, and a tokenizer beside it; the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = list(tensors(shape))
    facts = metadata(shape)
    head = [b"GGUF", struct.pack("<IQQ", 3, len(listed), len(facts))]
    head += [_text(key) + _value(value) for key, value in facts.items()]
    at = 0
    for tensor, kind, sizes in listed:
        head.append(_text(tensor) + struct.pack("<I", len(sizes)) + struct.pack(f"<{len(sizes)}Q", *reversed(sizes)))
        head.append(struct.pack("<IQ", _NUMBERS[kind], at))
        at += -(-_num_bytes(kind, sizes) // _ALIGNMENT) * _ALIGNMENT
    random = np.random.default_rng(0)
    pieces = {kind: _random_blocks(kind, random) for kind in _SCALES}
    path = folder / name
    with path.open("wb") as file:
        file.write(b"".join(head))
        _pad(file)
        for place, (_, kind, sizes) in enumerate(listed):
            if kind == "F32":  # norms, and routers, which should choose now these and now those
                file.write(_router(sizes, random) if len(sizes) > 1 else np.ones(sizes, np.float32).tobytes())
            else:
                _write(file, pieces[kind], place * _STEP % _BLOCKS, _num_bytes(kind, sizes) // _KINDS[kind].num_bytes)
            _pad(file)
    for each in TOKENIZER:
        shutil.copy(demo_model_path() / each, folder / each)
    return path


def _router(sizes: tuple[int, ...], random: np.random.Generator) -> bytes:
    return (0.02 * random.standard_normal(sizes, dtype=np.float32)).tobytes()


def _num_bytes(kind: str, sizes: tuple[int, ...]) -> int:
    return int(np.prod(sizes)) // _KINDS[kind].values * _KINDS[kind].num_bytes


def _random_blocks(kind: str, random: np.random.Generator) -> NDArray[np.uint8]:
    """[_BLOCKS, bytes of a block]."""
    blocks = random.integers(0, 256, (_BLOCKS, _KINDS[kind].num_bytes), dtype=np.uint8)
    for at, scale in _SCALES[kind]:
        scales = random.uniform(0.5, 1.5, (_BLOCKS, 1)) * scale
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks


def _write(file: BinaryIO, blocks: NDArray[np.uint8], place: int, count: int) -> None:
    while count:
        part = blocks[place : place + count]
        file.write(part.tobytes())
        count -= len(part)
        place = 0


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % _ALIGNMENT))


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: bool | float | str | list[int] | list[str]) -> bytes:
    """Its type by the format, and the value."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_text(str(each)) for each in value)
    return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make_gguf", description="Write a GGUF file of random weights.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b", help="of the model [qwen3-0.6b]")
    parser.add_argument("--layers", type=int, metavar="N", help="in place of the shape's own number")
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    if given.layers is not None:
        shape = shape._replace(layers=given.layers)
    started = time.monotonic()
    path = make(given.directory, shape)
    print(f"{path}: {path.stat().st_size / 1e9:.2f} GB in {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
