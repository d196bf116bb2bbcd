"""Admission by expected growth against admission by the prompt: throughput, first tokens, and the work done twice.

Promises: each load runs under both settings on the same simulated clock; requests share no tokens, so that nothing but
admission, victims and order can save blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from quire_bench.traces import TraceRow, read_trace
from quire_engine.cost_model import read_cost
from quire_lab.simulation.report import Distribution, Report, report
from quire_lab.simulation.setup import Setup
from quire_lab.simulation.simulator import simulate
from quire_lab.studies.published import Check

BY_PROMPT = (("admission", "prompt"), ("preemption_victim", "youngest"), ("scheduling_policy", "fcfs"))
TRACE = Path(__file__).parents[3] / "benchmarks" / "data" / "azure_conv_sample.csv"
_SMALL = "step=0.25ms,row=0.08ms,context=0.01us,token=0.025ms"  # about the embedded model on two cores
_LARGE = "step=20ms,row=0.2ms,context=0.1us,token=0.1ms"
_LOSS = 0.01  # most throughput that an ordinary load may lose
_MAX_TOKENS = 1024
_AMPLE = 16384  # blocks: more than any of the loads holds
VICTIM, GREEDY = "victim", "greedy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load, and the server that it meets.

    `is_ordinary`: it does not preempt all the time, so that caution must not cost throughput. `spared`: the tenant that
    others are to leave alone.
    """

    name: str
    rows: Sequence[TraceRow]
    setup: Setup
    is_ordinary: bool = True
    spared: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load under one setting. `ttft`, `tpot`: of the spared tenant, if there is one, and else of all."""

    load: str
    setting: str
    found: Report
    ttft: Distribution
    tpot: Distribution


def thrash(count: int = 74, output: int = 1200) -> list[TraceRow]:
    """Short prompts with long outputs, all at once."""
    return [TraceRow(at=0.0, input_tokens=20, output_tokens=output) for _ in range(count)]


def squeeze() -> list[TraceRow]:
    """Fill-and-Squeeze: one tenant's long outputs fill the pool and its short requests force preemptions; one other.

    The victim asks four times a second for 60 tokens.
    """
    rows = [TraceRow(at=0.05 * i, input_tokens=20, output_tokens=1200, tenant=GREEDY) for i in range(60)]
    rows += [TraceRow(at=0.5 + i / 40, input_tokens=100, output_tokens=16, tenant=GREEDY) for i in range(2000)]
    rows += [TraceRow(at=0.5 + i / 4, input_tokens=60, output_tokens=60, tenant=VICTIM) for i in range(200)]
    return sorted(rows, key=lambda row: row.at)


def declared(rows: Sequence[TraceRow], max_tokens: int) -> list[TraceRow]:
    """Return the requests with a limit that clients set, who do not know the lengths."""
    return [replace(row, max_tokens=max_tokens) for row in rows]


def server(cost: str, num_blocks: int) -> Setup:
    """Today's defaults on a pool of this size, with a queue that refuses nothing."""
    return Setup(cost=read_cost(cost)[0], max_num_queued_reqs=10_000).with_settings([("num_blocks", num_blocks)])


def loads() -> list[Load]:
    """Return loads that preempt, and loads that have no need to."""
    azure = read_trace(TRACE)
    found = [
        Load(name="thrash", rows=thrash(), setup=server(_SMALL, 128), is_ordinary=False),
        Load(
            name="thrash, max 2,000",
            rows=declared(thrash(), 2000),
            setup=server(_SMALL, 128),
            is_ordinary=False,
        ),
    ]
    for blocks in (1000, 2000, _AMPLE):
        name = f"Azure / {blocks:,}"
        found.append(Load(name=name, rows=azure, setup=server(_LARGE, blocks)))
        rows = declared(azure, _MAX_TOKENS)
        found.append(Load(name=f"{name}, max {_MAX_TOKENS:,}", rows=rows, setup=server(_LARGE, blocks)))
    found.append(Load(name="squeeze", rows=squeeze(), setup=server(_SMALL, 512), spared=VICTIM))
    return found


def run(load: Load, setting: str, changes: Sequence[tuple[str, str]] = ()) -> Run:
    """Simulate one load with changed settings."""
    outcome = simulate(load.setup.with_settings(changes), load.rows)
    spared = [one for one in outcome.done if load.spared in ("", one.row.tenant)]
    return Run(
        load=load.name,
        setting=setting,
        found=report(outcome),
        ttft=Distribution.of([one.ttft for one in spared]),
        tpot=Distribution.of([one.tpot for one in spared if one.tpot is not None]),
    )


def compare() -> tuple[list[Run], list[Check]]:
    """All runs, and what must hold: ordinary loads keep their throughput, and the spared tenant its first tokens."""
    runs: list[Run] = []
    checks = []
    for load in loads():
        before, after = run(load, "by the prompt", BY_PROMPT), run(load, "defaults")
        runs += [before, after]
        if load.is_ordinary:
            kept = min(1.0, after.found.output_token_rate / before.found.output_token_rate)
            checks.append(Check(name=f"{load.name}: throughput kept", expected=1, got=kept, tolerance=_LOSS))
        if load.spared:
            ample = run(replace(load, setup=load.setup.with_settings([("num_blocks", _AMPLE)])), "ample pool")
            runs.append(ample)
            for name, got, wanted in (("TTFT", after.ttft, ample.ttft), ("TPOT", after.tpot, ample.tpot)):
                ratio = (got.p95 or 0.0) / (wanted.p95 or 1.0)
                title = f"{load.name}: the victim's {name} p95, to that with an ample pool"
                checks.append(Check(name=title, expected=1, got=ratio, tolerance=1, unit="x"))
    return runs, checks


def table(runs: Sequence[Run]) -> Table:
    """A line for each run; times in milliseconds."""
    made = Table()
    made.add_column("load", no_wrap=True)
    made.add_column("admission")
    for column in ("tokens/s", "TTFT p50", "p95", "TPOT p95", "preempted", "most", "recomputed"):
        made.add_column(column, justify="right")
    for one in runs:
        made.add_row(
            one.load,
            one.setting,
            f"{one.found.output_token_rate:,.0f}",
            *[f"{1e3 * (value or 0.0):,.1f}" for value in (one.ttft.p50, one.ttft.p95, one.tpot.p95)],
            f"{one.found.preemptions:,}",
            f"{one.found.most_preemptions}",
            f"{one.found.recomputed:.1%}",
        )
    return made
