"""The results as a table and a few sentences on the terminal.

Promises: medians with their spread, ratios to the first server, and nothing that the JSON file does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from quire_bench.compare import Knee, Spread
from quire_bench.limits import Limits
from quire_bench.results import OnePoint, Results
from quire_bench.servers import KvUse
from quire_bench.workload import LoadPoint

_WIDTH = 140  # where there is no terminal
_LATE_MS = 20.0
_LITTLE_HOLDS = 0.05
_CHUNKS_PER_TOKEN = 0.98
_ENOUGH_REQUESTS = 30  # for a steady state to show


def print_report(results: Results, console: Console | None = None) -> None:
    """Everything, in the order of reading: what was done, the numbers, what they mean."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=max(_WIDTH, console.width))
    console.print(_title(results), highlight=False, style="dim")
    console.print(_table(results))
    for line in _sentences(results):
        console.print(line, highlight=False)


def _title(results: Results) -> str:
    machine, work = results.machine, results.workload
    lengths = f"{work.input_tokens} in, {work.output_tokens} out"
    if work.prefix_tokens:
        lengths = f"{work.prefix_tokens} shared + {lengths}"
    if work.trace_rows:
        lengths = f"a trace of {work.trace_rows} requests"
    return (
        f"{lengths}; medians of {results.repeat} (lowest-highest); {machine.processor}, {machine.cores} cores,"
        f" load {machine.load_average:.1f} before; {results.started}"
    )


def _table(results: Results) -> Table:
    table = Table()
    table.add_column("load")
    table.add_column("server")
    for title in ("output tok/s", "all tok/s", "TTFT ms p50 / p99", "TPOT ms p50 / p99", "ITL ms p99", "errors"):
        table.add_column(title, justify="right")
    if len(results.servers) > 1:
        table.add_column(f"{results.servers[0].name} is, tok/s", justify="right")
    for result in results.points:
        for one in result.servers:
            table.add_row(*_row(str(result.point), one, with_ratio=len(results.servers) > 1))
        table.add_section()
    return table


def _row(load: str, one: OnePoint, *, with_ratio: bool) -> list[str]:
    of = one.summary.get
    bad = sum(sum(run.errors.values()) for run in one.rounds)
    odd = sum(run.wrong_length for run in one.rounds)
    cells = [
        load,
        one.server,
        _spread(of("output_tok_s")),
        _middle(of("total_tok_s")),
        f"{_middle(of('ttft_p50_ms'))} / {_middle(of('ttft_p99_ms'))}",
        f"{_middle(of('tpot_p50_ms'))} / {_middle(of('tpot_p99_ms'))}",
        _middle(of("itl_p99_ms")),
        (str(bad) if bad else "") + (f" ({odd} of wrong length)" if odd else ""),
    ]
    if with_ratio:
        ratio = one.ratios.get("output_tok_s")
        cells.append(f"{ratio.median:.2f}x ({ratio.min:.2f}-{ratio.max:.2f})" if ratio is not None else "")
    return cells


def _sentences(results: Results) -> list[str]:
    lines = []
    for name, knee in results.knees.items():
        lines.append(f"{name}: {_knee(knee, results.points[0].point)}")
    for machine, limits in results.limits.items():
        lines.append(_limits_text(machine, limits))
    peaks = _peaks(results)
    for result in results.points:
        lines += [
            f"{one.server} at {result.point}: {text}" for one in result.servers if (text := _shares_text(one, peaks))
        ]
    for result in results.points:
        lines += [f"{one.server} at {result.point}: {_kv_text(one.kv)}" for one in result.servers if one.kv]
    for reason in dict.fromkeys(results.limits_missing.values()):
        names = ", ".join(name for name, why in results.limits_missing.items() if why == reason)
        lines.append(f"{names}: shares of the machine unknown: {reason}")
    for result in results.points:
        for one in result.servers:
            lines += _doubts(result.point, one, has_ids=results.workload.token_ids)
    return lines


