"""What to do with fields that have no effect here: refuse those that would change the answer, report the rest.

Promises: nothing that asks for other text is ever accepted and dropped; a field at its default is never an error.
Must not know: which endpoint asked.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire_server.errors import BadRequest

_ABSENT: tuple[object, ...] = (None,)
_OFF: tuple[object, ...] = (None, False)
_EMPTY: tuple[object, ...] = (None, "", [], {})

BATCH_TIER = "flex"  # what OpenAI calls requests that may wait

# Fields that ask for something this server does not do, with the values that do not ask for it.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "audio": _ABSENT,
    "beam_width": (None, 1),
    "chat_template": _ABSENT,
    "documents": _EMPTY,
    "dry_multiplier": (None, 0, 0.0),
    "function_call": (None, "none"),
    "functions": _EMPTY,
    "guided_whitespace_pattern": _ABSENT,
    "input_embeds": _ABSENT,
    "kv_transfer_params": _ABSENT,
    "length_penalty": (None, 1, 1.0),
    "logits_processors": _EMPTY,
    "lora_path": _ABSENT,
    "mirostat": (None, 0),
    "mm_processor_kwargs": _EMPTY,
    "modalities": (None, ["text"]),
    "prompt_embeds": _ABSENT,
    "repetition_detection": _ABSENT,
    "return_hidden_states": _OFF,
    "stop_regex": _EMPTY,
    "structural_tag": _ABSENT,
    "suffix": (None, ""),
    "thinking_token_budget": _ABSENT,
    "tool_choice": (None, "none"),
    "tools": _EMPTY,
    "typical_p": (None, 1, 1.0),
    "use_beam_search": _OFF,
    "vllm_xargs": _EMPTY,
    "xtc_probability": (None, 0, 0.0),
}

# Fields that are accepted without effect, with the values that ask for what is done anyway.
IGNORED: Mapping[str, tuple[object, ...]] = {
    "annotations": _EMPTY,
    "include_obfuscation": _OFF,
    "include_reasoning": (None, True),
    "parallel_tool_calls": (None, True),
    "separate_reasoning": (None, True),
    "service_tier": (None, "auto", "default", BATCH_TIER),
    "spaces_between_special_tokens": (None, True),
    "store": _OFF,
    "stream_reasoning": (None, True),
    "verbosity": (None, "medium"),
}

_HINTS: Mapping[str, str] = {
    "chat_template": "requests cannot bring templates; the operator sets one with --chat-template",
    "function_call": "it is the older form of 'tool_choice'; send that",
    "functions": "it is the older form of 'tools'; send those",
    "modalities": "only text is generated",
    "tool_choice": "functions are called in /v1/chat/completions",
    "tools": "functions are called in /v1/chat/completions",
    "suffix": "/v1/completions has it, for models that can write the middle of a text",
}


def review_extras(extras: Mapping[str, object] | None) -> list[str]:
    """The names to report as ignored, in the order given. Raises BadRequest for what is not supported."""
    ignored = []
    for name, value in (extras or {}).items():
        off_values = UNSUPPORTED.get(name)
        if off_values is not None:
            if not _is_among(value, off_values):
                hint = _HINTS.get(name)
                raise BadRequest(
                    f"'{name}' is not supported by this server" + (f": {hint}." if hint else "."),
                    param=name,
                    code="unsupported_parameter",
                )
        elif not _is_among(value, IGNORED.get(name, _ABSENT)):
            ignored.append(name)
    return ignored


def _is_among(value: object, candidates: tuple[object, ...]) -> bool:
    """Equality without the cross-type one of `False == 0` and `True == 1`."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in candidates)
