"""Checkpoints with quantised matrices, beside the same numbers as a checkpoint of float32.

Promises: the packing and the numbers follow the formats' descriptions value by value, by other means than the engine's.
Must not know: the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.checkpoints import make_checkpoint

_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble
Parts = dict[str, Tensor]
Quantise = Callable[[int, int, np.random.Generator], tuple[Parts, Tensor]]


def _words(values: NDArray[np.int64], bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[n, m] -> [n, m * bits / 32] int32: neighbours of the last axis in one word."""
    per = 32 // bits
    words = np.zeros((values.shape[0], values.shape[1] // per), dtype=np.uint64)
    for place in range(per):
        column = place if order is None else order[place]
        words |= values[:, column::per].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def _numbers(rows: int, columns: int, bits: int, group: int, random: np.random.Generator) -> Any:
    num_groups = -(-columns // group)
    values = random.integers(0, 1 << bits, (rows, columns))
    zeros = random.integers(0, 1 << bits, (rows, num_groups))
    scales = (random.uniform(0.5, 1.5, (rows, num_groups)) * 0.3 / (1 << bits)).astype(np.float16)
    return values, zeros, scales


def _dense(values: Any, zeros: Any, scales: Any, groups: Any) -> Tensor:
    dense = np.empty(values.shape, dtype=np.float32)
    for column, group in enumerate(groups):
        steps = (values[:, column] - zeros[:, group]).astype(np.float32)
        dense[:, column] = steps * scales[:, group].astype(np.float32)
    return torch.from_numpy(dense)


def gptq(bits: int, group: int, *, offset: int, shuffled: bool) -> Quantise:
    """`offset`: of zero points, taken from whole words; `shuffled`: columns in the order of their activations."""

    def quantise(rows: int, columns: int, random: np.random.Generator) -> tuple[Parts, Tensor]:
        size = columns if group < 0 else group
        values, zeros, scales = _numbers(rows, columns, bits, size, random)
        groups = np.arange(columns) // size
        if shuffled:
            groups = random.permutation(groups)
        parts = {
            "qweight": _words(values, bits).T.contiguous(),
            "qzeros": _words(zeros.T, bits) - sum(offset << place for place in range(0, 32, bits)),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return parts, _dense(values, zeros, scales, groups)

    return quantise


def awq(group: int) -> Quantise:
    def quantise(rows: int, columns: int, random: np.random.Generator) -> tuple[Parts, Tensor]:
        values, zeros, scales = _numbers(rows, columns, 4, group, random)
        parts = {
            "qweight": _words(values.T, 4, _AWQ),
            "qzeros": _words(zeros.T, 4, _AWQ),
            "scales": torch.from_numpy(scales.T.copy()),
        }
        return parts, _dense(values, zeros, scales, np.arange(columns) // group)

    return quantise


def fp8(block: tuple[int, int] | None) -> Quantise:
    """With a scale for each block, or for each row."""

    def quantise(rows: int, columns: int, random: np.random.Generator) -> tuple[Parts, Tensor]:
        high, wide = block or (1, columns)
        weight = torch.from_numpy(random.standard_normal((rows, columns)).astype(np.float32)).to(torch.float8_e4m3fn)
        shape = (-(-rows // high), -(-columns // wide))
        scale = torch.from_numpy(random.uniform(0.01, 0.1, shape).astype(np.float32))
        dense = weight.float()
        for i in range(rows):
            for j in range(shape[1]):
                dense[i, j * wide : (j + 1) * wide] *= scale[i // high, j]
        return {"weight": weight, "weight_scale_inv" if block else "weight_scale": scale}, dense

    return quantise


def packed(bits: int, group: int, *, symmetric: bool, shuffled: bool = False) -> Quantise:
    """Of compressed-tensors."""

    def quantise(rows: int, columns: int, random: np.random.Generator) -> tuple[Parts, Tensor]:
        size = columns if group < 0 else group
        values, zeros, scales = _numbers(rows, columns, bits, size, random)
        groups = np.arange(columns) // size
        if shuffled:
            groups = random.permutation(groups)
        parts = {
            "weight_packed": _words(values, bits),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor([rows, columns]),
        }
        if shuffled:
            parts["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        if symmetric:
            zeros[:] = 1 << (bits - 1)
        else:
            parts["weight_zero_point"] = _words(zeros.T, bits).T.contiguous()
        return parts, _dense(values, zeros, scales, groups)

    return quantise


def whole_bytes(rows: int, columns: int, random: np.random.Generator) -> tuple[Parts, Tensor]:
    """W8A8 of compressed-tensors: int8 with a scale for each row."""
    weight = torch.from_numpy(random.integers(-128, 128, (rows, columns)).astype(np.int8))
    scale = torch.from_numpy(random.uniform(0.001, 0.01, (rows, 1)).astype(np.float32)).to(torch.bfloat16)
    return {"weight": weight, "weight_scale": scale}, weight.float() * scale.float()


def fp4(group: int, *, of_matrix: bool) -> Quantise:
    """Of compressed-tensors. `of_matrix`: scales are e4m3 that a number of the matrix divides, else powers of two."""

    def quantise(rows: int, columns: int, random: np.random.Generator) -> tuple[Parts, Tensor]:
        codes = random.integers(0, 16, (rows, columns))
        shape = (rows, columns // group)
        parts = {"weight_packed": torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))}
        if of_matrix:
            scale = torch.from_numpy(random.uniform(1.0, 400.0, shape).astype(np.float32)).to(torch.float8_e4m3fn)
            whole = np.float32(random.uniform(4000.0, 9000.0))
            parts |= {"weight_global_scale": torch.tensor([whole]), "input_global_scale": torch.tensor([1.0])}
            factors = scale.float().numpy() / whole
        else:
            scale = torch.from_numpy(random.integers(119, 124, shape).astype(np.uint8))
            factors = np.exp2(scale.numpy().astype(np.float32) - 127)
        dense = np.empty((rows, columns), dtype=np.float32)
        for column in range(columns):
            low, sign = codes[:, column] & 7, np.where(codes[:, column] & 8, -1.0, 1.0)
            exponent, fraction = low >> 1, low & 1
            size = np.where(exponent == 0, fraction / 2, (1 + fraction / 2) * 2.0 ** (exponent - 1))
            dense[:, column] = (sign * size).astype(np.float32) * factors[:, column // group]
        return parts | {"weight_scale": scale}, torch.from_numpy(dense)

    return quantise


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    usual = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
        "observer": "mse",
    }
    group = {"targets": ["Linear"], "weights": usual | weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "version": "0.12.0",
        "sparsity_config": {},
        "transform_config": {},
    }


@dataclass(frozen=True, slots=True)
class Form:
    """A way to store matrices, and what config.json says of it."""

    config: dict[str, Any]
    quantise: Quantise


FORMS = {
    "gptq": Form(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "damp_percent": 0.01},
        gptq(4, 32, offset=1, shuffled=False),
    ),
    "gptq in activation order": Form(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq_v2"},
        gptq(4, 32, offset=0, shuffled=True),
    ),
    "gptq in 8 bits": Form(
        {"quant_method": "gptq", "bits": 8, "group_size": -1}, gptq(8, -1, offset=1, shuffled=False)
    ),
    "gptq in 2 bits": Form({"quant_method": "gptq", "bits": 2, "group_size": 16}, gptq(2, 16, offset=1, shuffled=True)),
    "awq": Form(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        awq(32),
    ),
    "fp8 by block": Form(
        {"quant_method": "fp8", "weight_block_size": [48, 40], "activation_scheme": "dynamic", "fmt": "e4m3"},
        fp8((48, 40)),
    ),
    "W4A16": Form(
        _compressed("pack-quantized", num_bits=4, strategy="group", group_size=16), packed(4, 16, symmetric=True)
    ),
    "W4A16 with zero points, in activation order": Form(
        _compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False, actorder="group"),
        packed(4, 32, symmetric=False, shuffled=True),
    ),
    "W8A16": Form(_compressed("pack-quantized"), packed(8, -1, symmetric=True)),
    "W8A8": Form(_compressed("int-quantized"), whole_bytes),
    "FP8 of compressed-tensors": Form(_compressed("float-quantized", type="float"), fp8(None)),
    "NVFP4": Form(
        _compressed(
            "nvfp4-pack-quantized",
            num_bits=4,
            type="float",
            strategy="tensor_group",
            group_size=16,
            scale_dtype="torch.float8_e4m3fn",
        ),
        fp4(16, of_matrix=True),
    ),
    "MXFP4": Form(
        _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        fp4(32, of_matrix=False),
    ),
    "fp8 by row": Form({"quant_method": "fp8", "activation_scheme": "static"}, fp8(None)),
}


def make_quantised(path: Path, form: Form, family: str = "qwen3", *, seed: int = 0) -> tuple[Path, Path]:
    """Two checkpoints of the same numbers: quantised, and in float32. Embedding, head and norms are as they were."""
    random = np.random.default_rng(seed)
    quantised, dense = (make_checkpoint(path / name, family) for name in ("quantised", "dense"))
    stored = load_file(str(dense / "model.safetensors"))
    packed: Parts = {}
    for name, value in stored.items():
        if value.dim() != 2 or any(word in name for word in ("embed", "lm_head", ".gate.")):  # .gate.: a router
            packed[name] = value
            continue
        parts, stored[name] = form.quantise(value.shape[0], value.shape[1], random)
        packed |= {name.removesuffix("weight") + role: part.contiguous() for role, part in parts.items()}
    if form.config["quant_method"] == "fp8" and "weight_block_size" not in form.config:
        packed |= {name + ".input_scale": torch.ones(1) for name in _linears(packed)}
    save_file(stored, str(dense / "model.safetensors"))
    save_file(packed, str(quantised / "model.safetensors"))
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(config | {"quantization_config": form.config}))
    return quantised, dense


def _linears(packed: Parts) -> list[str]:
    return [name.removesuffix(".weight_scale") for name in packed if name.endswith(".weight_scale")]
