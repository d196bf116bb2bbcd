"""From a request for the middle of a text to the prompt and the stop tokens with which its model writes it.

Promises: refused by name where the model has no tokens for it. Must not know: dialects, which tokens they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire_server.answering.options import GenerationOptions, Infill
from quire_server.answering.sampling import ModelLimits
from quire_server.errors import BadRequest
from quire_server.state import ServerState
from quire_server.text.infilling import Infilling, Parts


async def infilled(
    state: ServerState,
    source: Sequence[str | Sequence[int]],
    options: GenerationOptions,
    infill: Infill,
    limits: ModelLimits,
) -> tuple[list[Sequence[int]], GenerationOptions]:
    """Each prompt with its suffix as token ids, and the options with what ends the middle.

    Raises BadRequest, ContextLengthExceeded.
    """
    infilling = Infilling.of(state.tokenizer)
    if infilling is None:
        raise BadRequest(
            f"'{infill.param}' is not supported by this model: its tokenizer has no tokens for the middle of a text.",
            param=infill.param,
            code="unsupported_parameter",
        )
    special = options.prompt.add_special_tokens
    prompts: list[Sequence[int]] = []
    for prefix in source:
        parts = Parts(
            prefix=prefix, suffix=infill.suffix, begun=infill.begun, extras=infill.extras, add_special_tokens=special
        )
        limits.check_length(state.tokenizer.least_tokens(parts.num_chars), infill.param, is_exact=False)
        prompts.append(await state.text.infill(infilling, parts))
    stop_ids = (*options.stop.token_ids, *infilling.stop_ids)
    return prompts, replace(options, stop=replace(options.stop, token_ids=tuple(dict.fromkeys(stop_ids))))
