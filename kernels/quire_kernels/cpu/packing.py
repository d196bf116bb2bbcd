"""Weight matrices in the form of the C++ kernels: packed, perhaps quantised, in memory of the caller.

Promises: a packed matrix keeps its memory alive and never refers to the tensor that it came from. Must not know:
layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quire_kernels.cpu.context import Context
from quire_kernels.cpu.signatures import LinearArgs
from quire_kernels.cpu.stored import (
    K_MULTIPLE,
    LEAST_GROUP,
    MOST_PARTS,
    PANEL_ROWS,
    STACKED,
    STORED_KINDS,
    OffsetForm,
    ScaleForm,
    StoredForm,
    in_one_form,
    in_parts,
)
from quire_kernels.kernel_set import Quantization
from quire_kernels.packed_form import Allocate, PackedForm, PackGateUp, PackLinear, PackStored
from quire_kernels.stored import UNIT_COLUMNS, StoredMatrix

# Version of the packed bytes of all kinds; files of other versions are packed anew.
PACKING_VERSION = 1

# The memory of a matrix, by its names in C++, and what it holds; not every kind has all.
_PARTS = {
    "packed": torch.uint8,
    "starts": torch.int64,
    "scales": torch.float32,
    "sums": torch.int32,
    "bias": torch.float32,
    "table": torch.bfloat16,
}
_MAX_K = 65536  # sums of products of bytes must fit into int32
_ALIGNMENT = 64
_TABLE = 32  # entries of the table of nibbles
_FORM = ("kind", "group", "scale_form", "offset_form")  # facts of kinds that others quantised, as in `StoredForm`


class WeightKind(NamedTuple):
    """How weights are held: one of `enum WeightKind` in C++."""

    number: int  # there
    group_bytes: int  # of K_MULTIPLE values of a row, at most
    lane_parts: tuple[str, ...] = ()  # what is kept for every output row

    @property
    def bits(self) -> float:
        """The bits of one value, at most."""
        return self.group_bytes * 8 / K_MULTIPLE


KINDS: dict[Quantization | None, WeightKind] = {
    None: WeightKind(0, 2 * K_MULTIPLE),
    "int8": WeightKind(1, K_MULTIPLE, ("scales", "sums")),
    "int4": WeightKind(2, K_MULTIPLE // 2 + 1, ("scales",)),  # a group has a byte of scale
}


class PackedLinear(NamedTuple):
    """A packed matrix. `address` is that of `args`, the structure for C++; the other fields keep memory alive."""

    address: int
    num_outputs: int  # columns of the op's result: I for a gate-up pair
    num_inputs: int
    gate_up: bool
    args: LinearArgs
    parts: dict[str, Tensor]  # the memory that `args` points to

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.parts.values())


class Packer:
    """Packs matrices with the workers of one context."""

    def __init__(self, context: Context, quantization: Quantization | None, allocate: Allocate) -> None:
        self._context = context
        self._library = context.library
        self._kind = KINDS[quantization]
        self._allocate = allocate

    def linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """[N, K] bfloat16 and [N]."""
        n, k = weight.shape
        return self._pack((weight,), n, k, _lane_biases(bias, gate_up=False))

    def gate_up(self, gate: Tensor, up: Tensor, bias: Tensor | None) -> PackedLinear:
        """[I, K] bfloat16 twice and [2 I]. A panel is 32 rows of the gate, then the same 32 of up."""
        if gate.shape != up.shape:
            raise ValueError(f"gate {list(gate.shape)} and up {list(up.shape)} must have one shape")
        inner, k = gate.shape
        return self._pack((gate, up), 2 * inner, k, _lane_biases(bias, gate_up=True))

    def stored(self, matrices: Sequence[Sequence[StoredMatrix]], bias: Tensor | None) -> PackedLinear | None:
        """One matrix as others quantised it, or gate and up, each as rows one below the other, and [N] or [2 I].

        None: there is no form for them.
        """
        parts = in_parts(matrices)
        if len(parts) == 1:
            return self._stored(parts[0], bias)
        if not parts:
            return None
        biases = _lane_biases(bias, gate_up=False)
        kept = None if biases is None else self._memory("bias", len(biases)).copy_(biases)
        return _stacked([self._stored(part, None) for part in parts], kept)

    def _stored(self, matrices: Sequence[StoredMatrix], bias: Tensor | None) -> PackedLinear:
        """Pack matrices that have one form."""
        n, k = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
        gate_up = len(matrices) > 1
        if gate_up and matrices[0].shape != matrices[1].shape:
            raise ValueError("gate and up must have one shape")
        _check_size(n, k)
        made = in_one_form(matrices)
        args = _arguments(made.form.kind, n, k, gate_up=gate_up)
        _set_form(args, made.form)
        lanes = _lanes(self._library, args)
        parts = {"starts": self._memory("starts", lanes // PANEL_ROWS + 1)}
        if made.table is not None:
            parts["table"] = self._memory("table", _TABLE).copy_(made.table)
        _point(args, parts)
        if self._library.quire_lay_out(self._context.handle, ctypes.addressof(args), None, None):
            raise MemoryError("packing a weight matrix")
        parts["packed"] = self._memory("packed", int(parts["starts"][-1]))
        biases = _lane_biases(bias, gate_up=gate_up)
        if biases is not None:
            parts["bias"] = self._memory("bias", lanes).copy_(biases)
        _point(args, parts)
        rows = [ctypes.addressof(each) for each in made.rows]
        operands = (self._context.handle, ctypes.addressof(args), rows[0], rows[1] if gate_up else None)
        if self._library.quire_pack_stored(*operands):
            raise MemoryError("packing a weight matrix")
        return _packed(args, parts)

    def _pack(self, sources: tuple[Tensor, ...], n: int, k: int, bias: Tensor | None) -> PackedLinear:
        for source in sources:
            _check(source)
        _check_size(n, k)
        gate_up = len(sources) > 1
        args = _arguments(self._kind.number, n, k, gate_up=gate_up)
        lanes = _lanes(self._library, args)
        sources = tuple(source.contiguous() for source in sources)
        operands = (
            self._context.handle,
            ctypes.addressof(args),
            sources[0].data_ptr(),
            sources[1].data_ptr() if gate_up else None,
        )
        parts = {"starts": self._memory("starts", lanes // PANEL_ROWS + 1)}
        _point(args, parts)
        if self._library.quire_lay_out(*operands):
            raise MemoryError("packing a weight matrix")
        parts["packed"] = self._memory("packed", int(parts["starts"][-1]))
        parts |= {name: self._memory(name, lanes) for name in self._kind.lane_parts}
        if bias is not None:
            parts["bias"] = self._memory("bias", lanes).copy_(bias)
        _point(args, parts)
        if self._library.quire_pack(*operands):
            raise MemoryError("packing a weight matrix")
        return _packed(args, parts)

    def _memory(self, part: str, length: int) -> Tensor:
        dtype = _PARTS[part]
        return self._allocate(length * dtype.itemsize).view(dtype)


def packed_form(context: Context, quantization: Quantization | None) -> PackedForm:
    """The packed form of the matrices of a context's kernel set."""
    library, kind = context.library, KINDS[quantization]

    def packer(allocate: Allocate) -> tuple[PackLinear, PackGateUp]:
        packing = Packer(context, quantization, allocate)
        return packing.linear, packing.gate_up

    def stored_packer(allocate: Allocate) -> PackStored:
        return Packer(context, quantization, allocate).stored

    def all_finite(values: Tensor) -> bool:
        _check(values)
        values, finite = values.contiguous(), ctypes.c_uint8()
        if library.quire_all_finite(context.handle, values.data_ptr(), values.numel(), ctypes.byref(finite)):
            raise MemoryError("checking a weight matrix")
        return bool(finite.value)

    return PackedForm(
        name=f"{PACKING_VERSION} {library.quire_variant().decode()} {quantization or 'bf16'}",
        packer=packer,
        stored_packer=stored_packer,
        most_bytes=partial(_most_bytes, kind),
        facts=_facts,
        parts=lambda weight: dict(weight.parts),
        restore=lambda facts, parts: _restored(library, kind, facts, parts),
        all_finite=all_finite,
        checksum=library.quire_checksum,
    )


