"""Names what a served model can do, in the words of Ollama's clients, which other clients read too."""

from __future__ import annotations

from typing import Literal

from quire_server.state import ServerState
from quire_server.text.infilling import Infilling

Capability = Literal["completion", "tools", "thinking", "insert", "embedding"]


def capabilities(state: ServerState) -> list[Capability]:
    """The abilities that the model's files give it: its weights, its chat template, its tokens."""
    can_write = not state.client.plan.scheduler.why_no_text
    found: dict[Capability, bool] = {
        "completion": can_write,
        "tools": can_write and state.model_text.prompts is not None,
        "thinking": can_write and state.model_text.formats.marks is not None,
        "insert": can_write and Infilling.of(state.model_text.tokenizer) is not None,
        "embedding": state.model_text.pooling.name != "none",
    }
    return [capability for capability, has in found.items() if has]
