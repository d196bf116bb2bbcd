"""Reads a step log: JSON lines of events and steps, in the order of the calls.

Promises: every log of `scheduling.log.step_log` is read completely; another format or a broken line is refused with its
number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from quire_engine.contract.errors import ConfigError
from quire_engine.contract.limits import SchedulerConfig, SchedulerLimits, scheduler_limits
from quire_engine.cost_model import StepSizes
from quire_lab.simulation.fitting import Sample

_FORMAT = 2
_KINDS = ("submit", "abort", "fail", "expire", "hold", "release", "end", "reset", "adopt", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a log: an event, or a step."""

    kind: str
    ordinal: int
    plain: Mapping[str, Any]

    @property
    def request_id(self) -> str:
        return str(self.plain["request_id"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A whole log."""

    config: SchedulerConfig
    first_step: int
    entries: tuple[Entry, ...]
    restored_blocks: int = 0  # host blocks with contents from before the log
    unknown_settings: tuple[str, ...] = ()  # settings of a later version, which this scheduler does not have

    @property
    def steps(self) -> Iterator[Mapping[str, Any]]:
        """The steps, in order."""
        return (entry.plain for entry in self.entries if entry.kind == "step")

    @property
    def is_whole(self) -> bool:
        """Whether the log has every input of the plans, from the first step on."""
        return self.first_step <= 1

    def samples(self) -> list[Sample]:
        """The sizes and times of its steps, for a cost model."""
        return [
            Sample(sizes=sizes_of(step), seconds=float(step["seconds"])) for step in self.steps if step["seconds"] > 0
        ]


def sizes_of(step: Mapping[str, Any]) -> StepSizes:
    """The sizes of a recorded step, as `cost_model.step_sizes` has them for a batch."""
    guessed = {(name, choice): count for name, choice, count, _ in step.get("drafts", ())}
    context = before = 0
    for name, choice, start, num_tokens in step["slices"]:
        if num_tokens == 1 + guessed.get((name, choice), 0):  # each guessed token is a row as a decode is
            context += sum(range(start + 1, start + 1 + num_tokens))
        else:
            before += num_tokens * start
    num_decodes = step["decode_tokens"] + sum(guessed.values())
    return StepSizes(step["prefill_tokens"] + num_decodes, num_decodes, context, before)


@dataclass(slots=True)
class _Reading:
    config: Mapping[str, Any] | None = None
    entries: list[Entry] = field(default_factory=list)


def read_log(path: Path) -> Recording:
    """Read a log file. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    reading = _Reading()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            _take(json.loads(line), reading)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path}:{number}: {_reason(error)}") from None
    if reading.config is None:
        raise ConfigError(f"{path} is no step log: it has no line of kind config; `quire trace --json` writes one")
    config, unknown = _config(reading.config["config"], path)
    if reading.config["config"].get("speculates") and any(
        "drafts" not in entry.plain for entry in reading.entries if entry.kind == "step"
    ):
        raise ConfigError(f"{path}: its server guessed tokens ahead (speculation), which a log of its version lacks")
    entries = tuple(sorted(reading.entries, key=lambda entry: entry.ordinal))
    return Recording(
        config=config,
        first_step=int(reading.config.get("first_step", 1)),
        entries=entries,
        restored_blocks=int(reading.config.get("restored_blocks", 0)),
        unknown_settings=unknown,
    )


def _take(plain: dict[str, Any], reading: _Reading) -> None:
    kind = plain["kind"]
    if kind == "config":
        if plain.get("format") != _FORMAT:
            raise ValueError(f"the log has format {plain.get('format')!r}; this version reads {_FORMAT}")
        reading.config = plain
        return
    if kind not in _KINDS:
        raise ValueError(f"entries of kind {kind!r} are unknown")
    if kind == "step":
        plain = {
            "applied_at": None,
            "applied_ordinal": None,
            "forced": [],
            "failed": [],
            "beams": [],
            "ends": [],
        } | plain
        for name in ("step_id", "planned_at", "slices", "prefill_tokens", "decode_tokens", "seconds"):
            plain[name]
    else:
        plain["request_id"]
    reading.entries.append(Entry(kind=kind, ordinal=int(plain["ordinal"]), plain=plain))


def _config(plain: Mapping[str, Any], path: Path) -> tuple[SchedulerConfig, tuple[str, ...]]:
    limits = dict(plain["limits"])
    known = {one.name for one in fields(SchedulerLimits)}
    unknown = tuple(sorted(set(limits) - known))
    try:
        config = SchedulerConfig(
            **{name: plain[name] for name in ("num_blocks", "max_model_len")},
            **{name: plain[name] for name in ("plans_ahead", "num_host_blocks", "swap_seconds") if name in plain},
            windows=tuple(plain.get("windows", (None,))),
            limits=scheduler_limits({name: value for name, value in limits.items() if name in known}),
        )
        config.check()
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{path}: the configuration is not one: {_reason(error)}") from None
    return config, unknown


def _reason(error: Exception) -> str:
    return f"there is no {error}" if isinstance(error, KeyError) else str(error)
