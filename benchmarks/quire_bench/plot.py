"""The results as a picture: throughput and latency against load.

Promises: one PNG, without a display; matplotlib is loaded only when a picture is asked for.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quire_bench.compare import Spread
from quire_bench.results import Results

_PANELS = (
    ("output tokens/s", ("output_tok_s",)),
    ("time to first token, ms (dashed: p99)", ("ttft_p50_ms", "ttft_p99_ms")),
    ("time per output token, ms (dashed: p99)", ("tpot_p50_ms", "tpot_p99_ms")),
)
_LOADS = {"concurrency": "streams", "rate": "requests/s", "trace": "speed of the trace"}


def draw(results: Results, path: Path) -> None:
    """Medians as lines, lowest to highest of the rounds as bars; the 99th percentile is dashed."""
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    work = results.workload
    lengths = f"{work.input_tokens} tokens in, {work.output_tokens} out"
    figure.suptitle(f"{lengths}; medians of {results.repeat}; {results.machine.processor}")
    for axes, (title, quantities) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        _panel(axes, results, quantities)
        axes.set_title(title)
        axes.set_xlabel(_LOADS[results.points[0].point.mode])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    for name, knee in results.knees.items():
        if knee.reached:
            figure.axes[0].annotate(f"{name} saturates", (knee.value, knee.throughput), fontsize=8)
    figure.axes[0].legend()
    figure.savefig(path, dpi=120, format="png")


def _panel(axes: Axes, results: Results, quantities: tuple[str, ...]) -> None:
    loads = [result.point.value for result in results.points]
    if len(loads) > 1 and max(loads) >= 8 * min(loads):
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
    for place, info in enumerate(results.servers):
        for style, quantity in zip(("-", "--"), quantities, strict=False):
            found = [
                (result.point.value, spread)
                for result in results.points
                if (spread := result.servers[place].summary.get(quantity)) is not None
            ]
            _line(axes, sorted(found, key=lambda item: item[0]), colour=f"C{place}", style=style, name=info.name)


def _line(axes: Axes, found: list[tuple[float, Spread]], *, colour: str, style: str, name: str) -> None:
    axes.errorbar(
        [load for load, _ in found],
        [spread.median for _, spread in found],
        yerr=[[spread.median - spread.min for _, spread in found], [spread.max - spread.median for _, spread in found]],
        color=colour,
        linestyle=style,
        marker="o",
        capsize=3,
        label=name if style == "-" else None,
    )
