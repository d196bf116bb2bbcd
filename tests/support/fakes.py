"""A whole app around a fake engine and a byte-level tokenizer, and the ways to call it.

Promises: nothing but the engine and the tokenizer is pretended; `connect` calls the app without sockets.
Must not know: torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import fields
from typing import TYPE_CHECKING

import httpx

from quire_engine.contract.plan import EnginePlan
from support.fake_engine import HIDDEN_SIZE, FakeEngine
from support.fake_tokenizer import CHAT_TEMPLATE, VOCAB_SIZE, load_tokenizer, tokenizer_path
from support.limits import scheduler_config
from support.plans import small_plan

if TYPE_CHECKING:
    from fastapi import FastAPI

    from quire_server.http.listener import Listening
    from quire_server.settings import Settings
    from quire_server.state import ServerState
    from quire_server.text.prompt import ChatTemplate
    from quire_server.text.tokenizer import TextTokenizer

MODEL = "fake"


@functools.lru_cache(maxsize=8)
def _chat_template(source: str, tokenizer: TextTokenizer) -> ChatTemplate:
    """Return the template that states with this source share: each keeps processes."""
    from quire_server.text.prompt import ChatTemplate

    return ChatTemplate(source, tokenizer)


@functools.lru_cache(maxsize=256, typed=True)
def _kept_settings(_environment: tuple[tuple[str, str], ...], *options: tuple[str, object]) -> Settings:
    from quire_server.settings import Settings

    return Settings(**dict(options))


def _make_settings(options: dict[str, object]) -> Settings:
    """Validate once what many tests ask for: it takes longer than a request. What files say is read each time."""
    from quire_server.settings import Settings

    if "tenants" in options or "@" in repr(options):
        return Settings(**options)
    own = tuple(sorted(each for each in os.environ.items() if each[0].startswith("QUIRE_")))
    try:
        return _kept_settings(own, *sorted(options.items())).model_copy()
    except TypeError:  # a list or a dictionary among them
        return Settings(**options)


def make_plan(*, max_model_len: int = 512, max_num_seqs: int = 64) -> EnginePlan:
    return small_plan(
        scheduler_config(num_blocks=100, max_model_len=max_model_len, max_num_seqs=max_num_seqs),
        model={"path": MODEL, "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE},
        pool={"num_bytes": 100 * 16 * 4, "bytes_per_block": 64},
    )


def make_state(
    *,
    engine: FakeEngine | None = None,
    max_model_len: int = 512,
    max_queued_sequences: int = 256,
    model_names: tuple[str, ...] = (MODEL, "alias"),
    template: str | ChatTemplate | None = CHAT_TEMPLATE,
    clock: Callable[[], float] = time.time,
    **settings: object,
) -> ServerState:
    """The state of a server with a fake engine. Call inside an event loop. `clock`: of the usage, in seconds of UTC.

    Keyword arguments go to `ServerLimits` or to `Settings`, whichever has the name.
    """
    from quire_server.engine.admission import QueueLimits, TenantGate
    from quire_server.engine.engine_client import EngineClient
    from quire_server.http.credentials import Credentials
    from quire_server.metrics.metrics import Metrics
    from quire_server.metrics.usage import UsageBook
    from quire_server.settings import ServerLimits
    from quire_server.state import ServerState, tenants_of
    from quire_server.text.generation_config import GenerationDefaults
    from quire_server.text.model_text import ModelText
    from quire_server.text.parsing.formats import PLAIN
    from quire_server.text.pooling_method import pooling_method
    from quire_server.text.scoring_method import COSINE

    settings.setdefault("allowed_hosts", ("*",))  # clients of tests call it as they like
    settings.setdefault("tokenizer", str(tokenizer_path()))  # as the processes that try grammars know it
    plan = make_plan(max_model_len=max_model_len)
    tokenizer, engine = load_tokenizer(), engine or FakeEngine()
    limits = {each.name: settings.pop(each.name) for each in fields(ServerLimits) if each.name in settings}
    options = _make_settings(settings)
    tenants = tenants_of(options, options.tenant_list)
    metrics = Metrics(
        model_names[0],
        max_model_len=max_model_len,
        tenants=[each.name for each in tenants.all],
        usage=UsageBook(model_names[0], file=options.first_keys.tenants.usage_file, clock=clock),
    )
    metrics.observe_plan(plan)
    return ServerState(
        settings=options,
        credentials=Credentials(options),
        limits=ServerLimits(**limits),  # type: ignore[arg-type]
        model_text=ModelText(
            tokenizer=tokenizer,
            prompts=_chat_template(template, tokenizer) if isinstance(template, str) else template,
            pooling=pooling_method(settings.get("pooling", "auto"), tokenizer_path()),
            defaults=GenerationDefaults(),
            scoring=COSINE,
            formats=PLAIN,
            named_formats={},
        ),
        engines=engine,
        client=EngineClient(
            engine,
            plan=plan,
            limits=QueueLimits(max_sequences=max_queued_sequences),
            metrics=metrics,
            tenants=TenantGate(tenants.all, metrics.tenants, time.monotonic()) if tenants.all else None,
        ),
        tenants=tenants,
        metrics=metrics,
        model_names=model_names,
    )


def make_app(state: ServerState | None = None, **options: object) -> FastAPI:
    """The real app on `make_state(**options)`, or on the given state."""
    from quire_server.app import create_app

    return create_app(state if state is not None else make_state(**options))


@functools.cache
def documented_paths() -> tuple[str, ...]:
    """Every path of the OpenAPI document, which takes half a second to make. Call inside an event loop."""
    return tuple(make_app().openapi()["paths"])


@contextlib.asynccontextmanager
async def connect(app: FastAPI, **options: object) -> AsyncIterator[httpx.AsyncClient]:
    """An httpx client that calls the app without sockets."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", **options) as client:
        yield client


@contextlib.asynccontextmanager
async def listening(app: FastAPI) -> AsyncIterator[Listening]:
    """The app behind the real listener, on a free port of this machine; ends with no connection left."""
    from quire_server.http.listener import bind, serve

    state: ServerState = app.state.quire
    settings = state.settings.model_copy(update={"port": 0})
    started: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve(
            app,
            settings,
            sock=bind(settings),
            on_started=started.set_result,
            limits=state.limits,
            tls=None if state.credentials.tls is None else state.credentials.tls.context,
            door=lambda: app.state.door,
        )
    )
    await asyncio.wait({serving, started}, return_when=asyncio.FIRST_COMPLETED)
    if not started.done():
        serving.result()
    try:
        yield started.result()
    finally:
        started.result().stop(True)
        await serving


async def exchange(port: int, *parts: bytes, pause: float = 0.0, patience: float = 300.0) -> bytes:
    """Send the parts over one connection and return all that came back until the server closed it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(patience):
            for part in parts:
                writer.write(part)
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
                if pause:
                    await asyncio.sleep(pause)
            return await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def parse_reply(raw: bytes) -> httpx.Response:
    """The one reply in `raw`."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = [tuple(line.split(": ", 1)) for line in lines]
    return httpx.Response(int(status.split(" ")[1]), headers=headers, content=body)
