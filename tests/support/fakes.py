"""Stand-ins for tests of the server: a fake engine, a byte-level tokenizer, and a whole app around them.

Promises: the same request gets the same token ids every time; time passes only as far as a test asks for.
Must not know: torch, sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quire_engine.config import EnginePlan
from quire_engine.types import (
    EngineHealth,
    EngineStats,
    GenerationRequest,
    RequestTiming,
    StepOutput,
    TokenLogprobs,
    TokenOutput,
)
from support.limits import scheduler_config

if TYPE_CHECKING:
    from fastapi import FastAPI

    from quire_server.http.listener import Listening
    from quire_server.state import ServerState
    from quire_server.text.prompt import ChatTemplate
    from quire_server.text.tokenizer import TextTokenizer

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIAL_TOKENS = {BOS: "<|bos|>", EOS: "<|end|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
VOCAB_SIZE = 260  # bytes 0..255 are the ids 0..255
MODEL = "fake"
REPLY = b"The quick brown fox jumps over the lazy dog. "
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def default_reply(request: GenerationRequest, choice: int) -> Sequence[int]:
    """Token ids of one choice, repeated for ever: the fox, entered at another place by each choice and seed."""
    start = (choice + request.sampling.seed) % len(REPLY) if not request.sampling.is_greedy else 0
    return tuple(REPLY[start:] + REPLY[:start])


class FakeEngine:
    """An `EnginePort` on the event loop: each step gives every unfinished choice its next scripted token.

    `replies(request, choice)` gives the token ids (cyclic); `hold()` stops time and `release()` lets it go on;
    `fail_after=n` makes every request fail at its n-th token with `error`; `aborted` lists what was aborted while live.
    """

    def __init__(
        self,
        *,
        step_seconds: float = 0.0,
        replies: Callable[[GenerationRequest, int], Sequence[int]] = default_reply,
        fail_after: int | None = None,
        error: str = "the step failed",
        culprit: bool = False,
        num_cached_tokens: int = 0,
    ) -> None:
        self.on_step: Callable[[StepOutput], None] = lambda _step: None
        self.step_seconds = step_seconds
        self.replies = replies
        self.fail_after = fail_after
        self.error = error
        self.culprit = culprit
        self.num_cached_tokens = num_cached_tokens
        self.submitted: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.step_id = 0
        self._live: dict[str, _Live] = {}
        self._gate = asyncio.Event()
        self._gate.set()
        self._stepping: asyncio.Task[None] | None = None

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of unfinished requests."""
        return tuple(self._live)

    def hold(self) -> None:
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    def submit(self, request: GenerationRequest) -> None:
        self.submitted.append(request)
        self._live[request.request_id] = _Live(request)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.get_running_loop().create_task(self._steps())

    def abort(self, request_id: str) -> None:
        if self._live.pop(request_id, None) is not None:
            self.aborted.append(request_id)
            self.on_step(StepOutput(step_id=self.step_id, outputs=(), stats=self._stats()))

    def health(self) -> EngineHealth:
        return EngineHealth(alive=True, step_id=self.step_id, has_work=bool(self._live))

    async def _steps(self) -> None:
        while self._live:
            await asyncio.sleep(self.step_seconds)
            await self._gate.wait()
            self.step_id += 1
            outputs = [output for live in list(self._live.values()) for output in self._advance(live)]
            self.on_step(StepOutput(step_id=self.step_id, outputs=tuple(outputs), stats=self._stats()))

    def _advance(self, live: _Live) -> list[TokenOutput]:
        outputs = [self._next_token(live, choice) for choice in sorted(live.unfinished)]
        for output in outputs:
            if output.finish is not None:
                live.unfinished.discard(output.choice)
        if not live.unfinished:
            self._live.pop(live.request.request_id, None)
        return outputs

    def _next_token(self, live: _Live, choice: int) -> TokenOutput:
        request, position = live.request, live.num_tokens[choice]
        first = position == 0
        timing = RequestTiming(queue_seconds=0.001, kv_wait_seconds=0.0, prefill_seconds=0.002, num_preemptions=0)
        base = {
            "request_id": request.request_id,
            "choice": choice,
            "num_cached_tokens": self.num_cached_tokens,
            "prompt_logprobs": self._prompt_logprobs(request) if first else None,
        }
        if self.fail_after is not None and position >= self.fail_after:
            return TokenOutput(**base, finish="error", error=self.error, culprit=self.culprit, timing=timing)
        if request.stop.max_new_tokens == 0:
            return TokenOutput(**base, finish="length", timing=timing)
        script = self.replies(request, choice)
        token = script[position % len(script)]
        live.num_tokens[choice] = position + 1
        stopped = token in request.stop.stop_token_ids and position >= request.sampling.min_tokens
        finish = "stop" if stopped else "length" if position + 1 >= request.stop.max_new_tokens else None
        wanted = request.sampling.num_logprobs
        return TokenOutput(
            **base,
            token_ids=(token,),
            logprobs=None if wanted is None else (fake_logprobs(token, wanted),),
            finish=finish,
            stop_token_id=token if stopped else None,
            timing=timing if first or finish else None,
        )

    def _prompt_logprobs(self, request: GenerationRequest) -> tuple[TokenLogprobs | None, ...] | None:
        wanted = request.sampling.num_prompt_logprobs
        if wanted is None:
            return None
        return (None, *(fake_logprobs(token, wanted) for token in request.prompt_token_ids[1:]))

    def _stats(self) -> EngineStats:
        running = sum(len(live.unfinished) for live in self._live.values())
        used = min(running, 100)
        return EngineStats(
            running=running, waiting={}, blocks_total=100, blocks_used=used, blocks_free=100 - used, step_seconds=0.001
        )


