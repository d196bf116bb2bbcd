"""The load and the cost model of a step log, for a simulation with other settings.

Promises: requests keep their arrival times, their actual lengths and their common prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from quire_bench.traces import TraceRow
from quire_engine.contract.errors import ConfigError
from quire_engine.cost_model import CostModel
from quire_lab.simulation.contents import Contents
from quire_lab.simulation.fitting import fit_all
from quire_lab.simulation.recorded import Recording
from quire_lab.simulation.report import Distribution, Report


def fitted_cost(recording: Recording) -> CostModel:
    """The cost model of the recorded steps. Raises ConfigError for a log with too few of a kind."""
    try:
        return fit_all(recording.samples())
    except ConfigError as error:
        raise ConfigError(f"the log's own steps make no cost model: {error}; give one with --cost") from None


def load_of(recording: Recording) -> tuple[TraceRow, ...]:
    """A row for each request, the first at 0 s; n choices count as one with all their tokens. Raises ConfigError."""
    num_output: dict[str, int] = {}
    for step in recording.steps:
        for name, _, _, count in step["ends"]:
            num_output[name] = num_output.get(name, 0) + count
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}  # numbers of blocks, by the block before and the tokens
    contents = Contents(recording.entries, recording.config.limits.block_size)
    rows = []
    for entry in recording.entries:
        if entry.kind != "submit":
            continue
        asked = entry.plain["request"]
        scope, divider, _ = str(asked.get("cache_salt", "")).partition("\0")
        rows.append(
            TraceRow(
                at=float(asked.get("arrival_time") or entry.plain["at"]),
                input_tokens=asked["num_prompt_tokens"],
                output_tokens=max(1, num_output.get(entry.request_id, asked["max_new_tokens"])),
                blocks=tuple(_numbered(contents.blocks(entry.request_id), numbers)),
                block_tokens=recording.config.limits.block_size,
                tenant=str(asked.get("tenant", "")),
                weight=float(asked.get("weight", 1.0)),
                scope=scope if divider else "",
                max_tokens=asked["max_new_tokens"] if asked.get("may_stop") and asked.get("n") == 1 else None,
            )
        )
    if not rows:
        raise ConfigError("the log has no submission; `quire trace --json` writes them with the steps")
    rows.sort(key=lambda row: row.at)
    return tuple(replace(row, at=row.at - rows[0].at) for row in rows)


def _numbered(blocks: Iterable[tuple[int, ...]], numbers: dict[tuple[int, tuple[int, ...]], int]) -> Iterator[int]:
    """Equal numbers for blocks that are equal together with all blocks before them."""
    number = 0
    for block in blocks:
        number = numbers.setdefault((number, block), len(numbers) + 1)
        yield number


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The figures of a log that a simulation has too; times in seconds."""

    ttft: Distribution  # from arrival to the result of the step that computed the end of the prompt
    e2e: Distribution  # from arrival to the result of the step in which the last choice ended
    busy_seconds: float  # the durations of all steps
    steps: int  # that computed something
    preemptions: int
    peak_blocks: int


def measured(recording: Recording) -> Measured:
    """The figures of the recorded steps."""
    arrived: dict[str, float] = {}
    prompts: dict[str, int] = {}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for entry in recording.entries:
        if entry.kind == "submit":
            asked = entry.plain["request"]
            arrived[entry.request_id] = float(asked.get("arrival_time") or entry.plain["at"])
            prompts[entry.request_id] = asked["num_prompt_tokens"]
        elif entry.kind == "step" and entry.plain["applied_at"] is not None:
            for name, _, start, num_tokens in entry.plain["slices"]:
                if name not in first and start + num_tokens >= prompts.get(name, 1 << 62):
                    first[name] = float(entry.plain["applied_at"])
            last |= {name: float(entry.plain["applied_at"]) for name, *_ in entry.plain["ends"] if name in arrived}
    steps = list(recording.steps)
    decided = [decision["kind"] for step in steps for decision in step.get("decisions", ())]
    return Measured(
        ttft=Distribution.of([at - arrived[name] for name, at in first.items()]),
        e2e=Distribution.of([at - arrived[name] for name, at in last.items()]),
        busy_seconds=sum(float(step["seconds"]) for step in steps),
        steps=sum(1 for step in steps if step["slices"]),
        preemptions=decided.count("preempted") + sum(len(step.get("starved", ())) for step in steps),
        peak_blocks=max((int(step.get("blocks_used", 0)) for step in steps), default=0),
    )


BASE_TOLERANCE = 0.2  # as a share of the larger figure: as far as simulated and live servers were apart


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseFigure:
    """A figure of the recorded settings, as it was recorded and as it is simulated."""

    name: str
    recorded: float
    simulated: float
    is_time: bool  # in seconds; else a count

    @property
    def differs(self) -> bool:
        """True if the values differ by more than BASE_TOLERANCE, and by more than 1 ms (or a count of 1)."""
        larger, apart = max(self.recorded, self.simulated), abs(self.recorded - self.simulated)
        return apart > max(BASE_TOLERANCE * larger, 0.001 if self.is_time else 1.0)


def base_figures(known: Measured, base: Report) -> list[BaseFigure]:
    """The figures of a recorded run beside those of a simulation with its settings, where both have them."""
    figures: list[tuple[str, float | None, float | None, bool]] = [
        (f"{name} {statistic}", getattr(getattr(known, name), statistic), base.value(name, statistic), True)
        for name in ("ttft", "e2e")
        for statistic in ("p50", "p95")
    ]
    figures += [
        ("computing", known.busy_seconds, base.busy * base.seconds, True),
        ("steps", known.steps, base.steps, False),
        ("preemptions", known.preemptions, base.preemptions, False),
        ("peak blocks", known.peak_blocks, base.peak_blocks, False),
    ]
    return [
        BaseFigure(name=name, recorded=recorded, simulated=simulated, is_time=is_time)
        for name, recorded, simulated, is_time in figures
        if recorded is not None and simulated is not None
    ]
