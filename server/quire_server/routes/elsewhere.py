"""Advice in a 404 for paths of other servers for which this one has an equivalent."""

from __future__ import annotations

import re

COMPLETIONS, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
EMBEDDINGS, RESPONSES, MESSAGES = "/v1/embeddings", "/v1/responses", "/v1/messages"

# Advice by the path without a trailing slash.
_ELSEWHERE = {
    **dict.fromkeys(
        (
            *("/completion", "/completions", "/v1/completion", "/api/completion", "/api/completions"),  # llama-server
            *("/generate", "/generate_stream", "/v1/generate", "/inference/v1/generate"),  # TGI, SGLang, vLLM
            *("/api/generate", "/api/v1/generate"),  # Ollama, KoboldCpp
        ),
        COMPLETIONS,
    ),
    **dict.fromkeys(
        (
            *("/chat", "/chat/completions", "/v1/chat", "/v1/chat/completion", "/api/v1/chat"),
            *("/api/chat", "/api/chat/completions"),  # Ollama, Open WebUI
        ),
        CHAT,
    ),
    **dict.fromkeys(("/messages", "/v1/message", "/anthropic/v1/messages", "/v1/complete"), MESSAGES),
    **dict.fromkeys(("/responses", "/v1/response", "/api/responses", "/openai/v1/responses"), RESPONSES),
    **dict.fromkeys(("/models", "/api/models", "/api/tags", "/v1/engines", "/get_model_info", "/model_info"), MODELS),
    **dict.fromkeys(
        ("/embeddings", "/embedding", "/v1/embedding", "/embed", "/api/embeddings", "/api/embed"), EMBEDDINGS
    ),
    **dict.fromkeys(("/v1/tokenize", "/api/tokenize", "/chat_tokenize"), "/tokenize"),
    **dict.fromkeys(("/v1/detokenize", "/api/detokenize"), "/detokenize"),
    **dict.fromkeys(("/healthz", "/v1/health", "/health_generate"), "/health"),
    **dict.fromkeys(("/ready", "/readyz"), "/health/ready"),
    **dict.fromkeys(("/live", "/livez"), "/health/live"),
    **dict.fromkeys(("/api/version", "/v1/version"), "/version"),
    "/v1/metrics": "/metrics",
    "/v1/openapi.json": "/openapi.json",
}
# OpenAI's engines and Azure's deployments have the model's name in the path.
_PATTERNS = (
    (re.compile(r"(/v1)?/engines/[^/]+/completions|/openai/deployments/[^/]+/completions"), COMPLETIONS),
    (re.compile(r"(/v1)?/engines/[^/]+/embeddings|/openai/deployments/[^/]+/embeddings"), EMBEDDINGS),
    (re.compile(r"(/v1)?/engines/[^/]+/chat/completions|/openai/deployments/[^/]+/chat/completions"), CHAT),
)
_BATCHES = re.compile(r"(/v1)?/(batches|files|uploads)(/.*)?")  # OpenAI's offline work
# A base URL with /v1 to which a client adds another /v1.
_DOUBLED = re.compile(r"(/v1){2,}(/.*)?")


def advice(path: str) -> str | None:
    """One sentence of advice for a request to this path, if there is any."""
    name = path.rstrip("/")
    if _DOUBLED.fullmatch(name):
        return "'/v1' occurs twice: leave it out of the base URL, or of the path."
    if _BATCHES.fullmatch(name):
        return (
            "This server has no batch endpoint and keeps no files: send the requests themselves, as many at once as"
            " there are; they are computed together, and the queue is bounded by --max-num-queued-reqs."
        )
    route = _ELSEWHERE.get(name)
    if route is None:
        route = next((route for pattern, route in _PATTERNS if pattern.fullmatch(name)), None)
    return None if route is None else f"Use {route}."
