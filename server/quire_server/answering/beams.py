"""What is asked of a beam search, checked: its width, and that nothing else is asked that a search does not do.

Promises: whatever passes can be searched; what would change the ranking of beams and is not done is refused by name.
Must not know: any dialect, how beams are ranked.
"""

from __future__ import annotations

from quire_engine.types import BeamParams, SamplingParams
from quire_server.answering.options import BeamOptions, GenerationOptions
from quire_server.answering.sampling import ModelLimits
from quire_server.errors import BadRequest


def beam_params(options: GenerationOptions, sampling: SamplingParams, limits: ModelLimits) -> BeamParams | None:
    """None where tokens are sampled. `sampling` has all but the seed. Raises BadRequest."""
    asked = options.beam
    if asked is None:
        return None
    _check_width(asked, options, limits)
    for name, wrong in _refused(options).items():
        if wrong:
            raise BadRequest(
                f"Beam search ranks texts by the model's own log-probabilities; '{name}' cannot be combined with it.",
                param=name,
            )
    if options.stop.max_tokens == 0:
        param = options.stop.max_tokens_param
        raise BadRequest(f"Beam search needs '{param}' to be at least 1.", param=param)
    if sampling.grammar or sampling.thinking is not None:  # of tools that must be called, or as they are declared
        param = options.reasoning.max_tokens_param if sampling.thinking is not None else "tools"
        raise BadRequest(
            f"Beam search follows the model alone; what '{param}' asks for here would force tokens.", param=param
        )
    return BeamParams(width=asked.width, length_penalty=asked.length_penalty, early_stopping=asked.early_stopping)


def _check_width(asked: BeamOptions, options: GenerationOptions, limits: ModelLimits) -> None:
    param, n_param, most = asked.width_param, options.sampling.n_param, limits.scheduler.limits.max_choices
    if asked.width < options.sampling.n:
        raise BadRequest(f"'{param}' must be at least '{n_param}'.", param=param)
    if asked.width > most:
        raise BadRequest(f"'{param}' must be at most {most} on this server.", param=param)


def _refused(options: GenerationOptions) -> dict[str, bool]:
    """By the name of a field, whether it asks for something that a search does not do."""
    sampling = options.sampling
    structure = "response_format" if options.structure is None else options.structure.param
    return {
        "temperature": sampling.temperature not in (0.0, 1.0),
        "top_p": sampling.top_p != 1.0,
        "top_k": sampling.top_k != 0,
        "min_p": sampling.min_p != 0.0,
        "presence_penalty": sampling.presence_penalty != 0.0,
        "frequency_penalty": sampling.frequency_penalty != 0.0,
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "logit_bias": bool(sampling.logit_bias),
        "allowed_token_ids": bool(sampling.allowed_token_ids),
        "bad_words": bool(sampling.bad_words),
        "stop": bool(options.stop.strings),
        structure: options.structure is not None,
    }