class _Live:
    """A request in the fake engine."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.unfinished = set(range(request.n)) - set(request.finished_choices)
        self.num_tokens = [0] * request.n
        for choice, tokens in enumerate(request.resumed_token_ids):
            self.num_tokens[choice] = len(tokens)


def fake_logprobs(token: int, wanted: int) -> TokenLogprobs:
    """The token itself first, then its successors, each half as likely as the one before."""
    ids = tuple((token + step) % VOCAB_SIZE for step in range(wanted))
    return TokenLogprobs(
        token_id=token, logprob=-0.7, rank=1, top_ids=ids, top_logprobs=tuple(-0.7 * (1 + i) for i in range(wanted))
    )


@functools.cache
def _tokenizer_home() -> tempfile.TemporaryDirectory[str]:
    home = tempfile.TemporaryDirectory(prefix="fake-tokenizer-")
    write_tokenizer(Path(home.name))
    return home


def tokenizer_path() -> Path:
    """A directory with the byte-level tokenizer's files, made once per process."""
    return Path(_tokenizer_home().name)


def write_tokenizer(path: Path) -> None:
    """tokenizer.json and its companions: one token per byte, id = byte, and four special tokens."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS.values()])
    tokenizer.save(str(path / "tokenizer.json"))
    tokenizer_config = {
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, IM_END], "bos_token_id": BOS}))
    (path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "eos_token_id": EOS}))


@functools.cache
def load_tokenizer() -> TextTokenizer:
    from quire_server.text.tokenizer import TextTokenizer

    return TextTokenizer.load(tokenizer_path())


@functools.cache
def _chat_template(tokenizer: TextTokenizer) -> ChatTemplate:
    """Shared by all states: it keeps processes."""
    from quire_server.text.prompt import ChatTemplate

    return ChatTemplate(CHAT_TEMPLATE, tokenizer)


def make_plan(*, max_model_len: int = 512, max_num_seqs: int = 64) -> EnginePlan:
    return EnginePlan(
        model=MODEL,
        architecture="FakeForCausalLM",
        num_parameters=1,
        device="cpu",
        dtype="float32",
        kernels="reference",
        num_threads=1,
        vocab_size=VOCAB_SIZE,
        weights_bytes=4,
        kv_bytes=100 * 16 * 4,
        bytes_per_block=64,
        load_seconds=0.0,
        scheduler=scheduler_config(num_blocks=100, max_model_len=max_model_len, max_num_seqs=max_num_seqs),
    )


def make_state(
    *,
    engine: FakeEngine | None = None,
    max_model_len: int = 512,
    max_queued_sequences: int = 256,
    model_names: tuple[str, ...] = (MODEL, "alias"),
    chat: bool = True,
    **settings: object,
) -> ServerState:
    """The state of a server with a fake engine; keyword arguments go to `Settings`. Call inside an event loop."""
    from quire_server.engine.engine_client import EngineClient, QueueLimits
    from quire_server.metrics.metrics import Metrics
    from quire_server.settings import Settings
    from quire_server.state import ServerState

    plan = make_plan(max_model_len=max_model_len)
    tokenizer = load_tokenizer()
    metrics = Metrics(model_names[0], max_model_len=max_model_len)
    metrics.observe_plan(plan)
    return ServerState(
        settings=Settings(**settings),
        tokenizer=tokenizer,
        prompts=_chat_template(tokenizer) if chat else None,
        client=EngineClient(
            engine or FakeEngine(),
            plan=plan,
            limits=QueueLimits(max_sequences=max_queued_sequences),
            metrics=metrics,
        ),
        metrics=metrics,
        model_names=model_names,
    )


def make_app(state: ServerState | None = None, **options: object) -> FastAPI:
    """The real app on `make_state(**options)`, or on the given state."""
    from quire_server.app import create_app

    return create_app(state if state is not None else make_state(**options))


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

    settings = app.state.quire.settings.model_copy(update={"port": 0})
    started: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(app, settings, sock=bind(settings), on_started=started.set_result))
    await asyncio.wait({serving, started}, return_when=asyncio.FIRST_COMPLETED)
    if not started.done():
        serving.result()
    try:
        yield started.result()
    finally:
        started.result().stop(True)
        await serving


async def exchange(port: int, *parts: bytes, pause: float = 0.0, patience: float = 10.0) -> bytes:
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
