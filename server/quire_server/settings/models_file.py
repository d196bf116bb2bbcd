"""Several models behind one port: the file of `--models`, or `--model` given several times.

Promises: every model has whole, checked settings of its own; a message names the model and the key. Must not know:
HTTP, torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quire_server.settings.engine_fields import EngineFields
from quire_server.settings.experiments import EXPERIMENTS, SET, spelled, with_experiments
from quire_server.settings.fields import Settings
from quire_server.settings.sources import SettingsError, flag_name, moved_line, read_yaml, suggest

_FILES = (".yaml", ".yml")
_OWN = ("model", "served_model_name", "tokenizer", "revision", "chat_template", "lora_modules")  # of one model alone
# One engine of this machine computes a model, and one process accepts connections: what is more is not woken and slept.
_EXCLUDED = {
    "replicas": "a model has one engine here",
    "engines": "the models' engines are this machine's",
    "api_server_count": "one process accepts connections here",
    "warm_prefix": "a model's engine may start and end at any time",
    "kv_events_config": "events of a cache name no model",
    "enable_fault_injection": "a fault names no model",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One of several models: its settings, and how long it stays in memory."""

    settings: Settings
    pinned: bool = False  # loaded at the start and never put away for another
    priority: int = 0  # a busy model makes way for those of equal or higher priority alone
    idle_seconds: float | None = None  # without a request, after which the engine ends; None: only for another
    sleep_level: int = 1  # then: 1 keeps the weights in memory while they have room, 2 does not


class _Residency(BaseModel):
    """The keys of an entry that are no settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pinned: bool = False
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    idle_seconds: Annotated[float, Field(gt=0)] | None = None
    sleep_level: Literal[1, 2] = 1


def several_models(settings: Settings) -> tuple[ModelEntry, ...]:
    """The models of `--models`, the first is the default one; none where the server has one model.

    Raises SettingsError.
    """
    if not settings.models:
        return ()
    _check_excluded(settings)
    named = [Path(name) for name in settings.models if name.endswith(_FILES)]
    if not named:
        entries = [_entry(settings, {"model": name}, f"--model {name}") for name in settings.models]
    elif len(settings.models) > 1:
        raise SettingsError(f"--models {named[0]}: a file of models stands alone; write the others into it")
    else:
        entries = _from_file(settings, named[0])
    _check_names(entries)
    return tuple(entries)


def _from_file(settings: Settings, path: Path) -> list[ModelEntry]:
    source = f"--models {path}"
    content = read_yaml(path, source)
    listed = content.get("models") if isinstance(content, dict) else None
    if not isinstance(listed, list) or not listed or not isinstance(content, dict) or content.keys() != {"models"}:
        raise SettingsError(f"{source}: expected a list `models:` with an entry `- model: PATH` for each")
    entries = []
    for number, given in enumerate(listed, start=1):
        if not isinstance(given, dict) or not isinstance(given.get("model"), str):
            raise SettingsError(f"{source}: entry {number} has no `model: PATH`")
        values = {str(key).replace("-", "_"): value for key, value in given.items() if value is not None}
        entries.append(_entry(settings, values, f"{source}: {given['model']}"))
    return entries


def _entry(settings: Settings, given: Mapping[str, Any], source: str) -> ModelEntry:
    keys = _Residency.model_fields
    if moved := [key for key in given if key in EXPERIMENTS]:
        raise SettingsError(*(moved_line(f"{source}: {key}", f"set: [{key}={given[key]}]") for key in moved))
    given = with_experiments(given, f"{source}: {SET}:")
    unknown = [key for key in given if key not in keys and key not in EngineFields.model_fields]
    unknown += [key for key in given if key in _EXCLUDED and key not in unknown]
    if unknown:
        names = [*keys, *EngineFields.model_fields]
        raise SettingsError(
            *(
                f"{source}: {key} is not a model's"
                + (f": {_EXCLUDED[key]}" if key in _EXCLUDED else f" setting{suggest(key, names)}")
                for key in unknown
            )
        )
    common = {name: getattr(settings, name) for name in settings.model_fields_set if name != "models"}
    own = {key: value for key, value in given.items() if key not in keys}
    try:
        residency = _Residency.model_validate({key: given[key] for key in keys if key in given})
        made = Settings(**{**common, "models": (), **own})
    except ValidationError as error:
        raise SettingsError(*(_explained(source, problem) for problem in error.errors())) from None
    return ModelEntry(settings=made, **residency.model_dump())


def _explained(source: str, problem: Mapping[str, Any]) -> str:
    message = str(problem["msg"]).removeprefix("Value error, ")
    field = f"{problem['loc'][0]}: " if problem["loc"] else ""
    return f"{source}: {field}{message[:1].lower()}{message[1:]}"


def _check_excluded(settings: Settings) -> None:
    defaults = {name: field.get_default(call_default_factory=True) for name, field in Settings.model_fields.items()}
    given = {name for name in settings.model_fields_set if getattr(settings, name) != defaults[name]}
    problems = [
        f"--models and {spelled(name)} exclude each other: {why}" for name, why in _EXCLUDED.items() if name in given
    ]
    problems += [
        f"--models and {flag_name(name)} exclude each other: put `{name}` into the model's entry of the file"
        for name in _OWN
        if name in given
    ]
    if problems:
        raise SettingsError(*problems)


def _check_names(entries: list[ModelEntry]) -> None:
    seen: dict[str, str] = {}
    for entry in entries:
        names = [*entry.settings.model_names, *(each.name for each in entry.settings.lora_modules)]
        for name in names:
            other = seen.setdefault(name, entry.settings.model)
            if other is not entry.settings.model or names.count(name) > 1:
                raise SettingsError(
                    f"--models: the name {name!r} stands for several models; give each a `served_model_name`"
                )
