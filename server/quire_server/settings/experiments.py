"""Experiments: settings that tests, measurements and rare machines need, behind one `--set NAME=VALUE`.

Promises: each is declared like every other setting, and reached by `--set`, `QUIRE_SET` and the key `set` of a file
alone; a message tells how it is written. Must not know: torch, HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, Field

from quire_engine.contract.config import AsyncScheduling, AttentionChoice, CpuVariant, KernelChoice
from quire_engine.contract.limits import SchedulerLimits, VictimName
from quire_engine.contract.types import MAX_LOGPROBS
from quire_engine.routing.policy import RoutePolicyName
from quire_server.settings.faults import FaultList
from quire_server.settings.sources import SettingsError, flag_name
from quire_server.settings.values import BlockSize, LogprobLimit, Names, Positive, PositiveSeconds, option

SET = "set"  # the setting that has them
_LIMITS = SchedulerLimits()
_NEXT_PAIR = re.compile(r",(?=\s*[a-z_]+=)")  # a value may have commas too


class EngineExperiments(BaseModel):
    """Experiments with a model, its memory and its schedule."""

    kernels: KernelChoice = option("auto", "Experiments", "implementation of the model's operations")
    cpu_variant: CpuVariant | None = option(
        None, "Experiments", "instruction set of the C++ kernels; default: the fastest of this CPU's, as measured"
    )
    attention: AttentionChoice = option(
        "auto",
        "Experiments",
        "attention on a GPU: Quire's kernels (auto, triton) or an installed library (flash-attn)",
    )
    trust_gpu_paths: bool = option(
        False, "Experiments", "take every optional path of a GPU's kernels without the check at the start"
    )
    ignore_config_keys: Names = option(
        (), "Experiments", "unknown keys of config.json to ignore instead of refusing the model"
    )
    max_logprobs: LogprobLimit = option(
        20,
        "Experiments",
        f"most alternatives per token a client may request; at most {MAX_LOGPROBS}, which -1 means too",
    )
    max_cpu_loras: Positive | None = option(
        None, "Experiments", "most adapters kept in memory; others are read when requested; default: --max-loras"
    )
    block_size: BlockSize = option(
        _LIMITS.block_size, "Experiments", "tokens per KV block: 16, 32, 64, 128 or 256", "tokens"
    )
    enable_prefix_caching: bool = option(
        _LIMITS.enable_prefix_caching, "Experiments", "reuse the KV blocks of equal prompt beginnings"
    )
    max_num_partial_prefills: int = option(
        _LIMITS.max_num_partial_prefills,
        "Experiments",
        "sequences whose prompts may be partly computed at the same time",
    )
    preemption_victim: VictimName = option(
        _LIMITS.preemption_victim, "Experiments", "which request is preempted when memory runs out"
    )
    async_scheduling: AsyncScheduling = option(
        "auto", "Experiments", "plan each step while the one before it is computed; on a GPU only, where auto does"
    )


class ServerExperiments(BaseModel):
    """Experiments with a server around its engines."""

    response_store_size: Annotated[int, Field(ge=0)] = option(
        1024, "Experiments", "past responses of /v1/responses kept to be read and continued; 0 keeps none"
    )
    route_policy: RoutePolicyName = option(
        "predicted_ttft",
        "Experiments",
        "which replica gets a request: by its predicted first token, cached prefix included",
    )
    max_engine_restarts: Annotated[int, Field(ge=0)] = option(
        5, "Experiments", "engine restarts within ten minutes before giving up with exit code 70"
    )
    engine_hang_timeout: PositiveSeconds = option(
        10.0,
        "Experiments",
        "an engine that is silent for so long, or for five times its longest step, is replaced",
        "s",
    )
    learn: bool = option(False, "Experiments", "let the page /learn pause the engine: requests wait meanwhile")
    check_invariants: bool = option(False, "Experiments", "audit the scheduler after every step, not only when idle")
    enable_fault_injection: FaultList = option(
        "",
        "Experiments",
        "faults to inject, such as step.raise@5,oom@seed=7; for tests, see Faults for tests; loopback only",
    )


EXPERIMENTS = EngineExperiments.model_fields | ServerExperiments.model_fields


def spelled(name: str) -> str:
    """A setting's name on the command line: `--port`, or `--set kernels`."""
    return f"--{SET} {name}" if name in EXPERIMENTS else flag_name(name)


def given_as(name: str, value: str) -> str:
    """A setting with its value on the command line: `--port 80`, or `--set kernels=cpu`."""
    return f"{spelled(name)}{'=' if name in EXPERIMENTS else ' '}{value}"


def with_experiments(values: Mapping[str, object], source: str) -> dict[str, object]:
    """Return the settings of a source with those of its `set` beside them. Raises SettingsError.

    `source`: how `set` is spelled there, for messages.
    """
    plain = {name: value for name, value in values.items() if name != SET}
    return plain | dict(_pairs(values.get(SET), source))


def _pairs(given: object, source: str) -> list[tuple[str, object]]:
    """`a=1,b=2`, a list of such texts, or a mapping, as names with their values."""
    if isinstance(given, Mapping):
        found = [(str(name), _text(value)) for name, value in given.items()]
    else:
        words = given if isinstance(given, list | tuple) else [given] if given else []
        found = [_pair(pair, source) for word in words for pair in _NEXT_PAIR.split(str(word))]
    named = [(name.strip().replace("-", "_"), value) for name, value in found]
    if unknown := [name for name, _ in named if name not in EXPERIMENTS]:
        known = ", ".join(EXPERIMENTS)
        raise SettingsError(*(f"{source} {name}: no experiment has this name; known: {known}" for name in unknown))
    return named


def _text(value: object) -> object:
    """Return what YAML reads of `on` and `off` as they were written."""
    return ("off", "on")[value] if isinstance(value, bool) else value


def _pair(text: str, source: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SettingsError(f"{source} {text}: expected NAME=VALUE, such as check_invariants=true")
    return name, value.strip()
