"""Writes a plan into a section of a Markdown file: chosen values, evidence, rejected values and why.

Promises: only the text between the marks is replaced; a plan that equals the one in the file leaves the file unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_engine.contract.errors import ConfigError
from quire_lab.simulation.fitting import LARGEST_ERROR, FitError
from quire_lab.simulation.search import BACKLOG, Plan, Sustained
from quire_lab.simulation.slo import Slo
from quire_server.settings import given_as, spelled
from quire_server.showing.terminal import duration

BEGIN, END = "<!-- quire plan: begin; written by `quire plan --write` -->", "<!-- quire plan: end -->"
_LEAST_LENGTHS = 10  # fewest durations of a request that a load should last
_DATE = re.compile(r"^Planned on \d{4}-\d\d-\d\d", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """The circumstances of a plan: objectives, trace, date, machine, the calibration's error and the command."""

    slo: Slo
    trace: str
    date: str
    machine: Mapping[str, Any]
    error: FitError | None  # of the calibration; None where numbers give the times of steps
    command: str


def section(plan: Plan, about: Circumstances) -> str:
    """The text between the marks, as Markdown."""
    best = plan.best
    lines = [
        "## Planned settings",
        "",
        f"Planned on {about.date} for `{about.slo}` on {about.trace} ({plan.requests:,} requests), by"
        f" {plan.simulations:,} simulations of the scheduler that serves. {_step_times(about)}.",
        "",
        f"**{best.rate:.3g} requests/s** within the objectives ({plan.low:.3g} to {plan.high:.3g} over parts of the"
        f" load); {_gain(plan)}. What binds: {_binding(best)}.",
        "",
        "| setting | chosen | instead | requests/s | what it missed there |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, value in best.settings:
        lines.append(f"| `{spelled(name)}` | **{_text(value)}** | | {best.rate:.3g} | {_binding(best)} |")
        for other in plan.rejected:
            if other.name == name:
                found = other.found
                lines.append(f"| | | {_text(other.value)} | {found.rate:.3g} | {_binding(found)} |")
    if plan.runner_up is not None:
        differs = ", ".join(
            f"`{given_as(name, _text(value))}`"
            for (name, value), (_, chosen) in zip(plan.runner_up.settings, best.settings, strict=True)
            if value != chosen
        )
        lines += ["", f"Runner-up: {differs or 'the same'} with {plan.runner_up.rate:.3g} requests/s."]
    found_report = best.at_rate
    if found_report is not None:
        lines += [
            "",
            f"At that rate: TTFT p50 {duration(found_report.ttft.p50)}, p95 {duration(found_report.ttft.p95)}; ITL p50"
            f" {duration(found_report.itl.p50)}, p99 {duration(found_report.itl.p99)};"
            f" {found_report.output_token_rate:,.0f} output tokens/s; KV blocks at most {found_report.peak_blocks:,} of"
            f" {found_report.pool_blocks:,}; {found_report.preemptions:,} preemptions.",
        ]
    e2e = None if found_report is None else found_report.e2e.p95
    if e2e is not None and plan.seconds < _LEAST_LENGTHS * e2e:
        lines += [
            "",
            f"The load lasts {duration(plan.seconds)} at that rate, a request up to {duration(e2e)}: too short to"
            " trust. Take more of the trace.",
        ]
    return "\n".join([*lines, "", f"Again: `{about.command}`"])


def write(path: Path, text: str) -> bool:
    """Put the section in its place, or at the end; False if only the date would change. Raises ConfigError."""
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--write {path} cannot be read: {error}") from None
    begins, ends = before.count(BEGIN), before.count(END)
    if begins != ends or begins > 1 or (begins and before.index(END) < before.index(BEGIN)):
        raise ConfigError(f"--write {path}: the marks of the section are not one pair; put them right or remove them")
    marked = f"{BEGIN}\n{text}\n{END}"
    if begins:
        head, rest = before.split(BEGIN)
        old, tail = rest.split(END)
        if _DATE.sub("", old.strip()) == _DATE.sub("", text.strip()):
            return False
        after = f"{head}{marked}{tail}"
    else:
        after = f"{before.rstrip()}\n\n{marked}\n" if before.strip() else f"{marked}\n"
    try:
        path.write_text(after, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {path} cannot be written: {error.strerror}") from None
    return True


def _gain(plan: Plan) -> str:
    if plan.base.rate == 0:
        return "the settings so far meet them at no rate"
    return f"the settings so far do {plan.base.rate:.3g}, a factor of {plan.best.rate / plan.base.rate:.3g}"


def _binding(found: Sustained) -> str:
    if not found.binding:
        return "nothing at any rate"
    if found.binding.startswith("refused"):
        return f"{found.measured:,.0f} requests {found.binding} at {found.missed_at:.3g} requests/s"
    if found.binding == BACKLOG:
        return f"{BACKLOG}, by {found.measured:,.0f} requests, at {found.missed_at:.3g} requests/s"
    return f"{found.binding} of {duration(found.measured)} at {found.missed_at:.3g} requests/s"


def _step_times(about: Circumstances) -> str:
    origin, error = about.machine, about.error
    if not origin:
        return "Steps take the times that the command gives; their error is not known"
    where = ", ".join(origin.get("gpus") or [str(origin.get("processor", "?"))])
    judged = "its error is not known" if error is None else str(error)
    if error is not None and error.largest > LARGEST_ERROR:
        judged += f", more than the {LARGEST_ERROR:.0%} that a plan should rest on"
    return (
        f"Steps take what was measured on {where}, {origin.get('threads', '?')} threads,"
        f" {origin.get('architecture', '?')} in {origin.get('dtype', '?')} (calibration {origin.get('hash', '?')};"
        f" {judged})"
    )


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
