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
            "/api/v1/generate",  # KoboldCpp
        ),
        COMPLETIONS,
    ),
    **dict.fromkeys(
        (
            *("/chat", "/chat/completions", "/v1/chat", "/v1/chat/completion", "/api/v1/chat"),
            "/api/chat/completions",  # Open WebUI
        ),
        CHAT,
    ),
    **dict.fromkeys(("/messages", "/v1/message", "/anthropic/v1/messages", "/v1/complete"), MESSAGES),
    **dict.fromkeys(("/responses", "/v1/response", "/api/responses", "/openai/v1/responses"), RESPONSES),
    **dict.fromkeys(("/models", "/api/models", "/v1/engines", "/get_model_info", "/model_info"), MODELS),
    **dict.fromkeys(("/embeddings", "/embedding", "/v1/embedding", "/embed"), EMBEDDINGS),
    **dict.fromkeys(("/v1/tokenize", "/api/tokenize", "/chat_tokenize"), "/tokenize"),
    **dict.fromkeys(("/v1/detokenize", "/api/detokenize"), "/detokenize"),
    **dict.fromkeys(("/healthz", "/v1/health", "/health_generate"), "/health"),
    **dict.fromkeys(("/ready", "/readyz"), "/health/ready"),
    **dict.fromkeys(("/live", "/livez"), "/health/live"),
    **dict.fromkeys(("/v1/version",), "/version"),
    "/v1/metrics": "/metrics",
    "/v1/openapi.json": "/openapi.json",
}
# OpenAI's engines and Azure's deployments have the model's name in the path.
_PATTERNS = (
    (re.compile(r"(/v1)?/engines/[^/]+/completions|/openai/deployments/[^/]+/completions"), COMPLETIONS),
    (re.compile(r"(/v1)?/engines/[^/]+/embeddings|/openai/deployments/[^/]+/embeddings"), EMBEDDINGS),
    (re.compile(r"(/v1)?/engines/[^/]+/chat/completions|/openai/deployments/[^/]+/chat/completions"), CHAT),
)
_BATCHES = re.compile(r"(/v1/uploads|/batches|/files|/uploads)(/.*)?")  # OpenAI's offline work
_OLLAMA = re.compile(r"/api/(pull|push|create|copy|delete|blobs/.*)")  # of its own store of models
# A base URL with /v1 to which a client adds another /v1.
_DOUBLED = re.compile(r"(/v1){2,}(/.*)?")


def advice(path: str) -> str | None:
    """One sentence of advice for a request to this path, if there is any."""
    name = path.rstrip("/")
    if _DOUBLED.fullmatch(name):
        return "'/v1' occurs twice: leave it out of the base URL, or of the path."
    if _BATCHES.fullmatch(name):
        return "Use /v1/files, with the whole file in one request, and /v1/batches."
    if _OLLAMA.fullmatch(name):
        return "The models of this server are those that it was started with: see /api/tags."
    route = _ELSEWHERE.get(name)
    if route is None:
        route = next((route for pattern, route in _PATTERNS if pattern.fullmatch(name)), None)
    return None if route is None else f"Use {route}."
