"""The arguments of `LLM` as the settings that `quire serve` has.

Promises: an argument is a setting of the same name that concerns the model, its memory or its schedule; TypeError for
every other name, ValueError for a value that cannot work. Must not know: what settings do, the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from quire_engine.errors import ModelLoadError
from quire_server.checkpoint.locate import localized
from quire_server.flags import option_group
from quire_server.settings import Settings, SettingsError, load_settings, suggest

_GROUPS = {"Model", "Memory", "Scheduling"}
_OF_A_SERVER = {"model", "served_model_name", "max_num_queued_reqs", "max_num_queued_tokens"}
ARGUMENTS = frozenset(
    name for name, field in Settings.model_fields.items() if option_group(field) in _GROUPS and name not in _OF_A_SERVER
)


def engine_settings(
    model: str | os.PathLike[str], tensor_parallel_size: int, arguments: Mapping[str, object]
) -> Settings:
    """The settings of one LLM. What is not given comes from `QUIRE_*` variables, else from the defaults."""
    unknown = [name for name in arguments if name not in ARGUMENTS]
    if unknown:
        hint = suggest(unknown[0], ARGUMENTS)
        known = hint if "did you mean" in hint else f"; it has {', '.join(sorted(ARGUMENTS))}"
        raise TypeError(f"LLM() has no argument {unknown[0]!r}{known}")
    if tensor_parallel_size != 1:
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size} is not supported: a model runs on one device;"
            " leave it out or set it to 1"
        )
    try:
        # No queue to be refused from: whoever generates here waits for the end anyway.
        settings = load_settings({**arguments, "model": os.fspath(model), "max_num_queued_tokens": None})
    except SettingsError as error:
        raise ValueError(as_arguments(str(error))) from None
    try:
        return localized(settings)
    except ModelLoadError as error:
        raise ValueError(as_arguments(str(error))) from None


def as_arguments(text: str) -> str:
    """A message with the settings spelt as arguments: `--max-num-seqs 3` is `max_num_seqs 3`."""
    return re.sub(r"--([a-z][a-z-]*)", lambda flag: flag[1].replace("-", "_"), text)
