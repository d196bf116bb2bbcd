"""Whether tokens are guessed, and how: what the settings ask for, where it can be. Must not know: models."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire_engine.contract.config import SPECULATIONS, EngineConfig, draft_model
from quire_engine.contract.errors import ConfigError


def own_speculation(config: EngineConfig, device: torch.device, *, has_states: bool) -> tuple[EngineConfig, str]:
    """The configuration without `auto`, and a line for the plan.

    Raises ConfigError if speculation is asked for where a guess that turns out wrong could not be passed over.
    """
    asked = config.speculation
    if asked not in SPECULATIONS and not draft_model(asked):
        words = ", ".join(SPECULATIONS)
        raise ConfigError(f"speculation={asked} is unknown; set speculation to {words} or model:DIR")
    reason = ""
    if has_states:
        reason = "this model keeps a recurrent state, which a wrong guess would change"
    elif device.type != "cpu" and draft_model(asked):
        reason = "a draft model is computed on a CPU only, and suffix and outputs guess without one"
    elif device.type != "cpu" and asked == "auto":
        reason = "on a GPU guesses are for who asks for them, as suffix or outputs"
    if asked == "auto":
        return replace(config, speculation="off" if reason else "suffix"), f"off: {reason}" if reason else "suffix"
    if reason and asked != "off":
        raise ConfigError(f"speculation={asked}: {reason}; set speculation to off")
    return config, asked if asked in {"suffix", "outputs"} else ""
