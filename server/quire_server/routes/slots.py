"""GET /props and GET /slots, as llama-server's clients read them: the model's facts, and the sequences that run.

Promises: no text of any client; of another's requests no more than how long they are.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel

from quire_engine.contract.errors import QuireError
from quire_engine.contract.types import GenerationRequest
from quire_server.answering.caller import is_own
from quire_server.errors import NotReady
from quire_server.http.openapi import error_response
from quire_server.state import ServerState, choose_by_query, state_of

RETRY_SECONDS = 2.0
_RUNS = frozenset({"prefill", "decode", "recompute"})  # phases in which a request has seats

router = APIRouter(tags=["models"], dependencies=[Depends(choose_by_query)])


class Modalities(BaseModel):
    vision: bool = False
    audio: bool = False


class DefaultSettings(BaseModel):
    n_ctx: int  # tokens of prompt and answer together
    params: dict[str, float]  # of requests that bring none: the model's own


class Props(BaseModel):
    """The model's facts."""

    default_generation_settings: DefaultSettings
    total_slots: int  # sequences that are computed at once
    model_alias: str
    model_path: str  # the model's name: where its files lie is not told
    modalities: Modalities
    chat_template: str
    bos_token: str | None
    eos_token: str | None
    build_info: str


class Slot(BaseModel):
    """The place of one running sequence, or a free place."""

    id: int
    n_ctx: int
    is_processing: bool = False
    is_own: bool = False  # whether the request is the caller's
    request_id: str | None = None  # of the caller's own requests
    phase: str | None = None  # prefill, decode, or recompute after a preemption
    n_prompt_tokens: int = 0
    n_prompt_tokens_cache: int = 0  # of those, found in the prefix cache
    n_decoded: int = 0  # tokens of a choice; of several choices the mean
    n_remain: int | None = None  # tokens that it may still have


@router.get("/props")
async def props(request: Request) -> Props:
    """The context, the number of slots, the chat template and the defaults of the model."""
    state = state_of(request)
    info = state.model_text.tokenizer.info()
    return Props(
        default_generation_settings=DefaultSettings(n_ctx=state.max_model_len, params=state.model_text.defaults.shown),
        total_slots=state.client.num_seats,
        model_alias=state.model_names[0],
        model_path=state.model_names[0],
        modalities=Modalities(),
        chat_template="" if state.model_text.prompts is None else state.model_text.tokenizer.chat_template or "",
        bos_token=_text(info.get("bos_token")),
        eos_token=_text(info.get("eos_token")),
        build_info=f"quire {version('quire')}",
    )


@router.get("/slots", responses={NotReady.status: error_response(NotReady)})
async def slots(
    request: Request,
    fail_on_no_slot: Annotated[bool, Query(description="503 where every slot is taken")] = False,
) -> list[Slot]:
    """The sequences that run, each in a slot, and the free slots behind them. Requests that wait have none."""
    state = state_of(request)
    running = [each for each in await _live(state) if each["state"] in _RUNS]
    known = {each.request_id: each for each in state.client.live()}
    taken: list[Slot] = []
    for each in running:
        for _ in range(max(each["choices"] - len(each["finish"]), 1)):
            taken.append(_slot(request, len(taken), each, known.get(each["request_id"])))
    total = max(state.client.num_seats, len(taken))
    if fail_on_no_slot and len(taken) == total:
        raise NotReady("No slot is free.", retry_after_seconds=RETRY_SECONDS, code="no_slot")
    return taken + [Slot(id=number, n_ctx=state.max_model_len) for number in range(len(taken), total)]


def _slot(request: Request, number: int, running: dict[str, Any], known: GenerationRequest | None) -> Slot:
    state = state_of(request)
    own = known is not None and is_own(request, known)
    decoded = running["output_tokens"] // max(running["choices"], 1)
    return Slot(
        id=number,
        n_ctx=state.max_model_len,
        is_processing=True,
        is_own=own,
        request_id=state.names.name(running["request_id"]) if own else None,
        phase=running["state"],
        n_prompt_tokens=running["prompt_tokens"],
        n_prompt_tokens_cache=running["cached_tokens"],
        n_decoded=decoded,
        n_remain=None if known is None else max(known.stop.max_new_tokens - decoded, 0),
    )


async def _live(state: ServerState) -> list[dict[str, Any]]:
    """The engine's live requests. Raises NotReady."""
    if not state.client.in_flight:
        return []
    try:
        answer = await state.engines.inspect("requests", "{}")
    except QuireError as error:
        raise NotReady(f"Not answered: {error}.", retry_after_seconds=RETRY_SECONDS) from None
    live: list[dict[str, Any]] = msgspec.json.decode(answer)["live"]
    return live


def _text(token: object) -> str | None:
    return token if isinstance(token, str) else None
