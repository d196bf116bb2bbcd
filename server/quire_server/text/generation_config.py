"""A model's own defaults of generation: its generation_config.json, and what the operator puts in its place.

Promises: the values are within the bounds of a request's own fields; one that is not ends the start with its key. Must
not know: requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_engine.gguf import SAMPLING_SOURCE, typed_name
from quire_engine.plain_files import read_plain

FILE = "generation_config.json"
AUTO, NONE = "auto", "none"


class _Keys(BaseModel):
    """The keys that are read, with the bounds of a request's fields; null is absent, and others are not read."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None

    def given(self) -> dict[str, float]:
        """The values by the names of a request's numbers, and `max_new_tokens`."""
        values = cast(dict[str, float], self.model_dump(exclude_none=True))
        return values | ({"top_k": 0} if self.top_k == -1 else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The values of a request that brings none itself."""

    sampling: Mapping[str, float] = field(default_factory=dict)  # by the names of a request's numbers
    max_tokens: int | None = None  # of a request with neither its own limit nor one of its dialect
    most_tokens: int | None = None  # no request gets more: the operator's own limit, not the checkpoint's
    source: str = ""  # what they are from, for the log

    @property
    def shown(self) -> dict[str, float]:
        """All of them by a request's names, for the log and for clients."""
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return {**self.sampling, **limit}


def generation_defaults(asked: str, override: Mapping[str, object], model: Path) -> GenerationDefaults:
    """`asked`: auto (the checkpoint's file), none, or another directory with such a file; `override`'s values win.

    Raises ConfigError for the operator's own values, ModelLoadError for a checkpoint's.
    """
    values: dict[str, float] = {}
    source = ""
    if asked != NONE:
        values, source = _of_file(generation_config_file(asked, model), optional=asked == AUTO)
    own = _of_operator(override)
    most = own.get("max_new_tokens", None if asked == AUTO else values.get("max_new_tokens"))
    read, values = bool(values), values | own
    limit = values.pop("max_new_tokens", None)
    sources = [source or (FILE if asked == AUTO else str(Path(asked) / FILE))] * read
    return GenerationDefaults(
        sampling=values,
        max_tokens=None if limit is None else int(limit),
        most_tokens=None if most is None else int(most),
        source=" and ".join(sources + ["--override-generation-config"] * bool(own)),
    )


def generation_config_file(asked: str, model: Path) -> Path:
    """The file that the setting names; with `none` the checkpoint's, whose tokens that end a text hold all the same."""
    return (model if asked in (AUTO, NONE) else Path(asked)) / FILE


def _of_file(file: Path, *, optional: bool) -> tuple[dict[str, float], str]:
    """Return the file's values, and where they are from if not from the file itself."""
    if not file.is_file():
        if optional:
            return {}, ""
        raise ConfigError(f"--generation-config {file.parent}: there is no {FILE}; set it to auto or none")
    try:
        content = json.loads(read_plain(file))
        return _Keys.model_validate(content).given(), str(content.get(SAMPLING_SOURCE, ""))
    except ValidationError as error:
        raise ModelLoadError(
            f"{typed_name(file)}: {_told(error)}; --generation-config none leaves the file out"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{typed_name(file)}: not readable as JSON: {error}") from None


def _of_operator(override: Mapping[str, object]) -> dict[str, float]:
    unknown = sorted(set(override) - set(_Keys.model_fields))
    if unknown:
        raise ConfigError(
            f"--override-generation-config: {', '.join(unknown)} is not a sampling default;"
            f" it takes {', '.join(_Keys.model_fields)}"
        )
    try:
        return _Keys.model_validate(dict(override)).given()
    except ValidationError as error:
        raise ConfigError(f"--override-generation-config: {_told(error)}") from None


def _told(error: ValidationError) -> str:
    problems = (f"{'.'.join(map(str, each['loc'])) or 'the file'}: {each['msg']}" for each in error.errors())
    return "; ".join(text[:1] + text[1:].replace("Input should", "should") for text in problems)
