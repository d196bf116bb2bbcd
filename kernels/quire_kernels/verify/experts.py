"""Checks of mixtures of experts.

Promises: each result is compared with its definition in float64, and some rows with the same row alone. Rows whose
choice a permitted error could change are left out. Must not know: sequences, the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_kernels.activations import DEFINITIONS, Activation
from quire_kernels.kernel_set import ExpertMatrices, Norm, Routing, Scoring, expert_rows
from quire_kernels.reference.experts import choose
from quire_kernels.verify import tolerance
from quire_kernels.verify.findings import Check, Outcome, Subject, close, compared_alone, same, together
from quire_kernels.verify.operands import Source

_EPS = 1e-6
_INT8 = 127.0
_MOST_EXPERTS, _MOST_WEIGHTS = 8, 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingForm:
    """How a block's experts are chosen and weighed: see `Routing`, whose other numbers are made up."""

    scoring: Scoring = "softmax"
    normalised: bool = True
    biased: bool = False  # a selection bias
    groups: int = 1
    kept_groups: int = 1
    best_of_group: int = 2
    scaled: bool = False  # a scale for each expert, and one for all
    own_norm: bool = False

    def cut(self, count: int) -> RoutingForm:
        """The form for so few experts, four or more."""
        if self.groups == 1:
            return self
        groups = 2 if count < 8 else 4
        kept = groups if self.kept_groups == self.groups else groups // 2
        return replace(self, groups=groups, kept_groups=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """The sizes of a block of experts."""

    count: int
    top_k: int
    hidden: int
    inner: int
    activation: Activation = "silu"
    biases: bool = False
    form: RoutingForm = RoutingForm()

    def cut(self) -> ExpertSizes:
        """Few enough experts with few enough columns for a fast check."""
        count = min(self.count, _MOST_EXPERTS)
        if self.form.groups > 1:
            count = max(4, count // 4 * 4)
        return ExpertSizes(
            count=count,
            top_k=min(self.top_k, max(1, count // 2)),
            hidden=self.hidden,
            inner=min(self.inner, max(64, _MOST_WEIGHTS // self.hidden)),
            activation=self.activation,
            biases=self.biases,
            form=self.form.cut(count),
        )


class _Result(NamedTuple):
    value: Tensor  # float64
    bound: Tensor


class ExpertChecks:
    """Checks of the ops on one block of experts."""

    def __init__(self, subject: Subject, sizes: ExpertSizes, rows: tuple[int, ...]) -> None:
        self._subject, self._sizes, self._buckets = subject, sizes, rows
        count, hidden, inner = sizes.count, sizes.hidden, sizes.inner
        self._source = source = Source(count * hidden + inner)
        self._x = source.normal(max(rows), hidden).to(subject.dtype)
        self._residual = source.normal(max(rows), hidden).to(subject.dtype)
        self._router = (2 * source.normal(count, hidden) / hidden**0.5).to(subject.dtype)
        self._selection = 0.2 * Source(2).normal(count)
        self._scales = 1 + 0.2 * Source(3).normal(count)
        self._own_norm = Norm(1 + 0.2 * Source(4).normal(hidden), _EPS)
        self._gate, self._up, self._down = (
            torch.stack([self._weights(outputs, inputs) for _ in range(count)])
            for outputs, inputs in ((inner, hidden), (inner, hidden), (hidden, inner))
        )
        self._biases = [
            source.normal(count, outputs).to(subject.dtype) if sizes.biases else torch.zeros(count, outputs)
            for outputs in (inner, inner, hidden)
        ]

    def _weights(self, outputs: int, inputs: int) -> Tensor:
        found = self._source.normal(outputs, inputs) / math.sqrt(inputs)
        if self._subject.quantization is not None:
            found = self._source.weights(outputs, inputs, self._subject.quantization)
        return found.to(self._subject.dtype)

    def checks(self) -> Iterator[Check]:
        """All of them."""
        ops = [("given_experts", self._given), ("mix_experts", self._mixed)]
        if self._subject.kernels.route is not None:
            ops.append(("route", self._chooses))
        if self._subject.kernels.gate_rows is not None:
            ops.append(("gate_rows", self._gated))
        for op, run in ops:
            for count in self._buckets:
                yield Check(op=op, case=f"{self._sizes}, {count} rows", run=run(count))

    def _given(self, count: int) -> Callable[[], Outcome]:
        def run() -> Outcome:
            given, device = self._subject.kernels.given_experts, self._subject.device
            assert given is not None
            index, weights = self._chosen(count)

            def compute(first: int, last: int) -> Tensor:
                places = (index[first:last].to(device), weights[first:last].to(device))
                return given(self._x[first:last].to(device), *places, self._experts)

            found = compute(0, count)
            truth, bound = self._sums(index, weights)
            return together(close(found, truth, bound), *self._alone(compute, found))

        return run

    def _mixed(self, count: int) -> Callable[[], Outcome]:
        def run() -> Outcome:
            kernels, device = self._subject.kernels, self._subject.device
            mix = kernels.mix_experts
            assert mix is not None
            norm = Norm((1 + 0.2 * Source(1).normal(self._sizes.hidden)).to(device, self._subject.dtype), _EPS)

            def compute(first: int, last: int) -> Tensor:
                x, residual = (each[first:last].to(device, copy=True) for each in (self._x, self._residual))
                return mix(x, norm, self._routing, self._experts, 1.0, residual)

            x = self._x[:count].to(device, copy=True)
            plain = mix(x, None, self._routing, self._experts, 1.0, None)
            index, weights, error, sure = self._routed(count)
            truth, bound = self._sums(index, weights)
            outputs = self._sums(index, weights * torch.expm1(2 * error), magnitudes=True)
            right = close(plain[sure.to(device)], truth[sure], (bound + outputs.value + outputs.bound)[sure])
            normed = kernels.norm_add(x, norm, torch.zeros_like(x), 1.0)
            residual = self._residual[:count].to(device, copy=True)
            routing, found = replace(self._routing, norm=None), compute(0, count)
            on_the_way = mix(x, norm, routing, self._experts, 1.0, self._residual[:count].to(device, copy=True))
            wanted = mix(normed, None, routing, self._experts, 1.0, residual)
            return together(
                right, same(on_the_way, wanted, "rows that are normed on the way"), *self._alone(compute, found)
            )

        return run

    def _chooses(self, count: int) -> Callable[[], Outcome]:
        def run() -> Outcome:
            route, device = self._subject.kernels.route, self._subject.device
            assert route is not None

            def compute(first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
                return route(self._x[first:last].to(device), self._routing, self._sizes.count)

            _, index, weights = compute(0, count)
            wanted, truth, error, sure = self._routed(count)
            if not torch.equal(index.cpu()[sure], wanted[sure]):
                return Outcome(problem=f"{index[sure].tolist()} are not the experts {wanted[sure].tolist()}")
            bound = truth.abs() * torch.expm1(2 * error)
            right = close(weights[sure.to(device)], truth[sure], bound[sure])
            return together(right, *self._alone(lambda first, last: compute(first, last)[2], weights))

        return run

    def _gated(self, count: int) -> Callable[[], Outcome]:
        def run() -> Outcome:
            gate, pack, device = (
                self._subject.kernels.gate_rows,
                self._subject.kernels.pack_router,
                self._subject.device,
            )
            assert gate is not None
            assert pack is not None
            weight = pack(self._router[:1].to(device), None)

            def compute(first: int, last: int) -> Tensor:
                x, wide = (each[first:last].to(device, copy=True) for each in (self._x, self._residual))
                return gate(x, None, weight, wide)

            logits, error = self._logits(self._x[:count].double(), self._router[:1])
            truth = self._residual[:count].double() * torch.sigmoid(logits)
            bound = truth.abs() * torch.expm1(2 * error) + tolerance.rounded(truth, self._subject.dtype)
            found = compute(0, count)
            return together(close(found, truth, bound), *self._alone(compute, found))

        return run

    def _alone(self, compute: Callable[[int, int], Tensor], found: Tensor) -> Iterator[Outcome]:
        count = len(found)
        for row in sorted({0, count // 2, count - 1}) if count > 1 else ():
            equal = not same(found[row : row + 1], compute(row, row + 1), "").problem
            yield compared_alone(equal, self._subject, f"row {row} of {count}")

    def _chosen(self, count: int) -> tuple[Tensor, Tensor]:
        """Any experts of every row, and weights."""
        source = Source(count)
        index = source.normal(count, self._sizes.count).argsort(dim=1)[:, : self._sizes.top_k]
        return index, source.normal(count, self._sizes.top_k).abs()

    def _routed(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The experts that rows choose, their weights, logits' error, and which rows no such error could move."""
        rows, form = self._x[:count].double(), self._sizes.form
        if form.own_norm:
            rows = rows / (rows.square().mean(dim=1, keepdim=True) + _EPS).sqrt() * self._own_norm.weight.double()
            rows = rows.to(self._subject.dtype).double()
        logits, error = self._logits(rows, self._router)
        if form.own_norm:  # another rounding of each value is possible
            terms = rows.abs() @ self._router.double().abs().T
            error = error + tolerance.rounded(terms, self._subject.dtype).amax(dim=1, keepdim=True)
        index, weights = choose(logits, self._form)
        return index, weights, error, self._sure(logits, error)

    def _logits(self, rows: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of rows in float64, and for each row the error that a kernel's may have."""
        terms = rows.abs() @ router.double().abs().T
        error = tolerance.float32_sum(self._sizes.hidden + 4, terms).amax(dim=1, keepdim=True)
        return rows @ router.double().T, error + 2.0**-20

    def _sure(self, logits: Tensor, error: Tensor) -> Tensor:
        """Return the rows that no error of that size could move."""
        form, top_k, routing = self._sizes.form, self._sizes.top_k, self._form
        values, close_by = logits, 2 * error
        if form.biased or form.groups > 1:  # of scores, which are at most 1
            all_of_them = replace(routing, top_k=len(self._selection), groups=1, kept_groups=1, normalised=False)
            plain = replace(all_of_them, scale=1.0, expert_scales=None, selection_bias=None)
            index, scores = choose(logits, plain)
            values = torch.empty_like(scores).scatter(1, index, scores)
            if routing.selection_bias is not None:
                values = values + routing.selection_bias.double()
            close_by = 2 * torch.expm1(2 * error)
        sure = torch.ones(len(logits), dtype=torch.bool)
        if form.groups > 1:
            best = values.view(len(values), form.groups, -1).sort(dim=-1, descending=True).values
            total = best[..., : form.best_of_group].sum(dim=-1)
            ranked, order = total.sort(dim=1, descending=True)
            if form.kept_groups < form.groups:
                sure &= ranked[:, form.kept_groups - 1] - ranked[:, form.kept_groups] > 2 * close_by[:, 0]
            kept = torch.zeros_like(total, dtype=torch.bool).scatter(1, order[:, : form.kept_groups], value=True)
            kept = kept.repeat_interleave(values.shape[1] // form.groups, dim=1)
            values = values.masked_fill(~kept, -torch.inf)
        ranked = values.sort(dim=1, descending=True).values
        if top_k < ranked.shape[1]:
            sure &= (ranked[:, :top_k] - ranked[:, 1 : top_k + 1] > close_by).all(dim=1)
        return sure

    @cached_property
    def _form(self) -> Routing:
        """The routing without its matrix, in the memory of the host."""
        form = self._sizes.form
        return Routing(
            weight=None,
            top_k=self._sizes.top_k,
            scoring=form.scoring,
            normalised=form.normalised,
            scale=1.5 if form.scaled else 1.0,
            selection_bias=self._selection if form.biased else None,
            groups=form.groups,
            kept_groups=form.kept_groups,
            best_of_group=form.best_of_group,
            epsilon=2.0**-40 if form.biased else 0.0,
            expert_scales=self._scales if form.scaled else None,
            norm=self._own_norm if form.own_norm else None,
        )

    @cached_property
    def _routing(self) -> Routing:
        pack, device, form = self._subject.kernels.pack_router, self._subject.device, self._form
        assert pack is not None
        bias, scales = form.selection_bias, form.expert_scales
        norm = None if form.norm is None else form.norm._replace(weight=form.norm.weight.to(device))
        return replace(
            form,
            weight=pack(self._router.to(device), None),
            selection_bias=None if bias is None else bias.to(device),
            expert_scales=None if scales is None else scales.to(device),
            norm=norm,
        )

    @cached_property
    def _experts(self) -> ExpertMatrices:
        kernels, device, dtype = self._subject.kernels, self._subject.device, self._subject.dtype
        gate, up, down = (_stacked(each).to(device) for each in (self._gate, self._up, self._down))
        biases = [_stacked(each.unsqueeze(2)).flatten().to(device, dtype) for each in self._biases]
        return ExpertMatrices(
            count=self._sizes.count,
            inner=self._sizes.inner,
            gate_up=kernels.pack_gate_up(gate, up, torch.cat(biases[:2]) if self._sizes.biases else None),
            down=kernels.pack_linear(down, biases[2] if self._sizes.biases else None),
            activation=self._sizes.activation,
        )

    def _sums(self, index: Tensor, weights: Tensor, *, magnitudes: bool = False) -> _Result:
        """The weighted sums of the rows' experts; with `magnitudes` of their results' magnitudes."""
        total = torch.zeros(len(index), self._sizes.hidden, dtype=torch.float64)
        bound, size = torch.zeros_like(total), torch.zeros_like(total)
        for expert in range(self._sizes.count):
            row, rank = torch.where(index == expert)
            if not len(row):
                continue
            value, error = self._expert(self._x[row].double(), expert)
            share = weights[row, rank, None].double()
            total[row] += share * (value.abs() if magnitudes else value)
            size[row] += share * value.abs()
            bound[row] += share * error
        bound = bound + tolerance.float32_sum(2 * self._sizes.top_k, size)
        return _Result(total, bound + tolerance.rounded(total, self._subject.dtype))

    def _expert(self, rows: Tensor, expert: int) -> _Result:
        """One expert's results, rounded as they are stored between its products."""
        dtype, definition = self._subject.dtype, DEFINITIONS[self._sizes.activation]
        gate, up = (self._project(rows, side[expert], bias[expert]) for side, bias in self._sides)
        factor, active = definition.factor(up.value), definition.activate(gate.value)
        inner = active * factor
        error = definition.steepest * gate.bound * (factor.abs() + up.bound) + active.abs() * up.bound
        error = error + tolerance.rounded(inner, dtype) + tolerance.float32_sum(8, inner.abs())
        down = self._project(inner, self._down[expert], self._biases[2][expert])
        return _Result(down.value, down.bound + error @ self._down[expert].double().abs().T)

    @property
    def _sides(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        return (self._gate, self._biases[0]), (self._up, self._biases[1])

    def _project(self, rows: Tensor, weight: Tensor, bias: Tensor) -> _Result:
        step = None
        if self._subject.quantization is not None:
            step = rows.abs().amax(dim=1, keepdim=True) / _INT8
        exact = rows @ weight.double().T
        bound = tolerance.product(rows, weight, self._subject.dtype, roundings=1, step=step)
        bound = bound + tolerance.rounded(exact, self._subject.dtype)
        exact = exact + bias.double()
        return _Result(exact, bound + tolerance.rounded(exact, self._subject.dtype))


def _stacked(parts: Tensor) -> Tensor:
    """[E, N, K] as the rows of one matrix."""
    return F.pad(parts, (0, 0, 0, expert_rows(parts.shape[1]) - parts.shape[1])).flatten(0, 1)
