"""Checks of products with matrices as others quantised them, which a set takes without a change of their numbers.

Promises: every kind of codes with forms of scales and offsets that checkpoints have; each product is compared with the
dequantised matrix in float64, and some rows with the same row alone. All are findings about `pack_stored`, without
which such matrices are decoded. Must not know: the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from quire_kernels.kernel_set import LinearWeight, Norm
from quire_kernels.reference.linear import rms_norm
from quire_kernels.stored import UNIT_COLUMNS, StoredKind, StoredMatrix
from quire_kernels.verify import tolerance
from quire_kernels.verify.findings import Check, Outcome, Subject, close, compared_alone, same, together
from quire_kernels.verify.operands import Source

_EPS = 1e-6
_OUTPUTS, _INPUTS = 130, 512  # of a matrix: a last panel that is not full
_PLAIN = tuple(float(i) for i in range(16))
_E2M1 = tuple(sign * value for sign in (1.0, -1.0) for value in (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0))
# Roundings of a term: of the rows by the norm twice, and of a weight where a set multiplies bfloat16.
_ROUNDINGS = 4


class _Form(NamedTuple):
    """How a checkpoint stores a matrix."""

    name: str
    kind: StoredKind
    group: int
    scales: torch.dtype  # int8: times units of float16
    offsets: torch.dtype | None = None
    zero_points: bool = False
    table: tuple[float, ...] = ()


_FORMS = (
    _Form("nibbles with units", "nibbles", 32, torch.int8, torch.int8, table=_PLAIN),
    _Form("nibbles with zero points", "nibbles", 128, torch.float16, zero_points=True, table=_PLAIN),
    _Form("nibbles of floats", "nibbles", 16, torch.float32, table=_E2M1),
    _Form("six bits with units", "six_bits", 16, torch.int8),
    _Form("bytes", "bytes", 32, torch.float16),
    _Form("bytes with zero points", "bytes", 128, torch.bfloat16, zero_points=True),
    _Form("e4m3", "e4m3", 128, torch.float32),
)


class StoredChecks:
    """Checks of the products with matrices of every form that the set has a packed form for."""

    def __init__(self, subject: Subject, rows: tuple[int, ...]) -> None:
        self._subject, self._rows = subject, rows
        source = Source(_INPUTS)
        self._x = (source.normal(max(rows), _INPUTS) * source.powers(-3, 3, max(rows), 1)).to(subject.dtype)
        self._norm = (1 + 0.2 * source.normal(_INPUTS)).to(subject.dtype)

    def checks(self) -> Iterator[Check]:
        """All of them; none for a set that decodes such matrices."""
        if self._subject.kernels.pack_stored is None:
            return
        for form in _FORMS:
            for count in self._rows:
                yield Check(op="pack_stored", case=f"{form.name}, {count} rows", run=self._product(form, count))

    def _product(self, form: _Form, count: int) -> Callable[[], Outcome]:
        def run() -> Outcome:
            kernels, device = self._subject.kernels, self._subject.device
            matrix = _matrix(form, Source(_FORMS.index(form)))
            assert kernels.pack_stored is not None
            packed = kernels.pack_stored([[matrix.to(device)]], None)
            if packed is None:  # it is decoded
                return Outcome()
            weight, norm = matrix.dequantised(), Norm(self._norm.to(device), _EPS)
            outcomes = [self._compared(packed, each, weight, count) for each in (norm, None)]
            if kernels.embed_stored is not None and not form.zero_points:
                ids = torch.arange(count) * 37 % _OUTPUTS
                looked_up = kernels.embed_stored(packed, ids.to(device)).cpu()
                outcomes.append(same(looked_up, weight[ids].to(looked_up.dtype), "rows of the matrix"))
            return together(*outcomes)

        return run

    def _compared(self, packed: LinearWeight, norm: Norm | None, weight: Tensor, count: int) -> Outcome:
        subject = self._subject

        def compute(first: int, last: int) -> Tensor:
            return subject.kernels.norm_linear(self._x[first:last].to(subject.device, copy=True), norm, packed)

        found, alone = compute(0, count), []
        for row in sorted({0, count // 2, count - 1}) if count > 1 else ():
            equal = not same(found[row : row + 1], compute(row, row + 1), "").problem
            alone.append(compared_alone(equal, subject, f"row {row} of {count}"))
        rows = self._x[:count].double()
        if norm is not None:
            rows = rms_norm(rows, self._norm.double(), _EPS)
        truth = rows @ weight.double().T
        bound = tolerance.product(rows, weight, subject.dtype, roundings=_ROUNDINGS)
        return together(close(found, truth, bound + tolerance.rounded(truth, subject.dtype)), *alone)


def _matrix(form: _Form, source: Source) -> StoredMatrix:
    """Random numbers of about one over the root of the columns."""
    groups, spans = (_OUTPUTS, -(-_INPUTS // form.group)), (_OUTPUTS, _INPUTS // UNIT_COLUMNS)
    size = 1 / _INPUTS**0.5
    if form.kind == "nibbles":
        codes, largest = source.integers(0, 15, _OUTPUTS, _INPUTS).to(torch.uint8), max(map(abs, form.table))
    elif form.kind == "six_bits":
        codes, largest = source.integers(-32, 31, _OUTPUTS, _INPUTS).to(torch.int8).view(torch.uint8), 32.0
    elif form.kind == "bytes":
        codes, largest = source.integers(-128, 127, _OUTPUTS, _INPUTS).to(torch.int8).view(torch.uint8), 128.0
    else:  # without NaN
        codes = source.integers(0, 0x7E, _OUTPUTS, _INPUTS).to(torch.uint8)
        codes, largest = codes + 128 * source.integers(0, 1, _OUTPUTS, _INPUTS).to(torch.uint8), 448.0
    parts: dict[str, Tensor] = {}
    for name, dtype, step in (("scales", form.scales, size / largest), ("offsets", form.offsets, -size / 2)):
        if dtype is torch.int8:
            parts[name] = source.integers(1, 63, *groups).to(torch.int8)
            parts[f"{name[:-1]}_units"] = (step / 32 * source.powers(-1, 1, *spans)).half()
        elif dtype is not None:
            parts[name] = (step * source.integers(64, 255, *groups) / 128).to(dtype)
    if form.zero_points:
        parts["zero_points"] = source.integers(0, 15, *groups).to(torch.int8)
    return StoredMatrix(kind=form.kind, codes=codes, group_size=form.group, table=form.table, **parts)