def _stacked(parts: Sequence[PackedLinear], bias: Tensor | None) -> PackedLinear:
    """Matrices that others quantised, one below the other; all but the last have whole panels."""
    args = _arguments(STACKED, sum(part.args.n for part in parts), parts[0].args.columns, gate_up=False)
    below = (LinearArgs * len(parts))(*(part.args for part in parts))
    args.parts, args.num_parts, args.kept = ctypes.addressof(below), len(parts), below
    memory = {f"{place}.{name}": tensor for place, part in enumerate(parts) for name, tensor in part.parts.items()}
    if bias is not None:
        args.bias, memory["bias"] = bias.data_ptr(), bias
    return _packed(args, memory)


def _facts(weight: PackedLinear) -> dict[str, int]:
    facts = _facts_of(weight.args)
    if weight.args.kind == STACKED:
        for place, part in enumerate(weight.args.kept):
            facts |= {f"{place}.{name}": value for name, value in _facts_of(part).items()}
    return facts


def _facts_of(args: LinearArgs) -> dict[str, int]:
    form = _FORM if args.kind in STORED_KINDS.values() else ("kind", "num_parts") if args.kind == STACKED else ()
    return {name: getattr(args, name) for name in ("gate_up", "n", "columns", *form)}


def _restored_stack(
    library: ctypes.CDLL, kind: WeightKind, facts: Mapping[str, int], memory: Mapping[str, Tensor]
) -> PackedLinear:
    """Restore a packed stack, like `_restored`, whose parts are of several kinds."""
    n, k, gate_up, count = (facts.get(name, 0) for name in ("n", "columns", "gate_up", "num_parts"))
    if gate_up or not 1 < count <= MOST_PARTS:
        raise ValueError(f"there is no packed matrix of {count} parts")
    parts = []
    for place in range(count):
        of_part = {name.removeprefix(f"{place}."): fact for name, fact in facts.items() if name.startswith(f"{place}.")}
        if of_part.get("kind") not in STORED_KINDS.values() or of_part["columns"] != k or of_part["gate_up"]:
            raise ValueError(f"a part of a packed matrix of {n} x {k} is none of rows that others quantised")
        parts_memory = {
            name.removeprefix(f"{place}."): tensor for name, tensor in memory.items() if name.startswith(f"{place}.")
        }
        parts.append(_restored(library, kind, of_part, parts_memory))
    if sum(part.args.n for part in parts) != n or any(part.args.n % PANEL_ROWS for part in parts[:-1]):
        raise ValueError(f"the parts of a packed matrix of {n} x {k} do not fit together")
    bias = memory["bias"].view(_PARTS["bias"]) if "bias" in memory else None
    packed = _stacked(parts, bias)
    if packed.parts.keys() != memory.keys() or any("bias" in part.parts for part in parts):
        raise ValueError(f"a packed matrix has {', '.join(packed.parts)}, not {', '.join(memory)}")
    if bias is not None and len(bias) != _lanes(library, packed.args):
        raise ValueError(f"bias of a packed matrix of {n} x {k} takes {bias.nbytes} bytes")
    return packed


