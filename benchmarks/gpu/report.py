"""The results as a table, and as JSON.

Promises: shares are of the limits that were measured in the same run; nothing is told that the JSON does not have.
Must not know: how anything was measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from gpu.kernels import KernelTime
from gpu.steps import DecodeTime, PrefillTime, Throughput
from quire_engine.tools.gpu_limits import Limits

SCHEMA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResults:
    """One model's steps."""

    model: str
    kernels: str
    parameters: int
    load_seconds: float
    decodes: list[DecodeTime]
    prefills: list[PrefillTime]
    throughput: Throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuResults:
    """Everything."""

    schema: int = SCHEMA
    started: str  # UTC
    device: str
    versions: dict[str, str]
    limits: Limits
    doubts: list[str]
    kernel_set: str
    kernels: list[KernelTime]
    parts: dict[str, list[dict[str, str | int | float]]] = field(default_factory=dict)  # by name, rows of one table
    models: list[ModelResults] = field(default_factory=list)
    not_measured: dict[str, str] = field(default_factory=dict)  # by name, what this machine lacks for a part
    failures: list[str] = field(default_factory=list)  # parts that could not be measured
    seconds: float = 0.0

    def encode(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def lines(results: GpuResults) -> Iterator[str]:
    """The whole table."""
    limits = results.limits
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    yield f"{results.device}; {versions}; {results.started}; {results.seconds:.0f} s"
    yield (
        f"limits, measured: memory {limits.read_bytes_per_second / 1e9:,.0f} GB/s (a copy),"
        f" bf16 {limits.bf16_per_second / 1e12:,.1f} TFLOP/s, fp16 {limits.fp16_per_second / 1e12:,.1f}"
    )
    yield from results.doubts
    for name, part in results.parts.items():
        yield ""
        yield name
        heads = list(dict.fromkeys(head for row in part for head in row))
        yield from _table([heads, *([_cell(head, row.get(head, "")) for head in heads] for row in part)])
    if results.kernels:
        yield ""
        yield f"kernels ({results.kernel_set})"
        rows = [["op", "size", "us", "GB/s", "of it", "TFLOP/s", "of it"]]
        for one in results.kernels:
            name = one.name if one.replayed else f"{one.name} *"
            rows.append([name, one.size, f"{one.seconds * 1e6:,.1f}", *_rates(one, limits)])
        yield from _table(rows)
        if not all(one.replayed for one in results.kernels):
            yield "  * launch by launch: gaps between launches count"
    for model in results.models:
        yield from _model(model, limits)
    for name, reason in results.not_measured.items():
        yield f"NOT MEASURED: {name}: {reason}"
    for failure in results.failures:
        yield f"NOT MEASURED: {failure}"


def _model(model: ModelResults, limits: Limits) -> Iterator[str]:
    yield ""
    size = f"{model.parameters / 1e6:,.1f} M parameters"
    yield f"{model.model}: {size}, {model.kernels} kernels, {model.load_seconds:.1f} s to load"
    rows = [["decode", "batch", "ms a step", "tok/s", "of memory"]]
    rows += [
        [
            one.executor,
            str(one.batch),
            f"{one.seconds * 1e3:.3f}",
            f"{one.batch / one.seconds:,.0f}",
            f"{one.num_bytes / one.seconds / limits.read_bytes_per_second:.0%}",
        ]
        for one in model.decodes
    ]
    yield from _table(rows)
    rows = [["prefill", "tokens", "ms", "tok/s", "of bf16 peak"]]
    rows += [
        [
            "",
            str(one.tokens),
            f"{one.seconds * 1e3:.2f}",
            f"{one.tokens / one.seconds:,.0f}",
            f"{one.operations / one.seconds / limits.bf16_per_second:.0%}",
        ]
        for one in model.prefills
    ]
    yield from _table(rows)
    run = model.throughput
    yield (
        f"{run.requests} requests at once, {run.prompt_tokens:,} tokens in, {run.output_tokens:,} out, in"
        f" {run.seconds:.2f} s: {run.output_tokens / run.seconds:,.0f} tok/s out"
    )


def _cell(head: str, value: str | float) -> str:
    if isinstance(value, float):
        return f"{value:.0%}" if head.startswith("of ") else f"{value:,.3f}" if value < 100 else f"{value:,.0f}"
    return str(value)


def _rates(one: KernelTime, limits: Limits) -> list[str]:
    moved, computed = one.num_bytes / one.seconds, one.operations / one.seconds
    return [
        f"{moved / 1e9:,.0f}",
        f"{moved / limits.read_bytes_per_second:.0%}",
        f"{computed / 1e12:,.1f}",
        f"{computed / limits.bf16_per_second:.0%}",
    ]


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Words to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()
