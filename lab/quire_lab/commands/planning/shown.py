"""The printed tables of the commands that simulate, plan and diagnose: for a terminal, or as wide text in a file.

Promises: an unknown number is a dash.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from quire_lab.simulation.contiguous import LEGEND, ContiguousOutcome, drawn
from quire_lab.simulation.report import Distribution, Report
from quire_lab.simulation.static_batching import StaticOutcome
from quire_server.showing.terminal import duration

_LATENCIES = (
    ("ttft", "time to the first token"),
    ("itl", "between two tokens"),
    ("tpot", "per token, of each request"),
    ("e2e", "whole request"),
    ("queue", "in the queue"),
)


def print_report(title: str, found: Report, console: Console) -> None:
    """Print all numbers of a run."""
    table = Table(title=title, title_justify="left")
    table.add_column("latency")
    for column in ("p50", "p90", "p95", "p99", "max", "mean"):
        table.add_column(column, justify="right")
    for name, text in _LATENCIES:
        values: Distribution = getattr(found, name)
        table.add_row(
            text,
            *(duration(value) for value in (values.p50, values.p90, values.p95, values.p99, values.max, values.mean)),
        )
    console.print(table)
    for name, text in _lines(found):
        console.print(f"{name:<14}{text}", highlight=False)
    if found.tenants:
        _print_tenants(found, console)


def _lines(found: Report) -> list[tuple[str, str]]:
    refused = ", ".join(f"{count:,} by {reason}" for reason, count in found.refused.items())
    hits = f"{found.cached_tokens / found.prompt_tokens:.1%}" if found.prompt_tokens else "-"
    causes = "".join(f", {count:,} for {cause}" for cause, count in found.preemptions_by_cause.items())
    residual = "-" if found.little_residual is None else f"{found.little_residual:+.2%}"
    lines = [
        ("requests", f"{found.served:,} of {found.requests:,} served; refused: {refused or 'none'}"),
        (
            "throughput",
            f"{found.request_rate:.4g} requests/s, {found.output_token_rate:,.4g} output tokens/s over"
            f" {duration(found.seconds)}; offered {found.offered_rate:.4g} requests/s; computing {found.busy:.1%}",
        ),
        ("goodput", f"{found.goodput:.4g} requests/s: {found.good:,} within the objectives"),
        (
            "KV blocks",
            f"peak {found.peak_blocks:,} of {found.pool_blocks:,} in step {found.peak_step:,}, mean"
            f" {found.mean_blocks:,.4g}; cumulative {found.cumulative_blocks:,}",
        ),
        (
            "scheduling",
            f"{found.steps:,} steps, {found.evictions:,} cached blocks evicted; {hits} of prompt tokens from the prefix"
            " cache",
        ),
        (
            "preemptions",
            f"{found.preemptions:,}{causes}, at most {found.most_preemptions:,} of one request;"
            f" {found.recomputed_tokens:,} tokens recomputed, {found.recomputed:.1%} of the computed ones",
        ),
        ("Little's law", f"{found.little_in_flight:.4g} requests in flight, residual {residual}"),
    ]
    if found.guessed_tokens:
        share = found.guessed_right / found.guessed_tokens
        lines.append(("speculation", f"{found.guessed_tokens:,} tokens guessed, {share:.1%} of them right"))
    for name, measured in found.misses.items():
        lines.append(("MISSED", f"{name} is {duration(measured)}"))
    return lines


def _print_tenants(found: Report, console: Console) -> None:
    even = "-" if found.jain is None else f"{found.jain:.3f}"
    table = Table(title=f"Tenants; Jain's index of their service {even}", title_justify="left")
    table.add_column("tenant")
    for column in ("requests", "refused", "service", "cached", "TTFT p50", "TTFT p95"):
        table.add_column(column, justify="right")
    for one in found.tenants:
        table.add_row(
            one.tenant or "(none)",
            f"{one.requests:,}",
            f"{one.refused:,}",
            f"{one.service:,.0f}",
            f"{one.cached:.1%}",
            duration(one.ttft_p50),
            duration(one.ttft_p95),
        )
    console.print(table)


def print_static(found: StaticOutcome, continuous: Report, console: Console) -> None:
    """Print static batching beside the scheduler's run."""
    outcome = found.outcome
    table = Table(title="The same load in static batches", title_justify="left")
    table.add_column("")
    for column in ("static", "continuous"):
        table.add_column(column, justify="right")
    rows = (
        ("steps", f"{outcome.steps:,}", f"{continuous.steps:,}"),
        ("time", duration(outcome.seconds), duration(continuous.seconds)),
        ("decode slots computed", f"{found.slot_steps:,}", f"{found.useful_steps:,}"),
        ("of them useful", f"{found.efficiency:.3%}", "100%"),
        ("padding", f"{1 - found.efficiency:.1%}", "0%"),
        ("blocks at once, peak", f"{outcome.peak_blocks:,}", f"{continuous.peak_blocks:,}"),
        ("blocks, each request's at its end", f"{outcome.cumulative_blocks:,}", f"{continuous.cumulative_blocks:,}"),
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_contiguous(found: ContiguousOutcome, paged: Report, console: Console) -> None:
    """Print a run in memory without pages beside the scheduler's run, and the step with the most useless free slots."""
    outcome, paged_slots = found.outcome, paged.mean_blocks * found.num_slots / max(1, paged.pool_blocks)
    table = Table(title="The same load in memory without pages", title_justify="left")
    table.add_column("")
    for column in ("contiguous", "paged"):
        table.add_column(column, justify="right")
    refused = sum(1 for one in outcome.requests if one.refused)
    rows = (
        ("steps", f"{outcome.steps:,}", f"{paged.steps:,}"),
        ("time", duration(outcome.seconds), duration(paged.seconds)),
        ("requests served", f"{len(outcome.requests) - refused:,}", f"{paged.served:,}"),
        ("slots reserved, mean", f"{found.slot_steps / max(1, outcome.steps):,.0f}", f"{paged_slots:,.0f}"),
        ("of them with a token", f"{found.efficiency:.1%}", "-"),
        ("steps that a request waited for want of slots", f"{found.steps_short:,}", "-"),
        ("and with enough of them, but in holes", f"{found.steps_at_holes:,}", "0"),
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if found.worst is not None:
        holes = found.worst.holes
        lost = sum(length for _, length in holes)
        console.print(
            f"step {found.worst.step + 1:,}: {lost:,} free slots in {len(holes)} holes, none long enough; {LEGEND}",
            highlight=False,
        )
        for line in drawn(found.worst):
            console.print(line, highlight=False, markup=False)
