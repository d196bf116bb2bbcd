"""The small matrices of a checkpoint that the server itself multiplies: a classifier's head, and dense modules.

Only the bytes of one tensor are read, from a safetensors file. Must not know: requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire_engine.contract.errors import ModelLoadError
from quire_engine.plain_files import open_plain, read_plain

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER = 100 << 20  # bytes; the format's own limit
_MAX_VALUES = 1 << 28
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A linear layer, applied to one row."""

    weight: NDArray[np.float64]  # [N, H]
    bias: NDArray[np.float64] | None = None  # [N]
    is_tanh: bool = False

    @classmethod
    def read(cls, folder: Path, name: str, *, is_tanh: bool = False) -> Projection:
        """`name`.weight and, where it exists, `name`.bias, of a folder's files. Raises ModelLoadError."""
        weight, bias = _tensor(folder, f"{name}.weight"), _tensor(folder, f"{name}.bias")
        if weight is None or weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            raise ModelLoadError(f"{folder}: the tensor {name}.weight is missing or has another shape than expected")
        return cls(weight=weight, bias=bias, is_tanh=is_tanh)

    @property
    def size(self) -> int:
        """The length of what `apply` gives."""
        return len(self.weight)

    def apply(self, values: Sequence[float]) -> list[float]:
        import numpy as np  # noqa: PLC0415 - only servers with such a checkpoint need it

        row = self.weight @ np.asarray(values)
        row = row if self.bias is None else row + self.bias
        shown: list[float] = (np.tanh(row) if self.is_tanh else row).tolist()
        return shown


def _tensor(folder: Path, name: str) -> NDArray[np.float64] | None:
    """The tensor, or None where the folder has none of that name. Raises ModelLoadError."""
    import numpy as np  # noqa: PLC0415

    file = folder / _SINGLE
    try:
        if (folder / _INDEX).is_file():
            shard = json.loads(read_plain(folder / _INDEX))["weight_map"].get(name)
            if shard is None:
                return None
            file = folder / Path(str(shard)).name
        with open_plain(file) as source:
            length = int.from_bytes(source.read(8), "little")
            if length > _MAX_HEADER:
                raise ValueError("its header is too long")
            entry = json.loads(source.read(length)).get(name)
            if entry is None:
                return None
            start, end = entry["data_offsets"]
            kind = np.dtype(_TYPES[entry["dtype"]])
            if not 0 <= start <= end <= start + _MAX_VALUES * kind.itemsize:
                raise ValueError(f"the tensor {name} is too large")
            source.seek(8 + length + start)
            values = np.frombuffer(source.read(end - start), dtype=kind).reshape(entry["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{file}: cannot be read: {error}") from error
    if entry["dtype"] == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)
