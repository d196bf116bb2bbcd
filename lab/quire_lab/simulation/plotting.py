"""Plots used blocks over time: as an SVG file, or as text for a terminal.

Promises: no library, no display; the peak is always shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from quire_lab.simulation.outcome import Outcome

_WIDTH, _HEIGHT, _MARGIN = 900, 300, 50
_BARS = " ▁▂▃▄▅▆▇█"


def svg(outcome: Outcome, *, title: str, time_unit: str = "s", static_blocks: int | None = None) -> str:
    """Used blocks as an area, with the peak marked; with `static_blocks` also the blocks of static slots."""
    moments = outcome.moments
    end = max(outcome.seconds, 1e-9)
    most = max(outcome.peak_blocks, static_blocks or 0, 1)

    def x(at: float) -> float:
        return round(_MARGIN + at / end * (_WIDTH - 2 * _MARGIN), 2)

    def y(blocks: float) -> float:
        return round(_HEIGHT - _MARGIN - blocks / most * (_HEIGHT - 2 * _MARGIN), 2)

    path = [f"M{x(0)},{y(0)}"]
    for moment in moments:
        path.append(f"H{x(moment.at)}V{y(moment.blocks_used)}")
    path.append(f"H{x(end)}V{y(0)}Z")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_MARGIN}" y="24" font-size="15">{escape(title)}</text>',
        f'<path d="{"".join(path)}" fill="#4c78a8" fill-opacity="0.6" stroke="#4c78a8"/>',
        _rule(y(outcome.peak_blocks), f"peak {outcome.peak_blocks:,} blocks, step {outcome.peak_step:,}", "#e45756"),
    ]
    if static_blocks is not None:
        lines.append(_rule(y(static_blocks), f"static slots {static_blocks:,} blocks", "#72757a"))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = f"{share * end:.4g} {time_unit}"
        lines.append(
            f'<text x="{x(share * end)}" y="{_HEIGHT - 28}" font-size="11" text-anchor="middle">{at}</text>'
            f'<text x="{_MARGIN - 6}" y="{y(share * most) + 4}" font-size="11" text-anchor="end">'
            f"{share * most:.4g}</text>"
        )
    return "\n".join([*lines, "</svg>", ""])


def _rule(y: float, text: str, colour: str) -> str:
    return (
        f'<path d="M{_MARGIN},{y}H{_WIDTH - _MARGIN}" stroke="{colour}" stroke-dasharray="4 3"/>'
        f'<text x="{_WIDTH - _MARGIN}" y="{y - 4}" font-size="11" text-anchor="end" fill="{colour}">'
        f"{escape(text)}</text>"
    )


def terminal(outcome: Outcome, *, width: int = 72, height: int = 8, time_unit: str = "s") -> list[str]:
    """Return the plot as lines of text; each column is the maximum in its part of the time."""
    columns = _columns([(moment.at, moment.blocks_used) for moment in outcome.moments], outcome.seconds, width)
    if outcome.moments:  # a long run's moments are thinned out: its peak may not be among them
        most = max(columns)
        columns[columns.index(most)] = max(most, outcome.peak_blocks)
    top = max(outcome.peak_blocks, 1)
    lines = []
    for row in range(height, 0, -1):
        cells = []
        for value in columns:
            eighths = round(value / top * height * 8) - (row - 1) * 8
            cells.append(_BARS[max(0, min(8, eighths))])
        lines.append(f"{round(top * row / height):>7,} {''.join(cells)}")
    end = f"{outcome.seconds:>{max(1, width - 4 - len(time_unit))}.4g} {time_unit}"
    return [*lines, f"{'blocks':>7} 0 {time_unit}{end}"]


def _columns(points: Sequence[tuple[float, int]], end: float, width: int) -> list[int]:
    """The maximum in each part; a part without a point has the value of the part before."""
    found: list[int | None] = [None] * width
    for at, value in points:
        place = min(width - 1, int(at / max(end, 1e-9) * width))
        found[place] = max(found[place] or 0, value)
    columns, last = [], 0
    for value_or_none in found:
        last = last if value_or_none is None else value_or_none
        columns.append(last)
    return columns