def _limits_text(machine: str, limits: Limits) -> str:
    kinds = (
        ("bf16", limits.bf16_per_second, limits.bf16_instruction),
        ("fp16", limits.fp16_per_second, ""),
        ("int8", limits.int8_per_second, limits.int8_instruction),
        ("fp32", limits.fp32_per_second, limits.fp32_instruction),
    )
    peaks = ", ".join(f"{name} {rate / 1e9:,.0f} G/s{f' ({by})' if by else ''}" for name, rate, by in kinds if rate)
    who = f"this machine at its best, {limits.threads} threads"
    if machine.partition(" ")[0] != "cpu":
        who = f"{limits.variant} at its best, {limits.threads} multiprocessors"
    return f"{who}: {peaks} operations; memory {limits.read_bytes_per_second / 1e9:,.1f} GB/s"


def _peaks(results: Results) -> dict[str, str]:
    """Return by server the instruction whose rate is its peak, where that is known."""
    found = {}
    for info in results.servers:
        if info.facts is not None and (limits := results.limits.get(info.facts.machine)) is not None:
            found[info.name] = limits.instruction(info.facts.weight_type)
    return found


def _shares_text(one: OnePoint, peaks: Mapping[str, str]) -> str:
    by = peaks.get(one.server, "")
    kinds = (
        (f"of the peak of {by}" if by else "of peak arithmetic", "arithmetic"),
        ("of it in prefill", "prefill"),
        ("of read bandwidth in decode", "decode_read"),
    )
    return ", ".join(f"{_percent(one.shares[kind])} {what}" for what, kind in kinds if kind in one.shares)


def _kv_text(rounds: Sequence[KvUse]) -> str:
    """Return in words what sharing saved and what preemptions cost, over all rounds."""
    looked_up, found, computed, recomputed, saved, taken, preemptions = (
        sum(getattr(one, name) for one in rounds)
        for name in ("looked_up", "found", "computed", "recomputed", "blocks_saved", "blocks_taken", "preemptions")
    )
    cached = f"{found:,} of {looked_up:,} prompt tokens ({found / looked_up if looked_up else 0:.0%}) were cached"
    again = f"{recomputed:,} of {computed:,} tokens ({recomputed / computed if computed else 0:.1%}) were recomputed"
    return f"{cached}, {saved:,} blocks saved and {taken:,} taken; {again} after {preemptions:,} preemptions"


def _doubts(point: LoadPoint, one: OnePoint, *, has_ids: bool) -> list[str]:
    """Return what a reader should know before believing a number."""
    doubts = []
    examples = dict.fromkeys(example for run in one.rounds for example in run.error_examples)
    doubts += [f"{one.server} at {point}: {example}" for example in list(examples)[:3]]
    tokens, chunks = (sum(getattr(run, name) for run in one.rounds) for name in ("output_tokens", "chunks"))
    if chunks < _CHUNKS_PER_TOKEN * tokens and not has_ids:
        doubts.append(
            f"{one.server} at {point}: {chunks:,} chunks for {tokens:,} tokens; if tokens without text are the reason,"
            " TTFT is too long and TPOT too short: add --token-ids"
        )
    lag = max(run.send_lag_ms for run in one.rounds)
    if point.mode != "concurrency" and lag > _LATE_MS:
        doubts.append(f"{one.server} at {point}: a request was sent {lag:.0f} ms late; the load generator had no time")
    checked = [run.little for run in one.rounds if run.requests >= _ENOUGH_REQUESTS]
    residuals = [abs(little.residual) for little in checked if little.residual is not None]
    if residuals and min(residuals) > _LITTLE_HOLDS:
        doubts.append(
            f"{one.server} at {point}: Little's law is off by {min(residuals):.0%} or more; no steady state, run longer"
        )
    return doubts


def _knee(knee: Knee, point: LoadPoint) -> str:
    at = str(LoadPoint(mode=point.mode, value=knee.value))
    if not knee.reached:
        return f"not saturated up to {at} ({knee.throughput:.0f} tok/s)"
    return f"saturates at {at} ({knee.throughput:.0f} tok/s)"


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{_number(spread.median)} ({_number(spread.min)}-{_number(spread.max)})"


def _percent(spread: Spread) -> str:
    return f"{spread.median:.0%} ({spread.min:.0%}-{spread.max:.0%})"


def _middle(spread: Spread | None) -> str:
    return _number(spread.median) if spread is not None else "-"


def _number(value: float) -> str:
    """Three digits, without more decimals than they need."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
