"""The kernels one by one: what each must read and compute, and how long it takes.

Promises: operands of more bytes together than the caches hold; bytes and operations are what the op's definition needs,
each operand moved once. Must not know: the GPU's limits, how results are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu.shapes import ModelShape
from gpu.timing import time_calls
from quire_engine.contract.batch import Batch, ScheduledSequence
from quire_engine.contract.types import SamplingParams, StopParams
from quire_engine.execution.model_input import ModelInput, model_input
from quire_engine.execution.step_tensors import step_tensors
from quire_kernels.kernel_set import AttentionShape, ChoiceRows, KernelSet, Norm

_EPS = 1e-6
_BF16, _FP32 = 2, 4  # bytes
_MOST_CALLS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSizes:
    """What is measured."""

    rows: tuple[int, ...]  # of a step, for the products
    decodes: tuple[tuple[int, int], ...]  # sequences, tokens of context
    prefills: tuple[int, ...]  # tokens of a prompt
    operand_bytes: int  # of all copies of an operand together
    repeat: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """One op at one size; `work(i)` computes it on the i-th copy of its operands."""

    name: str
    size: str
    num_bytes: int
    operations: int
    calls: int
    work: Callable[[int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """A measured case."""

    name: str
    size: str
    num_bytes: int
    operations: int
    seconds: float
    replayed: bool  # as a graph; else gaps between launches count


class KernelBench:
    """The ops of one kernel set for one model's sizes."""

    def __init__(self, kernels: KernelSet, shape: ModelShape, sizes: KernelSizes, device: torch.device) -> None:
        self._kernels, self._shape, self._sizes, self._device = kernels, shape, sizes, device
        self._block_size = 16

    def run(self, tell: Callable[[str], None]) -> list[KernelTime]:
        found = []
        for case in self._cases():
            tell(f"{case.name}, {case.size}")
            with torch.inference_mode():
                timed = time_calls(case.work, self._device, calls=case.calls, repeat=self._sizes.repeat)
            found.append(
                KernelTime(
                    name=case.name,
                    size=case.size,
                    num_bytes=case.num_bytes,
                    operations=case.operations,
                    seconds=timed.seconds,
                    replayed=timed.replayed,
                )
            )
        return found

    def _cases(self) -> Iterator[KernelCase]:
        """Each is made when its turn comes: all operands at once would not fit."""
        shape = self._shape
        for rows in self._sizes.rows:
            yield self._product("norm + QKV", rows, shape.hidden, shape.qkv, self._qkv)
            yield self._product("norm + gate, up + SiLU", rows, shape.hidden, 2 * shape.intermediate, self._gate_up)
            yield self._product("down + residual", rows, shape.intermediate, shape.hidden, self._down)
        for rows in self._sizes.rows[:-1]:  # a step samples few rows
            yield self._product("norm + head", rows, shape.hidden, shape.vocab, self._head, out_bytes=_FP32)
            if self._kernels.choose is not None:
                yield self._choice(rows)
        yield from self.attentions()

    def attentions(self) -> Iterator[KernelCase]:
        """Those over the paged pool."""
        for sequences, context in self._sizes.decodes:
            yield self._attention("decode attention", [context] * sequences, [1] * sequences)
        for length in self._sizes.prefills:
            yield self._attention("prefill attention", [length], [length])

    # -- products

    def _product(
        self,
        name: str,
        rows: int,
        depth: int,
        columns: int,
        make: Callable[[int, int], Callable[[int], object]],
        *,
        out_bytes: int = _BF16,
    ) -> KernelCase:
        weight_bytes = _BF16 * depth * columns
        calls = self._copies(weight_bytes)
        moved = columns // 2 if name.startswith("norm + gate") else columns  # half of it is multiplied away
        return KernelCase(
            name=name,
            size=f"{rows} rows",
            num_bytes=weight_bytes + rows * (_BF16 * depth + out_bytes * moved),
            operations=2 * rows * depth * columns,
            calls=calls,
            work=make(rows, calls),
        )

    def _qkv(self, rows: int, copies: int) -> Callable[[int], object]:
        x, norm = self._rows(rows, self._shape.hidden)
        weights = [self._packed(self._shape.qkv, self._shape.hidden) for _ in range(copies)]
        return lambda i: self._kernels.norm_linear(x, Norm(norm, _EPS), weights[i])

    def _gate_up(self, rows: int, copies: int) -> Callable[[int], object]:
        x, norm = self._rows(rows, self._shape.hidden)
        width = self._shape.intermediate, self._shape.hidden
        weights = [self._kernels.pack_gate_up(self._random(*width), self._random(*width), None) for _ in range(copies)]
        return lambda i: self._kernels.norm_gate_up(x, Norm(norm, _EPS), weights[i], "silu")

    def _down(self, rows: int, copies: int) -> Callable[[int], object]:
        x, _ = self._rows(rows, self._shape.intermediate)
        residual = torch.zeros(rows, self._shape.hidden, dtype=torch.bfloat16, device=self._device)
        weights = [self._packed(self._shape.hidden, self._shape.intermediate) for _ in range(copies)]
        return lambda i: self._kernels.linear_add(x, weights[i], residual, 1.0)

    def _head(self, rows: int, copies: int) -> Callable[[int], object]:
        x, norm = self._rows(rows, self._shape.hidden)
        weights = [self._packed(self._shape.vocab, self._shape.hidden) for _ in range(copies)]
        return lambda i: self._kernels.logits(x, Norm(norm, _EPS), weights[i])

    # -- the rest

    def _choice(self, rows: int) -> KernelCase:
        """Temperature alone: what most requests ask for. The logits are read twice, for the peak and for the draw."""
        choose = self._kernels.choose
        assert choose is not None
        logits_bytes = _FP32 * rows * self._shape.vocab
        calls = self._copies(logits_bytes)
        logits = [torch.randn(rows, self._shape.vocab, device=self._device) for _ in range(calls)]
        wanted = self._drawn(rows)
        return KernelCase(
            name="choice, temperature",
            size=f"{rows} rows",
            num_bytes=2 * logits_bytes,
            operations=0,
            calls=calls,
            work=lambda i: choose(logits[i], wanted),
        )

    def _drawn(self, rows: int) -> ChoiceRows:
        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=self._device)

        return ChoiceRows(
            logits_rows=torch.arange(rows, device=self._device),
            temperature=column(0.8, torch.float32),
            top_k=column(0, torch.int32),
            top_p=column(1.0, torch.float64),
            min_p=column(0.0, torch.float32),
            seed=torch.arange(rows, device=self._device),
            choice=column(0, torch.int64),
            position=column(7, torch.int64),
            draws=True,
            limits_k=False,
            limits_p=False,
        )

    def _attention(self, name: str, contexts: list[int], queries: list[int]) -> KernelCase:
        shape, rows = self._shape, sum(queries)
        attention = AttentionShape(
            num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim, scale=shape.head_dim**-0.5
        )
        kv_bytes = 2 * _BF16 * shape.kv_heads * shape.head_dim * sum(contexts)  # of one layer
        layers = min(shape.layers, self._copies(kv_bytes))
        step = self._step(contexts, queries)
        kv = self._kernels.new_kv(
            1 + sum(self._blocks(context) for context in contexts),
            layers,
            shape.kv_heads,
            self._block_size,
            shape.head_dim,
            torch.bfloat16,
            self._device,
        )
        q = self._random(rows, shape.heads, shape.head_dim)
        looked_at = sum(
            count * context - count * (count - 1) // 2 for context, count in zip(contexts, queries, strict=True)
        )
        width = f"{contexts[0]} tokens" if len(contexts) == 1 else f"{len(contexts)} x {contexts[0]} tokens"
        return KernelCase(
            name=name,
            size=width,
            num_bytes=kv_bytes + 2 * _BF16 * rows * shape.heads * shape.head_dim,
            operations=4 * looked_at * shape.heads * shape.head_dim,
            calls=layers,
            work=lambda i: self._kernels.attention(q, attention, kv, i, step),
        )

    def _step(self, contexts: list[int], queries: list[int]) -> ModelInput:
        items, first = [], 1
        for i, (context, count) in enumerate(zip(contexts, queries, strict=True)):
            blocks = self._blocks(context)
            items.append(
                ScheduledSequence(
                    sequence_id=i,
                    choice=0,
                    prompt_token_ids=(0,) * context,
                    output_token_ids=(),
                    token_ids=(0,) * count,
                    start=context - count,
                    block_ids=tuple(range(first, first + blocks)),
                    wants_sample=True,
                    wants_prompt_logprobs=False,
                    forks=(),
                    sampling=SamplingParams(),
                    stop=StopParams(max_new_tokens=1),
                )
            )
            first += blocks
        batch = Batch(step_id=0, items=tuple(items), num_tokens=sum(queries))
        return model_input(step_tensors(batch, self._block_size, 1), self._block_size, self._device)

    def _copies(self, num_bytes: int) -> int:
        """Of an operand, so that none is still in a cache when it is needed again."""
        return min(_MOST_CALLS, max(1, -(-self._sizes.operand_bytes // num_bytes)))

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _rows(self, rows: int, width: int) -> tuple[Tensor, Tensor]:
        return self._random(rows, width), torch.ones(width, dtype=torch.bfloat16, device=self._device)

    def _packed(self, rows: int, columns: int) -> object:
        return self._kernels.pack_linear(self._random(rows, columns), None)

    def _random(self, *shape: int) -> Tensor:
        values = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return values.uniform_(-1, 1).mul_(shape[-1] ** -0.5)
