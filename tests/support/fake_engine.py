"""A fake engine for tests of the server: on the event loop, with scripted tokens.

Promises: the same request gets the same token ids every time; time passes only as far as a test asks for.
Must not know: torch, sockets.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from quire_engine.contract.errors import EngineDead
from quire_engine.contract.types import (
    EngineHealth,
    EngineStats,
    GenerationRequest,
    RequestTiming,
    StepOutput,
    TokenLogprobs,
    TokenOutput,
)
from support.fake_tokenizer import VOCAB_SIZE

HIDDEN_SIZE = 8  # of vectors
REPLY = b"The quick brown fox jumps over the lazy dog. "


def default_reply(request: GenerationRequest, choice: int) -> Sequence[int]:
    """Token ids of one choice, repeated for ever: the fox, entered at another place by each choice and seed."""
    start = (choice + request.sampling.seed) % len(REPLY) if not request.sampling.is_greedy else 0
    return tuple(REPLY[start:] + REPLY[:start])


class FakeEngine:
    """An `EnginePort` on the event loop: each step gives every unfinished choice its next scripted token.

    Asked as `Engines` are, it serves and knows nothing.

    `replies(request, choice)` gives the token ids (cyclic); `hold()` stops time and `release()` lets it go on;
    `held` are the ids of those that were set aside and get no tokens, `num_holds` how often any was;
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
        self.tokens_per_step = 1
        self.submitted: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.held: set[str] = set()
        self.num_holds = 0
        self.step_id = 0
        self._live: dict[str, _Live] = {}
        self._gate = asyncio.Event()
        self._gate.set()
        self._stepping: asyncio.Task[None] | None = None

    def trouble(self) -> str | None:
        return None

    def overdue_seconds(self) -> float:
        return -math.inf

    def load_ratio(self) -> float:
        return 1.0

    async def inspect(self, what: str, argument: str = "{}") -> bytes:
        raise EngineDead("there is no engine to be asked")

    async def control(self, what: str, argument: str = "{}") -> bytes:
        raise EngineDead("there is no engine to be asked")

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
        self.held.discard(request_id)
        if self._live.pop(request_id, None) is not None:
            self.aborted.append(request_id)
            self.on_step(StepOutput(step_id=self.step_id, outputs=(), stats=self._stats()))

    def hold_request(self, request_id: str) -> None:
        if request_id in self._live:
            self.held.add(request_id)
            self.num_holds += 1

    def release_request(self, request_id: str) -> None:
        self.held.discard(request_id)

    def health(self) -> EngineHealth:
        return EngineHealth(alive=True, step_id=self.step_id, has_work=bool(self._live))

    async def _steps(self) -> None:
        while self._live:
            await asyncio.sleep(self.step_seconds)
            await self._gate.wait()
            if self.held.issuperset(self._live):
                await asyncio.sleep(0.001)
                continue
            self.step_id += 1
            going = [live for name, live in self._live.items() if name not in self.held]
            outputs = [output for live in going for output in self._advance(live)]
            self.on_step(StepOutput(step_id=self.step_id, outputs=tuple(outputs), stats=self._stats()))

    def _advance(self, live: _Live) -> list[TokenOutput]:
        outputs = [self._next_tokens(live, choice) for choice in sorted(live.unfinished)]
        for output in outputs:
            if output.finish is not None:
                live.unfinished.discard(output.choice)
        if not live.unfinished:
            self._live.pop(live.request.request_id, None)
        return outputs

    def _next_tokens(self, live: _Live, choice: int) -> TokenOutput:
        output = self._next_token(live, choice)
        for _ in range(self.tokens_per_step - 1):
            if output.finish is not None:
                break
            more = self._next_token(live, choice)
            logprobs = None if output.logprobs is None else (*output.logprobs, *(more.logprobs or ()))
            output = replace(
                more,
                token_ids=(*output.token_ids, *more.token_ids),
                logprobs=logprobs,
                prompt_logprobs=output.prompt_logprobs,
                timing=output.timing or more.timing,
            )
        return output

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
            return TokenOutput(**base, finish="length", timing=timing, embedding=fake_embedding(request))
        script = self.replies(request, choice)
        token = script[position % len(script)]
        live.num_tokens[choice] = position + 1
        stopped = token in request.stop.stop_token_ids and position >= request.sampling.min_tokens
        finish = "stop" if stopped else "length" if position + 1 >= request.stop.max_new_tokens else None
        wanted = request.sampling.num_logprobs
        return TokenOutput(
            **base,
            token_ids=(token,),
            logprobs=None if wanted is None else (fake_logprobs(token, wanted, request.sampling.logprob_token_ids),),
            finish=finish,
            stop_token_id=token if stopped else None,
            beam_score=-0.5 * (choice + 1) if finish and request.beam else None,
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


def fake_embedding(request: GenerationRequest) -> tuple[float, ...] | None:
    """Where the prompt's tokens, or its last one, lie among the numbers modulo the vector's size."""
    if not request.pooling:
        return None
    ids = request.prompt_token_ids if request.pooling == "mean" else request.prompt_token_ids[-1:]
    counts = [0.0] * HIDDEN_SIZE
    for token_id in ids:
        counts[token_id % HIDDEN_SIZE] += 1 / len(ids) + token_id / 1000
    return tuple(counts)


class _Live:
    """A request in the fake engine."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.unfinished = set(range(request.n)) - set(request.finished_choices)
        self.num_tokens = [0] * request.n
        for choice, tokens in enumerate(request.resumed_token_ids):
            self.num_tokens[choice] = len(tokens)


def fake_logprobs(token: int, wanted: int, asked: tuple[int, ...] = ()) -> TokenLogprobs:
    """The token itself first, then its successors, each half as likely as the one before; those asked for unlikely."""
    ids = tuple((token + step) % VOCAB_SIZE for step in range(wanted))
    return TokenLogprobs(
        token_id=token,
        logprob=-0.7,
        rank=1,
        top_ids=ids,
        top_logprobs=tuple(-0.7 * (1 + i) for i in range(wanted)),
        asked_ids=asked,
        asked_logprobs=tuple(-9.0 - token / 8 for token in asked),
    )
