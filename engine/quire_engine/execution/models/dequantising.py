"""Quantised matrices of a checkpoint: as the numbers that they stand for, and as they are stored, in neutral form.

Promises: each value is (stored - zero point) * scale in float32 with one rounding, as the formats' own libraries have
it; shapes are checked against each other before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quire_engine.execution.models.checkpoint import Checkpoint, Kept
from quire_engine.execution.models.quantisation import Quantisation
from quire_kernels.stored import StoredKind, StoredMatrix

_WORD = 32  # bits of a stored integer
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds each of its eight columns
_FLOATS = ("F16", "BF16", "F32")
_Parts = dict[str, str]  # names of tensors by their roles
_BYTE = 8
_NIBBLES = tuple(map(float, range(16)))
# Numbers of four bits (e2m1), as the Open Compute Project's specification of MX formats has them.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127  # of their scales (e8m0)
_FP4 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")


def decode_quantised(checkpoint: Checkpoint, form: Quantisation) -> None:
    """Put the matrix `x.weight` in the place of the tensors that it is stored as. Raises ModelLoadError."""
    if form.method == "mxfp4":  # of stacks of experts, which are taken apart as they are decoded
        return
    ends = {"gptq": ".qweight", "awq": ".qweight", "pack-quantized": ".weight_packed"}
    ends |= dict.fromkeys(_FP4, ".weight_packed")
    end = ends.get(form.method, ".weight_scale_inv" if form.method == "fp8" and form.block else ".weight_scale")
    # Which stay as they are.
    activations = (".input_scale", ".input_zero_point", ".activation_scale", ".input_global_scale")
    checkpoint.drop(lambda name: name.endswith(activations))
    names = sorted(name.removesuffix(end) for name in checkpoint.names if name.endswith(end))
    for name in names:
        if form.method in {"gptq", "awq"}:
            _decode_packed(checkpoint, name, form)
        elif form.method == "pack-quantized":
            _decode_by_rows(checkpoint, name, form)
        elif form.method in _FP4:
            _decode_fp4(checkpoint, name, form)
        else:
            _decode_scaled(checkpoint, name, name + end, form)


def _decode_packed(checkpoint: Checkpoint, name: str, form: Quantisation) -> None:
    """GPTQ packs along K: qweight [K / p, N] for p values a word; AWQ along N: [K, N / p]."""
    per_word = _WORD // form.bits
    parts = {role: f"{name}.{role}" for role in ("qweight", "qzeros", "scales", "g_idx")}
    _, (first, second) = _matrix(checkpoint, parts["qweight"], "I32")
    inputs, outputs = (first * per_word, second) if form.method == "gptq" else (first, second * per_word)
    group = form.group_size or inputs
    num_groups = -(-inputs // group)
    if form.method == "awq" or parts["g_idx"] not in checkpoint:
        del parts["g_idx"]
    else:
        _require(checkpoint, parts["g_idx"], ("I32",), (inputs,))
    _require(checkpoint, parts["qzeros"], ("I32",), (num_groups, -(-outputs // per_word)))
    _require(checkpoint, parts["scales"], _FLOATS, (num_groups, outputs))
    if outputs % per_word:
        raise checkpoint.error(parts["qweight"], f"has {outputs} columns, which words of {per_word} do not divide")
    read = partial(_gptq, form, group) if form.method == "gptq" else partial(_awq, group)
    _know(checkpoint, name, parts, (outputs, inputs), read, bits=form.bits, group=group)


def _decode_by_rows(checkpoint: Checkpoint, name: str, form: Quantisation) -> None:
    """Compressed-tensors: [N, K / p] for p values a word, and zero points [N / p, G]."""
    per_word = _WORD // form.bits
    parts = {role: f"{name}.weight_{role}" for role in ("packed", "scale", "shape", "zero_point", "g_idx")}
    _, (outputs, words) = _matrix(checkpoint, parts["packed"], "I32")
    inputs = words * per_word
    num_groups = -(-inputs // (form.group_size or inputs))
    _require(checkpoint, parts["scale"], _FLOATS, (outputs, num_groups))
    if parts["g_idx"] in checkpoint:
        _require(checkpoint, parts["g_idx"], ("I32",), (inputs,))
    else:
        del parts["g_idx"]
    if form.symmetric:
        del parts["zero_point"]
    else:
        _require(checkpoint, parts["zero_point"], ("I32",), (-(-outputs // per_word), num_groups))
    _require(checkpoint, parts["shape"], ("I64", "I32"), (2,))
    group = form.group_size or inputs
    _know(checkpoint, name, parts, (outputs, inputs), partial(_by_rows, form), bits=form.bits, group=group)


def _decode_fp4(checkpoint: Checkpoint, name: str, form: Quantisation) -> None:
    """Compressed-tensors: two values a byte, [N, K / 2], the lower half first, and scales [N, G]."""
    parts = {role: f"{name}.weight_{role}" for role in ("packed", "scale", "global_scale")}
    _, (outputs, pairs) = _matrix(checkpoint, parts["packed"], "U8")
    inputs, group = 2 * pairs, form.group_size or 2 * pairs
    if inputs % group:
        raise checkpoint.error(parts["packed"], f"has {inputs} columns, which groups of {group} do not divide")
    if form.method == "mxfp4-pack-quantized":
        del parts["global_scale"]
    elif parts["global_scale"] not in checkpoint:
        raise _missing(checkpoint, parts["global_scale"])
    elif checkpoint.stored_as(parts["global_scale"]) not in {("F32", (1,)), ("F32", ())}:
        raise checkpoint.error(parts["global_scale"], "is not one number of F32")
    kind = "F8_E4M3" if "global_scale" in parts else "U8"
    _require(checkpoint, parts["scale"], (kind,), (outputs, inputs // group))
    read = partial(_fp4, group)
    kept = Kept(read, "nibbles", group, beside=32 if "global_scale" in parts else 16)
    checkpoint.decode(name + ".weight", parts, (outputs, inputs), lambda stored: read(stored).dequantised(), kept)


def _decode_scaled(checkpoint: Checkpoint, name: str, scale: str, form: Quantisation) -> None:
    weight = name + ".weight"
    _, (outputs, inputs) = _matrix(checkpoint, weight, "I8" if form.method == "int-quantized" else "F8_E4M3")
    if form.block is not None:
        rows, columns = form.block
        _require(checkpoint, scale, _FLOATS, (-(-outputs // rows), -(-inputs // columns)))
    elif checkpoint.stored_as(scale)[1] not in {(), (1,), (1, 1), (outputs,), (outputs, 1)}:
        raise checkpoint.error(scale, "has neither one scale nor one for each row")
    parts = {"weight": weight, "scale": scale}
    group = inputs if form.block is None else form.block[1]
    kind: StoredKind = "bytes" if form.method == "int-quantized" else "e4m3"
    decode, keep = partial(_times_scale, form.block), partial(_kept_with_scale, kind, form.block)
    checkpoint.decode(weight, parts, (outputs, inputs), decode, Kept(keep, kind, group))


class _Grouped(NamedTuple):
    """(value - zero point) * scale."""

    values: Tensor  # [K, N] integers
    zeros: Tensor  # [G, N]
    scales: Tensor  # [G, N]
    groups: Tensor  # [K], of each column


def _know(
    checkpoint: Checkpoint,
    name: str,
    parts: _Parts,
    shape: tuple[int, int],
    read: Callable[[dict[str, Tensor]], _Grouped],
    *,
    bits: int,
    group: int,
) -> None:
    checkpoint.decode(
        name + ".weight",
        parts,
        shape,
        lambda stored: _scaled(read(stored)),
        Kept(lambda stored: _kept(bits, group, read(stored)), "bytes" if bits == _BYTE else "nibbles", group),
    )


def _matrix(checkpoint: Checkpoint, name: str, dtype: str) -> tuple[str, tuple[int, int]]:
    if name not in checkpoint:
        raise _missing(checkpoint, name)
    stored, shape = checkpoint.stored_as(name)
    if stored != dtype or len(shape) != 2 or 0 in shape:
        raise checkpoint.error(name, f"is {stored} {list(shape)}, not a matrix of {dtype}")
    return stored, (shape[0], shape[1])


def _require(checkpoint: Checkpoint, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    if name not in checkpoint:
        raise _missing(checkpoint, name)
    stored, found = checkpoint.stored_as(name)
    if stored not in dtypes or found != shape:
        wanted = f"{' or '.join(dtypes)} {list(shape)}"
        raise checkpoint.error(name, f"is {stored} {list(found)}, the quantisation implies {wanted}")


def _missing(checkpoint: Checkpoint, name: str) -> Exception:
    beside = next(each for each in sorted(checkpoint.names) if each.startswith(name.rpartition(".")[0] + "."))
    return checkpoint.error(beside, f"is quantised, but there is no {name}")


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """[..., W] int32 -> [..., W, 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)


