"""The interface of a library of flash attention, before and after it is loaded: `Library` and `Loaded`.

Promises: only `load` imports anything.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from quire_kernels.flash.part import Part
from quire_kernels.kernel_set import AttentionShape, KVFormat
from quire_kernels.provider import Unavailable

# (q [t, Hq, D], K and V of one layer [blocks, page, Hkv, D], shape, part) -> [t, Hq, D]. Of K and V only the last
# dimension is contiguous: they are views of the pool.
Attend = Callable[[Tensor, Tensor, Tensor, AttentionShape, Part], Tensor]

LEAST_CAPABILITY = (8, 0)
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A library ready to compute."""

    version: str
    attend: Attend
    decodes_apart: bool  # whether single rows are faster in a call of their own
    decodes: bool = True  # whether it computes those; else the kernels' own attention does
    windows: bool = True  # whether it computes layers with a window; the same
    needs_one_piece: bool = False  # whether it asks a part for the places of its keys, one after the other


class Library(Protocol):
    name: str

    def why_not(self, kv: KVFormat, capability: tuple[int, int]) -> str | None:
        """Why it cannot compute over such a pool on such a GPU; None if it can. A clause that completes "NAME"."""
        ...

    def load(self) -> Loaded:
        """Import it. Raises Unavailable with a clause that completes "NAME"."""
        ...


def unsupported(kv: KVFormat, capability: tuple[int, int]) -> str | None:
    """Reasons that hold for every library."""
    if capability < LEAST_CAPABILITY:
        return f"needs a GPU of compute capability {_dotted(LEAST_CAPABILITY)}, this one has {_dotted(capability)}"
    if kv.head_dim % 8 or not 8 <= kv.head_dim <= MAX_HEAD_DIM:
        return f"takes heads whose width is a multiple of 8 up to {MAX_HEAD_DIM}, not head_dim {kv.head_dim}"
    return None


def whole_pages(kv: KVFormat, multiple: int) -> str | None:
    """The refusal of a library that needs blocks of a multiple of `multiple` tokens."""
    if kv.block_size % multiple == 0:
        return None
    return f"takes blocks of a multiple of {multiple} tokens, not {kv.block_size} (set block_size to {multiple})"


def require_parameters(function: Callable[..., Any], names: Iterable[str]) -> None:
    """Raise Unavailable if the function lacks one of these keywords, because its version is unknown."""
    try:
        missing = set(names) - set(inspect.signature(function).parameters)
    except ValueError:  # a function without a signature
        missing = set(names)
    if missing:
        name = getattr(function, "__name__", "its function")
        raise Unavailable(f"is of a version without what is needed: {name} takes no {', '.join(sorted(missing))}")


def window_of(shape: AttentionShape) -> tuple[int, int]:
    """The numbers of visible positions before and after a row's own, in the libraries' form; -1 is any number."""
    return (-1, -1) if shape.window is None else (shape.window - 1, 0)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
