"""The C interface of the kernels for ctypes: one table of structures and one of functions.

Promises: mirrors kernels/csrc/ops.h exactly; a library whose structures have another memory layout is refused. Must not
know: tensors.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p


class LinearArgs(ctypes.Structure):
    """`struct Linear`: a packed matrix."""

    _fields_ = (
        ("kind", c_int32),
        ("gate_up", c_int32),
        ("n", c_int64),
        ("k", c_int64),
        ("columns", c_int64),
        ("packed", c_void_p),
        ("starts", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("bias", c_void_p),
        ("group", c_int64),
        ("scale_form", c_int32),
        ("offset_form", c_int32),
        ("table", c_void_p),
        ("parts", c_void_p),
        ("num_parts", c_int64),
    )
    kept: ctypes.Array[LinearArgs]  # the parts, which it keeps alive


class StoredRowsArgs(ctypes.Structure):
    """`struct StoredRows`: a matrix as others quantised it."""

    _fields_ = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("scale_units", c_void_p),
        ("offsets", c_void_p),
        ("offset_units", c_void_p),
    )
    kept: tuple[object, ...]  # keeps the memory at the addresses alive


class NormArgs(ctypes.Structure):
    """`struct Norm`."""

    _fields_ = (("weight", c_void_p), ("eps", c_float), ("as_float", c_int32), ("centred", c_int32))


class PoolArgs(ctypes.Structure):
    """`struct KvPool`."""

    _fields_ = (
        ("data", c_void_p),
        ("kind", c_int32),
        ("units", c_int32),
        ("num_blocks", c_int64),
        ("num_layers", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_bytes", c_int64),
    )


class ShapeArgs(ctypes.Structure):
    """`struct AttentionShape`: a layer's constants."""

    _fields_ = (
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("scale", c_float),
        ("norm_eps", c_float),
        ("softcap", c_float),
        ("row_norms", c_int32),
        ("v_norm", c_int32),
        ("bidirectional", c_int32),
        ("window", c_int64),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("sinks", c_void_p),
    )
    kept: tuple[object, ...]  # keeps the memory at the addresses alive


class StepArgs(ctypes.Structure):
    """`struct AttentionStep`."""

    _fields_ = (
        ("rows", c_int64),
        ("sequences", c_int64),
        ("table_width", c_int64),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
    )
    kept: tuple[object, ...]  # keeps the memory at the addresses alive


class LayerOpArgs(ctypes.Structure):
    """`struct LayerOp`: one op of a layer program."""

    _fields_ = (
        ("kind", c_int32),
        ("epilogue", c_int32),
        ("scale", c_float),
        ("group", c_int32),
        ("part", c_int32),
        ("layer", c_int64),
        ("site", c_int64),
        ("weight", c_void_p),
        ("norm", c_void_p),
        ("attention", c_void_p),
        ("rope", c_void_p),
        ("rope_rows", c_int64),
        ("routing", c_void_p),
        ("experts", c_void_p),
    )


class RoutingArgs(ctypes.Structure):
    """`struct Routing`."""

    _fields_ = (
        ("weight", c_void_p),
        ("selection_bias", c_void_p),
        ("expert_scales", c_void_p),
        ("norm", c_void_p),
        ("top_k", c_int32),
        ("scoring", c_int32),
        ("groups", c_int32),
        ("kept_groups", c_int32),
        ("best_of_group", c_int32),
        ("normalised", c_int32),
        ("least_sum", c_float),
        ("epsilon", c_float),
        ("scale", c_float),
    )
    kept: object  # keeps the memory at the addresses alive


class ExpertsArgs(ctypes.Structure):
    """`struct Experts`."""

    _fields_ = (
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("count", c_int64),
        ("inner", c_int64),
        ("activation", c_int32),
    )


class LowRankArgs(ctypes.Structure):
    """`struct LowRank`: what an adapter adds to one matrix."""

    _fields_ = (
        ("rank", c_int64),
        ("shrink", c_void_p),
        ("scales", c_void_p),
        ("expand", c_void_p),
        ("halves", c_void_p),
        ("per_expert", c_int64),
    )


class StepAdaptersArgs(ctypes.Structure):
    """`struct StepAdapters`: the adapters of a step's rows."""

    _fields_ = (("slots", c_void_p), ("adapters", c_void_p), ("count", c_int64))
    kept: tuple[object, ...]  # keeps the memory at the addresses alive


class _Layout(ctypes.Structure):
    """`struct Layout`: the place of a field; without a field's name of the structure; without any name the end."""

    _fields_ = (("structure", c_char_p), ("field", c_char_p), ("offset", c_int64), ("size", c_int64))


# By their names in C++.
STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "Linear": LinearArgs,
    "StoredRows": StoredRowsArgs,
    "Norm": NormArgs,
    "KvPool": PoolArgs,
    "AttentionShape": ShapeArgs,
    "AttentionStep": StepArgs,
    "LayerOp": LayerOpArgs,
    "Routing": RoutingArgs,
    "Experts": ExpertsArgs,
    "LowRank": LowRankArgs,
    "StepAdapters": StepAdaptersArgs,
}

