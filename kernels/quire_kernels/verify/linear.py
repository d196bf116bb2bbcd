"""Checks of the embedding, the norms and the projections.

Promises: every number of rows in `ROWS`; each op's result is compared with `reference` in float64, and some rows with
the same row alone. Must not know: sequences, the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from quire_kernels.activations import DEFINITIONS, Activation
from quire_kernels.kernel_set import LinearWeight, Norm
from quire_kernels.reference import REFERENCE
from quire_kernels.reference.linear import Linear, rms_norm
from quire_kernels.verify import tolerance
from quire_kernels.verify.findings import Check, Outcome, Subject, close, compared_alone, same, together
from quire_kernels.verify.operands import Numbers, Source

_EPS = 1e-6
_INT8 = 127.0
_SCALE = 0.375  # of an addition


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The sizes of a projection."""

    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    truth: Tensor  # [M, N] float64
    bound: Tensor


class _Given(NamedTuple):
    x: Tensor  # rows for ops that apply a norm
    direct: Tensor  # rows for ops without a norm
    residual: Tensor
    added: Tensor  # a residual as wide as x


Compute = Callable[[_Given], Tensor]


class LinearChecks:
    """Checks of the ops on matrices of one size and one kind of numbers."""

    def __init__(self, subject: Subject, matrix: Matrix, numbers: Numbers, rows: tuple[int, ...]) -> None:
        self._subject, self._numbers, self._buckets = subject, numbers, rows
        self._name = f"{matrix.inputs} to {matrix.outputs}, {numbers}"
        self._eps = 0.0 if numbers == "exact" else _EPS
        source, dtype, num_rows = Source(matrix.inputs * 7 + matrix.outputs), subject.dtype, max(rows)
        n, k = matrix.outputs, matrix.inputs
        if numbers == "exact":
            # A row's numbers have one magnitude, so the norm maps them to their signs.
            self._x = (source.signs(num_rows, k) * source.powers(-3, 3, num_rows, 1)).to(dtype)
            self._norm = (source.bytes(k) * 2.0**-7).to(dtype)
            self._direct = (source.bytes(num_rows, k) * source.powers(-7, -5, num_rows, 1)).to(dtype)
        else:
            self._x = (source.normal(num_rows, k) * source.powers(-3, 3, num_rows, 1)).to(dtype)
            self._norm = (1 + 0.2 * source.normal(k)).to(dtype)
            self._direct = source.normal(num_rows, k).to(dtype)
        if numbers == "exact" or subject.quantization is not None:
            weights = [source.weights(n, k, subject.quantization) for _ in range(2)]
        else:
            weights = [source.normal(n, k) / k**0.5 for _ in range(2)]
        self._weight, self._up = (weight.to(dtype) for weight in weights)
        self._bias, self._pair_bias = source.normal(n).to(dtype), source.normal(2 * n).to(dtype)
        self._residual, self._added = source.normal(num_rows, n).to(dtype), source.normal(num_rows, k).to(dtype)

    def checks(self) -> Iterator[Check]:
        """All of them."""
        yield self._check("pack_linear", "", self._pack)
        for op, compute, expected in self._ops():
            wanted = cache(expected)
            for count in self._buckets:
                yield self._check(op, f"{count} rows", self._comparison(op, compute, wanted, count))
            yield self._check(op, "beside a NaN", self._beside_nan(compute))
        if self._subject.kernels.greedy is not None:
            for count in self._buckets:
                yield self._check("greedy", f"{count} rows", self._greedy(count))
        if self._subject.kernels.join is not None:
            yield from self.column_checks()

    def column_checks(self) -> Iterator[Check]:
        """Yield checks of the columns that a rank computes, for sets that are divided among ranks."""
        for count in self._buckets:
            yield self._check("norm_linear", f"{count} rows, some columns alone", self._columns(count, pair=False))
            yield self._check("norm_gate_up", f"{count} rows, some columns alone", self._columns(count, pair=True))

    def _check(self, op: str, case: str, run: Callable[[], Outcome]) -> Check:
        return Check(op=op, case=f"{self._name}, {case}" if case else self._name, run=run)

    def _ops(self) -> Iterator[tuple[str, Compute, Callable[[], _Expected]]]:
        """(name, op, its expected result) of each case."""
        kernels, norm = self._subject.kernels, Norm(self._norm.to(self._subject.device), self._eps)
        wide = Norm(norm.weight.float(), self._eps)

        def projection(norm: Norm) -> Compute:
            return lambda given: kernels.norm_linear(given.x, norm, self._biased)

        def gate_up(kind: Activation) -> Compute:
            return lambda given: kernels.norm_gate_up(given.x, norm, self._pair, kind)

        for each in (norm, wide):
            yield "norm_linear", projection(each), lambda: self._projection(self._bias)
        yield (
            "norm_linear",
            lambda given: kernels.norm_linear(given.direct, None, self._biased),
            self._plain_projection,
        )
        for kind in get_args(Activation):
            yield "norm_gate_up", gate_up(kind), partial(self._gate_up, kind)
        yield (
            "linear_add",
            lambda given: kernels.linear_add(given.direct, self._plain, given.residual, 1.0),
            lambda: self._addition(None, 1.0),
        )
        yield (
            "linear_add",
            lambda given: kernels.linear_add(given.direct, self._biased, given.residual, _SCALE),
            lambda: self._addition(self._bias, _SCALE),
        )
        yield (
            "norm_add",
            lambda given: kernels.norm_add(given.x, norm, given.added, 1.0),
            lambda: self._normed_addition(1.0),
        )
        yield (
            "norm_add",
            lambda given: kernels.norm_add(given.x, wide, given.added, _SCALE),
            lambda: self._normed_addition(_SCALE),
        )
        yield "mul_sigmoid", lambda given: kernels.mul_sigmoid(given.direct, given.x), self._gated
        yield (
            "logits",
            lambda given: kernels.logits(given.x, norm, self._plain),
            lambda: self._projection(None),
        )

    def _given(self, first: int, last: int) -> _Given:
        """Fresh copies of the rows: an op may overwrite its arguments."""
        device = self._subject.device
        rows = (self._x, self._direct, self._residual, self._added)
        return _Given(*(x[first:last].to(device, copy=True) for x in rows))

    @cached_property
    def _plain(self) -> LinearWeight:
        return self._subject.kernels.pack_linear(self._weight.to(self._subject.device, copy=True), None)

    @cached_property
    def _biased(self) -> LinearWeight:
        device = self._subject.device
        return self._subject.kernels.pack_linear(self._weight.to(device, copy=True), self._bias.to(device, copy=True))

    @cached_property
    def _pair(self) -> LinearWeight:
        device = self._subject.device
        gate, up, bias = (x.to(device, copy=True) for x in (self._weight, self._up, self._pair_bias))
        return self._subject.kernels.pack_gate_up(gate, up, bias)

    def _pack(self) -> Outcome:
        """Pack all three matrices, so that errors in packing are not reported by other ops."""
        lacking = any(w is None for w in (self._plain, self._biased, self._pair))
        return Outcome(problem="there is no packed matrix" if lacking else "")

    def _comparison(
        self, op: str, compute: Compute, expected: Callable[[], _Expected], count: int
    ) -> Callable[[], Outcome]:
        def run() -> Outcome:
            found, alone = compute(self._given(0, count)), []
            for row in sorted({0, count // 2, count - 1}) if count > 1 else ():
                equal = not same(found[row : row + 1], compute(self._given(row, row + 1)), "").problem
                alone.append(compared_alone(equal, self._subject, f"row {row} of {count}"))
            kind = torch.float32 if op == "logits" else self._subject.dtype
            if found.dtype != kind:
                return Outcome(problem=f"the result is {found.dtype}, not {kind}")
            wanted = expected()
            return together(close(found, wanted.truth[:count], wanted.bound[:count]), *alone)

        return run

    def _beside_nan(self, compute: Compute) -> Callable[[], Outcome]:
        """Check that a row of NaN gives a row of NaN and leaves other rows unchanged."""

        def run() -> Outcome:
            clean, given = compute(self._given(0, 5)), self._given(0, 5)
            for x in given:
                x[2] = torch.nan
            found = compute(given)
            if bool(found[2].isfinite().any()):
                return Outcome(problem="a row of NaN gives numbers that are finite")
            kept = [0, 1, 3, 4]
            return same(found[kept], clean[kept], "rows beside one of NaN")

        return run

    def _columns(self, count: int, *, pair: bool) -> Callable[[], Outcome]:
        """Check that columns of a matrix that is packed without the others have the bits that they have among all:
        ranks compute them by themselves. On devices it is a promise of those sets alone whose rows have such bits.
        """

        def run() -> Outcome:
            kernels, device = self._subject.kernels, self._subject.device
            norm, given = Norm(self._norm.to(device), self._eps), self._given(0, count)
            outputs, found = len(self._weight), list[Outcome]()
            part_of: Callable[[LinearWeight, int], LinearWeight] = kernels.part_of or (lambda w, _: w)
            for part in (slice(0, outputs // 2), slice(outputs // 2, outputs)):
                if pair:
                    gate, up = (x[part].to(device, copy=True) for x in (self._weight, self._up))
                    biases = [x[part].to(device) for x in self._pair_bias.chunk(2)]
                    packed = part_of(kernels.pack_gate_up(gate, up, torch.cat(biases)), 2 * outputs)
                    alone = kernels.norm_gate_up(given.x, norm, packed, "silu")
                    whole = kernels.norm_gate_up(given.x, norm, self._pair, "silu")
                else:
                    weight, bias = (x[part].to(device, copy=True) for x in (self._weight, self._bias))
                    packed = part_of(kernels.pack_linear(weight, bias), outputs)
                    alone = kernels.norm_linear(given.x, norm, packed)
                    whole = kernels.norm_linear(given.x, norm, self._biased)
                what, wanted = f"columns {part.start} to {part.stop - 1}", whole[:, part]
                if kernels.part_of is None:
                    found.append(same(alone, wanted, f"{what} alone"))
                else:
                    found.append(compared_alone(torch.equal(alone, wanted), self._subject, what))
            return together(*found)

        return run

    def _greedy(self, count: int) -> Callable[[], Outcome]:
        """Check ids against the argmax of the set's own logits, the lowest id among equals, and finite flags."""

        def run() -> Outcome:
            kernels, device = self._subject.kernels, self._subject.device
            assert kernels.greedy is not None
            x, norm = self._x[:count].to(device, copy=True), Norm(self._norm.to(device), self._eps)
            broken = count - 1 if count > 2 else count
            x[broken:] = torch.nan
            logits = kernels.logits(x, norm, self._plain).cpu()
            for allowed, masked in ((None, logits), _masked(logits)):
                ids, finite = kernels.greedy(x, norm, self._plain, allowed)
                possible = masked.amax(dim=1) > -torch.inf
                wanted = torch.where(possible, masked.argmax(dim=1), -1).tolist()
                if list(ids)[:broken] != wanted[:broken]:
                    return Outcome(problem=f"the greatest logits are those of {wanted[:broken]}, not of {ids}")
                if list(finite) != [row < broken for row in range(count)]:
                    return Outcome(problem=f"{finite} tells wrongly which rows are finite")
            return Outcome()

        return run

    @cached_property
    def _normed(self) -> Tensor:
        return rms_norm(self._x.double(), self._norm.double(), self._eps)

    def _terms(self, rows: Tensor, weight: Tensor, *, normed: bool) -> Tensor:
        """The bound of a product before its result is rounded.

        Each term may be rounded once as a part of a split sum, as in cuBLAS, and twice more by a norm of inexact
        numbers. With quantized weights, rows may be quantized to eight bits.
        """
        step = None
        if self._numbers == "normal" and self._subject.quantization is not None:
            step = rows.abs().amax(dim=1, keepdim=True) / _INT8
        roundings = 3 if normed and self._numbers == "normal" else 1
        return tolerance.product(rows, weight, self._subject.dtype, roundings=roundings, step=step)

    def _project(self, rows: Tensor, weight: Tensor, bias: Tensor | None, *, normed: bool) -> tuple[Tensor, Tensor]:
        """A projection in float64 and its bound; the result may be rounded before and after the bias is added."""
        exact = rows @ weight.double().T
        bound = self._terms(rows, weight, normed=normed) + tolerance.rounded(exact, self._subject.dtype)
        if bias is not None:
            exact = exact + bias.double()
            bound = bound + tolerance.rounded(exact, self._subject.dtype)
        return exact, bound

    def _projection(self, bias: Tensor | None) -> _Expected:
        weight = Linear(self._weight.double(), None if bias is None else bias.double())
        truth = REFERENCE.norm_linear(self._x.double(), Norm(self._norm.double(), self._eps), weight)
        _, bound = self._project(self._normed, self._weight, bias, normed=True)
        return _Expected(truth=truth, bound=bound)

    def _plain_projection(self) -> _Expected:
        truth, bound = self._project(self._direct.double(), self._weight, self._bias, normed=False)
        return _Expected(truth=truth, bound=bound)

    def _gate_up(self, activation: Activation) -> _Expected:
        pair = Linear(torch.cat([self._weight, self._up]).double(), self._pair_bias.double())
        norm = Norm(self._norm.double(), self._eps)
        truth = REFERENCE.norm_gate_up(self._x.double(), norm, pair, activation)
        gate_bias, up_bias = self._pair_bias.chunk(2)
        gate, gate_bound = self._project(self._normed, self._weight, gate_bias, normed=True)
        up, up_bound = self._project(self._normed, self._up, up_bias, normed=True)
        definition = DEFINITIONS[activation]
        factor = definition.factor(up).abs() + up_bound
        bound = definition.steepest * gate_bound * factor + definition.activate(gate).abs() * up_bound
        bound = bound + tolerance.rounded(truth, self._subject.dtype) + tolerance.float32_sum(8, truth.abs())
        return _Expected(truth=truth, bound=bound)

    def _addition(self, bias: Tensor | None, scale: float) -> _Expected:
        rows, residual = self._direct.double(), self._residual.double()
        weight = Linear(self._weight.double(), None if bias is None else bias.double())
        truth = REFERENCE.linear_add(rows, weight, residual.clone(), scale)
        _, bound = self._project(rows, self._weight, bias, normed=False)
        return _Expected(truth=truth, bound=bound + tolerance.rounded(truth, self._subject.dtype))

    def _normed_addition(self, scale: float) -> _Expected:
        truth = (self._added.double() + self._normed) * scale
        twice = 2 * scale * tolerance.rounded(self._normed, self._subject.dtype)
        bound = twice + tolerance.rounded(truth, self._subject.dtype) + tolerance.float32_sum(8, self._normed.abs())
        return _Expected(truth=truth, bound=bound + tolerance.float32_sum(1, truth.abs()))  # the sum, then the product

    def _gated(self) -> _Expected:
        truth = REFERENCE.mul_sigmoid(self._direct.double(), self._x.double())
        bound = tolerance.rounded(truth, self._subject.dtype) + tolerance.float32_sum(8, truth.abs())
        return _Expected(truth=truth, bound=bound)


def _masked(logits: Tensor) -> tuple[Tensor, Tensor]:
    """A mask of two thirds of each row's columns without the greatest logit, and logits with -inf outside the mask."""
    rows, columns = logits.shape
    may = (torch.arange(columns) + torch.arange(rows).unsqueeze(1)) % 3 > 0
    may.scatter_(1, logits.argmax(dim=1, keepdim=True), False)
    words = torch.nn.functional.pad(may, (0, -columns % 64)).view(rows, -1, 64).to(torch.int64)
    # Each bit is set at most once, so the sum is their union; bit 63 is the sign.
    return (words << torch.arange(64)).sum(dim=2), logits.masked_fill(~may, -torch.inf)


def embed_check(subject: Subject, hidden: int) -> Check:
    """Check rows of the table for ids from its whole range."""

    def run() -> Outcome:
        source = Source(hidden)
        table = source.normal(97, hidden).to(subject.device, subject.dtype)
        ids = torch.tensor([96, 0, 5, 5, 50], device=subject.device)
        return same(subject.kernels.embed(table, ids), table[ids], "rows of the table")

    return Check(op="embed", case=f"{hidden} wide", run=run)
