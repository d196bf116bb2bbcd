"""A matrix as others quantised it, in the neutral form that the readers of formats give and kernel sets pack.

Promises: `dequantised` is the specification: float32, rounded once by a product and once by a sum. Must not know: the
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

# Four bits through a table; signed bytes; floats of sign, four bits of exponent and three of mantissa.
StoredKind = Literal["nibbles", "bytes", "e4m3"]
UNIT_COLUMNS = 256  # that share a unit
_VALUES_AT_ONCE = 1 << 22  # that are made into floats


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """A matrix [N, K] in G groups of `group_size` columns, the last one perhaps shorter.

    weight = (value of the code - zero point) * scale + offset, where only one of zero points and offsets may be there.
    Scales and offsets are floats, or int8 that multiply a float16 for every 256 columns.
    """

    kind: StoredKind
    codes: Tensor  # [N, K] uint8: 0..15, or the bits of the byte
    group_size: int
    scales: Tensor  # [N, G] float32, float16, bfloat16 or int8
    table: tuple[float, ...] = ()  # nibbles: 16 values
    scale_units: Tensor | None = None  # [N, ceil(K / 256)] float16; scales are int8
    zero_points: Tensor | None = None  # [N, G] int8
    offsets: Tensor | None = None  # [N, G], as scales
    offset_units: Tensor | None = None

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        groups = (rows, -(-columns // self.group_size))
        units = (rows, -(-columns // UNIT_COLUMNS))
        if self.codes.dtype is not torch.uint8 or (len(self.table) == 16) != (self.kind == "nibbles"):
            raise ValueError(
                f"a stored matrix of {self.kind} has codes of {self.codes.dtype}, {len(self.table)} values"
            )
        if self.zero_points is not None and (self.offsets is not None or self.zero_points.dtype is not torch.int8):
            raise ValueError("a stored matrix has zero points of int8, or offsets")
        for values, unit in ((self.scales, self.scale_units), (self.offsets, self.offset_units)):
            if (values is not None and values.dtype is torch.int8) != (unit is not None):
                raise ValueError("scales and offsets of a stored matrix have units if they are int8")
            if unit is not None and (tuple(unit.shape) != units or unit.dtype is not torch.float16):
                raise ValueError(f"units of a stored matrix are {unit.dtype} {list(unit.shape)}, not {list(units)}")
            if unit is not None and UNIT_COLUMNS % self.group_size:
                raise ValueError(f"groups of {self.group_size} columns have no units")
        for values in (self.scales, self.zero_points, self.offsets):
            if values is not None and tuple(values.shape) != groups:
                raise ValueError(f"a stored matrix has scales {list(values.shape)}, not {list(groups)}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def over_rows(self, change: Callable[[Tensor], Tensor]) -> StoredMatrix:
        """With `change` made to the rows of every part: a choice of them, or another order."""
        return self.with_parts(lambda name: change(getattr(self, name)))

    def with_parts(self, made: Callable[[str], Tensor]) -> StoredMatrix:
        """With other tensors in the place of those that it has, by their names."""
        names = ("codes", "scales", "scale_units", "zero_points", "offsets", "offset_units")
        changes: dict[str, Any] = {name: made(name) for name in names if getattr(self, name) is not None}
        return replace(self, **changes)

    def dequantised(self) -> Tensor:
        """[N, K] float32."""
        wide = torch.empty(self.shape)
        step = max(1, _VALUES_AT_ONCE // self.shape[1])
        for start in range(0, self.shape[0], step):
            rows = slice(start, start + step)
            wide[rows] = self.over_rows(lambda part, rows=rows: part[rows])._numbers_of_codes()  # type: ignore[misc]
        return wide

    def _numbers_of_codes(self) -> Tensor:
        if self.kind == "nibbles":
            values = torch.tensor(self.table)[self.codes.int()]
        elif self.kind == "bytes":
            values = self.codes.view(torch.int8).float()
        else:
            values = self.codes.view(torch.float8_e4m3fn).float()
        if self.zero_points is not None:
            values = values - self._of_columns(self.zero_points.float())
        values = values * self._of_columns(self._numbers(self.scales, self.scale_units))
        if self.offsets is None:
            return values
        return values + self._of_columns(self._numbers(self.offsets, self.offset_units))

    def _numbers(self, values: Tensor, units: Tensor | None) -> Tensor:
        """[N, G] float32."""
        if units is None:
            return values.float()
        of_groups = units.float().repeat_interleave(UNIT_COLUMNS // self.group_size, dim=1)
        return values.float() * of_groups[:, : values.shape[1]]

    def _of_columns(self, of_groups: Tensor) -> Tensor:
        return of_groups.repeat_interleave(self.group_size, dim=1)[:, : self.codes.shape[1]]


def joined(matrices: Sequence[StoredMatrix]) -> StoredMatrix | None:
    """One below the other; None: they differ in more than their numbers."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    if any(form_of(each) != form_of(first) for each in matrices):
        return None
    return first.with_parts(lambda name: torch.cat([getattr(each, name) for each in matrices]))


def form_of(matrix: StoredMatrix) -> tuple[object, ...]:
    """All that matrices must have in common to be rows of one."""
    parts = (matrix.scale_units, matrix.zero_points, matrix.offsets, matrix.offset_units)
    return (
        matrix.kind,
        matrix.codes.shape[1],
        matrix.group_size,
        matrix.table,
        matrix.scales.dtype is torch.int8,
        *(part is None for part in parts),
    )