# name: (result, arguments), in the order of ops.h, which names the arguments. Pointers are plain addresses: shapes are
# checked where the tensors are known.
SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "quire_layouts": (POINTER(_Layout), ()),
    "quire_variant": (c_char_p, ()),
    "quire_activations": (c_char_p, ()),
    "quire_create": (c_void_p, (c_int32, c_void_p)),
    "quire_destroy": (None, (c_void_p,)),
    "quire_threads": (c_int32, (c_void_p,)),
    "quire_fetch": (None, (c_void_p, c_int32)),
    "quire_join": (None, (c_void_p, c_int32, c_int32, c_void_p, c_void_p)),
    "quire_ranks_bytes": (c_int64, (c_int32,)),
    "quire_ranks_open": (c_void_p, (c_int32, c_int32, c_int32, c_double)),
    "quire_ranks_close": (None, (c_void_p,)),
    "quire_ranks_await": (c_int32, (c_void_p,)),
    "quire_ranks_waited": (None, (c_void_p, c_void_p)),
    "quire_ranks_gather": (c_int32, (c_void_p, c_void_p, c_int64, c_int64, c_void_p)),
    "quire_panel_count": (c_int64, (c_void_p,)),
    "quire_checksum": (c_int64, (c_void_p, c_int64)),
    "quire_commit": (c_int32, (c_void_p, c_void_p, c_int64)),
    "quire_lay_out": (c_int32, (c_void_p,) * 4),
    "quire_pack": (c_int32, (c_void_p,) * 4),
    "quire_pack_stored": (c_int32, (c_void_p,) * 4),
    "quire_stored_panel_bytes": (c_int64, (c_void_p,)),
    "quire_stored_rows": (c_int32, (*(c_void_p,) * 3, c_int64, c_void_p)),
    "quire_all_finite": (c_int32, (c_void_p, c_void_p, c_int64, c_void_p)),
    "quire_norm_linear": (c_int32, (*(c_void_p,) * 3, c_int64, c_void_p, c_void_p, c_int32, c_void_p, c_int64)),
    "quire_greedy": (c_int32, (*(c_void_p,) * 3, c_int64, *(c_void_p,) * 4)),
    "quire_linear_add": (c_int32, (*(c_void_p,) * 3, c_int64, c_float, *(c_void_p,) * 3, c_int64)),
    "quire_norm_add": (c_int32, (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_float, c_void_p)),
    "quire_mul_sigmoid": (c_int32, (c_void_p, c_void_p, c_int64, c_int64, c_void_p)),
    "quire_mix_experts": (c_int32, (*(c_void_p,) * 4, c_int64, c_void_p, c_float, *(c_void_p,) * 3, c_int64)),
    "quire_route": (c_int32, (c_void_p, c_void_p, c_int64, c_void_p, c_int64, *(c_void_p,) * 3)),
    "quire_given_experts": (c_int32, (*(c_void_p,) * 3, c_int64, c_int64, *(c_void_p,) * 3)),
    "quire_gate_rows": (c_int32, (*(c_void_p,) * 3, c_int64, c_void_p, c_int64, c_void_p)),
    "quire_rope_write": (c_int32, (*(c_void_p,) * 3, c_int64, *(c_void_p,) * 3, c_int64, c_void_p)),
    "quire_attention": (c_int32, (*(c_void_p,) * 3, c_int64, *(c_void_p,) * 3)),
    "quire_layers": (c_int32, (c_void_p, c_void_p, c_int64, *(c_void_p,) * 6)),
    "quire_probe_arithmetic": (c_int32, (c_void_p, c_int32, c_double, c_void_p)),
    "quire_probe_instruction": (c_char_p, (c_int32,)),
    "quire_probe_read": (c_int32, (c_void_p, c_int64, c_int32, c_void_p)),
}


def declare(library: ctypes.CDLL) -> None:
    """Set the types of every function of the library.

    AttributeError if one is missing, ValueError if a structure has another memory layout than its mirror here.
    """
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    compare_structures(library)


def compare_structures(library: ctypes.CDLL) -> None:
    """ValueError naming the first structure that the library and STRUCTURES describe differently."""
    compiled = _compiled_layouts(library)
    for name in sorted(compiled.keys() | STRUCTURES.keys()):
        here = _layout(STRUCTURES[name]) if name in STRUCTURES else None
        if compiled.get(name) != here:
            raise ValueError(f"struct {name} is {compiled.get(name)} in C++ and {here} in Python")


def _layout(structure: type[ctypes.Structure]) -> dict[str, tuple[int, int]]:
    """Offset and size of every field, and under the empty name of the whole."""
    fields = {name: getattr(structure, name) for name, *_ in structure._fields_}
    return {"": (0, ctypes.sizeof(structure))} | {name: (field.offset, field.size) for name, field in fields.items()}


def _compiled_layouts(library: ctypes.CDLL) -> dict[str, dict[str, tuple[int, int]]]:
    layouts: dict[str, dict[str, tuple[int, int]]] = {}
    for entry in library.quire_layouts():
        if entry.structure is None:
            break
        field = (entry.field or b"").decode()
        layouts.setdefault(entry.structure.decode(), {})[field] = entry.offset, entry.size
    return layouts
