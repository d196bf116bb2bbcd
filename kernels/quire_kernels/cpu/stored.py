"""Matrices as others quantised them, in the forms that the C++ kernels know, without a change of any number.

Promises: the narrowest form that holds all scales exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from quire_kernels.cpu.signatures import StoredRowsArgs
from quire_kernels.stored import (
    StoredKind,
    StoredMatrix,
    form_of,
    in_common_form,
    joined,
    narrowest,
    without_equal_zero_points,
)

STORED_KINDS: dict[StoredKind, int] = {"nibbles": 3, "bytes": 4, "e4m3": 5, "six_bits": 6}  # as `enum WeightKind`
K_MULTIPLE = 32  # of a packed matrix's columns
STACKED, MOST_PARTS = 7, 4  # the kind of rows of several of these, and of how many at most
PANEL_ROWS = 64
LEAST_GROUP = 16  # columns; others are multiples of K_MULTIPLE


class ScaleForm(IntEnum):
    """`enum class ScaleForm`."""

    HALF = 0
    BF16 = 1
    FLOAT = 2
    UNITS = 3


class OffsetForm(IntEnum):
    """`enum class OffsetForm`."""

    NONE = 0
    ZERO_POINT = 1
    HALF = 2
    BF16 = 3
    FLOAT = 4
    UNITS = 5


class StoredForm(NamedTuple):
    """The fields of `struct Linear` that are the same for all rows, beside the table."""

    kind: int
    group: int
    scale_form: ScaleForm
    offset_form: OffsetForm

    @property
    def has_units(self) -> bool:
        return self.scale_form is ScaleForm.UNITS or self.offset_form is OffsetForm.UNITS


class InForm(NamedTuple):
    """Matrices in one form, and the table of their codes."""

    form: StoredForm
    table: Tensor | None  # [32] bfloat16
    rows: list[StoredRowsArgs]


def in_parts(matrices: Sequence[Sequence[StoredMatrix]]) -> list[list[StoredMatrix]]:
    """One matrix, or gate and up, each given as rows one below the other, as parts that have one form each.

    Rows of one matrix are parts of their own where panels begin with them; else all get a form in common. Empty: there
    is no form.
    """
    if len(matrices) == 1:
        runs = _runs(matrices[0])
        whole_panels = all(run.shape[0] % PANEL_ROWS == 0 for run in runs[:-1])
        if whole_panels and len(runs) <= MOST_PARTS and all(has_form([run]) for run in runs):
            return [[run] for run in runs]
    whole = [made for made in map(joined, matrices) if made is not None]
    alike = in_common_form(whole) if len(whole) == len(matrices) else None
    return [] if alike is None or not has_form(alike) else [alike]


def _runs(rows: Sequence[StoredMatrix]) -> list[StoredMatrix]:
    """Join neighbours of one form."""
    runs = [[rows[0]]]
    for each in rows[1:]:
        if form_of(each) == form_of(runs[-1][0]):
            runs[-1].append(each)
        else:
            runs.append([each])
    return [made for made in map(joined, runs) if made is not None]


def has_form(matrices: Sequence[StoredMatrix]) -> bool:
    """Whether the kernels have one form for a matrix, or for gate and up."""
    first = matrices[0]
    table = torch.tensor(first.table)
    return (
        packs_in_groups(first.group_size, first.shape[1])
        and torch.equal(table.bfloat16().float(), table)
        and all(form_of(each) == form_of(first) for each in matrices)
    )


def packs_in_groups(group_size: int, columns: int) -> bool:
    """Whether matrices of so many columns can be packed in groups of that size."""
    return group_size >= columns or group_size == LEAST_GROUP or group_size % K_MULTIPLE == 0


def stored_bits(kind: StoredKind, group_size: int, columns: int, beside: float | None = None) -> float | None:
    """Return the bits of a value with its share of a scale and zero point: `beside` bits a group, or the usual ones.

    None: there is no form for it.
    """
    if not packs_in_groups(group_size, columns):
        return None
    bits, usual = {"nibbles": (4, 24), "six_bits": (6, 24), "bytes": (8, 24), "e4m3": (8, 32)}[kind]
    return bits + (usual if beside is None else beside) / min(group_size, columns)


def in_one_form(matrices: Sequence[StoredMatrix]) -> InForm:
    """One matrix, or gate and up, which have a form."""
    matrices = without_equal_zero_points(matrices)
    first = matrices[0]
    columns, group = first.shape[1], first.group_size
    if group >= columns and group != LEAST_GROUP:
        group = -(-columns // K_MULTIPLE) * K_MULTIPLE
    scales = narrowest([matrix.scales for matrix in matrices])
    offset_form, offsets = _offsets(matrices)
    table = torch.tensor(first.table * 2).bfloat16() if first.table else None
    form = StoredForm(STORED_KINDS[first.kind], group, _form(scales[0]), offset_form)
    rows = [
        _arguments(matrix.codes, scale, matrix.scale_units, offset, matrix.offset_units)
        for matrix, scale, offset in zip(matrices, scales, offsets, strict=True)
    ]
    return InForm(form, table, rows)


def _offsets(matrices: Sequence[StoredMatrix]) -> tuple[OffsetForm, Sequence[Tensor | None]]:
    points = [matrix.zero_points for matrix in matrices if matrix.zero_points is not None]
    if points:
        return OffsetForm.ZERO_POINT, points
    found = [matrix.offsets for matrix in matrices if matrix.offsets is not None]
    if not found:
        return OffsetForm.NONE, [None] * len(matrices)
    found = narrowest(found)
    return OffsetForm[_form(found[0]).name], found


def _form(numbers: Tensor) -> ScaleForm:
    forms = {torch.float16: ScaleForm.HALF, torch.bfloat16: ScaleForm.BF16, torch.float32: ScaleForm.FLOAT}
    return forms.get(numbers.dtype, ScaleForm.UNITS)


def _arguments(*parts: Tensor | None) -> StoredRowsArgs:
    kept = [None if part is None else part.contiguous() for part in parts]
    args = StoredRowsArgs(*(None if part is None else part.data_ptr() for part in kept))
    args.kept = tuple(kept)
    return args
