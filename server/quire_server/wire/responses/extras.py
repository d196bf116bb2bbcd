"""Fields of a response's request that have no effect here: which are refused, which are reported.

Promises: as of the other dialects, nothing that asks for something else is accepted and dropped. Must not know: the
fields that have an effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quire_server.errors import BadRequest
from quire_server.wire.extras import review_extras

# What asks for something that this server does not do, with the values that do not ask for it.
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "background": ((None, False), "a response is made while its client waits"),
    "context_management": ((None, []), "histories are not compacted; see 'truncation'"),
    "conversation": ((None,), "use 'previous_response_id'"),
    "moderation": ((None,), "nothing is moderated"),
    "prompt": ((None,), "there are no stored prompts; use 'input' and 'instructions'"),
}
# What other dialects call a field of this one: as unknown names they would ask for other text without effect.
_RENAMED: Mapping[str, str] = {
    "functions": "tools",
    "guided_json": "text.format",
    "guided_regex": "text.format",
    "guided_choice": "text.format",
    "guided_grammar": "text.format",
    "guided_json_object": "text.format",
    "logprobs": "include: ['message.output_text.logprobs']",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "structured_outputs": "text.format",
}

INCLUDE_LOGPROBS = "message.output_text.logprobs"


def review(extras: Mapping[str, object] | None) -> list[str]:
    """The names to report as ignored. Raises BadRequest for what is not supported."""
    others = dict(extras or {})
    for name, (off_values, reason) in _REFUSED.items():
        if name in others and not any(others[name] is value or others[name] == value for value in off_values):
            raise BadRequest(
                f"'{name}' is not supported by this server: {reason}.", param=name, code="unsupported_parameter"
            )
        others.pop(name, None)
    for name, ours in _RENAMED.items():
        if others.get(name) is not None:
            raise BadRequest(
                f"'{name}' is not a field of responses; use '{ours}'.", param=name, code="unsupported_parameter"
            )
        others.pop(name, None)
    if others.get("n") not in (None, 1):
        raise BadRequest("A response has one answer: 'n' can only be 1.", param="n", code="unsupported_parameter")
    others.pop("n", None)
    return review_extras(others)


def review_includes(include: Iterable[str] | None) -> list[str]:
    """The names of what should be included and cannot be."""
    return [f"include.{name}" for name in include or () if name != INCLUDE_LOGPROBS]
