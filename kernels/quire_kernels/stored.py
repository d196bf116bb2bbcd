"""A matrix as others quantised it, in the neutral form that the readers of formats give and kernel sets pack.

Promises: `dequantised` is the specification: float32, rounded once by a product and once by a sum. Must not know: the
engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

# Four bits through a table; signed integers of six and of eight bits; floats of sign, four bits of exponent, three of
# mantissa.
StoredKind = Literal["nibbles", "six_bits", "bytes", "e4m3"]
UNIT_COLUMNS = 256  # that share a unit
_LEAST_COMMON_GROUP, _SIX_BITS = 16, 6
_E4M3_NAN = 0x7F  # beside its sign
_LARGEST = {"six_bits": 32.0, "bytes": 128.0, "e4m3": 448.0}
_VALUES_AT_ONCE = 1 << 22  # that are made into floats
_NUMBERS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """A matrix [N, K] in G groups of `group_size` columns, the last one perhaps shorter.

    weight = (value of the code - zero point) * scale + offset, where only one of zero points and offsets may be there.
    Scales and offsets are floats, or int8 that multiply a float16 for every 256 columns.
    """

    kind: StoredKind
    codes: Tensor  # [N, K] uint8: 0..15, or the bits of the byte, which for six bits has a value from -32 to 31
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
        """Return the matrix with `change` made to the rows of every part: a choice of them, or another order."""
        return self.with_parts(lambda name: change(getattr(self, name)))

    def with_parts(self, made: Callable[[str], Tensor]) -> StoredMatrix:
        """Return the matrix with other tensors in the place of those that it has, by their names."""
        names = ("codes", "scales", "scale_units", "zero_points", "offsets", "offset_units")
        changes: dict[str, Any] = {name: made(name) for name in names if getattr(self, name) is not None}
        return replace(self, **changes)

    def to(self, device: torch.device) -> StoredMatrix:
        """Return the matrix with all parts on a device."""
        return self.with_parts(lambda name: getattr(self, name).to(device))

    def dequantised(self) -> Tensor:
        """[N, K] float32."""
        wide = torch.empty(self.shape, device=self.codes.device)
        step = max(1, _VALUES_AT_ONCE // self.shape[1])
        for start in range(0, self.shape[0], step):
            rows = slice(start, start + step)
            wide[rows] = self.over_rows(lambda part, rows=rows: part[rows])._numbers_of_codes()  # type: ignore[misc]
        return wide

    def in_floats(self, name: Literal["scales", "offsets"]) -> StoredMatrix:
        """Return the matrix with floats for integers with units: their products are exact in float32."""
        values, units = getattr(self, name), f"{name.removesuffix('s')}_units"
        if values is None:
            return self
        changes: dict[str, Any] = {name: self._numbers(values, getattr(self, units)), units: None}
        return replace(self, **changes)

    def is_finite(self) -> bool:
        """Whether every number is finite; scales that are finite may still give numbers that are not."""
        if self.kind == "e4m3" and bool(((self.codes & _E4M3_NAN) == _E4M3_NAN).any()):
            return False
        largest = max(map(abs, self.table)) if self.kind == "nibbles" else _LARGEST[self.kind]
        largest += 0.0 if self.zero_points is None else _largest(self.zero_points)
        largest *= _largest(self.scales) * (1.0 if self.scale_units is None else _largest(self.scale_units))
        if self.offsets is not None:
            largest += _largest(self.offsets) * (1.0 if self.offset_units is None else _largest(self.offset_units))
        return largest < torch.finfo(torch.float32).max or bool(torch.isfinite(self.dequantised()).all())

    def _numbers_of_codes(self) -> Tensor:
        if self.kind == "nibbles":
            values = torch.tensor(self.table, device=self.codes.device)[self.codes.int()]
        elif self.kind in {"bytes", "six_bits"}:
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


def _largest(values: Tensor) -> float:
    """The largest distance from 0; NaN if one is."""
    if not values.numel():
        return 0.0
    low, high = (float(bound) for bound in torch.aminmax(values))  # NaN is both bounds
    return max(-low, high)


def joined(matrices: Sequence[StoredMatrix]) -> StoredMatrix | None:
    """One below the other; None: there is no form that has the numbers of all."""
    if len(matrices) == 1:
        return matrices[0]
    alike = in_common_form(matrices)
    if alike is None:
        return None
    return alike[0].with_parts(lambda name: torch.cat([getattr(each, name) for each in alike]))


def in_common_form(matrices: Sequence[StoredMatrix]) -> list[StoredMatrix] | None:
    """Return the same numbers in one form: codes as wide as the widest, groups as small as the smallest.

    None: there is no such form.
    """
    first = matrices[0]
    if all(form_of(each) == form_of(first) for each in matrices):
        return list(matrices)
    group = math.gcd(*(each.group_size for each in matrices))
    if group < _LEAST_COMMON_GROUP or any(not _may_change(each, first.shape[1]) for each in matrices):
        return None
    found = [_in_groups_of(each, group) for each in matrices]
    if any((each.kind, each.table) != (first.kind, first.table) for each in found):
        small = all(each.kind == "six_bits" or _fits(each.table, _SIX_BITS) for each in found)
        found = [_in_whole_numbers(each, "six_bits" if small else "bytes") for each in found]
    if any(each.scale_units is None for each in found):
        found = [each.in_floats("scales") for each in found]
    if all(each.offsets is None for each in found):
        return found
    in_units = all(each.offsets is None or each.offset_units is not None for each in found)
    return [_with_offsets(each if in_units else each.in_floats("offsets"), in_units=in_units) for each in found]


def _may_change(matrix: StoredMatrix, columns: int) -> bool:
    """Whether codes are or stand for bytes, and groups can be cut."""
    whole = matrix.kind in {"bytes", "six_bits"} or _fits(matrix.table, 8)
    return whole and matrix.zero_points is None and matrix.shape[1] == columns and columns % matrix.group_size == 0


def _fits(table: tuple[float, ...], bits: int) -> bool:
    """Whether there is a table, of signed integers of so many bits."""
    most = 1 << (bits - 1)
    return bool(table) and all(value == int(value) and -most <= value < most for value in table)


def _in_groups_of(matrix: StoredMatrix, group_size: int) -> StoredMatrix:
    if matrix.group_size == group_size:
        return matrix
    parts = {name: getattr(matrix, name) for name in ("scales", "offsets")}
    times = matrix.group_size // group_size
    changes = {name: part.repeat_interleave(times, dim=1) for name, part in parts.items() if part is not None}
    return replace(matrix, group_size=group_size, **changes)


def _in_whole_numbers(matrix: StoredMatrix, kind: Literal["six_bits", "bytes"]) -> StoredMatrix:
    """Return the matrix with codes that are the values themselves."""
    if not matrix.table:
        return replace(matrix, kind=kind)
    values = torch.tensor(matrix.table).to(torch.int8).view(torch.uint8)
    return replace(matrix, kind=kind, table=(), codes=values[matrix.codes.int()])


def _with_offsets(matrix: StoredMatrix, *, in_units: bool) -> StoredMatrix:
    """Return the matrix with offsets of 0, if it has none."""
    if matrix.offsets is not None:
        return matrix
    zeros = torch.zeros(matrix.scales.shape, dtype=torch.int8 if in_units else torch.float32)
    spans = (matrix.shape[0], -(-matrix.shape[1] // UNIT_COLUMNS))
    return replace(matrix, offsets=zeros, offset_units=torch.zeros(spans, dtype=torch.float16) if in_units else None)


def with_floats(matrix: StoredMatrix) -> StoredMatrix:
    """Return the matrix with scales and offsets that are floats: integers times their units."""
    if matrix.scale_units is not None:
        matrix = matrix.in_floats("scales")
    return matrix if matrix.offset_units is None else matrix.in_floats("offsets")


def without_equal_zero_points(matrices: Sequence[StoredMatrix]) -> Sequence[StoredMatrix]:
    """A zero point that all groups have belongs into the table; one of 0 is none."""
    points = [matrix.zero_points for matrix in matrices if matrix.zero_points is not None]
    if not points:
        return matrices
    least, most = (int(bound) for bound in torch.aminmax(torch.cat([each.flatten() for each in points])))
    if least != most or (matrices[0].kind != "nibbles" and least != 0):
        return matrices
    table = tuple(value - least for value in matrices[0].table)
    return [replace(matrix, table=table, zero_points=None) for matrix in matrices]


def narrowest(numbers: Sequence[Tensor]) -> list[Tensor]:
    """Scales or offsets in the first type that holds all of them; int8 as they are."""
    if numbers[0].dtype is torch.int8:
        return list(numbers)
    for dtype in _NUMBERS:
        found = [each.to(dtype) for each in numbers]
        if all(torch.equal(there.float(), here.float()) for there, here in zip(found, numbers, strict=True)):
            break
    return found


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
