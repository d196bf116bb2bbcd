"""The C interface of the kernels as ctypes sees it: structures and argument types, one table.

Promises: mirrors kernels/csrc exactly; every op returns 0, or 1 when memory ran out.
Must not know: tensors, how the library is found.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p


class LinearArgs(ctypes.Structure):
    """`struct Linear` of gemm.h: a packed matrix."""

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
    )


# name: (result, arguments). Pointers are plain addresses: their shapes are checked where the tensors are known.
SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "quire_variant": (c_char_p, ()),
    "quire_create": (c_void_p, (c_int32, c_void_p)),
    "quire_destroy": (None, (c_void_p,)),
    "quire_threads": (c_int32, (c_void_p,)),
    "quire_commit": (c_int32, (c_void_p, c_void_p, c_int64)),
    "quire_panel_count": (c_int64, (c_void_p,)),
    "quire_lay_out": (c_int32, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "quire_pack": (c_int32, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "quire_norm_linear": (c_int32, (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_float, c_void_p, c_int32)),
    "quire_greedy": (c_int32, (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_float, c_void_p, c_void_p)),
    "quire_linear_add": (c_int32, (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p)),
    # (context, shape, pool, layer, step, qkv, rope, rows of rope, q)
    "quire_rope_write": (c_int32, (*(c_void_p,) * 3, c_int64, *(c_void_p,) * 3, c_int64, c_void_p)),
    # (context, shape, pool, layer, step, q, out)
    "quire_attention": (c_int32, (*(c_void_p,) * 3, c_int64, *(c_void_p,) * 3)),
    # (context, layers, their count, eps, pool, step, rope, rows of rope, sampled rows' step or null, their places, x)
    "quire_layers": (c_int32, (c_void_p, c_void_p, c_int64, c_float, *(c_void_p,) * 3, c_int64, *(c_void_p,) * 3)),
}


def declare(library: ctypes.CDLL) -> None:
    """Give every function of the library its types. AttributeError if one is missing."""
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
