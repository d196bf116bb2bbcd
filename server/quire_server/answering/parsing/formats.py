"""The formats of calls by name, and which one a model writes.

Promises: an unknown name is refused with all that are known. Must not know: how a format is read.
"""

from __future__ import annotations

from quire_engine.errors import ConfigError
from quire_server.answering.parsing.hermes import HERMES
from quire_server.answering.parsing.tool_format import ToolFormat

TOOL_FORMATS = {"hermes": HERMES, "qwen": HERMES}


def tool_format(name: str) -> ToolFormat:
    """The format of that name. Raises ConfigError."""
    if name not in TOOL_FORMATS:
        raise ConfigError(f"tool call parser {name!r} is unknown; known are {', '.join(sorted(TOOL_FORMATS))}")
    return TOOL_FORMATS[name]


def detect_tool_format(template: str) -> ToolFormat | None:
    """The format that the chat template teaches the model; None where it has none, or one that is not known here."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return HERMES
    return None
