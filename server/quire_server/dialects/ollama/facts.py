"""The facts of the served models in Ollama's words: lists, details, capabilities."""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime

from quire_server.answering.capabilities import capabilities
from quire_server.dialects.ollama.reply import Details, ListedModel, RunningModel, ShownModel
from quire_server.state import ServerState

_NEVER = "9999-12-31T23:59:59Z"
_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "K"))


def listed(state: ServerState, name: str) -> ListedModel:
    """A served name, of the model or an adapter, in /api/tags."""
    size, digest = _size_and_digest(state, name)
    return ListedModel(
        name=name, model=name, modified_at=_since(state, name), size=size, digest=digest, details=_details(state, name)
    )


def running(state: ServerState, name: str) -> RunningModel:
    """Return a served name's entry in /api/ps."""
    plan = state.whole_plan
    size, digest = _size_and_digest(state, name)
    whole = size + plan.pool.num_bytes
    return RunningModel(
        name=name,
        model=name,
        size=whole,
        digest=digest,
        details=_details(state, name),
        expires_at=_expires(state),
        size_vram=0 if plan.machine.device == "cpu" else whole,
        context_length=state.max_model_len,
    )


def _expires(state: ServerState) -> str:
    """Return the time at which the model's engine ends unless a request comes before."""
    if state.catalog is None:
        return _NEVER
    engine = state.catalog.models.engines[state.model_names[0]]
    if engine.idle_limit == float("inf"):
        return _NEVER
    at = time.time() + engine.last_used + engine.idle_limit - time.monotonic()
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


def shown(state: ServerState, name: str) -> ShownModel:
    """Return a served name's details in /api/show."""
    model = state.client.plan.model
    family = _family(model.architecture)
    return ShownModel(
        license="",
        modelfile="",
        parameters="\n".join(f"{key} {value:g}" for key, value in state.model_text.defaults.shown.items()),
        template="" if state.model_text.prompts is None else state.model_text.tokenizer.chat_template or "",
        details=_details(state, name),
        model_info={
            "general.architecture": family,
            "general.basename": name,
            "general.parameter_count": model.num_parameters,
            f"{family}.context_length": state.max_model_len,
            f"{family}.vocab_size": model.vocab_size,
            f"{family}.embedding_length": model.hidden_size,
        },
        capabilities=capabilities(state),
        modified_at=_since(state, name),
    )


def _details(state: ServerState, name: str) -> Details:
    model = state.client.plan.model
    family = _family(model.architecture)
    served = state.adapters.find(name)
    return Details(
        parent_model="" if served is None else served.parent or state.model_names[0],
        format="gguf" if model.gguf_type else "safetensors",
        family=family,
        families=[family],
        parameter_size=_count(model.num_parameters),
        quantization_level=model.gguf_type or (model.stored_as or model.quantization or model.dtype).upper(),
    )


def _size_and_digest(state: ServerState, name: str) -> tuple[int, str]:
    plan, served = state.client.plan, state.adapters.find(name)
    identity = f"{plan.identity.checkpoint or plan.model.path} {'' if served is None else served.adapter.digest}"
    return plan.model.weights_bytes, hashlib.sha256(identity.encode()).hexdigest()


def _since(state: ServerState, name: str) -> str:
    served = state.adapters.find(name)
    loaded = int(state.started if served is None else served.loaded)
    return datetime.fromtimestamp(loaded, UTC).isoformat().replace("+00:00", "Z")


def _family(architecture: str) -> str:
    """`Qwen3ForCausalLM` is `qwen3`."""
    return architecture.partition("For")[0].lower() or "unknown"


def _count(parameters: int) -> str:
    unit, letter = next(((unit, letter) for unit, letter in _UNITS if parameters >= unit), (1.0, ""))
    return f"{parameters / unit:.1f}{letter}"