def _scaled(stored: _Grouped) -> Tensor:
    """[N, K] float32."""
    values, zeros, scales, groups = stored
    _check_scales(scales)
    wide = torch.empty(values.shape[1], values.shape[0])
    for rows in _pieces(len(values)):
        of = groups[rows]
        wide[:, rows] = ((values[rows] - zeros[of]).float() * scales.float()[of]).T
    return wide


def _kept(bits: int, group: int, stored: _Grouped) -> StoredMatrix | None:
    """Bytes and their zero points are signed, half of the range less. None: the columns of a group lie apart."""
    values, zeros, scales, groups = stored
    _check_scales(scales)
    if not torch.equal(groups, torch.arange(len(values)) // group):
        return None
    half = 1 << (_BYTE - 1) if bits == _BYTE else 0
    return StoredMatrix(
        kind="bytes" if half else "nibbles",
        table=() if half else _NIBBLES,
        codes=(values.to(torch.uint8) ^ half).T.contiguous(),
        group_size=group,
        scales=scales.T.contiguous(),
        zero_points=(zeros - half).to(torch.int8).T.contiguous(),
    )


def _fp4(group: int, parts: dict[str, Tensor]) -> StoredMatrix:
    """The scales are quotients of e4m3 and the matrix's own, or powers of two."""
    packed, scale = parts["packed"], parts["scale"]
    if "global_scale" in parts:
        scales = scale.float() / parts["global_scale"].reshape(1)
    else:
        scales = torch.ldexp(torch.ones(scale.shape), scale.int() - EXPONENT_BIAS)
    _check_scales(scales)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    return StoredMatrix(kind="nibbles", table=E2M1, codes=codes, group_size=group, scales=scales)


def _check_scales(scales: Tensor) -> None:
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("has scales that are not finite numbers")


def _pieces(count: int, size: int = 1024) -> Iterator[slice]:
    """Slices of so many rows: what is computed between takes the memory of a piece."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _gptq(form: Quantisation, group: int, parts: dict[str, Tensor]) -> _Grouped:
    """Frantar et al. 2022, arXiv:2210.17323, stored as by AutoGPTQ; `g_idx` is the group of each of the K."""
    values = _unpacked(parts["qweight"].T, form.bits).flatten(1).T  # [K, N]
    # The offset was taken from whole words, so that a zero point of 0 borrows from its neighbour.
    offset = sum(form.zero_offset << place for place in range(0, _WORD, form.bits))
    zeros = _unpacked(parts["qzeros"] + offset, form.bits).flatten(1)
    groups = parts["g_idx"].long() if "g_idx" in parts else torch.arange(len(values)) // group
    if bool(((groups < 0) | (groups >= len(zeros))).any()):
        raise ValueError(f"has a g_idx with groups beyond the {len(zeros)} that there are")
    return _Grouped(values, zeros, parts["scales"], groups)


def _awq(group: int, parts: dict[str, Tensor]) -> _Grouped:
    """Lin et al. 2023, arXiv:2306.00978, in the order of its gemm kernels."""
    order = torch.tensor(_AWQ_ORDER)
    values, zeros = (_unpacked(parts[role], 4)[..., order].flatten(1) for role in ("qweight", "qzeros"))
    return _Grouped(values, zeros, parts["scales"], torch.arange(len(values)) // group)


def _by_rows(form: Quantisation, parts: dict[str, Tensor]) -> _Grouped:
    """Values and zero points are stored without their signs: half of the range is added to both."""
    values = _unpacked(parts["packed"], form.bits).flatten(1)
    if parts["shape"].tolist() != list(values.shape):
        raise ValueError(f"holds {list(values.shape)} values, its weight_shape says {parts['shape'].tolist()}")
    scales = parts["scale"].T
    if form.symmetric:
        zeros = torch.full(scales.shape, 1 << (form.bits - 1), dtype=torch.int32)
    else:
        zeros = _unpacked(parts["zero_point"].T, form.bits).flatten(1)[:, : len(values)]
    inputs = values.shape[1]
    groups = torch.arange(inputs) // (form.group_size or inputs)
    if "g_idx" in parts and bool((parts["g_idx"] >= 0).any()):  # -1 in all places: the usual order
        groups = parts["g_idx"].long()
    if bool(((groups < 0) | (groups >= len(scales))).any()):
        raise ValueError(f"has a g_idx with groups beyond the {len(scales)} that there are")
    return _Grouped(values.T, zeros, scales, groups)


def _times_scale(block: tuple[int, int] | None, parts: dict[str, Tensor]) -> Tensor:
    """Values of e4m3 or int8 with a scale for each block, each row, or the matrix."""
    weight, scale = parts["weight"], parts["scale"].float()
    _check_scales(scale)
    if block is None:
        return weight.float() * scale.reshape(-1, 1)
    wide = weight.float()
    for row, scales in enumerate(scale):
        rows = wide[row * block[0] : (row + 1) * block[0]]
        rows *= scales.repeat_interleave(block[1])[: wide.shape[1]]
    return wide


def _kept_with_scale(kind: StoredKind, block: tuple[int, int] | None, parts: dict[str, Tensor]) -> StoredMatrix:
    weight, scale = parts["weight"], parts["scale"].float()
    _check_scales(scale)
    rows, columns = weight.shape
    codes = weight.contiguous().view(torch.uint8)
    scales = scale.reshape(-1, 1).expand(rows, 1) if block is None else scale.repeat_interleave(block[0], dim=0)[:rows]
    group = columns if block is None else block[1]
    return StoredMatrix(kind=kind, codes=codes, group_size=group, scales=scales.contiguous())
