"""The formats of calls by name, and which one a model writes.

Promises: an unknown name is refused with all that are known. Must not know: how a format is read.
"""

from __future__ import annotations

from dataclasses import replace

from quire_engine.errors import ConfigError
from quire_server.text.parsing.forced import FORCED
from quire_server.text.parsing.hermes import HERMES
from quire_server.text.parsing.llama import LLAMA
from quire_server.text.parsing.mistral import MISTRAL, MISTRAL_ARGS
from quire_server.text.parsing.qwen_xml import QWEN_XML
from quire_server.text.parsing.tool_format import ToolFormat

TOOL_FORMATS = {
    **{tool_format.name: tool_format for tool_format in (HERMES, QWEN_XML, LLAMA, MISTRAL, MISTRAL_ARGS, FORCED)},
    "qwen": HERMES,
    "llama4_json": LLAMA,
}


def tool_format(name: str) -> ToolFormat:
    """The format of that name. Raises ConfigError."""
    if name not in TOOL_FORMATS:
        raise ConfigError(f"tool call parser {name!r} is unknown; known are {', '.join(sorted(TOOL_FORMATS))}")
    return TOOL_FORMATS[name]


def detect_tool_format(template: str) -> ToolFormat | None:
    """The format that the chat template teaches the model; None where it has none, or one that is not known here."""
    if "tools" not in template:
        return None
    for is_taught, form in (
        ("<function=" in template, QWEN_XML),
        ("<tool_call>" in template and "<arg_key>" not in template, HERMES),  # with it: GLM's own
        ("[TOOL_CALLS]" in template and "[ARGS]" in template, MISTRAL_ARGS),
        ("[TOOL_CALLS] [" in template, replace(MISTRAL, begin="[TOOL_CALLS] [")),
        ("[TOOL_CALLS]" in template, MISTRAL),
        ("python_tag" in template or ('"parameters": ' in template and "<|eot_id|>" in template), LLAMA),
    ):
        if is_taught:
            return form
    return None