def _restored(
    library: ctypes.CDLL, kind: WeightKind, facts: Mapping[str, int], memory: Mapping[str, Tensor]
) -> PackedLinear:
    """A matrix from its memory, after a look at all that C++ takes on trust."""
    if facts.get("kind") == STACKED:
        return _restored_stack(library, kind, facts, memory)
    n, k, gate_up = (facts[name] for name in ("n", "columns", "gate_up"))
    if not 0 < k <= _MAX_K or n <= 0 or gate_up not in (0, 1):
        raise ValueError(f"there is no packed matrix of {n} x {k}")
    form = _form_of(facts) if "kind" in facts else None
    args = _arguments(kind.number if form is None else form.kind, n, k, gate_up=bool(gate_up))
    lanes = _lanes(library, args)
    lengths = {"starts": lanes // PANEL_ROWS + 1}
    if form is None:
        lengths |= dict.fromkeys(kind.lane_parts, lanes)
    else:
        _set_form(args, form)
        if form.kind == STORED_KINDS["nibbles"]:
            lengths["table"] = _TABLE
    if "bias" in memory:
        lengths["bias"] = lanes
    if memory.keys() != {"packed", *lengths}:
        raise ValueError(f"a packed matrix has {', '.join(lengths)}, not {', '.join(memory)}")
    for name, length in lengths.items():
        if memory[name].nbytes != length * _PARTS[name].itemsize:
            raise ValueError(f"{name} of a packed matrix of {n} x {k} takes {memory[name].nbytes} bytes")
    parts = {name: tensor.view(_PARTS[name]) for name, tensor in memory.items()}
    starts = parts["starts"]
    if starts[0] != 0 or starts[-1] != len(parts["packed"]) or bool((starts % _ALIGNMENT).any()):
        raise ValueError(f"the panels of a packed matrix of {n} x {k} are not where they should be")
    if bool((starts.diff() <= 0).any()):
        raise ValueError(f"the panels of a packed matrix of {n} x {k} do not follow each other")
    if form is not None and bool((starts.diff() != library.quire_stored_panel_bytes(ctypes.addressof(args))).any()):
        raise ValueError(f"the panels of a packed matrix of {n} x {k} have another size")
    _point(args, parts)
    return _packed(args, parts)


def _form_of(facts: Mapping[str, int]) -> StoredForm:
    kind, group, scale, offset = (facts[name] for name in _FORM)
    if kind not in STORED_KINDS.values() or (group != LEAST_GROUP and (group <= 0 or group % K_MULTIPLE)):
        raise ValueError(f"there is no packed matrix of kind {kind} in groups of {group}")
    form = StoredForm(kind, group, ScaleForm(scale), OffsetForm(offset))
    if form.has_units and UNIT_COLUMNS % group:
        raise ValueError(f"groups of {group} columns have no units")
    return form


def _set_form(args: LinearArgs, form: StoredForm) -> None:
    args.group, args.scale_form, args.offset_form = form.group, form.scale_form, form.offset_form


def _arguments(kind: int, n: int, k: int, *, gate_up: bool) -> LinearArgs:
    return LinearArgs(kind=kind, gate_up=int(gate_up), n=n, k=-(-k // K_MULTIPLE) * K_MULTIPLE, columns=k)


def _lanes(library: ctypes.CDLL, args: LinearArgs) -> int:
    return int(library.quire_panel_count(ctypes.addressof(args))) * PANEL_ROWS


def _point(args: LinearArgs, parts: Mapping[str, Tensor]) -> None:
    for name, tensor in parts.items():
        setattr(args, name, tensor.data_ptr())


def _packed(args: LinearArgs, parts: dict[str, Tensor]) -> PackedLinear:
    outputs = args.n // 2 if args.gate_up else args.n
    return PackedLinear(ctypes.addressof(args), outputs, args.columns, bool(args.gate_up), args, parts)


def _most_bytes(kind: WeightKind, rows: int, columns: int) -> int:
    """A gate-up pair may have one panel more than its rows fill; what is coded is smaller than what it is made of."""
    panels = -(-rows // PANEL_ROWS) + 1
    groups = -(-columns // K_MULTIPLE)
    of_a_lane = groups * kind.group_bytes + sum(_PARTS[name].itemsize for name in ("scales", "sums", "bias"))
    starts = (panels + 1) * _PARTS["starts"].itemsize
    return panels * PANEL_ROWS * of_a_lane + starts + len(_PARTS) * _ALIGNMENT


def _check_size(n: int, k: int) -> None:
    if not 0 < k <= _MAX_K or n == 0:
        raise ValueError(f"a matrix of {n} x {k} cannot be packed; at most {_MAX_K} columns are possible")


def _check(source: Tensor) -> None:
    if source.dtype != torch.bfloat16 or source.device.type != "cpu":
        raise ValueError(f"weights must be bfloat16 on the CPU, not {source.dtype} on {source.device}")


def _lane_biases(bias: Tensor | None, *, gate_up: bool) -> Tensor | None:
    """Return biases in the order of the panels' lanes: 32 of a gate, then those of the same rows of up."""
    if bias is None:
        return None
    if not gate_up:
        return _padded(bias, PANEL_ROWS)
    half = PANEL_ROWS // 2
    return torch.stack([_padded(part, half).view(-1, half) for part in bias.chunk(2)], dim=1).flatten()


def _padded(values: Tensor, multiple: int) -> Tensor:
    """Return the values in float32, with zeros up to a multiple of `multiple`."""
    padded = torch.zeros(-(-len(values) // multiple) * multiple, dtype=torch.float32)
    padded[: len(values)] = values
    return padded
